// Contract 6 at a worker's UNIX socket: whatever a process of the host sends there gets a typed answer or a hang-up,
// the worker keeps no descriptor of it, and the job goes on.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>
#include <random>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/memory/futex.h"
#include "local/memory/mailbox.h"
#include "local/memory/segment.h"
#include "local/process/host_id.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "server/store/store.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kTimeout = absl::Seconds(10);

class LocalGarbage : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::TinyJob("job", "fsdp=2", 2)));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK_AND_ASSIGN(session_, job_->Attach({Slot(0)}));
    ASSERT_OK(session_->AwaitWeights(kTimeout));
    ASSERT_OK_AND_ASSIGN(const v1::AttachReply grant, Grant(1));
    path_ = grant.socket_path();
    ASSERT_OK_AND_ASSIGN(secret_, SecretOfJob());
    descriptors_ = CountDescriptors();
  }
  // The trainer that was attached all the time and one that comes now train on; nothing of the guests is kept.
  void TearDown() override {
    if (HasFatalFailure()) return;
    const absl::Time deadline = MonotonicNow() + kTimeout;
    while (CountDescriptors() > descriptors_ && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(20));
    EXPECT_LE(CountDescriptors(), descriptors_);
    session_.reset();
    absl::StatusOr<std::unique_ptr<Session>> both = job_->Attach({Slot(0), Slot(1)});
    while (!both.ok() && MonotonicNow() < deadline) both = job_->Attach({Slot(0), Slot(1)});
    ASSERT_OK(both);
    ASSERT_OK(testing::TrainTo(**both, 3));
  }
  // Nobody tells it: from a copy of the state file, which the coordinator may be writing just then.
  absl::StatusOr<std::string> SecretOfJob() {
    const std::string copy = cluster_->folder().File("copy.db");
    const absl::Time deadline = MonotonicNow() + kTimeout;
    while (true) {
      std::filesystem::copy_file(cluster_->folder().File("state.db"), copy,
                                 std::filesystem::copy_options::overwrite_existing);
      absl::StatusOr<StoreContents> contents;
      if (const auto store = NewSqliteStore(copy); store.ok()) contents = (*store)->Load();
      if (contents.ok()) return contents->jobs.at("job").secret;
      if (MonotonicNow() > deadline) return contents.status();
      testing::Pause(absl::Milliseconds(20));
    }
  }
  int CountDescriptors() {
    int count = 0;
    DIR* folder = opendir(absl::StrCat("/proc/", cluster_->worker(job_->members()[0].worker()).pid(), "/fd").c_str());
    while (folder != nullptr && readdir(folder) != nullptr) ++count;
    if (folder != nullptr) closedir(folder);
    return count;
  }
  absl::StatusOr<v1::AttachReply> Grant(int slot) {
    ASSIGN_OR_RETURN(const std::string host_id, HostId());
    v1::AttachRequest request;
    request.set_job("job");
    request.set_epoch(job_->epoch().value());
    request.set_host_id(host_id);
    request.add_slots(slot);
    return job_->worker(Rank(0)).Attach(request, kTimeout);
  }
  // Sends a first message on a new connection; the answer's status (Unavailable: hung up).
  absl::Status Say(absl::string_view bytes) {
    ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(path_));
    return SayOn(socket, bytes);
  }
  absl::Status SayOn(LocalSocket& socket, absl::string_view bytes) {
    RETURN_IF_ERROR(socket.Send(bytes, {}, kTimeout));
    ASSIGN_OR_RETURN(const LocalMessage answer, socket.Receive(kTimeout));
    v1::LocalWelcome welcome;
    if (!welcome.ParseFromString(answer.bytes)) return absl::InternalError("no welcome");
    return absl::Status(static_cast<Code>(welcome.code()), welcome.message());
  }
  static std::string TrainerHello(const std::string& token) {
    v1::LocalHello hello;
    hello.mutable_trainer()->set_token(token);
    return hello.SerializeAsString();
  }
  v1::LocalHello GoodPeer() const {
    v1::LocalHello hello;
    hello.mutable_peer()->set_job("job");
    hello.mutable_peer()->set_epoch(job_->epoch().value());
    hello.mutable_peer()->set_rank(1);
    hello.mutable_peer()->set_incarnation(job_->members()[1].incarnation());
    hello.mutable_peer()->set_plan_hash(job_->plan().hash());
    hello.mutable_peer()->set_secret(secret_);
    return hello;
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  std::string path_, secret_;
  int descriptors_ = 0;
};

TEST_F(LocalGarbage, FirstMessagesThatAreNone) {
  EXPECT_THAT(Say("garbage"), StatusIs(Code::kInvalidArgument, HasSubstr("LocalHello")));
  EXPECT_THAT(Say(std::string(60'000, '\xff')), StatusIs(Code::kInvalidArgument, HasSubstr("LocalHello")));
  v1::LocalHello nothing;
  nothing.mutable_trainer();
  EXPECT_THAT(Say(nothing.SerializeAsString()), StatusIs(Code::kPermissionDenied, HasSubstr("token")));
  EXPECT_THAT(Say(TrainerHello("0123456789abcdef0123456789abcdef")),
              StatusIs(Code::kPermissionDenied, HasSubstr("token")));
  { ASSERT_OK(LocalSocket::Connect(path_)); }  // says nothing and goes
}

TEST_F(LocalGarbage, TokenIsGoodOnce) {
  ASSERT_OK_AND_ASSIGN(const v1::AttachReply grant, Grant(1));
  ASSERT_OK_AND_ASSIGN(LocalSocket first, LocalSocket::Connect(path_));
  EXPECT_OK(SayOn(first, TrainerHello(grant.token())));
  EXPECT_THAT(Say(TrainerHello(grant.token())), StatusIs(Code::kPermissionDenied, HasSubstr("used")));
}

TEST_F(LocalGarbage, SlotOfAnotherTrainer) {
  ASSERT_OK_AND_ASSIGN(const v1::AttachReply taken, Grant(0));
  EXPECT_THAT(Say(TrainerHello(taken.token())),
              StatusIs(Code::kFailedPrecondition, HasSubstr("slot 0 is written by session")));
  ASSERT_OK_AND_ASSIGN(const v1::AttachReply grant, Grant(1));
  ASSERT_OK_AND_ASSIGN(LocalSocket socket, LocalSocket::Connect(path_));
  ASSERT_OK(SayOn(socket, TrainerHello(grant.token())));
  v1::TrainerRequest request;
  request.mutable_step()->set_job("job");
  request.mutable_step()->set_epoch(job_->epoch().value());
  request.mutable_step()->set_step(1);
  request.mutable_step()->add_slots(0);  // attached by session_, not by this one
  const auto ask = [&]() -> absl::Status {
    RETURN_IF_ERROR(socket.Send(request.SerializeAsString(), {}, kTimeout));
    ASSIGN_OR_RETURN(const LocalMessage answer, socket.Receive(kTimeout));
    v1::TrainerReply reply;
    if (!reply.ParseFromString(answer.bytes)) return absl::InternalError("no reply");
    return absl::Status(static_cast<Code>(reply.code()), reply.message());
  };
  EXPECT_THAT(ask(), StatusIs(Code::kInvalidArgument, HasSubstr("slot 0 is not one that this session attached to")));
  request.mutable_step()->clear_slots();
  EXPECT_THAT(ask(), StatusIs(Code::kInvalidArgument, HasSubstr("slot")));
  request.mutable_step()->add_slots(1);
  request.mutable_step()->set_step(9);
  EXPECT_THAT(ask(), StatusIs(Code::kFailedPrecondition, HasSubstr("the next is 1")));
  request.mutable_step()->set_step(1);
  request.mutable_step()->set_epoch(99);
  EXPECT_THAT(ask(), StatusIs(Code::kAborted, HasSubstr("epoch 99")));
  request.mutable_step()->set_epoch(job_->epoch().value());
  request.mutable_step()->add_learning_rates(-1);
  EXPECT_THAT(ask(), StatusIs(Code::kInvalidArgument, HasSubstr("-1")));
  request.mutable_step()->clear_learning_rates();
  v1::NonFinite* bad = request.mutable_step()->add_non_finite();
  bad->set_slot(77);
  bad->set_tensor(1 << 30);
  EXPECT_THAT(ask(), StatusIs(Code::kInvalidArgument, HasSubstr("77")));
  bad->set_slot(1);
  EXPECT_THAT(ask(), StatusIs(Code::kInvalidArgument, HasSubstr("1073741824")));
  bad->set_tensor(-1);
  EXPECT_THAT(ask(), StatusIs(Code::kInvalidArgument, HasSubstr("-1")));
  ASSERT_OK(socket.Send("no request", {}, kTimeout));
  EXPECT_THAT(socket.Receive(kTimeout), StatusIs(Code::kUnavailable, HasSubstr("closed")));
}

TEST_F(LocalGarbage, PeersThatAreNone) {
  v1::LocalHello hello = GoodPeer();
  hello.mutable_peer()->set_job("nope");
  EXPECT_THAT(Say(hello.SerializeAsString()), StatusIs(Code::kUnavailable, HasSubstr("nope")));
  hello = GoodPeer();
  for (int rank : {0, -1, 2, 1 << 30}) {
    hello.mutable_peer()->set_rank(rank);
    EXPECT_THAT(Say(hello.SerializeAsString()),
                StatusIs(Code::kInvalidArgument, HasSubstr(absl::StrCat("rank ", rank))));
  }
  hello = GoodPeer();
  hello.mutable_peer()->set_incarnation(5);
  EXPECT_THAT(Say(hello.SerializeAsString()), StatusIs(Code::kAborted, HasSubstr("not 5")));
  hello = GoodPeer();
  hello.mutable_peer()->set_plan_hash("other");
  EXPECT_THAT(Say(hello.SerializeAsString()), StatusIs(Code::kFailedPrecondition, HasSubstr("other")));
  hello = GoodPeer();
  hello.mutable_peer()->set_epoch(job_->epoch().value() - 1);
  EXPECT_THAT(Say(hello.SerializeAsString()), StatusIs(Code::kAborted, HasSubstr("is over")));
  for (const std::string& secret : {std::string(), std::string(16, '\0'), secret_.substr(1), secret_ + "x"}) {
    hello = GoodPeer();
    hello.mutable_peer()->set_secret(secret);
    EXPECT_THAT(Say(hello.SerializeAsString()), StatusIs(Code::kPermissionDenied, HasSubstr("secret of job job")));
  }
}

TEST_F(LocalGarbage, DescriptorsNobodyAskedFor) {
  ASSERT_OK_AND_ASSIGN(Segment segment, Segment::Create("guest", 4096, 0));
  const std::vector<int> many(kMaxLocalDescriptors, segment.fd());
  for (int i = 0; i < 20; ++i) {
    ASSERT_OK_AND_ASSIGN(LocalSocket socket, LocalSocket::Connect(path_));
    ASSERT_OK(socket.Send("garbage", many, kTimeout));
    ASSERT_OK(socket.Receive(kTimeout));
  }
}

TEST_F(LocalGarbage, RandomMessages) {
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  const std::string peer = GoodPeer().SerializeAsString(), trainer = TrainerHello("0123456789abcdef0123456789abcdef");
  for (int i = 0; i < 300; ++i) {
    std::string bytes = i % 3 == 0 ? peer : i % 3 == 1 ? trainer : std::string(1 + random() % 200, '\0');
    const int changes = 1 + random() % 8;
    for (int c = 0; c < changes; ++c) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (bytes == peer) continue;  // a true peer, whose hang-up would mean that rank 1 died
    EXPECT_FALSE(Say(bytes).ok());
  }
}

// Whatever a trainer writes into its mailbox and the notifier, the others train on; and so does whoever has its slot
// next.
TEST_F(LocalGarbage, RandomMessagesInAMailbox) {
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  ASSERT_OK_AND_ASSIGN(const v1::AttachReply grant, Grant(1));
  ASSERT_OK_AND_ASSIGN(LocalSocket socket, LocalSocket::Connect(path_));
  ASSERT_OK(socket.Send(TrainerHello(grant.token()), {}, kTimeout));
  ASSERT_OK_AND_ASSIGN(LocalMessage message, socket.Receive(kTimeout));
  v1::LocalWelcome welcome;
  ASSERT_TRUE(welcome.ParseFromString(message.bytes));
  ASSERT_EQ(welcome.segments_size(), 3);
  const auto map = [&](int i) {
    return Segment::Map(std::move(message.descriptors[i]), welcome.segments(i).num_bytes(),
                        welcome.segments(i).data_offset(), Segment::Access::kReadWrite);
  };
  ASSERT_OK_AND_ASSIGN(const Segment slot, map(1));
  ASSERT_OK_AND_ASSIGN(const Segment notifier, map(2));
  Mailbox& box = MailboxAt(slot.data() + job_->plan().gradient_window_bytes());
  v1::TrainerRequest request;
  request.set_session(welcome.session());
  request.mutable_step()->set_epoch(job_->epoch().value());
  request.mutable_step()->set_step(7);
  request.mutable_step()->add_slots(0);
  const std::string good = request.SerializeAsString();
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = i % 2 == 0 ? good : std::string(random() % 300, '\0');
    for (char& byte : bytes) {
      if (random() % 4 == 0) byte = static_cast<char>(random());
    }
    std::copy(bytes.begin(), bytes.end(), box.request.bytes);
    box.request.num_bytes.store(i % 7 == 0 ? random() : static_cast<uint32_t>(bytes.size()));
    box.request.number.store(i % 5 == 0 ? random() : box.request.number.load() + 1);
    if (i % 11 == 0) box.request.taken.store(random());
    if (i % 13 == 0) box.reply.taken.store(random());
    FutexBump(*reinterpret_cast<std::atomic<uint32_t>*>(notifier.data()));
  }
  EXPECT_EQ(session_->committed_step(), Step(0));
}

}  // namespace
}  // namespace shardmesh
