// What is wrong with TLS files that work: a certificate whose time is over or that is for clients alone, a private key
// that others may read. gRPC serves with all of them; every peer refuses the first two, and the last gives the identity
// away. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "rpc/tls/pem.h"

namespace shardmesh {

// One sentence for each fault; empty: there is none that can be told. Names the flag, the file, and what to do.
std::vector<std::string> TlsFileWarnings(const std::string& cert_file, const std::string& key_file, absl::Time now);

// Of the first certificate in a PEM text. InvalidArgument: it has none that can be read.
absl::StatusOr<CertificateTimes> ReadCertificateTimes(absl::string_view pem);

}  // namespace shardmesh
