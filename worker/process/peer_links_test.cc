#include "worker/process/peer_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"
#include "rpc/server.h"
#include "worker/node/testing/await.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
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
  // One for each connection that a call came over.
  std::set<std::string> callers() const {
    MutexLock lock(mu_);
    return callers_;
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
  absl::Status Heard(const grpc::CallbackServerContext& context) {
    MutexLock lock(mu_);
    callers_.insert(context.peer());
    return status_;
  }

  mutable Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
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
  absl::Status Meet(const v1::Peer& peer) { return links_.Meet(peer, v1::MeetRequest(), kTime).status(); }
  absl::Status Transfer(const v1::Peer& peer) {
    const TransferSink sink = {[](const v1::TransferHeader&) { return absl::OkStatus(); },
                               [](absl::string_view) { return absl::OkStatus(); }};
    return links_.Transfer(peer, v1::TransferRequest(), sink, kTime).status();
  }
  absl::Status Copy(const v1::Peer& peer, const std::function<absl::Status()>& meanwhile = absl::OkStatus) {
    const auto told = [&](const v1::FileProgress&) { return meanwhile(); };
    return links_.Copy(peer, v1::CopyRequest(), told, kTime).status();
  }

  PeerLinks links_{TlsOptions()};
};

TEST_F(PeerLinksTest, AllCallsToAnAddress_AlsoAtTheSameTime_ComeOverOneConnection) {
  const Served served, other;
  EXPECT_OK(Meet(served.PeerAs(0)));
  EXPECT_OK(Transfer(served.PeerAs(1)));
  EXPECT_OK(Copy(served.PeerAs(2), [&] { return Transfer(served.PeerAs(3)); }));
  EXPECT_EQ(served.worker.callers().size(), 1);
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

TEST_F(PeerLinksTest, WhatIsNoAddress_IsRefused) {
  v1::Peer peer;
  peer.set_address("nowhere");
  EXPECT_THAT(Meet(peer), StatusIs(Code::kInvalidArgument, HasSubstr("nowhere")));
}

}  // namespace
}  // namespace shardmesh
