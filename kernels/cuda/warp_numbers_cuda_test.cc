// Square roots, quotients and codes of 8-bit floats as warps of a device make them have the bits of the rules. Needs a
// device: without one, or in a build without CUDA, it is skipped and says why.
#include <gtest/gtest.h>

#include <utility>

#include "kernels/cuda/cuda_available.h"

#ifdef SHARDMESH_CUDA
#include "kernels/cuda/warp_numbers_check_cuda.h"
#endif

namespace shardmesh {
namespace {

#ifdef SHARDMESH_CUDA

void ExpectTheRules(WarpNumbers numbers) {
  uint64_t differences = 0;
  ASSERT_STREQ(CountWarpDifferences(numbers, &differences), nullptr);
  EXPECT_EQ(differences, 0u);
}

TEST(WarpNumbersCuda, AreThoseOfTheRules) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  const std::pair<const char*, WarpNumbers> kAll[] = {{"square roots", WarpNumbers::kSqrt},
                                                      {"quotients", WarpNumbers::kDivide},
                                                      {"codes of first moments", WarpNumbers::kEncodeFirst},
                                                      {"codes of second moments", WarpNumbers::kEncodeSecond},
                                                      {"decoded codes", WarpNumbers::kDecode}};
  for (const auto& [name, numbers] : kAll) {
    SCOPED_TRACE(name);
    ExpectTheRules(numbers);
  }
}

#else

TEST(WarpNumbersCuda, BuiltWithout) { GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message(); }

#endif

}  // namespace
}  // namespace shardmesh
