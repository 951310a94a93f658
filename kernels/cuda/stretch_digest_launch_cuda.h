// What nvcc compiles and g++ calls of the digest of stretches. Null on success, else the CUDA runtime's description of the
// error (static storage). Only in builds with --config=cuda. Thread-safe.
#pragma once

#include "kernels/cuda/stretch_digest.h"

namespace shardmesh {

const char* LaunchStretchDigests(const StretchDigests& args, void* stream);

}  // namespace shardmesh
