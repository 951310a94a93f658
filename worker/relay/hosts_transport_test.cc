#include "worker/relay/hosts_transport.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "rpc/server.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Answers each message with an empty reply. One with `again` is the last, and has none; one with workers is the last, and
// has one; one with two workers has two.
class Answering final : public v1::Hosts::Service {
 public:
  grpc::Status Heartbeats(grpc::ServerContext*,
                          grpc::ServerReaderWriter<v1::HostHeartbeatReplies, v1::HostHeartbeats>* stream) override {
    v1::HostHeartbeats message;
    while (stream->Read(&message)) {
      if (message.again()) return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "it is the last one");
      stream->Write({});
      if (message.workers_size() == 2) stream->Write({});
      if (message.workers_size() == 1) return grpc::Status::OK;
    }
    return grpc::Status::OK;
  }
};

// Sooner than a relay would send the next message.
bool AwaitSoon(const std::function<bool()>& holds) {
  const absl::Time until = MonotonicNow() + absl::Seconds(2);
  while (!holds() && MonotonicNow() < until) std::this_thread::yield();
  return holds();
}

class HostsTransportTest : public ::testing::Test {
 protected:
  static v1::HostHeartbeats Message(int workers) {
    v1::HostHeartbeats message;
    for (int i = 0; i < workers; ++i) message.add_workers()->set_place(i);
    return message;
  }

  Answering answering_;
  std::unique_ptr<Server> server_ = Server::Start(ServerOptions(), {&answering_}).value();
  const std::string address_ = server_->address();
  const std::unique_ptr<HostsTransport> link_ = HostsTransport::Dial(address_, {}, absl::Seconds(10)).value();
};

TEST_F(HostsTransportTest, StandsAsLongAsItsConnection) {
  EXPECT_FALSE(link_->Stands()) << "no call has begun";
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(link_->Exchange({}, /*anew=*/i == 0).status());
    EXPECT_TRUE(link_->Stands());
  }
  server_->Drain(absl::ZeroDuration());
  server_ = nullptr;
  EXPECT_TRUE(AwaitSoon([&] { return !link_->Stands(); }));
  EXPECT_THAT(link_->Exchange({}, /*anew=*/false), StatusIs(Code::kUnavailable, HasSubstr(address_)));
}

TEST_F(HostsTransportTest, ACallThatEndedAfterItsReply_DoesNotStand_AndTheNextOneIsNew) {
  ASSERT_OK(link_->Exchange(Message(1), /*anew=*/true).status());
  EXPECT_TRUE(AwaitSoon([&] { return !link_->Stands(); }));
  EXPECT_THAT(link_->Exchange({}, /*anew=*/false),
              StatusIs(Code::kUnavailable, HasSubstr(address_ + ": the call has ended")))
      << "what was agreed on in it does not hold in another one";
  EXPECT_FALSE(link_->Stands());
  ASSERT_OK(link_->Exchange({}, /*anew=*/true).status());
  EXPECT_TRUE(link_->Stands());
}

TEST_F(HostsTransportTest, ACallThatIsRefused_SaysWhy) {
  ASSERT_OK(link_->Exchange({}, /*anew=*/true).status());
  v1::HostHeartbeats last;
  last.set_again(true);
  EXPECT_THAT(link_->Exchange(last, /*anew=*/false), StatusIs(Code::kInvalidArgument, HasSubstr("it is the last one")));
  EXPECT_FALSE(link_->Stands());
  ASSERT_OK(link_->Exchange({}, /*anew=*/true).status());
}

TEST_F(HostsTransportTest, AReplyThatNobodyAskedFor_EndsTheCall) {
  ASSERT_OK(link_->Exchange(Message(2), /*anew=*/true).status());
  EXPECT_TRUE(AwaitSoon([&] { return !link_->Stands(); }));
  EXPECT_THAT(link_->Exchange({}, /*anew=*/false), StatusIs(Code::kUnavailable, HasSubstr("the call has ended")));
  ASSERT_OK(link_->Exchange({}, /*anew=*/true).status());
}

}  // namespace
}  // namespace shardmesh
