// Blas: the machine's own BLAS, found at run time, for the fast mode of Muon. Nothing is linked with it.
//
// Its products are close to those of kernels/muon/gemm.h, not the same bits: every library adds in an order of its own,
// which may depend on its number of threads too. It has its own threads, set as that library wants them
// (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS). Thread-safe, as these libraries are.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/muon/gemm.h"

namespace shardmesh {

class Blas {
 public:
  // The first of libopenblas.so.0, libmkl_rt.so, libblas.so.3 that the loader finds (the last one, where the
  // distribution chooses it, may be any); looked for once.
  //   FailedPrecondition: there is none; the message has what was tried, and why it was not taken.
  static absl::StatusOr<const Blas*> Find();
  // The first of these files that is found and has sgemm_ (with 32-bit integers); it stays loaded. Errors as Find.
  static absl::StatusOr<Blas> Load(absl::Span<const char* const> names);

  const std::string& name() const { return name_; }
  // As kernels/muon/gemm.h, in any order; what a caller knows of symmetry is not made use of.
  // REQUIRES: every side is below 2^31.
  void Multiply(const Gemm& gemm) const;

 private:
  // The Fortran interface: everything by address, column-major, and the lengths of both texts.
  using Sgemm = void (*)(const char* transposed_a, const char* transposed_b, const int* rows, const int* columns,
                         const int* depth, const float* alpha, const float* a, const int* lda, const float* b,
                         const int* ldb, const float* beta, float* out, const int* ldc, size_t, size_t);

  Blas(std::string name, Sgemm sgemm) : name_(std::move(name)), sgemm_(sgemm) {}

  std::string name_;
  Sgemm sgemm_;
};

}  // namespace shardmesh
