// The cut into blocks and the reference; compiled for any processor.
#include "kernels/muon/gemm.h"

#include <algorithm>

#include "kernels/muon/gemm_simd.h"
#include "kernels/rules/number.h"

namespace shardmesh {
namespace {

int64_t Blocks(int64_t length) { return (length + kGemmBlock - 1) / kGemmBlock; }

}  // namespace

int64_t NumGemmBlocks(const Gemm& gemm) {
  const int64_t down = Blocks(gemm.rows), across = Blocks(gemm.columns);
  return gemm.symmetric ? down * (down + 1) / 2 : down * across;
}

GemmBlock GemmBlockAt(const Gemm& gemm, int64_t index) {
  const int64_t across = Blocks(gemm.columns);
  int64_t row = index / across, column = index % across;
  if (gemm.symmetric) {
    // Column by column down to the diagonal: column c has c + 1 blocks.
    for (row = index, column = 0; row > column; ++column) row -= column + 1;
  }
  const auto end = [](int64_t block, int64_t length) { return std::min((block + 1) * kGemmBlock, length); };
  return {row * kGemmBlock, end(row, gemm.rows), column * kGemmBlock, end(column, gemm.columns)};
}

void GemmBlockReference(const Gemm& gemm, const GemmBlock& block, GemmScratch&) {
  const bool mirrored = gemm.symmetric && block.row_begin != block.column_begin;
  const int64_t b_row = gemm.transposed_b ? 1 : gemm.columns, b_column = gemm.transposed_b ? gemm.depth : 1;
  for (int64_t i = block.row_begin; i < block.row_end; ++i) {
    for (int64_t j = block.column_begin; j < block.column_end; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < gemm.depth; ++k) {
        sum = MulAdd(gemm.a[i * gemm.depth + k], gemm.b[k * b_row + j * b_column], sum);
      }
      const float product = gemm.alpha * sum;
      const int64_t at = i * gemm.columns + j;
      gemm.out[at] = gemm.addend == nullptr ? product : MulAdd(gemm.beta, gemm.addend[at], product);
      if (mirrored) gemm.out[j * gemm.columns + i] = gemm.out[at];
    }
  }
}

void GemmBlockSimd(const Gemm& gemm, const GemmBlock& block, GemmScratch& scratch) {
#if defined(__x86_64__)
  simd8::GemmOneBlock(gemm, block, scratch);
#else
  GemmBlockReference(gemm, block, scratch);
#endif
}

}  // namespace shardmesh
