// The CUDA kernel gives the reference's bits. Needs a device: without one, or in a build without CUDA, the comparison
// is skipped and says why.
#include <random>

#include "core/base/matchers.h"
#include "kernels/cuda/cuda_available.h"
#include "kernels/sum/slot_sum_fixture.h"

#ifdef SHARDMESH_CUDA
#include "kernels/cuda/device_memory_cuda.h"
#include "kernels/sum/slot_sum_cuda.h"
#endif

namespace shardmesh {
namespace {

#ifdef SHARDMESH_CUDA

TEST(SlotSumCuda, IsTheReference_BitForBit) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  const uint64_t seed = std::random_device()();
  ForEachSlotSum({0, 1, 4096 + 65}, [seed](const SlotSumCase& c) {
    const SlotSumFixture fixture(c, seed);
    constexpr int64_t kGuard = SlotSumFixture::kGuard;
    std::vector<uint32_t> sum(c.elements + 2 * kGuard, SlotSumFixture::kGuardBits);
    const auto bytes = static_cast<int64_t>(sum.size() * sizeof(uint32_t));
    DeviceBlock slots(static_cast<int64_t>(fixture.slots().size()) + 1), device_sum(bytes);
    ASSERT_STREQ(slots.CopyFromHost(fixture.slots().data(), static_cast<int64_t>(fixture.slots().size())), nullptr);
    ASSERT_STREQ(device_sum.CopyFromHost(sum.data(), bytes), nullptr);
    ASSERT_STREQ(SlotSumCuda(c.format, slots.data(), c.num_slots, c.elements,
                             reinterpret_cast<float*>(device_sum.data()) + kGuard, nullptr),
                 nullptr);
    ASSERT_STREQ(device_sum.CopyToHost(sum.data(), bytes), nullptr);
    ASSERT_EQ(sum, fixture.Sum(SlotSumReference, 1)) << c.ToString() << ", seed " << seed;
  });
}

#else

TEST(SlotSumCuda, BuiltWithout_SaysSo) {
  EXPECT_THAT(CudaAvailable(), StatusIs(absl::StatusCode::kUnimplemented, testing::HasSubstr("--config=cuda")));
  GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
}

#endif

}  // namespace
}  // namespace shardmesh
