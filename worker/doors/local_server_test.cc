#include "worker/doors/local_server.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "local/memory/mailbox.h"
#include "worker/doors/push_sink.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Servers of their own, for the numbers that they begin with.
struct SessionNumbers : ::testing::Test {
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 3))); }
  std::unique_ptr<LocalServer> Server(uint32_t first) {
    return *LocalServer::Start(host.folder.File(absl::StrCat("server", ++servers)), *host.workers[0], host.clock,
                               first);
  }
  // The number of a trainer's session, which stays.
  uint64_t Attach(LocalServer& server, int slot) {
    const auto token = server.Grant(*host.workers[0]->Find("small"), {slot});
    absl::StatusOr<Trainer> trainer = Trainer::Attach(server.path(), *token);
    EXPECT_OK(trainer);
    if (!trainer.ok()) return 0;
    trainers.push_back(*std::move(trainer));
    return SessionOf(trainers.back().welcome.session());
  }

  LocalHost host{1};
  int servers = 0;
  std::vector<Trainer> trainers;
};

TEST_F(SessionNumbers, NextToTheirWrap_NoneIsZero) {
  for (const uint32_t first : {(1u << 30) - 1, ~0u}) {
    const auto server = Server(first);
    EXPECT_EQ(Attach(*server, 0), (1u << 30) - 1);
    EXPECT_EQ(Attach(*server, 1), 1u);
    EXPECT_EQ(Attach(*server, 2), 2u);
    trainers.clear();
  }
}

TEST_F(SessionNumbers, OneThatComesAgainWhileItIsInUse_IsPassedOver) {
  const auto first = Server(5), second = Server(5), third = Server(5);
  EXPECT_EQ(Attach(*first, 0), 5u);
  EXPECT_EQ(Attach(*second, 1), 6u);
  EXPECT_EQ(Attach(*third, 2), 7u);
}

TEST(LocalServerTest, TrainersMistakes_AreTypedErrors_AndTheSessionGoesOn) {
  LocalHost host(1);
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
  bad.add_learning_rates(-1);
  EXPECT_THAT(trainer.Step(bad), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_FALSE((*host.workers[0]->Find("small"))->protocol().declarations().HasGradientShard(Slot(0), 0, Step(1)));
  ASSERT_OK_AND_ASSIGN(Trainer other, Trainer::Attach(host, 0, {1}));
  ASSERT_OK(trainer.Send(Request({0}, 1)));
  ASSERT_OK(other.Step(Request({1}, 1)));
  EXPECT_OK(trainer.Reply());
}

TEST(LocalServerTest, Grant_IsGoodOnce_AndASlotHasOneTrainer_UntilItHangsUp) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  std::shared_ptr<JobShard> shard = *host.workers[0]->Find("small");
  ASSERT_OK_AND_ASSIGN(const std::string token, host.servers[0]->Grant(shard, {0}));
  {
    ASSERT_OK_AND_ASSIGN(Trainer first, Trainer::Attach(host.paths[0], token));
    EXPECT_THAT(Trainer::Attach(host.paths[0], token), StatusIs(Code::kPermissionDenied, HasSubstr("used")));
    EXPECT_THAT(Trainer::Attach(host.paths[0], "guess"), StatusIs(Code::kPermissionDenied, HasSubstr("unknown")));
    EXPECT_THAT(Trainer::Attach(host, 0, {1, 0}), StatusIs(Code::kFailedPrecondition, HasSubstr("slot 0 is written")));
    EXPECT_EQ(shard->protocol().slots().HolderOf(Slot(1)), 0u);  // given back
  }
  EXPECT_TRUE(Await([&] { return shard->protocol().slots().HolderOf(Slot(0)) == 0; }));
  EXPECT_OK(Trainer::Attach(host, 0, {1, 0}));
}

TEST(LocalServerTest, GrantsOfOneCaller_LeaveTheLastQuarterToOthers) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  std::shared_ptr<JobShard> shard = *host.workers[0]->Find("small");
  ManualClock clock;
  ASSERT_OK_AND_ASSIGN(const auto server, LocalServer::Start(host.folder.File("server"), *host.workers[0], clock));
  for (int i = 0; i <= kMaxGrants * 3 / 4; ++i) ASSERT_OK(server->Grant(shard, {0}, "a"));
  const auto refused = StatusIs(Code::kResourceExhausted, AllOf(HasSubstr("caller \"a\" has 3073 of 4096 open grants"),
                                                                HasSubstr("wait 30 s, or ask from another host")));
  EXPECT_THAT(server->Grant(shard, {0}, "a"), refused);
  EXPECT_THAT(server->GrantReader(shard, absl::Seconds(1), "a"), refused);
  EXPECT_OK(server->GrantReader(shard, absl::Seconds(1), "b"));
  EXPECT_OK(server->Grant(shard, {0}));
  clock.Advance(kGrantLifetime + absl::Seconds(1));
  EXPECT_OK(server->Grant(shard, {0}, "a"));
}

TEST(LocalServerTest, ASessionThatEnded_GivesItsSlotToTheNextOfItsProcess) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  for (int i = 0; i < 200; ++i) ASSERT_OK(Trainer::Attach(host, 0, {0}).status()) << i;
}

TEST(LocalServerTest, ASessionThatEnded_GivesItsSlotToConnectedTrainers) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  std::shared_ptr<JobShard> shard = *host.workers[0]->Find("small");
  v1::PushHeader header;
  header.set_job("small");
  header.set_epoch(shard->epoch().value());
  header.set_content(v1::PushHeader::CONTENT_GRADIENT);
  header.set_step(1);
  header.set_total_bytes(shard->plan().GradientShardBytes(0));
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK(Trainer::Attach(host, 0, {0}).status()) << i;
    ASSERT_OK(PushSink::Begin(shard, header).status()) << i;
  }
}

// Stopped trainers read nothing, while their worker says again and again that it is alive.
TEST(LocalServerTest, TrainersThatAreStopped_UntilTheirSocketsAreFull_GoOn) {
  constexpr absl::Duration kStopped = absl::Seconds(8);  // a socket is full after 3 s
  LocalHost host(1, {}, absl::Milliseconds(20));
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 3)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  std::shared_ptr<JobShard> shard = *host.workers[0]->Find("small");
  ASSERT_OK_AND_ASSIGN(Trainer asks, Trainer::Attach(host, 0, {0}));
  ASSERT_OK_AND_ASSIGN(Trainer writes, Trainer::Attach(host, 0, {1}));
  ASSERT_OK(asks.Send(Request({0}, 1)));
  v1::TrainerRequest message;
  *message.mutable_step() = Request({1}, 1);
  message.set_session(writes.welcome.session());
  message.set_id(1);
  ASSERT_TRUE(PutMessage(shard->host().mailbox(1).request, message.SerializeAsString()));
  FutexBump(shard->protocol().notifier());
  ASSERT_TRUE(Await([&] { return shard->protocol().control()->slots[1].declared.load() == 1; }));
  const absl::Time until = MonotonicNow() + kStopped;
  const auto holds = [&](int slot) { return shard->protocol().slots().HolderOf(Slot(slot)) != 0; };
  EXPECT_TRUE(Await([&] { return !holds(0) || !holds(1) || MonotonicNow() > until; }));
  EXPECT_TRUE(holds(0) && holds(1));
  ASSERT_OK_AND_ASSIGN(Trainer last, Trainer::Attach(host, 0, {2}));
  ASSERT_OK(last.Step(Request({2}, 1)));
  EXPECT_OK(asks.Reply());
  EXPECT_TRUE(Await([&] { return !shard->host().mailbox(1).open(); }));  // it has its answer
}

TEST(LocalServerTest, SlotDeclaredByATrainerThatDied_OpensAtTheCommit) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  StepProtocol& protocol = (*host.workers[0]->Find("small"))->protocol();
  {
    ASSERT_OK_AND_ASSIGN(Trainer dies, Trainer::Attach(host, 0, {0}));
    ASSERT_OK(dies.Send(Request({0}, 1)));
    ASSERT_TRUE(Await([&] { return protocol.control()->slots[0].declared.load() == 1; }));
  }
  ASSERT_TRUE(Await([&] { return protocol.slots().HolderOf(Slot(0)) == 0; }));
  absl::StatusOr<Trainer> heir = absl::UnknownError("not yet");
  std::thread attaching([&] { heir = Trainer::Attach(host, 0, {0}); });
  EXPECT_TRUE(Await([&] { return protocol.slots().HolderOf(Slot(0)) != 0; }));  // from here on it waits for the commit
  absl::StatusOr<Trainer> other = Trainer::Attach(host, 0, {1});
  EXPECT_OK(other);
  if (other.ok()) {
    EXPECT_OK(other->Step(Request({1}, 1)));
  }
  attaching.join();
  ASSERT_OK(heir);
  EXPECT_EQ(heir->welcome.committed_step(), 1);
}

TEST(LocalServerTest, AllTrainersDiedInAStep_OneThatBringsTheMissingSlotsGoesOn) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  StepProtocol& protocol = (*host.workers[0]->Find("small"))->protocol();
  {
    ASSERT_OK_AND_ASSIGN(Trainer declares, Trainer::Attach(host, 0, {0}));
    ASSERT_OK_AND_ASSIGN(Trainer does_not, Trainer::Attach(host, 0, {1}));
    ASSERT_OK(declares.Send(Request({0}, 1)));
    ASSERT_TRUE(Await([&] { return protocol.control()->gradient_shards[0][0].load() == 1; }));
  }
  // While its step waits, a trainer that hangs up frees its slots within a slice.
  ASSERT_TRUE(
      Await([&] { return protocol.slots().HolderOf(Slot(0)) == 0 && protocol.slots().HolderOf(Slot(1)) == 0; }));
  ASSERT_OK_AND_ASSIGN(Trainer heir, Trainer::Attach(host, 0, {0, 1}));
  EXPECT_EQ(heir.welcome.committed_step(), 0);
  EXPECT_OK(heir.Step(Request({0, 1}, 1)));
  EXPECT_EQ(protocol.committed_step(), Step(1));
}

TEST(LocalServerTest, DeletedJob_ABusyTrainerIsToldAtItsNextStep) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
  ASSERT_OK(trainer.Step(Request({0}, 1)));
  host.workers[0]->Reconcile({});
  const auto reply = trainer.Step(Request({0}, 2));
  EXPECT_TRUE(absl::IsNotFound(reply.status()) || absl::IsUnavailable(reply.status())) << reply.status();
}

// Its epoch may be over before the worker says again how a message is.
TEST(LocalServerTest, JobThatIsClosed_ATrainerWithAnOpenMessageIsToldWhy) {
  for (int time = 0; time < 10; ++time) {
    LocalHost host(1);
    ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
    ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<JobShard> shard, host.workers[0]->Find("small"));
    shard->protocol().members().Abort(AbortReason::kLate, 0, Rank(0));
    ASSERT_TRUE(PutMessage(shard->host().mailbox(0).request, "a request"));
    host.workers[0]->Reconcile({});
    EXPECT_THAT(trainer.Reply().status(), StatusIs(Code::kUnavailable, HasSubstr("did not finish its part of the step")));
  }
}

// A seat of this worker's last incarnation, through which a trainer was connected, is the next one's that comes. One of a
// trainer that lives is not.
TEST(LocalServerTest, SeatOfAProcessThatHasEnded_IsFree_BeforeItsSessionIsGivenUp) {
  JobSpec job = SmallJob("fsdp=1", 2);
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = 1;
  for (const bool ended : {true, false}) {
    LocalHost host(1);
    ASSERT_NO_FATAL_FAILURE(host.Start(job));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<JobShard> shard, host.workers[0]->Find("small"));
    const pid_t child = ended ? fork() : getppid();
    if (child == 0) _exit(0);
    if (ended) {
      ASSERT_EQ(waitpid(child, nullptr, 0), child);
    }
    constexpr uint64_t kHolder = uint64_t{1} << 32 | 7;
    ASSERT_OK(shard->protocol().slots().Take(Slot(0), kHolder));
    shard->protocol().control()->slots[0].holder_pid.store(child);
    shard->unclaimed().Expect({{kHolder, {0}}});
    EXPECT_EQ(host.servers[0]->TakeSeat(shard).status().code(), ended ? Code::kOk : Code::kResourceExhausted);
  }
}

TEST(LocalServerTest, WhileAStepWaits_TheTrainerIsToldWhatIsMissing) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer late, Trainer::Attach(host, 0, {1}));
  ASSERT_OK_AND_ASSIGN(Trainer waits, Trainer::Attach(host, 0, {0}));
  ASSERT_OK(waits.Send(Request({0}, 1)));
  ASSERT_OK_AND_ASSIGN(LocalMessage message, waits.socket.Receive(kLong));
  v1::TrainerReply reply;
  ASSERT_TRUE(reply.ParseFromString(message.bytes));
  EXPECT_TRUE(reply.alive());
  EXPECT_EQ(reply.message(), absl::StrCat("missing slots: 1 (trainer pid ", getpid(), ")"));
}

TEST(LocalServerTest, PaddingOfAnAttachedGradient_IsNotStepped) {
  LocalHost host(1);
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

TEST(LocalServerTest, OldGrant_IsRefused) {
  ManualClock clock;
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_OK_AND_ASSIGN(auto server, LocalServer::Start(host.paths[0] + "m", *host.workers[0], clock));
  ASSERT_OK_AND_ASSIGN(const std::string token, server->Grant(*host.workers[0]->Find("small"), {0}));
  clock.Advance(kGrantLifetime + absl::Seconds(1));
  EXPECT_THAT(Trainer::Attach(server->path(), token), StatusIs(Code::kPermissionDenied, HasSubstr("older than 30 s")));
}

TEST(LocalServerTest, NoHello_IsAnswered) {
  LocalHost host(1);
  for (const char* bytes : {"garbage", "\x08\x01"}) {
    ASSERT_OK_AND_ASSIGN(LocalSocket socket, LocalSocket::Connect(host.paths[0]));
    ASSERT_OK(socket.Send(bytes, {}, kLong));
    ASSERT_OK_AND_ASSIGN(LocalMessage answer, socket.Receive(kLong));
    v1::LocalWelcome welcome;
    ASSERT_TRUE(welcome.ParseFromString(answer.bytes));
    EXPECT_EQ(welcome.code(), static_cast<int>(Code::kInvalidArgument));
  }
}

// One request about a bucket, and its answer.
absl::Status Ask(Trainer& trainer, const v1::TrainerRequest& request) {
  RETURN_IF_ERROR(trainer.socket.Send(request.SerializeAsString(), {}, kLong));
  while (true) {
    ASSIGN_OR_RETURN(LocalMessage message, trainer.socket.Receive(kLong));
    v1::TrainerReply reply;
    if (!reply.ParseFromString(message.bytes)) return absl::InternalError("no reply");
    if (reply.alive()) continue;
    EXPECT_EQ(reply.id(), request.id());
    return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
  }
}

absl::Status Use(Trainer& trainer, int kind, int bucket, int64_t timeout_ms = 60'000) {
  v1::TrainerRequest request;
  request.set_id(7);
  request.mutable_use()->set_kind(static_cast<v1::BucketUse::Kind>(kind));
  request.mutable_use()->set_bucket(bucket);
  request.mutable_use()->set_timeout_ms(timeout_ms);
  return Ask(trainer, request);
}

absl::Status DeclareBucket(Trainer& trainer, int slot, int64_t step, int bucket, int64_t timeout_ms = 60'000) {
  v1::TrainerRequest request;
  request.set_id(8);
  v1::DeclareBucketRequest& declare = *request.mutable_declare();
  declare.set_epoch(3);
  declare.set_step(step);
  declare.add_slots(slot);
  declare.set_bucket(bucket);
  declare.set_timeout_ms(timeout_ms);
  return Ask(trainer, request);
}

JobSpec BucketJob(int slots) {
  JobSpec job = SmallJob("fsdp=1", slots);
  job.residency = Residency::kBucket;
  job.parameters.clear();
  for (const char* name : {"a", "b", "c"}) job.parameters.push_back({name, {1024}, WeightFormat::kFp32});
  return job;
}

TEST(LocalServerTest, UsesOfBuckets_AreCheckedCountedAndDroppedWithTheTrainer) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(BucketJob(2)));
  StepProtocol& protocol = (*host.workers[0]->Find("small"))->protocol();
  using U = v1::BucketUse;
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
  EXPECT_THAT(Use(trainer, U::ACQUIRE, 0), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  for (const int kind : {0, 5, -3}) {
    EXPECT_THAT(Use(trainer, kind, 0), StatusIs(Code::kInvalidArgument, HasSubstr("it is 1 to 4")));
  }
  for (const int64_t timeout : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    EXPECT_THAT(Use(trainer, U::ACQUIRE, 0, timeout), StatusIs(Code::kInvalidArgument, HasSubstr("timeout_ms")));
  }
  for (const int bucket : {-1, 3, INT32_MAX}) {
    EXPECT_THAT(Use(trainer, U::ACQUIRE, bucket), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(Use(trainer, U::RELEASE, bucket), StatusIs(Code::kFailedPrecondition, HasSubstr("acquire it first")));
    EXPECT_THAT(Use(trainer, U::AWAIT, bucket), StatusIs(Code::kFailedPrecondition, HasSubstr("acquire it first")));
  }
  ASSERT_OK(Use(trainer, U::PREFETCH, 2));
  ASSERT_OK(Use(trainer, U::AWAIT, 2));
  EXPECT_TRUE(protocol.buckets().Holds(2));
  EXPECT_EQ(reinterpret_cast<const float*>(trainer.segments[0].data())[2048], 1.0f);
  ASSERT_OK(Use(trainer, U::ACQUIRE, 1));
  EXPECT_THAT(Use(trainer, U::PREFETCH, 0), StatusIs(Code::kResourceExhausted, HasSubstr("may use (1,2)")));
  ASSERT_OK(Use(trainer, U::ACQUIRE, 1));
  {
    ASSERT_OK_AND_ASSIGN(Trainer other, Trainer::Attach(host, 0, {1}));
    ASSERT_OK(Use(other, U::ACQUIRE, 0));
    EXPECT_TRUE(protocol.buckets().Holds(0));
  }
  EXPECT_TRUE(Await([&] { return !protocol.buckets().Holds(0); }));  // its trainer is gone
  ASSERT_OK(Use(trainer, U::RELEASE, 1));
  ASSERT_OK(Use(trainer, U::RELEASE, 2));
  EXPECT_TRUE(Await([&] { return !protocol.buckets().Holds(2); }));
  EXPECT_TRUE(protocol.buckets().Holds(1));  // one of two uses is left
}

TEST(LocalServerTest, DeclaredBuckets_WaitForOtherSlotsWithADeadline) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(BucketJob(2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, 0, {0}));
  ASSERT_OK_AND_ASSIGN(Trainer other, Trainer::Attach(host, 0, {1}));
  EXPECT_THAT(DeclareBucket(trainer, 1, 1, 0), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1 is not one")));
  EXPECT_THAT(DeclareBucket(trainer, 0, 2, 0), StatusIs(Code::kFailedPrecondition, HasSubstr("is ahead")));
  EXPECT_THAT(DeclareBucket(trainer, 0, 1, 0, 0), StatusIs(Code::kInvalidArgument, HasSubstr("timeout_ms")));
  EXPECT_THAT(trainer.Step(Request({0}, 1)), StatusIs(Code::kFailedPrecondition, HasSubstr("lacks the gradients")));
  ASSERT_OK(DeclareBucket(trainer, 0, 1, 0));
  EXPECT_THAT(DeclareBucket(trainer, 0, 1, 1, 20), StatusIs(Code::kDeadlineExceeded, HasSubstr("lacks slots 1")));
  for (int b : {2, 1, 0}) ASSERT_OK(DeclareBucket(other, 1, 1, b));
  for (int b : {0, 1, 2}) ASSERT_OK(DeclareBucket(trainer, 0, 1, b));
  ASSERT_OK(trainer.Send(Request({0}, 1)));
  ASSERT_OK(other.Step(Request({1}, 1)));
  ASSERT_OK(trainer.Reply());
}

// The worker's answer to a message of these bytes and descriptors, over a connection that this process makes.
absl::Status AnswerTo(const std::string& path, const std::string& bytes, const std::vector<int>& descriptors) {
  ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(path));
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * descriptors.size()));
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  }
  if (sendmsg(socket.fd(), &message, MSG_NOSIGNAL) < 0) return absl::InternalError("not sent");
  ASSIGN_OR_RETURN(const LocalMessage answer, socket.Receive(kLong));
  v1::LocalWelcome welcome;
  if (!welcome.ParseFromString(answer.bytes)) return absl::InternalError("no welcome");
  return absl::Status(static_cast<absl::StatusCode>(welcome.code()), welcome.message());
}

TEST(LocalServerTest, ARefusal_ReachesWhoIsRefused) {
  LocalHost host(1);
  const std::string& path = host.paths[0];
  EXPECT_THAT(AnswerTo(path, "not a hello", {}), StatusIs(Code::kInvalidArgument, HasSubstr("LocalHello")));
  const std::vector<int> many(250, 0);
  EXPECT_THAT(AnswerTo(path, "x", many), StatusIs(Code::kInvalidArgument, HasSubstr("200 descriptors")));
  v1::LocalHello hello;
  hello.mutable_trainer()->set_token("guess");
  EXPECT_THAT(AnswerTo(path, hello.SerializeAsString(), {}), StatusIs(Code::kPermissionDenied, HasSubstr("token")));

  if (chmod(path.c_str(), 0777) != 0 || chmod(host.folder.path().c_str(), 0755) != 0 || seteuid(65534) != 0) {
    GTEST_SKIP() << "only root can be another user";
  }
  const absl::Status refused = AnswerTo(path, hello.SerializeAsString(), {});
  absl::StatusOr<LocalSocket> silent = LocalSocket::Connect(path);
  ASSERT_EQ(seteuid(0), 0);
  ASSERT_OK(silent);  // an answer before its hello would close the socket that the hello is sent to
  EXPECT_THAT(silent->Receive(absl::Milliseconds(200)), StatusIs(Code::kDeadlineExceeded, ::testing::_));
  EXPECT_THAT(refused, StatusIs(Code::kPermissionDenied, HasSubstr("user 65534 may not attach")));
}

TEST(LocalServerTest, AGrantThatIsNotUsed_KeepsNoJob) {
  LocalHost host(1);
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  std::shared_ptr<JobShard> shard = *host.workers[0]->Find("small");
  ASSERT_OK_AND_ASSIGN(const std::string token, host.servers[0]->Grant(shard, {0}));
  ASSERT_OK(host.servers[0]->GrantReader(shard, kLong).status());
  const std::weak_ptr<JobShard> left = shard;
  shard.reset();
  host.workers[0]->Reconcile({});
  EXPECT_TRUE(Await([&] { return left.expired(); }));
  EXPECT_THAT(Trainer::Attach(host.paths[0], token), StatusIs(Code::kNotFound, HasSubstr("deleted")));
}

}  // namespace
}  // namespace shardmesh
