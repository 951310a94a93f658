#include "core/job/device_job.h"

#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardmesh {
namespace {

JobSpec PlainJob() {
  JobSpec job;
  job.name = "plain";
  job.mesh = *ParseMeshSpec("fsdp=2");
  job.num_slots = 2;
  job.parameters = {{"a", {8, 8}, WeightFormat::kFp32}, {"b", {64, 4}, WeightFormat::kBf16Sr}};
  return job;
}

TEST(CheckDeviceJob, WhatDevicesCannotDo_IsRefusedAndSaysWhatWould) {
  const auto refusal = [](const JobSpec& job, int hosts = 1) { return CheckDeviceJob(job, *Plan::Create(job), hosts); };
  const auto is = [](const std::string& text) {
    return StatusIs(absl::StatusCode::kUnimplemented, testing::HasSubstr(text));
  };
  JobSpec job = PlainJob();
  EXPECT_OK(refusal(job));
  EXPECT_THAT(refusal(job, 2), is("is on several hosts"));
  job.residency = Residency::kBucket;
  EXPECT_THAT(refusal(job), is("has bucket residency, which workers on a CUDA device cannot do yet; take full"));
  job = PlainJob();
  job.parameters[1].gather = GatherFormat::kFp8Tensor;
  EXPECT_THAT(refusal(job), is("has parameter \"b\", which is gathered as fp8_tensor"));
  job.parameters[1].format = WeightFormat::kInt8Row;
  EXPECT_THAT(refusal(job), is("has parameter \"b\", which is gathered as fp8_tensor"));
  job.parameters[1].gather = GatherFormat::kInt8Row;
  EXPECT_OK(refusal(job)) << "their own codes";
  job = PlainJob();
  job.check_every = 10;
  EXPECT_THAT(refusal(job), is("has check_every"));
  job = PlainJob();
  job.num_slots = kMaxDeviceSlots + 1;
  EXPECT_THAT(refusal(job), is("has 65 slots"));
  job = PlainJob();
  job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  job.parameters[0].group = 1;
  EXPECT_THAT(refusal(job), is("has parameter \"a\", which Muon steps"));
}

}  // namespace
}  // namespace shardmesh
