// Errors that workers meet at the points that can fail (core/base/fault_point.h): whoever waits there is told, by the
// same typed error, nothing is half done, and the same call may be repeated. The job learns what an undisturbed one
// does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr int64_t kSteps = 4;

struct Case {
  FaultPoint point;
  std::string worker;  // w0 is the lead, with the attached trainer; w1 has the connected one
  int nth = 1;
};

const FaultPointInfo& InfoOf(FaultPoint point) {
  return *std::find_if(std::begin(kFaultPoints), std::end(kFaultPoints),
                       [point](const FaultPointInfo& info) { return info.point == point; });
}

class FaultErrors : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& at = GetParam();
    setenv("SHARDMESH_FAULT", absl::StrCat(at.worker, ":", InfoOf(at.point).name, ":error:", at.nth).c_str(), 1);
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2, .worker_program = "tests/testing/faulty_worker"}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  static JobSpec Spec() { return testing::OddJob("job", "fsdp=2", 2); }
  auto Injected() const {
    return StatusIs(absl::StatusCode::kResourceExhausted,
                    HasSubstr(absl::StrCat("fault injected at ", InfoOf(GetParam().point).name)));
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
};

class FaultErrorsInCalls : public FaultErrors {
 protected:
  // Calls until it succeeds; what it said before goes to `errors`.
  void Insist(std::vector<absl::Status>& errors, const std::function<absl::Status()>& call) {
    for (int tries = 0; tries < 3; ++tries) {
      const absl::Status status = call();
      if (status.ok()) return;
      errors.push_back(status);
    }
    ADD_FAILURE() << "it stays: " << errors.back();
  }
  absl::Status Open(std::unique_ptr<Session>& session, absl::StatusOr<std::unique_ptr<Session>> opened) {
    if (opened.ok()) session = *std::move(opened);
    return opened.status();
  }
  // Both slots of a step, one after the other: the connected trainer's call comes first, and is repeated until the
  // attached one has declared, too.
  void Train(Session& attached, Session& connected) {
    std::vector<absl::Status> of_connected;
    std::thread other([&] { Insist(of_connected, [&] { return testing::TrainTo(connected, kSteps); }); });
    Insist(errors_, [&] { return testing::TrainTo(attached, kSteps); });
    other.join();
    errors_.insert(errors_.end(), of_connected.begin(), of_connected.end());
  }

  std::vector<absl::Status> errors_;
};

TEST_P(FaultErrorsInCalls, TheCallerIsToldOnce_AndRepeatsTheCall) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec()));
  ASSERT_EQ(job->members()[0].worker(), "w0");
  Insist(errors_, [&] { return testing::Initialize(*job); });  // waits until weights can be pulled
  std::unique_ptr<Session> attached, connected;
  Insist(errors_, [&] { return Open(attached, job->Attach({Slot(0)})); });
  Insist(errors_, [&] { return Open(connected, job->Connect({Slot(1)})); });
  ASSERT_TRUE(attached != nullptr && connected != nullptr);
  for (Session* session : {attached.get(), connected.get()}) {
    Insist(errors_, [&] { return session->AwaitWeights(kLong); });
  }
  Train(*attached, *connected);
  Learnt learnt;
  Insist(errors_, [&] {
    const absl::StatusOr<Learnt> said = testing::Learn(*job, kSteps);
    if (said.ok()) learnt = *said;
    return said.status();
  });
  EXPECT_THAT(errors_, ElementsAre(Injected())) << "the point was not reached, or more failed than that";
  ASSERT_OK(testing::Delete(*client_, "job"));
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, Spec(), kSteps));
  EXPECT_EQ(learnt, undisturbed);
}

class FaultErrorsInPreparing : public FaultErrors {};

TEST_P(FaultErrorsInPreparing, TheJobFailsAndSaysWhy_AndTheNextOneRuns) {
  EXPECT_THAT(client_->CreateJob(Spec()),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(absl::StrCat("worker ", GetParam().worker, " could not prepare it")),
                             HasSubstr(absl::StrCat("fault injected at ", InfoOf(GetParam().point).name)))));
  ASSERT_OK(testing::Delete(*client_, "job"));
  EXPECT_OK(testing::Undisturbed(*client_, Spec(), kSteps).status());
}

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(InfoOf(info.param.point).name, "_", info.param.worker, "_", info.param.nth);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(, FaultErrorsInPreparing,
                         ::testing::Values(Case{FaultPoint::kAssigned, "w0"}, Case{FaultPoint::kAssigned, "w1"},
                                           Case{FaultPoint::kPrepared, "w0"}, Case{FaultPoint::kPrepared, "w1"}),
                         NameOf);
// Pulls: of whoever waits for the initial weights, of a connected trainer before its first step, and behind each.
INSTANTIATE_TEST_SUITE_P(, FaultErrorsInCalls,
                         ::testing::Values(Case{FaultPoint::kAttaching, "w0"}, Case{FaultPoint::kPulling, "w1", 1},
                                           Case{FaultPoint::kPulling, "w1", 2}, Case{FaultPoint::kPulling, "w1", 3},
                                           Case{FaultPoint::kPulling, "w1", 4}, Case{FaultPoint::kStepCalled, "w1", 2},
                                           Case{FaultPoint::kMessageTaken, "w0", 2},
                                           Case{FaultPoint::kGradientShardReceived, "w0", 3},
                                           Case{FaultPoint::kGradientShardReceived, "w1", 3}),
                         NameOf);

TEST(FaultErrorsTest, EveryPointThatCanFail_IsACase) {
  std::vector<FaultPoint> cases = {FaultPoint::kAssigned,
                                   FaultPoint::kPrepared,
                                   FaultPoint::kAttaching,
                                   FaultPoint::kPulling,
                                   FaultPoint::kStepCalled,
                                   FaultPoint::kMessageTaken,
                                   FaultPoint::kGradientShardReceived};
  for (const FaultPointInfo& info : kFaultPoints) {
    const bool of_checkpoint = info.stage == FaultStage::kSaving || info.stage == FaultStage::kLoading;
    if (of_checkpoint || info.stage == FaultStage::kMoving) continue;  // checkpoint_faults_test, reshard_test
    EXPECT_EQ(info.can_fail, std::count(cases.begin(), cases.end(), info.point) == 1) << info.name;
  }
}

}  // namespace
}  // namespace shardmesh
