#include "kernels/muon/blas.h"

#include <dlfcn.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardmesh {

absl::StatusOr<const Blas*> Blas::Find() {
  static const absl::StatusOr<Blas>* const found =
      new absl::StatusOr<Blas>(Load({"libopenblas.so.0", "libmkl_rt.so", "libblas.so.3"}));
  if (!found->ok()) return found->status();
  return &found->value();
}

absl::StatusOr<Blas> Blas::Load(absl::Span<const char* const> names) {
  std::string tried;
  for (const char* name : names) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    void* sgemm = library == nullptr ? nullptr : dlsym(library, "sgemm_");
    if (sgemm != nullptr) return Blas(name, reinterpret_cast<Sgemm>(sgemm));
    const char* why = dlerror();
    absl::StrAppend(&tried, tried.empty() ? "" : "; ", why == nullptr ? name : why);
    if (library != nullptr) dlclose(library);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("no BLAS was found (", tried, "); install one, or leave the fast mode"));
}

// Row-major out = a b is column-major out^T = b^T a^T: the same memory, the factors exchanged.
void Blas::Multiply(const Gemm& gemm) const {
  const int rows = static_cast<int>(gemm.rows), columns = static_cast<int>(gemm.columns),
            depth = static_cast<int>(gemm.depth), ldb = gemm.transposed_b ? depth : columns;
  float beta = 0;
  if (gemm.addend != nullptr) {
    std::memcpy(gemm.out, gemm.addend, static_cast<size_t>(gemm.rows * gemm.columns) * sizeof(float));
    beta = gemm.beta;
  }
  sgemm_(gemm.transposed_b ? "T" : "N", "N", &columns, &rows, &depth, &gemm.alpha, gemm.b, &ldb, gemm.a, &depth, &beta,
         gemm.out, &columns, 1, 1);
}

}  // namespace shardmesh
