// The CUDA kernel gives the reference's bits. Needs a device: without one, or in a build without CUDA, the comparison
// is skipped and says why.
#include "kernels/fused_step_cuda.h"

#include <random>

#include "core/matchers.h"
#include "kernels/run_fixture.h"

#ifdef SHARDMESH_CUDA
#include "kernels/device_memory_cuda.h"
#endif

namespace shardmesh {
namespace {

#ifdef SHARDMESH_CUDA

// The fixture's image after the step ran on a copy of it in device memory.
std::vector<uint8_t> ApplyOnDevice(const RunFixture& f) {
  std::vector<uint8_t> image = f.image();
  DeviceBlock arena(image.size());
  const std::vector<const void*> pointers = f.Gradients(arena.data());
  DeviceBlock gradients(pointers.size() * sizeof(void*));
  EXPECT_STREQ(gradients.CopyFromHost(pointers.data(), pointers.size() * sizeof(void*)), nullptr);
  EXPECT_STREQ(arena.CopyFromHost(image.data(), image.size()), nullptr);
  const FusedRun run = f.Bind(arena.data(), reinterpret_cast<const void* const*>(gradients.data()));
  EXPECT_OK(FusedStepCuda(f.context(), run, nullptr));
  EXPECT_STREQ(arena.CopyToHost(image.data(), image.size()), nullptr);
  return image;
}

TEST(FusedStepCudaTest, EqualsTheReference) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  const uint64_t seed = std::random_device()();
  for (Format weights : {Format::kFp32, Format::kBf16, Format::kBf16Sr}) {
    for (Format gradients : {Format::kFp32, Format::kBf16}) {
      for (int slots : {1, 2, 3, 4, 5, 8, 21}) {
        for (Contents contents : {Contents::kOrdinary, Contents::kExtreme}) {
          for (int64_t elements : {0, 64, 4096 + 64}) {
            RunCase c;
            c.weights = weights, c.gradients = gradients, c.num_slots = slots, c.contents = contents;
            c.num_elements = elements, c.num_copies = slots % 3, c.misalign = 1, c.first_element = 64 * 77;
            const RunFixture f(c, seed);
            ASSERT_EQ(ApplyOnDevice(f), f.Apply(FusedStepReference)) << ToString(c) << ", seed " << seed;
          }
        }
      }
    }
  }
}

#else

TEST(FusedStepCudaTest, BuiltWithout_SaysSo) {
  EXPECT_THAT(CudaAvailable(), StatusIs(absl::StatusCode::kUnimplemented, testing::HasSubstr("--config=cuda")));
  EXPECT_THAT(FusedStepCuda({}, {}, nullptr),
              StatusIs(absl::StatusCode::kUnimplemented, testing::HasSubstr("no CUDA")));
  GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
}

#endif

}  // namespace
}  // namespace shardmesh
