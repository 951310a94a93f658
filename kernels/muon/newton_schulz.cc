#include "kernels/muon/newton_schulz.h"

#include <utility>

namespace shardmesh {
namespace {

void RunGemm(const Gemm& gemm, GemmScratch* scratches, GemmBlockFn gemm_block, const Parallel& parallel) {
  parallel.ForRanges(NumGemmBlocks(gemm), [&](int part, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) gemm_block(gemm, GemmBlockAt(gemm, i), scratches[part]);
  });
}

Gemm GramOf(const float* x, int64_t rows, int64_t columns, float* gram) {
  Gemm gemm;
  gemm.rows = gemm.columns = rows;
  gemm.depth = columns;
  gemm.a = gemm.b = x;
  gemm.transposed_b = true;
  gemm.out = gram;
  gemm.symmetric = true;
  return gemm;
}

Gemm PolynomialOf(const MuonScalars& scalars, const float* gram, int64_t rows, float* polynomial) {
  Gemm gemm;
  gemm.rows = gemm.columns = gemm.depth = rows;
  gemm.a = gemm.b = gemm.addend = gram;
  gemm.alpha = scalars.c;
  gemm.beta = scalars.b;
  gemm.out = polynomial;
  gemm.symmetric = true;
  return gemm;
}

Gemm NextOf(const MuonScalars& scalars, const float* polynomial, const float* x, int64_t rows, int64_t columns,
            float* next) {
  Gemm gemm;
  gemm.rows = gemm.depth = rows;
  gemm.columns = columns;
  gemm.a = polynomial;
  gemm.b = gemm.addend = x;
  gemm.beta = scalars.a;
  gemm.out = next;
  return gemm;
}

}  // namespace

float* NewtonSchulz(const MuonScalars& scalars, int64_t rows, int64_t columns, const NewtonSchulzMemory& memory,
                    GemmBlockFn gemm_block, const Parallel& parallel) {
  return NewtonSchulz(scalars, rows, columns, memory,
                      [&](const Gemm& gemm) { RunGemm(gemm, memory.scratches, gemm_block, parallel); });
}

float* NewtonSchulz(const MuonScalars& scalars, int64_t rows, int64_t columns, const NewtonSchulzMemory& memory,
                    MultiplyFn multiply) {
  float *x = memory.x, *next = memory.next;
  for (int i = 0; i < scalars.iterations; ++i) {
    multiply(GramOf(x, rows, columns, memory.gram));
    multiply(PolynomialOf(scalars, memory.gram, rows, memory.polynomial));
    multiply(NextOf(scalars, memory.polynomial, x, rows, columns, next));
    std::swap(x, next);
  }
  return x;
}

}  // namespace shardmesh
