#include "worker/process/worker.h"

#include <atomic>
#include <functional>
#include <set>
#include <string>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST(WorkerTest, FourWorkersAndTwoTrainers_Train) {
  LocalHost host(4);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("ddp=2,fsdp=2", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer a, Trainer::Attach(host, 0, {0}));
  ASSERT_OK_AND_ASSIGN(Trainer b, Trainer::Attach(host, 3, {1}));
  EXPECT_EQ(a.welcome.committed_step(), 0);
  EXPECT_EQ(b.welcome.worker(), "w3");
  EXPECT_EQ(b.welcome.rank(), 3);
  const float* window_a = reinterpret_cast<const float*>(a.segments[0].data());
  const float* window_b = reinterpret_cast<const float*>(b.segments[0].data());
  EXPECT_EQ(window_a[0], 1.0f);
  for (int64_t step = 1; step <= 10; ++step) {
    const float before = window_a[0];
    for (int e = 0; e < 150; ++e) {
      reinterpret_cast<float*>(a.segments[1].data())[e] = 1.0f;
      reinterpret_cast<float*>(b.segments[1].data())[e] = 2.0f;
    }
    ASSERT_OK(a.Send(Request({0}, step)));
    ASSERT_OK_AND_ASSIGN(v1::StepReply reply, b.Step(Request({1}, step)));
    EXPECT_EQ(reply.step(), step);
    ASSERT_OK(a.Reply());
    EXPECT_LT(window_a[0], before);
    EXPECT_EQ(window_a[149], window_b[149]);
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(host.StatusOf(i).committed_step(), 10);
  ASSERT_OK_AND_ASSIGN(v1::StepReply again, a.Step(Request({0}, 10)));
  EXPECT_TRUE(again.already_applied());
}

TEST(WorkerTest, PeerCloses_TheOthersNameIt) {
  LocalHost host(4);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=4", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 1, {0}));
  ASSERT_OK(trainer.Send(Request({0}, 1)));  // waits for slot 1, which nobody has
  host.workers[2]->Reconcile({});
  const auto names = StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker w2 (rank 2"), HasSubstr("is gone")));
  EXPECT_THAT(trainer.Reply(), names);
  for (int i : {0, 1, 3}) {
    EXPECT_THAT(host.HealthOf(i), names);
    EXPECT_EQ(host.StatusOf(i).state(), v1::MEMBER_STATE_FAILED);
    EXPECT_TRUE(host.StatusOf(i).has_lost_rank());
    EXPECT_EQ(host.StatusOf(i).lost_rank(), 2);
  }
  EXPECT_THAT(host.HealthOf(2), StatusIs(Code::kNotFound, HasSubstr("holds no job")));
}

// Its members, those of the older epoch that it goes on from, who leaves, and who keeps copies.
TEST(WorkerTest, ItTellsWhichAddressesItsJobsName) {
  using Addresses = std::set<std::string>;
  Addresses named = {"none"};
  WorkerOptions options;
  options.name = "w0";
  options.peers_named = [&](const Addresses& addresses) { named = addresses; };
  Worker worker(options, NewProcessMemory());
  const LocalHost host(2);
  v1::Assignment older = host.AssignmentOf(SmallJob("fsdp=2", 1), 0, 3);
  older.mutable_peers(0)->set_address("a:1");
  older.mutable_peers(1)->set_address("b:1");
  worker.Reconcile({older});
  EXPECT_EQ(named, (Addresses{"a:1", "b:1"}));

  v1::Assignment next = host.AssignmentOf(SmallJob("fsdp=1", 1), 0, 4);
  next.mutable_peers()->RemoveLast();
  next.mutable_peers(0)->set_address("a:1");
  v1::Assignment moves = next;
  moves.mutable_from()->set_epoch(3);
  moves.mutable_from()->set_mesh("fsdp=2");
  moves.mutable_from()->add_was(0);
  worker.Reconcile({moves});
  EXPECT_EQ(named, (Addresses{"a:1", "b:1"}));
  worker.Reconcile({next});
  EXPECT_EQ(named, Addresses{"a:1"});

  moves.set_epoch(5);
  moves.mutable_from()->set_epoch(4);
  moves.mutable_from()->set_mesh("fsdp=1");
  moves.mutable_from()->add_departing()->set_address("c:1");
  moves.set_staged(true);
  worker.Reconcile({next, moves});
  EXPECT_EQ(named, (Addresses{"a:1", "c:1"}));

  next.set_epoch(6);
  next.mutable_back()->add_holders()->set_address("d:1");
  worker.Reconcile({next});
  EXPECT_EQ(named, (Addresses{"a:1", "d:1"}));
  worker.Reconcile({});
  EXPECT_EQ(named, Addresses());
}

TEST(WorkerTest, LeadCloses_ThePeersNameIt) {
  LocalHost host(3);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=3", 1)));
  host.servers[0].reset();  // ends although peers are connected
  host.workers[0].reset();
  for (int i : {1, 2}) {
    EXPECT_TRUE(Await([&] { return !host.HealthOf(i).ok(); }));
    EXPECT_THAT(host.HealthOf(i), StatusIs(Code::kUnavailable, HasSubstr("worker w0 (rank 0")));
  }
}

TEST(WorkerTest, OrderlyLeave_SaysSo) {
  LocalHost host(2);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=2", 1)));
  host.workers[1]->Leave();
  for (int i : {0, 1}) {
    EXPECT_THAT(host.HealthOf(i),
                StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker w1"), HasSubstr("told to stop"))));
  }
}

TEST(WorkerTest, DeletedJob_HangsUpOnTrainers_AndNewEpochStartsAnew) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
  host.workers[0]->Reconcile({host.AssignmentOf(SmallJob("fsdp=1", 1), 0, 3)});  // known: nothing changes
  ASSERT_OK(trainer.Step(Request({0}, 1)));
  host.workers[0]->Reconcile({host.AssignmentOf(SmallJob("fsdp=1", 1), 0, 4)});
  EXPECT_THAT(trainer.socket.Receive(kLong), StatusIs(Code::kUnavailable, HasSubstr("closed")));
  EXPECT_TRUE(Await([&] { return host.StatusOf(0).state() == v1::MEMBER_STATE_READY; }));
  EXPECT_EQ(host.StatusOf(0).epoch(), 4);
  EXPECT_EQ(host.StatusOf(0).committed_step(), kNoStep);
}

// A member of a job that is not ready is lost: the others drop what they prepared, and take the next epoch without it.
TEST(WorkerTest, AssignedAnew_SurvivorsDropTheOldEpoch_AndPrepareTheNewOne) {
  LocalHost host(3);
  const JobSpec job = SmallJob("fsdp=2", 1);
  const auto among = [&](const std::vector<int>& members, int rank, int64_t epoch) {
    v1::Assignment assignment = host.AssignmentOf(job, rank, epoch);
    const v1::Assignment all = assignment;
    assignment.clear_peers();
    for (size_t r = 0; r < members.size(); ++r) {
      *assignment.add_peers() = all.peers(members[r]);
      assignment.mutable_peers(static_cast<int>(r))->set_rank(static_cast<int>(r));
    }
    return assignment;
  };
  const auto ready = [&](int worker, int64_t epoch) {
    return Await([&, worker, epoch] {
      return host.StatusOf(worker).epoch() == epoch && host.StatusOf(worker).state() == v1::MEMBER_STATE_READY;
    });
  };
  host.workers[0]->Reconcile({among({0, 1}, 0, 3)});
  host.workers[1]->Reconcile({among({0, 1}, 1, 3)});
  ASSERT_TRUE(ready(0, 3) && ready(1, 3));
  const std::weak_ptr<JobShard> old = *host.workers[1]->Find("small");
  host.workers[0]->Reconcile({});  // as when it died
  ASSERT_TRUE(Await([&] { return host.StatusOf(1).lost_rank() == 0 && host.StatusOf(1).has_lost_rank(); }));
  host.workers[1]->Reconcile({among({1, 2}, 0, 4)});
  host.workers[2]->Reconcile({among({1, 2}, 1, 4)});
  EXPECT_TRUE(ready(1, 4) && ready(2, 4));
  EXPECT_TRUE(Await([&] { return old.expired(); })) << "its memory is still held";
  EXPECT_OK(host.HealthOf(1));
  EXPECT_FALSE(host.StatusOf(1).has_lost_rank());
}

TEST(WorkerTest, PeerHello_IsCheckedAgainstTheAssignment) {
  LocalHost host(2);
  const JobSpec job = SmallJob("fsdp=2", 1);
  ASSERT_NO_FATAL_FAILURE(host.Start(job));
  v1::PeerHello good;
  good.set_job("small");
  good.set_epoch(3);
  good.set_rank(1);
  good.set_incarnation(101);
  good.set_plan_hash(Plan::Create(job)->hash());
  good.set_secret(kJobSecret);
  struct Case {
    std::function<void(v1::PeerHello&)> change;
    Code code;
    const char* message;
  };
  const Case cases[] = {
      {[](v1::PeerHello& h) { h.set_job("other"); }, Code::kUnavailable, "no memory of job other yet"},
      {[](v1::PeerHello& h) { h.set_epoch(4); }, Code::kUnavailable, "no memory of job small yet"},
      {[](v1::PeerHello& h) { h.set_epoch(2); }, Code::kAborted, "epoch 2 of job small is over; now 3"},
      {[](v1::PeerHello& h) { h.set_rank(0); }, Code::kInvalidArgument, "rank 0 asks rank 0"},
      {[](v1::PeerHello& h) { h.set_rank(2); }, Code::kInvalidArgument, "rank 2"},
      {[](v1::PeerHello& h) { h.set_rank(-1); }, Code::kInvalidArgument, "rank -1"},
      {[](v1::PeerHello& h) { h.set_incarnation(99); }, Code::kAborted, "is incarnation 101 in this epoch, not 99"},
      {[](v1::PeerHello& h) { h.set_plan_hash("abc"); }, Code::kFailedPrecondition, "plan hash abc differs"},
      {[](v1::PeerHello& h) { h.clear_secret(); }, Code::kPermissionDenied, "does not show the secret of job small"},
      {[](v1::PeerHello& h) { h.set_secret("of the members alonf"); }, Code::kPermissionDenied, "secret of job small"},
      // Nothing else is told to who does not show it.
      {[](v1::PeerHello& h) { h.clear_secret(), h.set_epoch(2); }, Code::kPermissionDenied, "secret of job small"},
      {[](v1::PeerHello& h) { h.clear_secret(), h.set_rank(0); }, Code::kPermissionDenied, "secret of job small"},
      {[](v1::PeerHello& h) { h.clear_secret(), h.set_plan_hash("abc"); }, Code::kPermissionDenied, "secret"},
  };
  for (const Case& c : cases) {
    v1::LocalHello hello;
    *hello.mutable_peer() = good;
    c.change(*hello.mutable_peer());
    ASSERT_OK_AND_ASSIGN(LocalSocket socket, LocalSocket::Connect(host.paths[0]));
    ASSERT_OK(socket.Send(hello.SerializeAsString(), {}, kLong));
    ASSERT_OK_AND_ASSIGN(LocalMessage answer, socket.Receive(kLong));
    v1::LocalWelcome welcome;
    ASSERT_TRUE(welcome.ParseFromString(answer.bytes));
    EXPECT_EQ(welcome.code(), static_cast<int>(c.code)) << welcome.message();
    EXPECT_THAT(welcome.message(), HasSubstr(c.message));
    EXPECT_TRUE(answer.descriptors.empty());
    EXPECT_THAT(welcome.message(), ::testing::Not(HasSubstr(kJobSecret)));
  }
  EXPECT_OK(host.HealthOf(0));
}

TEST(WorkerTest, AssignmentsThatCannotBe_AreFailedStatuses) {
  struct Case {
    std::function<void(v1::Assignment&)> change;
    const char* message;
  };
  const Case cases[] = {
      {[](v1::Assignment& a) { a.set_plan_hash(std::string(32, '0')); }, "differs from the coordinator's"},
      {[](v1::Assignment& a) { a.clear_peers(); }, "assigned rank 0 among 0 members; the mesh fsdp=1 has 1"},
      {[](v1::Assignment& a) { a.set_rank(1); }, "assigned rank 1 among 1 members"},
      {[](v1::Assignment& a) { a.set_rank(-1); }, "assigned rank -1"},
      {[](v1::Assignment& a) { a.mutable_spec()->clear_parameters(); }, "has no parameters"},
      {[](v1::Assignment& a) { a.mutable_spec()->clear_optimizer(); }, "optimizer"},
  };
  for (const Case& c : cases) {
    LocalHost host(1);
    v1::Assignment assignment = host.AssignmentOf(SmallJob("fsdp=1", 1), 0);
    c.change(assignment);
    host.workers[0]->Reconcile({assignment, assignment});  // said twice: the first counts
    EXPECT_TRUE(Await([&] { return host.StatusOf(0).state() == v1::MEMBER_STATE_FAILED; }));
    EXPECT_THAT(host.StatusOf(0).error(), AllOf(HasSubstr("worker w0 could not prepare it"), HasSubstr(c.message)));
    EXPECT_THAT(host.workers[0]->Find("small"), StatusIs(Code::kUnavailable, HasSubstr(c.message)));
  }
}

// A job that is taken back at once, again and again: peers wait for a lead that never comes.
TEST(WorkerTest, ClosedWhilePreparing_Ends) {
  LocalHost host(2);
  for (int64_t epoch = 1; epoch <= 20; ++epoch) {
    host.workers[1]->Reconcile({host.AssignmentOf(SmallJob("fsdp=2", 1), 1, epoch)});
    host.workers[1]->Reconcile({});
  }
  EXPECT_TRUE(host.workers[1]->Statuses().empty());
}

TEST(WorkerTest, OnChange_IsCalledWhenAJobIsReady) {
  LocalHost host(1);
  std::atomic<int> calls{0};
  host.workers[0]->OnChange([&] { ++calls; });
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  EXPECT_TRUE(Await([&] { return calls.load() > 0; }));
  host.workers[0]->OnChange(nullptr);
}

// The coordinator would refuse a heartbeat with it.
TEST(WorkerTest, AVersionThatIsShownBeforeItsStepIsCommitted_IsNotTold) {
  LocalHost host(1);
  const JobSpec job = SmallJob("fsdp=1", 1);
  ASSERT_NO_FATAL_FAILURE(host.Start(job));
  ASSERT_OK_AND_ASSIGN(const auto shard, host.workers[0]->Find(job.name));
  shard->protocol().publications().Show(0, 7);
  EXPECT_EQ(shard->protocol().publications().Published().size(), 1u);
  EXPECT_EQ(host.StatusOf(0).published_steps_size(), 0);
}

TEST(WorkerTest, Hurry_CallsBackSeveralTimes_ForATimeOut) {
  WorkerOptions options;
  options.heartbeat_timeout = absl::Seconds(1);
  Worker worker(options, NewProcessMemory());
  std::atomic<int> calls{0};
  std::atomic<int64_t> last{0};
  worker.OnChange([&] {
    ++calls;
    last.store(MonotonicNanos());
  });
  EXPECT_EQ(calls.load(), 0);
  const int64_t begin = MonotonicNanos();
  worker.Hurry();
  EXPECT_TRUE(Await([&] { return calls.load() >= 3; }));
  const int64_t quiet = absl::ToInt64Nanoseconds(options.heartbeat_timeout / 2);
  EXPECT_TRUE(Await([&] { return MonotonicNanos() - last.load() > quiet; })) << "it ends";
  EXPECT_LT(last.load() - begin, 2 * absl::ToInt64Nanoseconds(options.heartbeat_timeout));
  worker.OnChange(nullptr);
}

}  // namespace
}  // namespace shardmesh
