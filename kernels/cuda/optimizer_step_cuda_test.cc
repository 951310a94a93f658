// The CUDA kernel gives the reference's bits. Needs a device: without one, or in a build without CUDA, the comparison
// is skipped and says why.
#include "kernels/cuda/optimizer_step_cuda.h"

#include <cstring>
#include <memory>

#include "core/base/matchers.h"
#include "kernels/cuda/cuda_available.h"
#include "kernels/step/step_fixture.h"

#ifdef SHARDMESH_CUDA
#include "kernels/cuda/device_memory_cuda.h"
#include "kernels/cuda/device_table_cuda.h"
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

// A tensor's streams in device memory, and the run of one step of it there.
class TensorOnDevice {
 public:
  TensorOnDevice(StepTensor& tensor, int64_t step, int64_t n)
      : run_(tensor.RunOf(step, 0, n)),
        squares_(tensor.square_sums()),
        changed_(tensor.changed()),
        digests_((std::memset(tensor.digests().data(), 0, tensor.digests().size()), tensor.digests())),
        mx8_codes_(tensor.mx8_codes()),
        mx8_scales_(tensor.mx8_scales()),
        largest_(tensor.largest()),
        pointers_(static_cast<int64_t>(tensor.gradients().size() * sizeof(void*))) {
    std::vector<const void*> slots;
    for (Guarded& part : tensor.parts()) parts_.push_back(std::make_unique<OnDevice>(part));
    for (Guarded& slot : tensor.gradients()) {
      gradients_.push_back(std::make_unique<OnDevice>(slot));
      slots.push_back(gradients_.back()->data());
    }
    EXPECT_STREQ(pointers_.CopyFromHost(slots.data(), static_cast<int64_t>(slots.size() * sizeof(void*))), nullptr);
    run_.gradients = reinterpret_cast<const void* const*>(pointers_.data());
    const auto at = [&](size_t stream) {
      return StoredRun{parts_[2 * stream]->data(), parts_[2 * stream + 1]->data()};
    };
    run_.weights_in = run_.weights_out = at(0);
    for (size_t s = 0; 2 * s + 2 < parts_.size(); ++s) run_.states_in[s] = run_.states_out[s] = at(1 + s);
    run_.square_sums = reinterpret_cast<float*>(squares_.data());
    run_.changed = changed_.data();
    run_.digests = reinterpret_cast<uint64_t*>(digests_.data());
    if (run_.mx8.codes != nullptr) run_.mx8 = {mx8_codes_.data(), mx8_scales_.data()};
    run_.largest = reinterpret_cast<float*>(largest_.data());
  }
  const OptimizerRun& run() const { return run_; }
  void Back() {
    for (const auto& part : parts_) part->Back();
    for (OnDevice* told : {&squares_, &changed_, &digests_, &mx8_codes_, &mx8_scales_, &largest_}) told->Back();
  }

 private:
  OptimizerRun run_;
  std::vector<std::unique_ptr<OnDevice>> parts_, gradients_;
  OnDevice squares_, changed_, digests_, mx8_codes_, mx8_scales_, largest_;
  DeviceBlock pointers_;
};

TEST(OptimizerStepCuda, IsTheReference_BitForBit) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  for (const StepCase& each : AllStepCases()) {
    SCOPED_TRACE(each.ToString());
    for (const int64_t n : {1, 255, 256, 1000, 1548}) {
      StepTensor reference(each, n), device(each, n);
      reference.Step(OptimizerStepReference, 3);
      for (int64_t step = 1; step <= 3; ++step) {
        TensorOnDevice there(device, step, n);
        ASSERT_OK(OptimizerStepCuda(each.Context(step), there.run(), nullptr));
        there.Back();
      }
      ASSERT_TRUE(reference == device) << n << " elements";
    }
  }
}

// Three steps of tensors that take the cases in turns, each step one launch; the launches share a table.
void ExpectListIsReference(const std::vector<StepCase>& cases, const std::vector<int64_t>& lengths) {
  std::vector<std::unique_ptr<StepTensor>> reference, listed;
  for (size_t i = 0; i < lengths.size(); ++i) {
    reference.push_back(std::make_unique<StepTensor>(cases[i % cases.size()], lengths[i]));
    listed.push_back(std::make_unique<StepTensor>(cases[i % cases.size()], lengths[i]));
    reference[i]->Step(OptimizerStepReference, 3);
  }
  DeviceTable table;
  for (int64_t step = 1; step <= 3; ++step) {
    std::vector<OptimizerContext> contexts;
    for (const StepCase& each : cases) contexts.push_back(each.Context(step));
    std::vector<std::unique_ptr<TensorOnDevice>> there;
    std::vector<OptimizerItem> items;
    for (size_t i = 0; i < lengths.size(); ++i) {
      there.push_back(std::make_unique<TensorOnDevice>(*listed[i], step, lengths[i]));
      items.push_back({static_cast<int>(i % cases.size()), there[i]->run()});
    }
    ASSERT_OK(OptimizerStepListCuda(contexts, items, table, nullptr));
    for (const auto& tensor : there) tensor->Back();
  }
  for (size_t i = 0; i < lengths.size(); ++i) ASSERT_TRUE(*reference[i] == *listed[i]) << "tensor " << i;
}

TEST(OptimizerStepListCuda, TensorsOfTwoGroups_AreTheReference_BitForBit) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  StepCase decayed = AllStepCases().back();
  StepCase other = decayed;
  other.hyper.weight_decay = 0;
  ExpectListIsReference({decayed, other}, {768, 1, 300, 2048, 255, 257, 100'000});
}

TEST(OptimizerStepListCuda, TensorsOfUnlikeFormats_AreTheReference_BitForBit) {
  if (!CudaAvailable().ok()) GTEST_SKIP() << "SKIPPED: no CUDA device: " << CudaAvailable().message();
  const std::vector<StepCase> cases = AllStepCases();
  ExpectListIsReference(cases, std::vector<int64_t>(cases.size(), 300));
}

TEST(OptimizerStepListCuda, UnknownContext_IsRefused) {
  DeviceTable table;
  const OptimizerContext context;
  const OptimizerItem item = {1, {}};
  EXPECT_THAT(OptimizerStepListCuda({&context, 1}, {&item, 1}, table, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("names context 1; there are 1")));
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
