// Loss scaling: gradients that are 2^k times as large, with that said at the step, give the same bits, another k at
// each step; one that overflows skips its step and nothing else. Attached and connected trainers, with clipping and
// without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kSteps = 6;
double ScaleOf(int64_t step) { return std::ldexp(1.0, static_cast<int>(step * 7 % 24) - 8); }

// bf16 by a power of two is exact.
void Multiply(Session& session, double scale) {
  for (const Slot slot : session.slots()) {
    for (const ParameterSpec& p : session.job().spec().parameters) {
      if (!p.tied_to.empty()) continue;
      const absl::StatusOr<TensorView> view = session.gradient(slot, p.name);
      ASSERT_OK(view);
      ASSERT_EQ(view->format, Format::kBf16);
      auto* values = static_cast<uint16_t*>(view->data);
      for (int64_t i = 0; i < view->num_elements; ++i) {
        const uint32_t bits = uint32_t{values[i]} << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        value *= static_cast<float>(scale);
        uint32_t scaled;
        std::memcpy(&scaled, &value, 4);
        ASSERT_EQ(scaled & 0xffff, 0u);
        values[i] = static_cast<uint16_t>(scaled >> 16);
      }
    }
  }
}

absl::StatusOr<v1::StepReply> Step(Session& session, int64_t step, double scale) {
  RETURN_IF_ERROR(testing::WriteGradients(session, shardmesh::Step(step)));
  Multiply(session, scale);
  StepOptions options;
  options.learning_rates = testing::LearningRates(session.job().spec(), step);
  options.loss_scale = scale;
  return session.Step(options);
}

TEST(LossScale, PowersOfTwo_ChangeNoBit) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  for (const double clip_norm : {0.0, 0.5}) {
    for (const bool attach : {true, false}) {
      JobSpec spec = testing::OddJob(absl::StrCat("scaled-", attach, "-", clip_norm > 0), "ddp=2,fsdp=2", 3);
      spec.clip_norm = clip_norm;
      ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
      ASSERT_OK(testing::Initialize(*job));
      const std::vector<Slot> slots = {Slot(0), Slot(1), Slot(2)};
      ASSERT_OK_AND_ASSIGN(const auto session, attach ? job->Attach(slots) : job->Connect(slots));
      ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
      for (int64_t step = 1; step <= kSteps; ++step) {
        ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, Step(*session, step, ScaleOf(step)));
        EXPECT_FALSE(reply.skipped()) << reply.skip_reason();
      }
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
      EXPECT_EQ(learnt, testing::ReferenceOf(spec, kSteps)) << (attach ? "attached" : "connected");
    }
  }
}

TEST(LossScale, AnOverflow_SkipsItsStep_AndScalesMustAgree) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::TinyJob("tiny", "fsdp=1", 2)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  StepOptions options;
  options.loss_scale = 0;
  EXPECT_THAT(session->Step(options), StatusIs(Code::kInvalidArgument, HasSubstr("loss scale 0 of step 1")));
  ASSERT_OK_AND_ASSIGN(const TensorView view, session->gradient(Slot(1), "w"));
  static_cast<uint16_t*>(view.data)[17] = 0x7f80;  // what overflowed
  options.loss_scale = 0x1p40;
  ASSERT_OK_AND_ASSIGN(v1::StepReply reply, session->Step(options));
  EXPECT_TRUE(reply.skipped());
  ASSERT_OK_AND_ASSIGN(reply, Step(*session, 2, 0x1p10));  // the trainer's scaler takes a smaller one
  EXPECT_FALSE(reply.skipped());
}

}  // namespace
}  // namespace shardmesh
