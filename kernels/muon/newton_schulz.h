// Newton-Schulz: iterations that lead the singular values of a matrix towards 1 and keep its singular vectors.
//
//   G = X X^T,  P = b G + c G G,  X' = a X + P X        (three products of kernels/muon/gemm.h)
//
// With Muon's coefficients (Jordan et al., 2024) singular values in (0, 1] end roughly in [0.7, 1.2], not at 1.
// G and P are symmetric bit for bit (a fused multiply-add does not care for the order of its factors), so half of each
// is computed. The bits are those of the products: the same for every number of parts and either implementation.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "core/job/muon.h"
#include "kernels/cpu/parallel.h"
#include "kernels/muon/gemm.h"

namespace shardmesh {

// REQUIRES: nothing overlaps.
struct NewtonSchulzMemory {
  float* x = nullptr;                // [rows][columns]: the matrix, largest singular value at most 1; overwritten
  float* next = nullptr;             // [rows][columns]
  float* gram = nullptr;             // [rows][rows]
  float* polynomial = nullptr;       // [rows][rows]
  GemmScratch* scratches = nullptr;  // one for each part
};

// How a product is computed.
using MultiplyFn = absl::FunctionRef<void(const Gemm& gemm)>;

// Runs scalars.iterations iterations; returns where the result lies: x or next. REQUIRES: rows <= columns, or it costs
// more than it has to.
float* NewtonSchulz(const MuonScalars& scalars, int64_t rows, int64_t columns, const NewtonSchulzMemory& memory,
                    GemmBlockFn gemm_block, const Parallel& parallel);
// The same with other products, and their bits. The scratches are not used.
float* NewtonSchulz(const MuonScalars& scalars, int64_t rows, int64_t columns, const NewtonSchulzMemory& memory,
                    MultiplyFn multiply);

}  // namespace shardmesh
