#include "worker/process/peer_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "local/testing/temp_folder.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"
#include "rpc/server.h"
#include "rpc/testing/test_authority.h"
#include "worker/node/testing/await.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using Code = absl::StatusCode;

constexpr absl::Duration kTime = absl::Seconds(20);

// The whole of a stream: one message, or none, and then the status.
template <class Message>
class OneAnswer final : public grpc::ServerWriteReactor<Message> {
 public:
  OneAnswer(Message message, const absl::Status& status) : message_(std::move(message)) {
    if (status.ok()) {
      this->StartWriteAndFinish(&message_, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      this->Finish(ToGrpc(status));
    }
  }
  void OnDone() override { delete this; }

 private:
  const Message message_;
};

// A worker that gives every call the same answer, and notes which connections they come over.
class FakeWorker final : public v1::Shard::CallbackService {
 public:
  void Say(absl::Status status) {
    MutexLock lock(mu_);
    status_ = std::move(status);
  }
  // Who it says that it is. An error: it answers with that, and one that never comes with DeadlineExceeded.
  void Be(absl::StatusOr<v1::GetStatusReply> self) {
    MutexLock lock(mu_);
    self_ = std::move(self);
  }
  int asked() const {  // so often who it is
    MutexLock lock(mu_);
    return asked_;
  }
  // One for each connection that a call came over.
  std::set<std::string> callers() const {
    MutexLock lock(mu_);
    return callers_;
  }

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                      v1::GetStatusReply* reply) override {
    const absl::StatusOr<v1::GetStatusReply> self = Asked();
    if (absl::IsDeadlineExceeded(self.status())) return new NoAnswer();
    return Unary(context, request, reply, [&](const v1::GetStatusRequest&, v1::GetStatusReply* r) -> absl::Status {
      ASSIGN_OR_RETURN(*r, self);
      return absl::OkStatus();
    });
  }
  grpc::ServerUnaryReactor* Meet(grpc::CallbackServerContext* context, const v1::MeetRequest* request,
                                 v1::MeetReply* reply) override {
    return Unary(context, request, reply, [=](const v1::MeetRequest&, v1::MeetReply*) { return Heard(*context); });
  }
  grpc::ServerWriteReactor<v1::TransferChunk>* Transfer(grpc::CallbackServerContext* context,
                                                        const v1::TransferRequest* /*request*/) override {
    v1::TransferChunk chunk;
    chunk.mutable_header()->set_step(7);
    return new OneAnswer<v1::TransferChunk>(chunk, Heard(*context));
  }
  grpc::ServerWriteReactor<v1::FileProgress>* Copy(grpc::CallbackServerContext* context,
                                                   const v1::CopyRequest* /*request*/) override {
    v1::FileProgress done;
    done.set_step(7);
    return new OneAnswer<v1::FileProgress>(done, Heard(*context));
  }

 private:
  // Until the caller gives up.
  struct NoAnswer final : grpc::ServerUnaryReactor {
    void OnCancel() override { Finish(grpc::Status::CANCELLED); }
    void OnDone() override { delete this; }
  };

  absl::StatusOr<v1::GetStatusReply> Asked() {
    MutexLock lock(mu_);
    ++asked_;
    return self_;
  }
  absl::Status Heard(const grpc::CallbackServerContext& context) {
    MutexLock lock(mu_);
    callers_.insert(context.peer());
    return status_;
  }

  mutable Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  absl::StatusOr<v1::GetStatusReply> self_ ABSL_GUARDED_BY(mu_) = v1::GetStatusReply();
  int asked_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<std::string> callers_ ABSL_GUARDED_BY(mu_);
};

// The worker and its server.
struct Served {
  explicit Served(const std::string& listen = "127.0.0.1:0") {
    ServerOptions options;
    options.listen = listen;
    absl::StatusOr<std::unique_ptr<Server>> started = Server::Start(options, {&worker});
    EXPECT_OK(started.status());
    server = *std::move(started);
  }
  v1::Peer PeerAs(int rank) const {
    v1::Peer peer;
    peer.set_rank(rank);
    peer.set_worker("w2");
    peer.set_incarnation(3);
    peer.set_address(server->address());
    return peer;
  }

  FakeWorker worker;
  std::unique_ptr<Server> server;  // it uses the worker
};

class PeerLinksTest : public ::testing::Test {
 protected:
  absl::Status Meet(const v1::Peer& peer) {
    v1::MeetRequest request;
    request.set_job("job");
    return links_.Meet(peer, request, kTime).status();
  }
  absl::Status Transfer(const v1::Peer& peer) {
    const TransferSink sink = {[](const v1::TransferHeader&) { return absl::OkStatus(); },
                               [](absl::string_view) { return absl::OkStatus(); }};
    v1::TransferRequest request;
    request.set_job("job");
    return links_.Transfer(peer, request, sink, kTime).status();
  }
  absl::Status Copy(const v1::Peer& peer, const std::function<absl::Status()>& meanwhile = absl::OkStatus) {
    const auto told = [&](const v1::FileProgress&) { return meanwhile(); };
    v1::CopyRequest request;
    request.set_job("job");
    return links_.Copy(peer, request, told, kTime).status();
  }

  PeerLinks links_{TlsOptions()};
};

TEST_F(PeerLinksTest, CallsToAnAddress_AlsoAtTheSameTime_ShareAConnection_AndTransfersAnother) {
  const Served served, other;
  EXPECT_OK(Meet(served.PeerAs(0)));
  EXPECT_OK(Copy(served.PeerAs(2), [&] { return Meet(served.PeerAs(3)); }));
  EXPECT_EQ(served.worker.callers().size(), 1);
  EXPECT_OK(Transfer(served.PeerAs(1)));
  EXPECT_OK(Copy(served.PeerAs(2), [&] { return Transfer(served.PeerAs(3)); }));
  EXPECT_EQ(served.worker.callers().size(), 2) << "a small call does not wait behind a transfer";
  EXPECT_TRUE(other.worker.callers().empty());
  EXPECT_OK(Meet(other.PeerAs(0)));
  EXPECT_EQ(other.worker.callers().size(), 1);
}

TEST_F(PeerLinksTest, ErrorsNameTheMemberThatWasCalled) {
  Served served;
  served.worker.Say(absl::UnavailableError("later"));
  EXPECT_THAT(Meet(served.PeerAs(0)), StatusIs(Code::kUnavailable, HasSubstr("worker w2 (rank 0) at 127.0.0.1")));
  EXPECT_THAT(Transfer(served.PeerAs(5)), StatusIs(Code::kUnavailable, HasSubstr("worker w2 (rank 5) at 127.0.0.1")));
}

TEST_F(PeerLinksTest, DroppedAddresses_AreConnectedAnew_OthersAreNot) {
  const Served stays, goes;
  EXPECT_OK(Meet(stays.PeerAs(0)));
  EXPECT_OK(Meet(goes.PeerAs(1)));
  links_.DropAllBut({stays.server->address(), "127.0.0.1:1"});
  EXPECT_OK(Meet(stays.PeerAs(0)));
  EXPECT_OK(Meet(goes.PeerAs(1)));
  EXPECT_EQ(stays.worker.callers().size(), 1);
  EXPECT_EQ(goes.worker.callers().size(), 2);
}

TEST_F(PeerLinksTest, ACallUnderWay_OutlastsThatItsAddressIsDropped) {
  const Served served;
  EXPECT_OK(Copy(served.PeerAs(0), [&] {
    links_.DropAllBut({});
    return absl::OkStatus();
  }));
  EXPECT_OK(Transfer(served.PeerAs(0)));
  EXPECT_EQ(served.worker.callers().size(), 2);
}

v1::GetStatusReply Worker(const std::string& name, int64_t incarnation) {
  v1::GetStatusReply reply;
  reply.set_worker(name);
  reply.set_incarnation(incarnation);
  return reply;
}

// With a job with which it went on so often where the incarnation before it was killed.
v1::GetStatusReply WithJob(v1::GetStatusReply worker, const std::string& job, int restarts) {
  v1::GetStatusReply::Job* const added = worker.add_jobs();
  added->set_name(job);
  added->set_restarts(restarts);
  return worker;
}

class PeerLinksWordTest : public PeerLinksTest, public ::testing::WithParamInterface<Code> {};

// Peers are "w2", incarnation 3.
TEST_P(PeerLinksWordTest, AnErrorCounts_OnlyIfTheWorkerItselfGivesIt) {
  Served served;
  const v1::Peer peer = served.PeerAs(1);
  served.worker.Say(absl::Status(GetParam(), "no"));
  const auto by = [](const std::string& end) {
    return StatusIs(Code::kUnavailable, MatchesRegex("worker \"w2\" \\(incarnation 3\\) at 127.0.0.1:[0-9]+ " + end));
  };
  served.worker.Be(Worker("x1", 3));
  for (const absl::Status& status : {Meet(peer), Transfer(peer), Copy(peer)}) {
    EXPECT_THAT(status, by("has ended: worker \"x1\" answers there now"));
  }
  served.worker.Be(WithJob(Worker("w2", 4), "job", 0));
  EXPECT_THAT(Transfer(peer), by("has ended: its incarnation 4 answers there now"));
  served.worker.Be(Worker("w2", 2));
  EXPECT_THAT(Transfer(peer), by("is not there yet: its incarnation 2 answers there now"));
  served.worker.Be(Worker("w2", 3));
  for (const absl::Status& status : {Meet(peer), Transfer(peer), Copy(peer)}) {
    EXPECT_THAT(status, StatusIs(GetParam(), HasSubstr("worker w2 (rank 1)")));
  }
}

INSTANTIATE_TEST_SUITE_P(, PeerLinksWordTest,
                         ::testing::Values(Code::kNotFound, Code::kPermissionDenied, Code::kUnimplemented,
                                           Code::kInvalidArgument, Code::kFailedPrecondition, Code::kAborted,
                                           Code::kUnauthenticated, Code::kInternal, Code::kUnknown,
                                           Code::kResourceExhausted, Code::kOutOfRange, Code::kAlreadyExists));

// Members name it by the incarnation that it was when the job's epoch began.
TEST_F(PeerLinksTest, TheNextIncarnationThatTookTheJobOver_IsBelieved) {
  Served served;
  served.worker.Say(absl::FailedPreconditionError("it started anew"));
  const auto believed = [&](const v1::GetStatusReply& self) {
    served.worker.Be(self);
    return absl::IsFailedPrecondition(Copy(served.PeerAs(1)));
  };
  EXPECT_TRUE(believed(WithJob(WithJob(Worker("w2", 5), "other", 0), "job", 2)));
  EXPECT_FALSE(believed(WithJob(WithJob(Worker("w2", 5), "other", 1), "job", 0)));
  EXPECT_FALSE(believed(WithJob(Worker("x1", 5), "job", 1)));
  EXPECT_FALSE(believed(WithJob(Worker("w2", 2), "job", 1)));
}

TEST_F(PeerLinksTest, WhoDoesNotSayWhoItIs_IsNotBelieved) {
  Served served;
  served.worker.Say(absl::NotFoundError("no such job"));
  for (const absl::Status& self : {absl::UnimplementedError("what is that"), absl::PermissionDeniedError("not you")}) {
    served.worker.Be(self);
    EXPECT_THAT(Meet(served.PeerAs(1)),
                StatusIs(Code::kUnavailable, AllOf(HasSubstr("what answers for worker \"w2\" (incarnation 3)"),
                                                   HasSubstr(std::string(self.message())), HasSubstr("no such job"))));
  }
}

TEST_F(PeerLinksTest, WhoNeverSaysWhoItIs_IsWaitedForAShortWhile) {
  Served served;
  served.worker.Say(absl::NotFoundError("no such job"));
  served.worker.Be(absl::DeadlineExceededError("never"));
  const absl::Time begin = MonotonicNow();
  EXPECT_THAT(Meet(served.PeerAs(1)), StatusIs(Code::kUnavailable, HasSubstr("does not say who it is")));
  EXPECT_LT(MonotonicNow() - begin, kTime / 2);
}

// The caller asks again anyway, every few milliseconds; or found the error itself.
TEST_F(PeerLinksTest, WhoIsThere_IsNotAskedInVain) {
  Served served;
  const v1::Peer peer = served.PeerAs(1);
  served.worker.Be(Worker("x1", 9));
  EXPECT_OK(Transfer(peer));
  EXPECT_THAT(Copy(peer, [] { return absl::DataLossError("mine"); }), StatusIs(Code::kDataLoss, "mine"));
  EXPECT_THAT(Copy(peer, [] { return absl::CancelledError("mine"); }), StatusIs(Code::kCancelled, "mine"));
  served.worker.Say(absl::UnavailableError("later"));
  EXPECT_THAT(Transfer(peer), StatusIs(Code::kUnavailable, HasSubstr("later")));
  EXPECT_EQ(served.worker.asked(), 0);
  served.worker.Say(absl::NotFoundError("no"));
  EXPECT_THAT(Transfer(peer), StatusIs(Code::kUnavailable, HasSubstr("has ended")));
  EXPECT_EQ(served.worker.asked(), 1);
}

// As a worker that was killed, and is there again at the same place.
TEST_F(PeerLinksTest, AConnectionThatBroke_ComesBack) {
  auto served = std::make_unique<Served>();
  const v1::Peer peer = served->PeerAs(0);
  EXPECT_OK(Meet(peer));
  served.reset();
  EXPECT_THAT(Meet(peer), StatusIs(Code::kUnavailable, HasSubstr("worker w2 (rank 0)")));
  served = std::make_unique<Served>(peer.address());
  EXPECT_TRUE(Await([&] { return Meet(peer).ok(); }));
  EXPECT_EQ(served->worker.callers().size(), 1);
}

TEST_F(PeerLinksTest, CertificatesThatAreReplaced_AreRead) {
  const testing::TempFolder folder;
  testing::TestAuthority right(folder.path(), "right"), wrong(folder.path(), "wrong");
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.tls = right.Issue("server");
  FakeWorker worker;
  ASSERT_OK_AND_ASSIGN(const auto server, Server::Start(options, {&worker}));
  TlsOptions mine = wrong.Issue("mine");
  mine.ca_file = right.file();
  PeerLinks links(mine);
  v1::Peer peer;
  peer.set_address(server->address());
  const auto meet = [&] { return links.Meet(peer, v1::MeetRequest(), kTime).status(); };
  EXPECT_THAT(meet(), StatusIs(Code::kUnavailable, HasSubstr("certificate")));
  std::filesystem::remove(mine.key_file);
  for (const absl::Time until = MonotonicNow() + absl::Milliseconds(1500); MonotonicNow() < until;) {
    ASSERT_THAT(meet(), StatusIs(Code::kUnavailable, HasSubstr("certificate"))) << "while they are being replaced";
  }
  right.Issue("mine");
  EXPECT_TRUE(Await([&] { return meet().ok(); }));
}

TEST_F(PeerLinksTest, WhatIsNoAddress_IsRefused) {
  v1::Peer peer;
  peer.set_address("nowhere");
  EXPECT_THAT(Meet(peer), StatusIs(Code::kInvalidArgument, HasSubstr("nowhere")));
}

}  // namespace
}  // namespace shardmesh
