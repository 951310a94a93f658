// Gradients that a process writes into a slot of a device behind their declaration: the command that reads them is not
// committed, and says why.
#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/pass/device/testing/device_group.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A job, a step that it has made, and the next one, of which one gradient of the first parameter is `value`.
struct Written {
  Written(const std::string& mesh, Format format, float value, bool clips = false) : both(JobOf(mesh, format, clips)) {
    both.PlaceWeights();
    both.RunStep(1);
    command = both.CpuStep(2);
    const Placement& place = both.gpu.plan.placements()[0];
    const int64_t bytes = BytesPerElement(format);
    uint8_t* const to = both.gpu.host.device()->slots[1].data() +
                        both.gpu.plan.buckets()[place.bucket].gradient_offset + (place.offset + 3) * bytes;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const auto half = static_cast<uint16_t>(bits >> 16);
    EXPECT_OK(both.gpu.host.device()->Copy(to, bytes == 4 ? static_cast<const void*>(&bits) : &half, bytes));
  }
  static JobSpec JobOf(const std::string& mesh, Format format, bool clips) {
    JobSpec job = MixedJob(mesh, 2);
    job.gradient_format = format;
    job.parameters[2].frozen = true;
    if (clips) job.clip_norm = 0.01;
    return job;
  }

  TwoGroups both;
  Command command;
};

TEST(DeviceLook, GradientsThatAreNoNumbersAnyMore_AreFoundInANormAndInAStepThatLooksAgain) {
  for (const char* mesh : {"fsdp=2", "ddp=2"}) {
    for (const Format format : {Format::kFp32, Format::kBf16}) {
      for (const bool norm : {false, true}) {
        for (const float value : {NAN, INFINITY, -INFINITY}) {
          Written written(mesh, format, value, norm);
          if (norm) written.command.kind = CommandKind::kNorm;
          written.both.gpu.host.control()->looks_again.store(norm ? 0 : 1);
          const absl::Status status = written.both.gpu.Execute(written.command, written.both.cpu.seq).status();
          EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status << " " << mesh << " " << norm << " " << value;
          EXPECT_THAT(std::string(status.message()),
                      AllOf(HasSubstr("finite when they were declared"),
                            HasSubstr(written.both.gpu.job.parameters[0].name), HasSubstr("found in step 2")));
        }
      }
    }
  }
}

// As large as may be declared: their squares are infinite, and they are numbers all the same.
TEST(DeviceLook, LargeGradients_AreNoDamage) {
  Written written("fsdp=1", Format::kFp32, 1e37F);
  written.both.gpu.host.control()->looks_again.store(1);
  EXPECT_OK(written.both.gpu.Execute(written.command, written.both.cpu.seq).status());
}

// A look changes no bit.
TEST(DeviceLook, StepsThatLookAgain_HaveTheBitsOfProcessors) {
  TwoGroups both(MixedJob("ddp=2,fsdp=2", 3));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  both.gpu.host.control()->looks_again.store(1);
  for (const int64_t step : {1, 2, 4}) {
    ASSERT_NO_FATAL_FAILURE(both.RunStep(step));
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame("step " + std::to_string(step)));
  }
}

}  // namespace
}  // namespace shardmesh
