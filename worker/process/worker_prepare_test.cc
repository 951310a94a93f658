// What a worker does while a job is being prepared: whether it begins at all, and how it stops.

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "worker/process/worker.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kBlocked = absl::Seconds(20);  // at most: what should not wait for it is done long before

// Counts what is opened, and lets nobody through who opens memory of the job "slow", until Release or for kBlocked.
class SlowMemory final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    const absl::Time until = MonotonicNow() + kBlocked;
    MutexLock lock(mu_);
    ++opened_;
    if (name.find("-slow-") != std::string::npos) {
      ++blocked_;
      while (!released_ && MonotonicNow() < until) released_changed_.WaitFor(mu_, until - MonotonicNow());
      --blocked_;
    }
    return Segment::Create(name, num_bytes, data_offset);
  }
  int blocked() {
    MutexLock lock(mu_);
    return blocked_;
  }
  int opened() {
    MutexLock lock(mu_);
    return opened_;
  }
  void Release() {
    MutexLock lock(mu_);
    released_ = true;
    released_changed_.SignalAll();
  }

 private:
  Mutex mu_;
  CondVar released_changed_;
  int opened_ ABSL_GUARDED_BY(mu_) = 0;
  int blocked_ ABSL_GUARDED_BY(mu_) = 0;
  bool released_ ABSL_GUARDED_BY(mu_) = false;
};

// Memory that the test still has when the worker is gone.
class SharedMemory final : public Memory {
 public:
  explicit SharedMemory(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    return memory_->Open(name, num_bytes, data_offset);
  }

 private:
  const std::shared_ptr<Memory> memory_;
};

struct WorkerPrepareTest : ::testing::Test {
  static WorkerOptions Options() {
    WorkerOptions options;
    options.name = "w";
    options.heartbeat_timeout = kLong;
    options.prepare_timeout = kLong;
    return options;
  }
  std::unique_ptr<Worker> NewWorker(const WorkerOptions& options) {
    return std::make_unique<Worker>(options, std::make_unique<SharedMemory>(memory));
  }
  static JobSpec Named(const std::string& name) {
    JobSpec job = SmallJob("fsdp=1", 1);
    job.name = name;
    return job;
  }
  static v1::MemberState StateOf(const Worker& worker) {
    const std::vector<v1::MemberStatus> statuses = worker.Statuses();
    return statuses.size() == 1 ? statuses[0].state() : v1::MEMBER_STATE_UNSPECIFIED;
  }

  const LocalHost host{1};  // its assignments alone
  const std::shared_ptr<SlowMemory> memory = std::make_shared<SlowMemory>();
};

TEST_F(WorkerPrepareTest, TooMuchForTheHost_FailsBeforeAnythingIsBuilt) {
  WorkerOptions options = Options();
  options.host_capacity = {100'000, "what this test allows"};
  const auto worker = NewWorker(options);
  worker->Reconcile({host.AssignmentOf(Named("large"), 0)});
  EXPECT_TRUE(Await([&] { return StateOf(*worker) == v1::MEMBER_STATE_FAILED; }));
  EXPECT_THAT(worker->Statuses()[0].error(), AllOf(HasSubstr("worker w could not prepare it: job large takes"),
                                                   HasSubstr("for the windows of 1 slots"),
                                                   HasSubstr("this host has 97.66 KiB (what this test allows)")));
  EXPECT_EQ(memory->opened(), 0);
}

TEST_F(WorkerPrepareTest, ReadyJob_HasTheMemoryOfItsFirstCommand_AndNoRoomForACopyThatDoesNotFit) {
  const JobSpec job = Named("exact");
  const Plan plan = *Plan::Create(job);
  WorkerOptions options = Options();
  options.host_capacity = {MemoryOf(plan, job).total() + CopyBytesOf(plan) - 1, "what this test allows"};
  const auto worker = NewWorker(options);
  worker->Reconcile({host.AssignmentOf(job, 0)});
  ASSERT_TRUE(Await([&] { return StateOf(*worker) == v1::MEMBER_STATE_READY; }));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<JobShard> shard, worker->Find("exact"));
  EXPECT_GE(shard->host().window().ResidentBytes(), plan.window_bytes());
  EXPECT_GE(shard->host().Resident().publications, plan.window_bytes());
  EXPECT_LT(shard->host().Resident().publications, 2 * plan.window_bytes());
  EXPECT_THAT(shard->memory().CheckCopyFits(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("(what this test allows)")));
}

TEST_F(WorkerPrepareTest, ClosedInALongPreparation_NobodyWaitsForIt) {
  auto worker = NewWorker(Options());
  worker->Reconcile({host.AssignmentOf(Named("slow"), 0)});
  ASSERT_TRUE(Await([&] { return memory->blocked() == 1; }));
  worker->Reconcile({});
  EXPECT_EQ(memory->blocked(), 1);
  EXPECT_TRUE(worker->Statuses().empty());
  worker->Reconcile({host.AssignmentOf(Named("other"), 0)});
  EXPECT_TRUE(Await([&] { return StateOf(*worker) == v1::MEMBER_STATE_READY; }));
  EXPECT_EQ(memory->blocked(), 1);
  const int opened = memory->opened();
  memory->Release();
  worker.reset();
  EXPECT_EQ(memory->opened(), opened);  // nothing more for the job that was closed
}

TEST_F(WorkerPrepareTest, ClosedWhileTheLeadIsSilent_HangsUp) {
  LocalHost two(2);
  two.servers[0].reset();
  ASSERT_OK_AND_ASSIGN(LocalListener lead, LocalListener::Listen(two.paths[0]));
  two.workers[1]->Reconcile({two.AssignmentOf(SmallJob("fsdp=2", 1), 1)});
  ASSERT_OK_AND_ASSIGN(LocalSocket peer, lead.Accept(kLong));
  ASSERT_OK(peer.Receive(kLong).status());  // its hello, never answered
  EXPECT_THAT(peer.Receive(absl::Milliseconds(300)), StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  two.workers[1]->Reconcile({});
  EXPECT_THAT(peer.Receive(absl::Seconds(5)), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("closed")));
}

}  // namespace
}  // namespace shardmesh
