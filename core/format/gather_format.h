// Gather formats: how windows, publications and pulls hold a parameter's weights, whatever way its owner stores them.
// Values and pure functions, thread-safe. Definitions of the codes: kernels/encode/encode.h; of the same names there.
//
//   gather      codes            scales
//   stored      fp32 or bf16     none                   as stored: the bf16 of weights with a remainder; int8_row
//                                                       weights as int8_row, and nf4 weights as nf4
//   fp8_tensor  E4M3             a float                torchao's float8 with tensorwise scales
//   fp8_row     E4M3             a float a row          a row is what the last dimension counts
//   fp8_block   E4M3             a float for 128 x 128  of a matrix
//   mx8         E4M3             E8M0 for 32 of a row   rows of whole blocks
//   int8_row    int8             a float a row
//   nf4         2 in a byte      int8 for 64           behind them, from a multiple of 4 bytes on, floats: a factor for
//                                                       every 256 of them, and the mean of the tensor
//
// What is quantized are the weights as `stored` would show them. A scale is of the whole tensor, never of a shard.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/format/format.h"
#include "core/format/numeric_formats.h"

namespace shardmesh {

enum class GatherFormat { kStored, kFp8Tensor, kFp8Row, kFp8Block, kMx8, kInt8Row, kNf4 };

absl::string_view GatherFormatName(GatherFormat format);
// InvalidArgument: no such format; the message lists them.
absl::StatusOr<GatherFormat> ParseGatherFormat(absl::string_view name);

// The format of weights of a storage format for who reads them as `stored`: fp32 or bf16. Of int8_row and nf4, what
// codes and scales stand for: fp32.
Format GatheredFormat(WeightFormat format);

// How weights of a storage format are gathered: those that are gathered as `stored` in int8_row or nf4 if they are
// stored so.
GatherFormat GatherOf(WeightFormat weights, GatherFormat gather);

// Whether gathered weights are codes that are made of the stored ones. Otherwise they are what is stored: fp32, bf16,
// or the codes and scales of int8_row. Those of nf4 are made: its scales are of the whole tensor, and stored ones are
// not.
bool IsQuantized(WeightFormat weights, GatherFormat gather);

inline constexpr int64_t kNf4BlockElements = 64, kNf4FactorBlocks = 256;

// Bytes of the codes of `num_elements`, which would be `stored` otherwise; of one scale (0: there are none); and of all
// of a tensor, with what lies behind them.
int64_t GatheredCodeBytes(Format stored, GatherFormat gather, int64_t num_elements);
int64_t GatheredScaleBytes(GatherFormat gather);
int64_t GatheredScalesBytes(GatherFormat gather, int64_t num_scales);
// Of nf4: bytes from a tensor's first scale to its first factor, and to its mean.
int64_t Nf4FactorsOffset(int64_t num_scales);
int64_t Nf4MeanOffset(int64_t num_scales);

// Which elements of a tensor share a scale: it is taken for a matrix, row-major, and cut into blocks, numbered
// row-major. Those at the edges may be smaller. Every tensor has elements.
struct ScaleBlocks {
  int64_t columns = 1;        // of the matrix
  int64_t block_rows = 1;     // of a block
  int64_t block_columns = 1;  // at most `columns`
  int64_t num_blocks = 0;     // 0: stored

  int64_t across() const { return (columns + block_columns - 1) / block_columns; }
};

// InvalidArgument: a shape that the format does not fit: fp8_block codes matrices, mx8 rows of multiples of 32, and
// none but `stored` a tensor without elements. REQUIRES: sizes are not negative, and their product is at most 2^40.
absl::StatusOr<ScaleBlocks> ScaleBlocksOf(GatherFormat gather, absl::Span<const int64_t> shape);

// The dimensions of a tensor's scales, as PartsOf (kernels/encode/encode.h) has them. REQUIRES: ScaleBlocksOf(...) is
// OK, and not `stored`.
std::vector<int64_t> ScaleShape(GatherFormat gather, absl::Span<const int64_t> shape);

// Calls visit(offset, size, block, begins) for the pieces of elements [first, first + num) that lie in one row of one
// block, ascending: `offset` counts from `first`, `begins`: the piece has the block's first element.
template <class Visit>
void ForEachPiece(const ScaleBlocks& blocks, int64_t first, int64_t num, const Visit& visit) {
  for (int64_t at = first; at < first + num;) {
    const int64_t row = at / blocks.columns, column = at - row * blocks.columns;
    const int64_t block = column / blocks.block_columns, block_row = row / blocks.block_rows;
    const int64_t row_end = std::min((block + 1) * blocks.block_columns, blocks.columns);
    const int64_t size = std::min(row_end - column, first + num - at);
    visit(at - first, size, block_row * blocks.across() + block,
          column == block * blocks.block_columns && row == block_row * blocks.block_rows);
    at += size;
  }
}

}  // namespace shardmesh
