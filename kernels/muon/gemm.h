// Gemm: a matrix product in fp32 whose bits are defined.
//
//   sum_ij = fma(a_i,K-1, b_K-1,j, ... fma(a_i1, b_1j, fma(a_i0, b_0j, +0)))      k ascending, one rounding for each k
//   out_ij = alpha sum_ij, or with an addend  fma(beta, addend_ij, alpha sum_ij)
//
// Each output is computed by itself, in this order alone: so the bits depend neither on how outputs are cut into
// blocks, nor on which threads compute them, nor on the implementation (NaNs are NaN everywhere, with any payload).
// Matrices are dense and row-major; they need the alignment of floats only. Memory is borrowed for the call; nothing
// is allocated. Nothing is checked. Thread-safe for blocks with a scratch of their own: blocks write disjoint outputs.
// REQUIRES of every call: the floating-point environment is set (kernels/cpu/fp_environment.h).
//
// Two implementations, the same bits: the reference (plain loops) and SIMD (8 lanes across output columns, AVX2 and
// FMA): packed panels and a register tile of 6 x 16, as in Goto, van de Geijn, "Anatomy of high-performance matrix
// multiplication", ACM TOMS 34(3), 2008, and Van Zee, van de Geijn, "BLIS", ACM TOMS 41(3), 2015.
#pragma once

#include <cstdint>

namespace shardmesh {

struct Gemm {
  int64_t rows = 0, columns = 0, depth = 0;
  const float* a = nullptr;  // [rows][depth]
  const float* b = nullptr;  // [depth][columns], or [columns][depth] when transposed_b
  bool transposed_b = false;
  float alpha = 1, beta = 0;
  const float* addend = nullptr;  // [rows][columns], or null; may not be `out`
  float* out = nullptr;           // [rows][columns]; overlaps no input
  // The caller knows that the product (and the addend) is symmetric, as X X^T and its square are, bit for bit: then
  // only blocks on and above the diagonal are computed, and mirrored. The same bits as without.
  bool symmetric = false;
};

// At most this many rows and columns go into a block: about what a second-level cache holds of packed operands and
// sums.
inline constexpr int64_t kGemmBlock = 240;
inline constexpr int64_t kGemmDepth = 192;  // how much of the depth is packed at a time

// Output rows and columns, half-open. With `symmetric`, a block that is not on the diagonal (other rows than columns)
// is written to its mirror image too, so it lies wholly above the diagonal; one on the diagonal is square.
// REQUIRES: at most kGemmBlock rows and columns.
struct GemmBlock {
  int64_t row_begin = 0, row_end = 0;
  int64_t column_begin = 0, column_end = 0;
};

// The cut into largest blocks: how many there are to compute, and which is number `index`.
int64_t NumGemmBlocks(const Gemm& gemm);
GemmBlock GemmBlockAt(const Gemm& gemm, int64_t index);

// What one block needs while it is computed, 586 KiB. Its contents mean nothing between blocks.
struct GemmScratch {
  alignas(64) float a[kGemmBlock * kGemmDepth + 16];
  alignas(64) float b[kGemmBlock * kGemmDepth];
  alignas(64) float sums[kGemmBlock * kGemmBlock];
};

using GemmBlockFn = void (*)(const Gemm& gemm, const GemmBlock& block, GemmScratch& scratch);

void GemmBlockReference(const Gemm& gemm, const GemmBlock& block, GemmScratch& scratch);
// REQUIRES: SimdSupported() (kernels/cpu/processor.h).
void GemmBlockSimd(const Gemm& gemm, const GemmBlock& block, GemmScratch& scratch);

}  // namespace shardmesh
