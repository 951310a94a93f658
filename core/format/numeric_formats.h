// How weights and optimizer states are stored on a shard, and how weights are published. Values and pure functions,
// thread-safe. Definitions of the codes: kernels/rules/.
//
//   weights     parts                          bytes an element
//   fp32        codes                          4
//   bf16        codes                          2      rounded to nearest
//   bf16_sr     codes                          2      rounded stochastically
//   bf16+16     codes, remainder (2 bytes)     4      fp32 exactly
//   bf16+8sr    codes, remainder (1 byte)      3      24 bits, the last one rounded stochastically
//   int8_row    codes, a scale for each row    1 + 4/row
//   nf4         codes, a scale for 64          0.5625 of frozen weights; two in a byte, the even element in the upper half
//
// The scale of nf4 is the largest magnitude of its 64 elements, exactly: nothing that is stored is of more than one
// block. From the scales of a whole tensor follow those of torchao's NF4Tensor, in which the weights are gathered
// (core/format/gather_format.h).
//
//   states      parts                          bytes an element
//   fp32        codes                          4
//   bf16_sr     codes                          2
//   dyn8        codes, a scale for 256         1.016  dynamic map
//   dyn4        codes, a scale for 128         0.531  two in a byte, the even element in the upper half
//   fp8         codes, a scale for 256         1.016  E4M3
//   fp8x32      codes, a bf16 scale for 32     1.063  E4M3, and UE5M3 for second moments (stochastic)
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/host_device.h"

namespace shardmesh {

enum class WeightFormat { kFp32, kBf16, kBf16Sr, kBf16Plus16, kBf16Plus8Sr, kInt8Row, kNf4 };
enum class StateFormat { kFp32, kBf16Sr, kDyn8, kDyn4, kFp8, kFp8x32 };

absl::string_view WeightFormatName(WeightFormat format);
absl::string_view StateFormatName(StateFormat format);
// InvalidArgument: no such format; the message lists them.
absl::StatusOr<WeightFormat> ParseWeightFormat(absl::string_view name);
absl::StatusOr<StateFormat> ParseStateFormat(absl::string_view name);

// How one part of a format lies in memory: `bytes` for each `elements` in a row (the last ones may be fewer).
struct PartLayout {
  int64_t bytes = 0;  // 0: there is no such part
  int64_t elements = 1;

  SHARDMESH_HOST_DEVICE int64_t BytesOf(int64_t num_elements) const {
    return (num_elements + elements - 1) / elements * bytes;
  }
};

struct StoredLayout {
  PartLayout codes;
  PartLayout extra;  // the remainder, or the scales
};

// row_elements: of int8_row. REQUIRES: row_elements >= 1 there.
StoredLayout LayoutOf(WeightFormat format, int64_t row_elements = 1);
StoredLayout LayoutOf(StateFormat format);

}  // namespace shardmesh
