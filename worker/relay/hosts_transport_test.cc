#include "worker/relay/hosts_transport.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "absl/time/clock.h"
#include "core/base/matchers.h"
#include "rpc/server.h"

namespace shardmesh {
namespace {

using Code = absl::StatusCode;

// Answers each message with an empty reply.
class Answering final : public v1::Hosts::Service {
 public:
  grpc::Status Heartbeats(grpc::ServerContext*,
                          grpc::ServerReaderWriter<v1::HostHeartbeatReplies, v1::HostHeartbeats>* stream) override {
    v1::HostHeartbeats message;
    while (stream->Read(&message)) {
      if (message.again()) break;
      stream->Write({});
    }
    return grpc::Status::OK;
  }
};

bool Await(const std::function<bool()>& holds) {
  const absl::Time until = absl::Now() + absl::Seconds(10);
  while (!holds() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(1));
  return holds();
}

TEST(HostsTransportTest, StandsAsLongAsItsCallAndItsConnection) {
  Answering answering;
  std::unique_ptr<Server> server = Server::Start(ServerOptions(), {&answering}).value();
  const std::string address = server->address();
  const auto link = HostsTransport::Dial(address, {}, absl::Seconds(10)).value();
  EXPECT_FALSE(link->Stands()) << "no call has begun";
  ASSERT_OK(link->Exchange({}, /*anew=*/true).status());
  EXPECT_TRUE(link->Stands());
  v1::HostHeartbeats last;
  last.set_again(true);
  EXPECT_THAT(link->Exchange(last, /*anew=*/false), StatusIs(Code::kUnavailable, testing::HasSubstr(address)));
  EXPECT_FALSE(link->Stands()) << "the call has ended";
  ASSERT_OK(link->Exchange({}, /*anew=*/false).status());
  EXPECT_TRUE(link->Stands());
  server->Drain(absl::ZeroDuration());
  server = nullptr;
  EXPECT_TRUE(Await([&] { return !link->Stands(); })) << "its connection was closed";
}

}  // namespace
}  // namespace shardmesh
