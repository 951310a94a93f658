// Runs of a tensor's weights to the codes in which they are gathered (core/format/gather_format.h), in two passes: the
// first finds the largest magnitude under every scale, whoever holds its elements, the second codes. What comes of all
// runs of a tensor is what Encode (kernels/encode/encode.h, options as they are by default) gives for the whole of it,
// however it is cut into runs.
//
// Weights that are not finite, which Encode refuses: their scale is NaN, and so is all that shares it, decoded.
//
// Nothing is checked. Thread-safe for runs of different elements. Memory is borrowed for the call. The processor's
// floating-point environment has no part in it: every function sets it for the call, and restores it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/format/format.h"
#include "core/format/gather_format.h"

namespace shardmesh {

struct GatheredRun {
  GatherFormat gather = GatherFormat::kFp8Tensor;  // not stored
  const ScaleBlocks* blocks = nullptr;             // of the tensor
  Format format = Format::kFp32;                   // of the values: fp32 or bf16
  const void* values = nullptr;                    // at the run's first element
  int64_t first_element = 0;                       // in the tensor; of mx8 a multiple of 32, of nf4 of 64
  int64_t num_elements = 0;
  float mean = 0;  // of nf4, for EncodeGathered: Nf4Mean of the tensor
  // Of weights that are stored in int8_row: `values` are their codes, in whole rows of `row_elements`, and these the
  // rows' scales. What is gathered is codes times scales in fp32, as `format` says. Null: values are numbers.
  const float* row_scales = nullptr;
  int64_t row_elements = 1;
  // Of weights that are stored in nf4, and gathered so: `values` are their codes, and these the largest magnitudes of
  // their blocks, from the run's first one on. Null: as above.
  const float* nf4_scales = nullptr;
};

// Raises each of the tensor's maxima to the largest magnitude (its bits as fp32, which order like it) of the run's
// elements in that block: in any order and any number of times. Of mx8 there are none: nothing is done.
void RaiseMaxima(const GatheredRun& run, std::atomic<uint32_t>* maxima);

// Of nf4: the mean of a tensor's maxima, added in double in their order; NaN if one is not finite.
float Nf4Mean(const std::atomic<uint32_t>* maxima, int64_t num_blocks);

// A place that gets them.
struct GatheredPlace {
  uint8_t* codes = nullptr;  // of the run
  void* scales = nullptr;    // of the tensor: floats, bytes of mx8, or nf4's (core/format/gather_format.h); aligned to floats
};

// Writes to `count` places the run's codes, and the scales of those blocks whose first element it has.
// REQUIRES: the maxima of all runs of the tensor are in; count >= 1.
void EncodeGathered(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                    int count);

// Weights to nf4 as it is stored (core/format/numeric_formats.h): codes, and the largest magnitude of every 64 elements.
// `values` begin at a multiple of 64 elements of their tensor. The codes are those that EncodeGathered gives for them.
void StoreNf4(const float* values, int64_t num_elements, uint8_t* codes, float* scales);

// The same in plain C++, one element at a time; the others use 8 lanes where the processor has them.
void RaiseMaximaReference(const GatheredRun& run, std::atomic<uint32_t>* maxima);
void EncodeGatheredReference(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                             int count);
void StoreNf4Reference(const float* values, int64_t num_elements, uint8_t* codes, float* scales);

}  // namespace shardmesh
