// The sum of slots (kernels/sum/slot_sum.h) on the current CUDA device, with plain types. Only in builds with
// --config=cuda. Thread-safe.
#pragma once

#include <cstdint>

#include "core/format/format.h"

namespace shardmesh {

// sum[i] = the tree sum over s of slots[s * elements + i], in fp32: SlotSumReference's bits at scale 1 (a NaN's payload
// aside). `slots`, in kFp32 or kBf16, and `sum` are memory that the device reads and writes; asynchronous, in stream
// `stream` (a cudaStream_t). Returns null on success, else the CUDA runtime's description of the error (static
// storage).
const char* SlotSumCuda(Format format, const void* slots, int num_slots, int64_t elements, float* sum, void* stream);

}  // namespace shardmesh
