// The CUDA kernel gives the reference's bits. Needs a device: without one, or in a build without CUDA, the comparison
// is skipped and says why.
#include "kernels/optimizer_step_cuda.h"

#include <cstring>
#include <memory>

#include "core/matchers.h"
#include "kernels/fused_step_cuda.h"
#include "kernels/step_fixture.h"

#ifdef SHARDMESH_CUDA
#include "kernels/device_memory_cuda.h"
#endif

namespace shardmesh {
namespace {

#ifdef SHARDMESH_CUDA

// A copy of a part in device memory.
class OnDevice {
 public:
  explicit OnDevice(Guarded& part) : part_(part), block_(part.size() + 1) {
    EXPECT_STREQ(block_.CopyFromHost(part.data(), part.size()), nullptr);
  }
  uint8_t* data() const { return block_.data(); }
  void Back() { EXPECT_STREQ(block_.CopyToHost(part_.data(), part_.size()), nullptr); }

 private:
  Guarded& part_;
  DeviceBlock block_;
};

// One step of the whole tensor on the device.
void StepOnDevice(StepTensor& tensor, int64_t step, int64_t n) {
  OptimizerRun run = tensor.RunOf(step, 0, n);
  std::vector<std::unique_ptr<OnDevice>> parts, gradients;
  for (Guarded& part : tensor.parts()) parts.push_back(std::make_unique<OnDevice>(part));
  std::vector<const void*> slots;
  for (Guarded& slot : tensor.gradients()) {
    gradients.push_back(std::make_unique<OnDevice>(slot));
    slots.push_back(gradients.back()->data());
  }
  DeviceBlock pointers(slots.size() * sizeof(void*));
  ASSERT_STREQ(pointers.CopyFromHost(slots.data(), slots.size() * sizeof(void*)), nullptr);
  run.gradients = reinterpret_cast<const void* const*>(pointers.data());
  const auto at = [&](size_t stream) { return StoredRun{parts[2 * stream]->data(), parts[2 * stream + 1]->data()}; };
  run.weights_in = run.weights_out = at(0);
  for (size_t s = 0; 2 * s + 2 < parts.size(); ++s) run.states_in[s] = run.states_out[s] = at(1 + s);
  std::memset(tensor.digests().data(), 0, tensor.digests().size());
  OnDevice squares(tensor.square_sums()), changed(tensor.changed()), digests(tensor.digests());
  OnDevice mx8_codes(tensor.mx8_codes()), mx8_scales(tensor.mx8_scales()), largest(tensor.largest());
  run.square_sums = reinterpret_cast<float*>(squares.data());
  run.changed = changed.data();
  run.digests = reinterpret_cast<uint64_t*>(digests.data());
  if (run.mx8.codes != nullptr) run.mx8 = {mx8_codes.data(), mx8_scales.data()};
  run.largest = reinterpret_cast<float*>(largest.data());
  ASSERT_OK(OptimizerStepCuda(tensor.step_case().Context(step), run, nullptr));
  for (const auto& part : parts) part->Back();
  squares.Back();
  changed.Back();
  digests.Back();
  mx8_codes.Back();
  mx8_scales.Back();
  largest.Back();
}

TEST(OptimizerStepCuda, IsTheReference_BitForBit) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  for (const StepCase& each : AllStepCases()) {
    if (each.weights == WeightFormat::kInt8Row) continue;  // has no kernel
    SCOPED_TRACE(each.ToString());
    for (const int64_t n : {1, 255, 256, 1000}) {
      StepTensor reference(each, n), device(each, n);
      reference.Step(OptimizerStepReference, 3);
      for (int64_t step = 1; step <= 3; ++step) StepOnDevice(device, step, n);
      ASSERT_TRUE(reference == device) << n << " elements";
    }
  }
}

#else

TEST(OptimizerStepCuda, BuiltWithout_SaysSo) {
  EXPECT_THAT(OptimizerStepCuda({}, {}, nullptr),
              StatusIs(absl::StatusCode::kUnimplemented, testing::HasSubstr("--config=cuda")));
  GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
}

#endif

}  // namespace
}  // namespace shardmesh
