// Contract 6 for gradients that are not finite: under policy skip the step counts and changes nothing, under policy
// fail the slot is refused until it is written again; the answer names slot, parameter and element. Attached and
// connected trainers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/time.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kTimeout = absl::Seconds(10);

enum class Way { kAttached, kConnected };

class NotFinite : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  void Open(NonFinitePolicy policy) {
    JobSpec spec = testing::OddJob("nan", "fsdp=2", 2);
    spec.non_finite = policy;
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK_AND_ASSIGN(
        session_, GetParam() == Way::kAttached ? job_->Attach({Slot(0), Slot(1)}) : job_->Connect({Slot(0), Slot(1)}));
    ASSERT_OK(session_->AwaitWeights(kTimeout));
    ASSERT_OK(testing::TrainTo(*session_, 2));
    ASSERT_OK(testing::WriteGradients(*session_, Step(3)));
    ASSERT_OK_AND_ASSIGN(const TensorView view, session_->gradient(Slot(1), "layers.1.weight"));
    static_cast<uint16_t*>(view.data)[2999] = 0x7fc0;  // NaN as bf16
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
};

TEST_P(NotFinite, Skip_CountsTheStepAndChangesNothing) {
  Open(NonFinitePolicy::kSkip);
  ASSERT_OK_AND_ASSIGN(const Learnt before, testing::Learn(*job_, 2));
  ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, session_->Step());
  EXPECT_TRUE(reply.skipped());
  EXPECT_THAT(reply.skip_reason(), AllOf(HasSubstr("slot 1"), HasSubstr("layers.1.weight")));
  ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, job_->Digest(kTimeout));
  EXPECT_EQ(digest.step(), 3);
  EXPECT_EQ(digest.digest(), before.digest);
  EXPECT_OK(testing::TrainTo(*session_, 5));
}

TEST_P(NotFinite, Fail_RefusesTheSlotUntilItIsWrittenAgain) {
  Open(NonFinitePolicy::kFail);
  EXPECT_THAT(session_->Step(),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("slot 1"), HasSubstr("layers.1.weight"), HasSubstr("element 2999"))));
  EXPECT_EQ(session_->committed_step(), Step(2));
  ASSERT_OK(testing::TrainTo(*session_, 5));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, 5));
  JobSpec spec = job_->spec();
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, spec, 5));
  EXPECT_EQ(learnt, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(, NotFinite, ::testing::Values(Way::kAttached, Way::kConnected),
                         [](const auto& info) { return info.param == Way::kAttached ? "Attached" : "Connected"; });

}  // namespace
}  // namespace shardmesh
