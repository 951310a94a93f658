// What nvcc compiles and g++ calls of digests and copies of stretches. Null on success, else the CUDA runtime's
// description of the error (static storage). Only in builds with --config=cuda. Thread-safe.
#pragma once

#include "kernels/cuda/stretch_digest.h"

namespace shardmesh {

const char* LaunchStretchDigests(const StretchDigests& args, void* stream);
const char* LaunchStretchCopies(const StretchCopies& args, void* stream);

}  // namespace shardmesh
