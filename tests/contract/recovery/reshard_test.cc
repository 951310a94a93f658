// A job is brought to another mesh while it trains: its trainers only open it again, and it learns the bits of one
// process. Where that cannot be, or a worker ends on the way, the job goes on: as it was, or there.
#include "client/cpp/checkpoint/reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(30);

class Reshard : public ::testing::Test {
 protected:
  void Start(int workers, const std::string& faults = "", ClusterOptions options = {}) {
    setenv("SHARDMESH_FAULT", faults.c_str(), 1);
    if (faults.empty()) unsetenv("SHARDMESH_FAULT");
    options.workers = workers;
    options.heartbeat_timeout = absl::Seconds(2);
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  void Create(const JobSpec& spec) {
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    created_ = job_->spec();
    ASSERT_OK(testing::Initialize(*job_));
  }
  void Train(int64_t steps) {
    step_ += steps;
    ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
    testing::TrainByTwo(*client_, job_, step_);
  }
  absl::Status To(const std::string& mesh, absl::Duration timeout = kLong) {
    ReshardOptions options;
    options.timeout = timeout;
    return ReshardJob(*client_, "job", ParseMeshSpec(mesh).value(), options).status();
  }
  // To the mesh, while two trainers train all the time.
  absl::Status ToWhileItTrains(const std::string& mesh) {
    absl::Status status;
    std::atomic<bool> done{false};
    std::thread resharding([&] {
      status = To(mesh);
      done.store(true);
    });
    while (!done.load()) Train(2);
    resharding.join();
    return status;
  }
  void ExpectLearnt(const std::string& mesh) {
    ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
    EXPECT_EQ(job_->spec().mesh.ToString(), mesh);
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, step_));
    EXPECT_EQ(learnt, testing::ReferenceOf(created_, step_));
  }
  v1::JobDescription Describe() const {
    v1::DescribeJobRequest request;
    request.set_job("job");
    return client_->coordinator().DescribeJob(request, kLong).value();
  }
  bool Logged(const std::string& event) const { return absl::StrContains(cluster_->coordinator().Log(), event); }
  void AwaitEvent(const std::string& event) const {
    const absl::Time deadline = MonotonicNow() + kLong;
    while (!Logged(event) && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(2));
    EXPECT_TRUE(Logged(event)) << event;
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  JobSpec created_;
  int64_t step_ = 0;
};

struct Way {
  int workers;
  std::vector<std::string> meshes;
  Residency residency = Residency::kFull;
};

class ReshardMeshes : public Reshard, public ::testing::WithParamInterface<Way> {};

TEST_P(ReshardMeshes, EveryFormat_LearnsTheReferencesBits) {
  const Way& way = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(way.workers));
  JobSpec spec = testing::EverythingJob("job", way.meshes[0]);
  spec.residency = way.residency;
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  for (size_t i = 1; i < way.meshes.size(); ++i) {
    ASSERT_OK(ToWhileItTrains(way.meshes[i])) << way.meshes[i];
    ASSERT_NO_FATAL_FAILURE(Train(1));
    ASSERT_NO_FATAL_FAILURE(ExpectLearnt(way.meshes[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(, ReshardMeshes,
                         ::testing::Values(Way{4, {"fsdp=2", "fsdp=4", "fsdp=3"}},
                                           Way{4, {"fsdp=4", "fsdp=1", "ddp=4", "ddp=2,fsdp=2"}},
                                           Way{6, {"ddp=2,fsdp=2", "fsdp=3,ddp=2", "ddp=3", "fsdp=6", "fsdp=2"}},
                                           Way{4, {"fsdp=2", "fsdp=4", "ddp=2,fsdp=2", "fsdp=1"}, Residency::kBucket}));

// What its trainers do not use takes none on the other mesh either.
TEST_F(Reshard, Buckets_TakeNoMemoryBeforeTheyAreUsed) {
  ASSERT_NO_FATAL_FAILURE(Start(3));
  JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
  spec.residency = Residency::kBucket;
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_OK(To("fsdp=3"));
  ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kLong));
  ASSERT_EQ(status.jobs_size(), 1);
  EXPECT_LT(status.jobs(0).slot_resident_bytes(), job_->plan().gradient_window_bytes());  // of one of two
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=3"));
}

TEST_F(Reshard, PulledSlots_AndTokenWeights) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  JobSpec spec = testing::OddJob("job", "fsdp=2", 5);
  spec.slot_mode = SlotMode::kPulled;
  spec.num_trainers = 2;
  spec.token_weights = true;
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  ASSERT_OK(ToWhileItTrains("fsdp=4"));
  ASSERT_OK(ToWhileItTrains("fsdp=3"));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=3"));
}

TEST_F(Reshard, WithoutWeights_TheyComeLater) {
  ASSERT_NO_FATAL_FAILURE(Start(3));
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", "fsdp=2", 2)));
  created_ = job_->spec();
  ASSERT_OK(To("fsdp=3"));
  ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
  ASSERT_OK(testing::Initialize(*job_));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=3"));
}

TEST_F(Reshard, TheMeshThatItHas_ChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  ASSERT_OK(To("fsdp=2"));
  EXPECT_EQ(Describe().epoch(), 1);
}

// Nothing of the job changes.
TEST_F(Reshard, WhatCannotBe_IsATypedError) {
  ASSERT_NO_FATAL_FAILURE(Start(3));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  EXPECT_THAT(To("fsdp=4"), StatusIs(Code::kFailedPrecondition,
                                     AllOf(HasSubstr("needs 4 workers of its host; there are its 2 and 1 others"))));
  EXPECT_THAT(To("fsdp=65"), StatusIs(Code::kInvalidArgument, HasSubstr("65 ranks; a job has at most 64")));
  EXPECT_THAT(ReshardJob(*client_, "no", ParseMeshSpec("fsdp=3").value()).status(),
              StatusIs(Code::kNotFound, HasSubstr("no job no")));
  MeshSpec twice;
  twice.dims = {{"a", 1}, {"a", 2}};
  EXPECT_THAT(ReshardJob(*client_, "job", twice).status(), StatusIs(Code::kInvalidArgument, HasSubstr("a")));
  EXPECT_EQ(Describe().epoch(), 1);
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=2"));
}

// It takes a worker a while to build its memory: until then the job is at its epoch.
TEST_F(Reshard, OnItsWay_AnotherMeshIsRefused_AndItsOwnCallsThatOff) {
  ASSERT_NO_FATAL_FAILURE(Start(3, "w2:staged:stop:1"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  std::thread resharding([&] {
    EXPECT_THAT(To("fsdp=3"), StatusIs(Code::kAborted, AllOf(HasSubstr("as it was"), HasSubstr("called off"))));
  });
  AwaitEvent("reshard_begins");
  ASSERT_TRUE(cluster_->worker("w2").AwaitStopped(kLong));
  EXPECT_THAT(To("fsdp=1"), StatusIs(Code::kFailedPrecondition, HasSubstr("on its way to mesh fsdp=3 already")));
  ASSERT_OK(To("fsdp=2"));
  resharding.join();
  cluster_->worker("w2").Continue();
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=2"));
  ASSERT_OK(To("fsdp=3"));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=3"));
}

TEST_F(Reshard, NotReadyInTime_IsCalledOff) {
  ASSERT_NO_FATAL_FAILURE(Start(3, "w2:staged:stop:1"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  EXPECT_THAT(To("fsdp=3", absl::Milliseconds(500)), StatusIs(Code::kDeadlineExceeded, HasSubstr("called off")));
  EXPECT_FALSE(Describe().has_resharding());
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=2"));
}

struct Loss {
  const char *fault, *worker, *from, *to;
};
class ReshardStaged : public Reshard, public ::testing::WithParamInterface<Loss> {};

// A worker that is to come, one that is to leave, one that stays, whose shard another has.
TEST_P(ReshardStaged, AWorkerEndsBeforeItMoves_ItGoesOnAsItWas_AndMayMoveLater) {
  const Loss& loss = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(5, absl::StrCat(loss.worker, ":", loss.fault)));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", loss.from, 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  EXPECT_THAT(ToWhileItTrains(loss.to),
              StatusIs(Code::kAborted, AllOf(HasSubstr("as it was"), HasSubstr(absl::StrCat("worker ", loss.worker)))));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt(loss.from));
  ASSERT_OK(ToWhileItTrains("fsdp=3"));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=3"));
}

INSTANTIATE_TEST_SUITE_P(, ReshardStaged,
                         ::testing::Values(Loss{"staged:kill:1", "w3", "ddp=2", "fsdp=4"},
                                           Loss{"staged:error:1", "w3", "ddp=2", "fsdp=4"},
                                           Loss{"assigned:kill:1", "w2", "ddp=2", "fsdp=3"},
                                           Loss{"staged:kill:1", "w1", "ddp=2", "fsdp=4"},
                                           Loss{"staged:kill:1", "w0", "ddp=2", "fsdp=4"}));

class ReshardMoving : public Reshard, public ::testing::WithParamInterface<Loss> {};

// Its shards are moving: it goes on with those that are left, as long as each shard has a holder.
TEST_P(ReshardMoving, AWorkerEndsWhileItMoves) {
  const Loss& loss = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(5, absl::StrCat(loss.worker, ":", loss.fault)));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", loss.from, 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_OK(ToWhileItTrains(loss.to));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt(loss.to));
  ASSERT_OK_AND_ASSIGN(const int ended, cluster_->worker(loss.worker).Wait(absl::Seconds(5)));
  EXPECT_EQ(ended, 128 + SIGKILL) << "the point was not reached";
}

INSTANTIATE_TEST_SUITE_P(, ReshardMoving,
                         ::testing::Values(Loss{"shard-moved:kill:1", "w3", "fsdp=2", "fsdp=4"},  // w4 takes its place
                                           Loss{"epoch-ended:kill:1", "w1", "ddp=2", "fsdp=4"},
                                           Loss{"shard-moved:kill:1", "w0", "ddp=2", "fsdp=4"},
                                           Loss{"epoch-ended:kill:1", "w2", "ddp=2,fsdp=2", "fsdp=3"},
                                           Loss{"epoch-ending:kill:1", "w1", "ddp=2,fsdp=2", "fsdp=1"},
                                           Loss{"epoch-ended:kill:1", "w1", "ddp=2,fsdp=2", "fsdp=1"}));

class ReshardStopped : public Reshard, public ::testing::WithParamInterface<Loss> {};

// It has not ended its part of the older epoch, or is not heard any more: one that stays, one that leaves. Others have
// what it has.
TEST_P(ReshardStopped, OneThatOthersWaitFor_TheyGoOnWithoutIt) {
  const Loss& loss = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(4, absl::StrCat(loss.worker, ":", loss.fault)));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", loss.from, 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  const absl::Time begin = MonotonicNow();
  ASSERT_OK(ToWhileItTrains(loss.to));
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(15));
  cluster_->worker(loss.worker).Continue();
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt(loss.to));
}

INSTANTIATE_TEST_SUITE_P(, ReshardStopped,
                         ::testing::Values(Loss{"epoch-ending:stop:1", "w0", "ddp=2,fsdp=2", "fsdp=1"},
                                           Loss{"epoch-ending:stop:1", "w1", "ddp=2,fsdp=2", "fsdp=1"},
                                           Loss{"epoch-ended:stop:1", "w1", "ddp=2,fsdp=2", "fsdp=1"},
                                           Loss{"epoch-ending:stop:1", "w3", "ddp=2,fsdp=2", "fsdp=2"}));

struct RetainedLoss {
  const char *fault, *worker;
};
class ReshardRetained : public Reshard, public ::testing::WithParamInterface<RetainedLoss> {};

// Nobody else has its shard: the job waits for its next incarnation.
TEST_P(ReshardRetained, TheOnlyHolderOfAShardIsKilledWhileItMoves_ItsNextIncarnationGivesIt) {
  const RetainedLoss& loss = GetParam();
  const testing::TempFolder folder;
  setenv("SHARDMESH_FAULT_ONCE", folder.File("once").c_str(), 1);
  ASSERT_NO_FATAL_FAILURE(Start(3, absl::StrCat(loss.worker, ":", loss.fault), {.retained = true}));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=3", 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  const pid_t before = cluster_->PidOf(loss.worker);
  ASSERT_OK(ToWhileItTrains("fsdp=2"));
  EXPECT_NE(cluster_->PidOf(loss.worker), before) << "the point was not reached";
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=2"));
  unsetenv("SHARDMESH_FAULT_ONCE");
}

INSTANTIATE_TEST_SUITE_P(, ReshardRetained,
                         ::testing::Values(RetainedLoss{"epoch-ended:kill:1", "w-0"},
                                           RetainedLoss{"epoch-ended:kill:1", "w-1"},
                                           RetainedLoss{"epoch-ended:kill:1", "w-2"},  // leaves
                                           RetainedLoss{"shard-moved:kill:1", "w-0"},
                                           RetainedLoss{"shard-moved:kill:1", "w-1"}));

TEST_F(Reshard, TheCoordinatorDies_BeforeItMoves_ItIsAskedAgain) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "w3:staged:delay:1"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  std::thread resharding([&] { EXPECT_OK(To("fsdp=4")); });
  AwaitEvent("reshard_begins");
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->RestartCoordinator());
  resharding.join();
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=4"));
}

TEST_F(Reshard, TheCoordinatorDies_WhileItMoves) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "w1:epoch-ended:delay:1"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  std::thread resharding([&] { EXPECT_OK(To("fsdp=4")); });
  AwaitEvent("job_reshards");
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->RestartCoordinator());
  resharding.join();
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=4"));
}

struct Waits {
  bool pulled, attached;
};
class ReshardWaits : public Reshard, public ::testing::WithParamInterface<Waits> {
 protected:
  // Opens a session; what is returned waits there for weights. If slots are assigned, it is of this one. Whether they are
  // or not, three sessions are at three ranks.
  absl::StatusOr<std::function<absl::Status()>> WaitOf(int slot) const {
    if (GetParam().pulled) {
      ASSIGN_OR_RETURN(std::shared_ptr<PullingSession> session,
                       GetParam().attached ? job_->AttachPulling() : job_->ConnectPulling());
      return [session] { return session->AwaitWeights(kLong); };
    }
    ASSIGN_OR_RETURN(std::shared_ptr<Session> session,
                     GetParam().attached ? job_->Attach({Slot(slot)}) : job_->Connect({Slot(slot)}));
    return [session] { return session->AwaitWeights(kLong); };
  }
  // Until a worker of job_ answers that it has no job.
  void AwaitOneWithoutTheJob() const {
    const absl::Time deadline = MonotonicNow() + kLong;
    for (int rank = 0; MonotonicNow() < deadline; rank = (rank + 1) % job_->plan().num_ranks()) {
      ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job_->worker(Rank(rank)).GetStatus(kLong));
      if (status.jobs().empty()) return;
      testing::Pause(absl::Milliseconds(2));
    }
    ADD_FAILURE() << "all workers still have the job";
  }
};

// The node would start the worker again if it were gone. It is not gone: it answers, but is not in the job any more.
TEST_P(ReshardWaits, ASessionAtAWorkerThatIsLeftOut_LearnsThatTheEpochIsOver) {
  ASSERT_NO_FATAL_FAILURE(Start(3, "", {.retained = true}));
  JobSpec spec = testing::OddJob("job", "fsdp=3", 3);
  if (GetParam().pulled) {
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 3;
  }
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  std::vector<std::function<absl::Status()>> waits(3);
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(waits[i], WaitOf(i));
  }
  ASSERT_OK_AND_ASSIGN(const int trainers, job_->CountTrainers(kLong));
  EXPECT_EQ(trainers, GetParam().pulled ? 3 : 0);
  ASSERT_OK(To("fsdp=2"));
  ASSERT_NO_FATAL_FAILURE(AwaitOneWithoutTheJob());
  const auto is_over = AnyOf(StatusIs(Code::kAborted, HasSubstr("open the job again")),
                             StatusIs(Code::kUnavailable, HasSubstr("open the job again")));
  const absl::Time begin = MonotonicNow();
  for (const std::function<absl::Status()>& wait : waits) EXPECT_THAT(wait(), is_over);
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(6));  // three heartbeat time-outs; each wait may take kLong
  EXPECT_THAT(job_->CountTrainers(kLong).status(), is_over);
  waits.clear();
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=2"));
}

INSTANTIATE_TEST_SUITE_P(, ReshardWaits,
                         ::testing::Values(Waits{false, false}, Waits{false, true}, Waits{true, false},
                                           Waits{true, true}));

// It is the mesh that it was brought to that comes back, when there are workers enough.
TEST_F(Reshard, AfterALoss_ItKeepsTheMeshThatItWasBroughtTo) {
  ASSERT_NO_FATAL_FAILURE(Start(5));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  ASSERT_OK(ToWhileItTrains("ddp=2,fsdp=2"));
  ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
  cluster_->worker(job_->members()[1].worker()).Kill9();
  ASSERT_OK(client_->Reopen(*job_));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=2"));  // the fifth takes its place
}

// A version that a reader holds stays; the next one that it sees is a later one, whole.
TEST_F(Reshard, AttachedReaders_GoOnWithLaterVersions) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=2", 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_OK_AND_ASSIGN(const auto reader, VersionReader::Open(*client_, "job"));
  ASSERT_OK_AND_ASSIGN(const auto held, reader->Take({VersionChoice::kLatest}, kLong));
  const std::string name = created_.parameters[0].name;
  ASSERT_OK_AND_ASSIGN(const ConstTensorView view, held.parameter(name));
  const std::string before(static_cast<const char*>(view.data), view.data_bytes());
  const Step step = held.step();
  ASSERT_OK(ToWhileItTrains("fsdp=4"));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  EXPECT_EQ(std::string(static_cast<const char*>(view.data), view.data_bytes()), before);
  ASSERT_OK_AND_ASSIGN(const auto next, reader->Take({VersionChoice::kAtLeast, Step(step_)}, kLong));
  EXPECT_GT(next.step(), step);
  ASSERT_OK_AND_ASSIGN(const ConstTensorView now, next.parameter(name));
  const Learnt reference = testing::ReferenceOf(created_, next.step().value());
  EXPECT_EQ(std::string(static_cast<const char*>(now.data), now.data_bytes()), reference.weights.at(name));
}

// At the worker that granted the lease, a member of both meshes or one that leaves.
class ReshardLeases : public Reshard, public ::testing::WithParamInterface<int> {
 protected:
  static absl::StatusOr<std::string> PullLeased(ShardTransport& worker, const v1::Lease& lease) {
    v1::PullRequest request;
    request.set_job("job");
    request.set_lease(lease.id());
    std::string bytes;
    const auto begin = [&](const v1::PullHeader& header) {
      return header.step() == lease.step() ? absl::OkStatus() : absl::InternalError("another version");
    };
    const auto data = [&](absl::string_view more) {
      bytes.append(more.data(), more.size());
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(worker.Pull(request, begin, data, kLong).status());
    return bytes;
  }
};

TEST_P(ReshardLeases, ALeasedVersion_StaysUntilItsLeaseEnds) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "fsdp=4", 2)));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ShardTransport& worker = job_->worker(Rank(GetParam()));
  const std::shared_ptr<Job> before = job_;
  v1::AcquireLeaseRequest acquire;
  acquire.set_job("job");
  acquire.set_latest(true);
  acquire.set_ttl_ms(60'000);
  acquire.set_nonce(1);
  ASSERT_OK_AND_ASSIGN(const v1::Lease lease, worker.AcquireLease(acquire, kLong));
  ASSERT_OK_AND_ASSIGN(const std::string bytes, PullLeased(worker, lease));
  for (const char* mesh : {"fsdp=3", "fsdp=2"}) {
    ASSERT_OK(ToWhileItTrains(mesh));
    ASSERT_NO_FATAL_FAILURE(Train(2));
    ASSERT_OK_AND_ASSIGN(const std::string now, PullLeased(worker, lease));
    EXPECT_EQ(now, bytes) << mesh;
  }
  v1::RenewLeaseRequest renew;
  renew.set_job("job");
  renew.set_epoch(lease.epoch());
  renew.set_id(lease.id());
  renew.set_nonce(acquire.nonce());
  renew.set_ttl_ms(60'000);
  EXPECT_THAT(worker.RenewLease(renew, kLong),
              StatusIs(Code::kFailedPrecondition, HasSubstr("acquire one of a version of now")));
  v1::ReleaseLeaseRequest release;
  release.set_job("job");
  release.set_epoch(lease.epoch());
  release.set_id(lease.id());
  release.set_nonce(acquire.nonce());
  EXPECT_OK(worker.ReleaseLease(release, kLong));
  EXPECT_THAT(PullLeased(worker, lease), StatusIs(Code::kNotFound, HasSubstr("")));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=2"));
}

INSTANTIATE_TEST_SUITE_P(, ReshardLeases, ::testing::Values(1, 3));

}  // namespace
}  // namespace shardmesh
