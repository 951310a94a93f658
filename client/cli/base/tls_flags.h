// The flags --tls-*, for programs that use clients alone.
#pragma once

#include "rpc/tls/tls_flags.h"
