// Worker and LocalServer together: the members of a job as workers of this process, with real UNIX sockets between
// them.
#include "worker/worker.h"

#include <unistd.h>

#include <cstring>
#include <functional>

#include "core/clock.h"
#include "core/matchers.h"
#include "core/sync.h"
#include "local/socket.h"
#include "proto/convert.h"
#include "worker/local_server.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);

// Looks at `done` until it holds, or for kLong.
bool Await(const std::function<bool()>& done) {
  Mutex mu;
  CondVar never;
  const absl::Time deadline = absl::Now() + kLong;
  while (!done() && absl::Now() < deadline) {
    MutexLock lock(mu);
    never.WaitFor(mu, absl::Milliseconds(5));
  }
  return done();
}

// A host with `n` workers, each with its socket.
struct Host {
  explicit Host(int n) {
    static int count = 0;
    char folder[] =
        "/tmp/shardmesh-worker-XXXXXX";  // a test's own temporary folder may be too long for a socket's path
    const std::string prefix = absl::StrCat(mkdtemp(folder), "/", count++, "-");
    for (int i = 0; i < n; ++i) {
      WorkerOptions options;
      options.name = absl::StrCat("w", i);
      options.heartbeat_timeout = kLong;  // a loaded machine is not a dead worker: who closes is seen at once anyway
      options.prepare_timeout = kLong;
      workers.push_back(std::make_unique<Worker>(options, NewProcessMemory()));
      servers.push_back(*LocalServer::Start(absl::StrCat(prefix, i), *workers[i], clock));
      paths.push_back(servers[i]->path());
    }
  }

  v1::Assignment AssignmentOf(const JobSpec& job, int rank, int64_t epoch = 3) const {
    v1::Assignment assignment;
    *assignment.mutable_spec() = ToProto(job);
    assignment.set_epoch(epoch);
    assignment.set_rank(rank);
    assignment.set_plan_hash(Plan::Create(job)->hash());
    for (size_t r = 0; r < workers.size(); ++r) {
      v1::Peer* peer = assignment.add_peers();
      peer->set_rank(static_cast<int>(r));
      peer->set_worker(absl::StrCat("w", r));
      peer->set_incarnation(100 + r);
      peer->set_local_socket(paths[r]);
      peer->set_pid(getpid());
    }
    return assignment;
  }

  v1::MemberStatus StatusOf(int i) const {
    const std::vector<v1::MemberStatus> statuses = workers[i]->Statuses();
    return statuses.size() == 1 ? statuses[0] : v1::MemberStatus();
  }

  // Everybody is told, the lead last: peers must ask again.
  void Start(const JobSpec& job) {
    for (int i = static_cast<int>(workers.size()) - 1; i >= 0; --i) workers[i]->Reconcile({AssignmentOf(job, i)});
    for (size_t i = 0; i < workers.size(); ++i) {
      ASSERT_TRUE(Await([&] { return StatusOf(i).state() == v1::MEMBER_STATE_READY; })) << StatusOf(i).DebugString();
    }
  }

  void PlaceWeights() {
    for (auto& worker : workers) {
      std::shared_ptr<JobShard> shard = *worker->Find("small");
      ASSERT_OK(shard->engine().StageInitial(std::vector<float>(shard->plan().InitialPieceBytes() / 4, 1.0f), 5));
    }
    ASSERT_OK((*workers[0]->Find("small"))->protocol().AwaitCommit(Step(0), kLong));
  }

  absl::Status HealthOf(int i) const {
    absl::StatusOr<std::shared_ptr<JobShard>> shard = workers[i]->Find("small");
    return shard.ok() ? (*shard)->Health() : shard.status();
  }

  RealClock clock;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::unique_ptr<LocalServer>> servers;  // they use the workers
  std::vector<std::string> paths;
};

// A trainer's end of the socket protocol.
struct Trainer {
  static absl::StatusOr<Trainer> Attach(const std::string& path, const std::string& token) {
    ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(path));
    v1::LocalHello hello;
    hello.mutable_trainer()->set_token(token);
    RETURN_IF_ERROR(socket.Send(hello.SerializeAsString(), {}, kLong));
    ASSIGN_OR_RETURN(LocalMessage message, socket.Receive(kLong));
    v1::LocalWelcome welcome;
    if (!welcome.ParseFromString(message.bytes)) return absl::InternalError("no welcome");
    if (welcome.code() != 0) return absl::Status(static_cast<Code>(welcome.code()), welcome.message());
    Trainer trainer{std::move(socket), welcome, {}};
    for (int i = 0; i < welcome.segments_size(); ++i) {
      ASSIGN_OR_RETURN(Segment segment,
                       Segment::Map(std::move(message.descriptors[i]), welcome.segments(i).num_bytes(),
                                    welcome.segments(i).data_offset(),
                                    i == 0 ? Segment::Access::kReadOnly : Segment::Access::kReadWrite));
      trainer.segments.push_back(std::move(segment));
    }
    return trainer;
  }
  static absl::StatusOr<Trainer> Attach(Host& host, int worker, std::vector<int> slots) {
    ASSIGN_OR_RETURN(auto shard, host.workers[worker]->Find("small"));
    ASSIGN_OR_RETURN(const std::string token, host.servers[worker]->Grant(shard, std::move(slots)));
    return Attach(host.paths[worker], token);
  }

  absl::Status Send(const v1::StepRequest& request) {
    v1::LocalRequest message;
    *message.mutable_step() = request;
    return socket.Send(message.SerializeAsString(), {}, kLong);
  }
  absl::StatusOr<v1::StepReply> Reply() {
    while (true) {
      ASSIGN_OR_RETURN(LocalMessage message, socket.Receive(kLong));
      v1::LocalReply reply;
      if (!reply.ParseFromString(message.bytes)) return absl::InternalError("no reply");
      if (reply.alive()) continue;
      if (reply.code() != 0) return absl::Status(static_cast<Code>(reply.code()), reply.message());
      return reply.step();
    }
  }
  absl::StatusOr<v1::StepReply> Step(const v1::StepRequest& request) {
    RETURN_IF_ERROR(Send(request));
    return Reply();
  }

  LocalSocket socket;
  v1::LocalWelcome welcome;
  std::vector<Segment> segments;  // the window, then a gradient window for each slot
};

v1::StepRequest Request(std::vector<int> slots, int64_t step) {
  v1::StepRequest request;
  request.set_epoch(3);
  request.set_step(step);
  for (int slot : slots) request.add_slots(slot);
  return request;
}

TEST(WorkerTest, FourWorkersAndTwoTrainers_Train) {
  Host host(4);
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

TEST(WorkerTest, TrainersMistakes_AreTypedErrors_AndTheSessionGoesOn) {
  Host host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
  EXPECT_THAT(trainer.Step(Request({0}, 1)), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  EXPECT_THAT(trainer.Step(Request({1}, 1)), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1 is not one")));
  EXPECT_THAT(trainer.Step(Request({0}, 2)), StatusIs(Code::kFailedPrecondition, HasSubstr("step 2 is ahead")));
  EXPECT_THAT(trainer.Step(Request({}, 1)), StatusIs(Code::kInvalidArgument, HasSubstr("without slots")));
  v1::StepRequest bad = Request({0}, 1);
  bad.set_epoch(2);
  EXPECT_THAT(trainer.Step(bad), StatusIs(Code::kAborted, HasSubstr("epoch 2")));
  bad = Request({0}, 1);
  bad.set_learning_rate(-1);
  EXPECT_THAT(trainer.Step(bad), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_FALSE((*host.workers[0]->Find("small"))->protocol().HasPiece(Slot(0), 0, Step(1)));
  ASSERT_OK_AND_ASSIGN(Trainer other, Trainer::Attach(host, 0, {1}));
  ASSERT_OK(trainer.Send(Request({0}, 1)));
  ASSERT_OK(other.Step(Request({1}, 1)));
  EXPECT_OK(trainer.Reply());
}

TEST(WorkerTest, Grant_IsGoodOnce_AndASlotHasOneTrainer_UntilItHangsUp) {
  Host host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  std::shared_ptr<JobShard> shard = *host.workers[0]->Find("small");
  ASSERT_OK_AND_ASSIGN(const std::string token, host.servers[0]->Grant(shard, {0}));
  {
    ASSERT_OK_AND_ASSIGN(Trainer first, Trainer::Attach(host.paths[0], token));
    EXPECT_THAT(Trainer::Attach(host.paths[0], token), StatusIs(Code::kPermissionDenied, HasSubstr("used")));
    EXPECT_THAT(Trainer::Attach(host.paths[0], "guess"), StatusIs(Code::kPermissionDenied, HasSubstr("unknown")));
    EXPECT_THAT(Trainer::Attach(host, 0, {1, 0}), StatusIs(Code::kFailedPrecondition, HasSubstr("slot 0 is written")));
    EXPECT_EQ(shard->protocol().HolderOf(Slot(1)), 0u);  // given back
  }
  EXPECT_TRUE(Await([&] { return shard->protocol().HolderOf(Slot(0)) == 0; }));
  EXPECT_OK(Trainer::Attach(host, 0, {1, 0}));
}

TEST(WorkerTest, SlotDeclaredByATrainerThatDied_OpensAtTheCommit) {
  Host host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  StepProtocol& protocol = (*host.workers[0]->Find("small"))->protocol();
  {
    ASSERT_OK_AND_ASSIGN(Trainer dies, Trainer::Attach(host, 0, {0}));
    ASSERT_OK(dies.Send(Request({0}, 1)));
    ASSERT_TRUE(Await([&] { return protocol.page()->slots[0].declared.load() == 1; }));
  }
  absl::StatusOr<Trainer> heir = absl::UnknownError("not yet");
  std::thread attaching([&] { heir = Trainer::Attach(host, 0, {0}); });
  ASSERT_OK_AND_ASSIGN(Trainer other, Trainer::Attach(host, 0, {1}));
  EXPECT_OK(other.Step(Request({1}, 1)));
  attaching.join();
  // The old holder may still be there when the heir asks: then it is told so; otherwise it gets the slot after the
  // commit.
  if (absl::IsFailedPrecondition(heir.status())) {
    ASSERT_TRUE(Await([&] { return protocol.HolderOf(Slot(0)) == 0; }));
    heir = Trainer::Attach(host, 0, {0});
  }
  ASSERT_OK(heir);
  EXPECT_EQ(heir->welcome.committed_step(), 1);
}

TEST(WorkerTest, PaddingOfAnAttachedGradient_IsClearedBeforeTheStep) {
  Host host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
  float* gradient = reinterpret_cast<float*>(trainer.segments[1].data());
  gradient[149] = gradient[150] = 1.0f;  // the tensor has 150 elements
  ASSERT_OK(trainer.Step(Request({0}, 1)));
  const float* window = reinterpret_cast<const float*>(trainer.segments[0].data());
  EXPECT_NE(window[149], 1.0f);
  EXPECT_EQ(window[150], 0.0f);
}

TEST(WorkerTest, OldGrant_IsRefused) {
  ManualClock clock;
  Host host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_OK_AND_ASSIGN(auto server, LocalServer::Start(host.paths[0] + "m", *host.workers[0], clock));
  ASSERT_OK_AND_ASSIGN(const std::string token, server->Grant(*host.workers[0]->Find("small"), {0}));
  clock.Advance(kGrantLife + absl::Seconds(1));
  EXPECT_THAT(Trainer::Attach(server->path(), token), StatusIs(Code::kPermissionDenied, HasSubstr("older than 30 s")));
}

TEST(WorkerTest, NoHello_IsAnswered) {
  Host host(1);
  for (const char* bytes : {"garbage", "\x08\x01"}) {
    ASSERT_OK_AND_ASSIGN(LocalSocket socket, LocalSocket::Connect(host.paths[0]));
    ASSERT_OK(socket.Send(bytes, {}, kLong));
    ASSERT_OK_AND_ASSIGN(LocalMessage answer, socket.Receive(kLong));
    v1::LocalWelcome welcome;
    ASSERT_TRUE(welcome.ParseFromString(answer.bytes));
    EXPECT_EQ(welcome.code(), static_cast<int>(Code::kInvalidArgument));
  }
}

TEST(WorkerTest, PeerCloses_TheOthersNameIt) {
  Host host(4);
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
  }
  EXPECT_THAT(host.HealthOf(2), StatusIs(Code::kNotFound, HasSubstr("holds no job")));
}

TEST(WorkerTest, LeadCloses_ThePeersNameIt) {
  Host host(3);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=3", 1)));
  host.servers[0].reset();  // ends although peers are connected
  host.workers[0].reset();
  for (int i : {1, 2}) {
    EXPECT_TRUE(Await([&] { return !host.HealthOf(i).ok(); }));
    EXPECT_THAT(host.HealthOf(i), StatusIs(Code::kUnavailable, HasSubstr("worker w0 (rank 0")));
  }
}

TEST(WorkerTest, OrderlyLeave_SaysSo) {
  Host host(2);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=2", 1)));
  host.workers[1]->Leave();
  EXPECT_THAT(host.HealthOf(0), StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker w1"), HasSubstr("told to stop"))));
  EXPECT_THAT(host.HealthOf(1), StatusIs(Code::kNotFound, HasSubstr("was deleted, or moved")));
}

TEST(WorkerTest, DeletedJob_HangsUpOnTrainers_AndNewEpochStartsAnew) {
  Host host(1);
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

TEST(WorkerTest, PeerHello_IsCheckedAgainstTheAssignment) {
  Host host(2);
  const JobSpec job = SmallJob("fsdp=2", 1);
  ASSERT_NO_FATAL_FAILURE(host.Start(job));
  v1::PeerHello good;
  good.set_job("small");
  good.set_epoch(3);
  good.set_rank(1);
  good.set_incarnation(101);
  good.set_plan_hash(Plan::Create(job)->hash());
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
    Host host(1);
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
  Host host(2);
  for (int64_t epoch = 1; epoch <= 20; ++epoch) {
    host.workers[1]->Reconcile({host.AssignmentOf(SmallJob("fsdp=2", 1), 1, epoch)});
    host.workers[1]->Reconcile({});
  }
  EXPECT_TRUE(host.workers[1]->Statuses().empty());
}

TEST(WorkerTest, OnChange_IsCalledWhenAJobIsReady) {
  Host host(1);
  std::atomic<int> calls{0};
  host.workers[0]->OnChange([&] { ++calls; });
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  EXPECT_TRUE(Await([&] { return calls.load() > 0; }));
  host.workers[0]->OnChange(nullptr);
}

}  // namespace
}  // namespace shardmesh
