// The fast mode of Muon beside the exact one. Where the machine has no BLAS, only that this is said is tested.
#include <cmath>
#include <memory>

#include "core/base/matchers.h"
#include "kernels/muon/blas.h"
#include "kernels/muon/muon.h"
#include "kernels/muon/muon_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST(Blas, NoneThere_FailedPreconditionSaysWhatWasTried) {
  EXPECT_THAT(Blas::Load({"libno-such-blas.so.1", "libc.so.6"}),
              StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr("libno-such-blas.so.1"), HasSubstr("libc.so.6"), HasSubstr("sgemm_"))));
}

// Every element a small integer: then every order gives the same bits.
TEST(Blas, Products_AreThoseOfGemm) {
  const absl::StatusOr<const Blas*> blas = Blas::Find();
  if (!blas.ok()) GTEST_SKIP() << "SKIPPED: " << blas.status().message();
  constexpr int64_t kRows = 5, kColumns = 7, kDepth = 3;
  Floats a(kRows * kDepth), b(kDepth * kColumns), addend(kRows * kColumns);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 4) - 1;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 5) - 2;
  for (size_t i = 0; i < addend.size(); ++i) addend[i] = static_cast<float>(i % 3);
  const auto scratch = std::make_unique<GemmScratch>();
  for (const bool transposed_b : {false, true}) {
    for (const bool adds : {false, true}) {
      Floats ours(kRows * kColumns), fast(kRows * kColumns, std::nanf(""));
      Gemm gemm;
      gemm.rows = kRows;
      gemm.columns = kColumns;
      gemm.depth = kDepth;
      gemm.a = a.data();
      gemm.b = b.data();
      gemm.transposed_b = transposed_b;
      gemm.alpha = 2;
      gemm.beta = 3;
      gemm.addend = adds ? addend.data() : nullptr;
      gemm.out = ours.data();
      GemmBlockReference(gemm, GemmBlockAt(gemm, 0), *scratch);
      gemm.out = fast.data();
      (*blas)->Multiply(gemm);
      EXPECT_EQ(ours, fast) << transposed_b << adds;
    }
  }
}

// The update of either mode is within 1e-3 of float64 for these shapes, so both within 2e-3 of each other
// (kernels/muon/newton_schulz_test.cc); it enters the weights times the learning rate. The new weights are rounded once
// each, by 2^-24 of themselves; what is before the update has the same bits.
TEST(FastMuon, OneStep_SameMomentumAndCloseWeights) {
  const absl::StatusOr<MuonStepFn> fast = FastMuonStep();
  if (!fast.ok()) GTEST_SKIP() << "SKIPPED: " << fast.status().message();
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 9}, {7, 13}, {65, 33}, {64, 64}, {24, 130}}) {
    Settings settings;
    settings.hyper.lr = 0.02;
    Matrix exact(settings, rows, columns), other(settings, rows, columns);
    const Floats start = Normals(exact.n(), 1), gradient = Normals(exact.n(), 2);
    exact.SetWeights(start);
    other.SetWeights(start);
    exact.Step(BestMuonStep(), {gradient});
    other.Step(*fast, {gradient});
    EXPECT_EQ(exact.Momentum(), other.Momentum());
    const Floats ours = exact.Weights(), theirs = other.Weights();
    double squares = 0, norm = 0, moved = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
      squares += std::pow(static_cast<double>(ours[i]) - theirs[i], 2);
      norm += std::pow(static_cast<double>(ours[i]), 2);
      moved += std::pow(static_cast<double>(theirs[i]) - start[i], 2);
    }
    const double lr = 0.02 * std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
    EXPECT_LE(std::sqrt(squares), lr * 2e-3 + 2 * 0x1p-24 * 1.01 * std::sqrt(norm)) << rows << " x " << columns;
    EXPECT_GT(std::sqrt(moved), 0.5 * lr);
  }
}

}  // namespace
}  // namespace shardmesh
