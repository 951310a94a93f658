// One block of a product with 8 lanes across output columns. Compiled for AVX2 and FMA as a whole: nothing here may
// run before SimdSupported() was asked.
//
// A stretch of the depth at a time, the block's rows of `a` and columns of `b` are packed into panels of 6 rows and 16
// columns, k by k, filled up with zeros; each pair of panels moves 6 x 16 sums on in registers. Between stretches the
// sums rest in memory, as the fp32 numbers that they are, so the order of the operations is that of one long loop.
#include "kernels/muon/gemm_simd.h"

#include <cstring>

#include "kernels/cpu/simd8.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh::simd8 {
namespace {

constexpr int64_t kRows = 6, kColumns = 16;  // of the register tile: 12 of 16 registers hold sums
constexpr int64_t kTile = kRows * kColumns;
static_assert(kGemmBlock % kRows == 0 && kGemmBlock % kColumns == 0, "a block is cut into whole register tiles");

// Stretch [k, k + depth) of the depth.
struct Stretch {
  int64_t k, depth;
};

int64_t Panels(int64_t length, int64_t width) { return (length + width - 1) / width; }

// 8 lines of 8 lanes, transposed.
HWY_INLINE void Transpose8(F32x8 (&lines)[8]) {
  __m256 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(lines[i].lanes.raw, lines[i + 1].lanes.raw);
    pairs[i + 1] = _mm256_unpackhi_ps(lines[i].lanes.raw, lines[i + 1].lanes.raw);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 low = pairs[i / 2 * 4 + i % 2], high = pairs[i / 2 * 4 + i % 2 + 2];
    fours[i * 2] = _mm256_shuffle_ps(low, high, 0x44);
    fours[i * 2 + 1] = _mm256_shuffle_ps(low, high, 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    lines[i] = F32x8(hn::Vec<Floats>{_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20)});
    lines[i + 4] = F32x8(hn::Vec<Floats>{_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31)});
  }
}

// 8 lines of `depth` numbers: line i at to[k * kWidth + i]. With a width of 6 the last two are overwritten by the next
// k.
template <int64_t kWidth>
HWY_INLINE void PackEight(const float* const (&lines)[8], int64_t depth, float* to) {
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    F32x8 numbers[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) numbers[i] = Load8(lines[i] + k);
    Transpose8(numbers);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) Store8(numbers[i], to + (k + i) * kWidth);
  }
  for (; k < depth; ++k) {
    for (int i = 0; i < 8; ++i) to[k * kWidth + i] = lines[i][k];
  }
}

// A matrix whose lines [begin, end) lie along the depth: to[panel][k][line of the panel]. Two numbers behind the last
// panel are written too.
template <int64_t kWidth>
void PackLines(const float* from, int64_t stride, int64_t begin, int64_t end, Stretch stretch, float* to) {
  alignas(64) static constexpr float kZeros[kGemmDepth] = {};
  for (int64_t first = begin; first < end; first += kWidth, to += kWidth * stretch.depth) {
    for (int64_t half = 0; half < kWidth; half += 8) {
      const float* lines[8];
      for (int64_t i = 0; i < 8; ++i) {
        const int64_t line = first + half + i;
        lines[i] = half + i < kWidth && line < end ? from + line * stride + stretch.k : kZeros;
      }
      PackEight<kWidth>(lines, stretch.depth, to + half);
    }
  }
}

// A matrix whose lines lie across the depth: columns [begin, end) of `b` as it is.
void PackColumns(const float* from, int64_t stride, int64_t begin, int64_t end, Stretch stretch, float* to) {
  const int64_t whole = (end - begin) / kColumns, rest = (end - begin) % kColumns;
  for (int64_t k = 0; k < stretch.depth; ++k) {
    const float* line = from + (stretch.k + k) * stride + begin;
    float* at = to + k * kColumns;
    for (int64_t panel = 0; panel < whole; ++panel, line += kColumns, at += kColumns * stretch.depth) {
      Store8(Load8(line), at);
      Store8(Load8(line + 8), at + 8);
    }
    if (rest > 0) {
      std::memset(at, 0, kColumns * sizeof(float));
      std::memcpy(at, line, rest * sizeof(float));
    }
  }
}

// 6 x 16 sums over the stretch: a is [depth][6], b is [depth][16].
HWY_INLINE void MoveTileOn(const float* a, const float* b, int64_t depth, float* sums) {
  F32x8 sum[kRows][2];
#pragma GCC unroll 6
  for (int64_t i = 0; i < kRows; ++i) {
    sum[i][0] = Load8(sums + i * kColumns);
    sum[i][1] = Load8(sums + i * kColumns + 8);
  }
  for (int64_t k = 0; k < depth; ++k, a += kRows, b += kColumns) {
    const F32x8 left = Load8(b), right = Load8(b + 8);
#pragma GCC unroll 6
    for (int64_t i = 0; i < kRows; ++i) {
      const F32x8 factor(a[i]);
      sum[i][0] = MulAdd(factor, left, sum[i][0]);
      sum[i][1] = MulAdd(factor, right, sum[i][1]);
    }
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < kRows; ++i) {
    Store8(sum[i][0], sums + i * kColumns);
    Store8(sum[i][1], sums + i * kColumns + 8);
  }
}

// 8 sums -> 8 outputs.
HWY_INLINE F32x8 Output8(const Gemm& gemm, F32x8 sums, const float* addend) {
  const F32x8 product = F32x8(gemm.alpha) * sums;
  return addend == nullptr ? product : MulAdd(F32x8(gemm.beta), Load8(addend), product);
}

// The first `width` of 8 outputs, through memory of full width.
void WriteNarrow(const Gemm& gemm, const float* sums, int64_t at, int64_t width) {
  alignas(32) float addend[8] = {}, out[8];
  if (gemm.addend != nullptr) std::memcpy(addend, gemm.addend + at, width * sizeof(float));
  Store8(Output8(gemm, Load8(sums), gemm.addend == nullptr ? nullptr : addend), out);
  std::memcpy(gemm.out + at, out, width * sizeof(float));
}

// The block's outputs from its sums, which lie as [column panel][row panel][6][16].
void WriteOutputs(const Gemm& gemm, const GemmBlock& block, const float* sums) {
  const int64_t row_panels = Panels(block.row_end - block.row_begin, kRows);
  for (int64_t i = block.row_begin; i < block.row_end; ++i) {
    for (int64_t j = block.column_begin; j < block.column_end; j += 8) {
      const int64_t row = i - block.row_begin, column = j - block.column_begin;
      const int64_t tile = column / kColumns * row_panels + row / kRows;
      const float* from = sums + tile * kTile + row % kRows * kColumns + column % kColumns;
      const int64_t at = i * gemm.columns + j;
      if (j + 8 <= block.column_end) {
        Store8(Output8(gemm, Load8(from), gemm.addend == nullptr ? nullptr : gemm.addend + at), gemm.out + at);
      } else {
        WriteNarrow(gemm, from, at, block.column_end - j);
      }
    }
  }
}

void Mirror(const Gemm& gemm, const GemmBlock& block) {
  for (int64_t first = block.column_begin; first < block.column_end; first += kColumns) {
    const int64_t end = first + kColumns < block.column_end ? first + kColumns : block.column_end;
    for (int64_t i = block.row_begin; i < block.row_end; ++i) {
      for (int64_t j = first; j < end; ++j) gemm.out[j * gemm.columns + i] = gemm.out[i * gemm.columns + j];
    }
  }
}

}  // namespace

void GemmOneBlock(const Gemm& gemm, const GemmBlock& block, GemmScratch& scratch) {
  const int64_t row_panels = Panels(block.row_end - block.row_begin, kRows);
  const int64_t column_panels = Panels(block.column_end - block.column_begin, kColumns);
  std::memset(scratch.sums, 0, row_panels * column_panels * kTile * sizeof(float));
  for (int64_t k = 0; k < gemm.depth; k += kGemmDepth) {
    const Stretch stretch = {k, gemm.depth - k < kGemmDepth ? gemm.depth - k : kGemmDepth};
    PackLines<kRows>(gemm.a, gemm.depth, block.row_begin, block.row_end, stretch, scratch.a);
    if (gemm.transposed_b) {
      PackLines<kColumns>(gemm.b, gemm.depth, block.column_begin, block.column_end, stretch, scratch.b);
    } else {
      PackColumns(gemm.b, gemm.columns, block.column_begin, block.column_end, stretch, scratch.b);
    }
    for (int64_t column = 0; column < column_panels; ++column) {
      for (int64_t row = 0; row < row_panels; ++row) {
        MoveTileOn(scratch.a + row * kRows * stretch.depth, scratch.b + column * kColumns * stretch.depth,
                   stretch.depth, scratch.sums + (column * row_panels + row) * kTile);
      }
    }
  }
  WriteOutputs(gemm, block, scratch.sums);
  if (gemm.symmetric && block.row_begin != block.column_begin) Mirror(gemm, block);
}

}  // namespace shardmesh::simd8
HWY_AFTER_NAMESPACE();
