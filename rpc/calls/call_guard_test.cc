#include "rpc/calls/call_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class CallGuardTest : public ::testing::Test {
 protected:
  CallGuardTest() {
    guard_.SetAbort([this](const std::string& connection) { aborted_.push_back(connection); });
  }
  void Open(int call, const std::string& connection) {
    guard_.Created(&calls_[call]);
    guard_.Started(&calls_[call], connection);
  }

  CallGuard guard_{2};
  char calls_[8];
  std::vector<std::string> aborted_;
};

TEST_F(CallGuardTest, AtTheLimit_NothingHappens) {
  Open(0, "ipv4:10.0.0.1:1");
  Open(1, "ipv4:10.0.0.1:1");
  EXPECT_EQ(guard_.open_calls(), 2);
  EXPECT_THAT(aborted_, IsEmpty());
}

TEST_F(CallGuardTest, OverTheLimit_AbortsThatConnectionOnly) {
  Open(0, "ipv4:10.0.0.1:1");
  Open(1, "ipv4:10.0.0.1:2");
  Open(2, "ipv4:10.0.0.1:2");
  EXPECT_THAT(aborted_, IsEmpty());
  Open(3, "ipv4:10.0.0.1:2");
  EXPECT_THAT(aborted_, ElementsAre("ipv4:10.0.0.1:2"));
}

TEST_F(CallGuardTest, EndedCalls_DoNotCount) {
  for (int round = 0; round < 10; ++round) {
    Open(0, "ipv6:%5B::1%5D:1");
    Open(1, "ipv6:%5B::1%5D:1");
    guard_.Ended(&calls_[0]);
    guard_.Ended(&calls_[1]);
  }
  EXPECT_EQ(guard_.open_calls(), 0);
  EXPECT_THAT(aborted_, IsEmpty());
}

TEST_F(CallGuardTest, AConnection_HasACall_UntilItsLastOneEnds) {
  Open(0, "ipv4:10.0.0.1:1");
  Open(1, "ipv4:10.0.0.1:1");
  Open(2, "ipv4:10.0.0.2:1");
  guard_.Ended(&calls_[0]);
  EXPECT_TRUE(guard_.HasCall("ipv4:10.0.0.1:1"));
  EXPECT_FALSE(guard_.HasCall("ipv4:10.0.0.3:1"));
  EXPECT_THAT(guard_.TakeEnded(), IsEmpty());
  guard_.Ended(&calls_[1]);
  EXPECT_TRUE(guard_.HasCall("ipv4:10.0.0.1:1")) << "while somebody looks at the connections, one after the other";
  EXPECT_THAT(guard_.TakeEnded(), ElementsAre("ipv4:10.0.0.1:1"));
  EXPECT_FALSE(guard_.HasCall("ipv4:10.0.0.1:1"));
  EXPECT_THAT(guard_.TakeEnded(), IsEmpty());
}

TEST_F(CallGuardTest, CallNeverStarted_LeavesNoTrace) {
  guard_.Created(&calls_[0]);
  guard_.Ended(&calls_[0]);
  guard_.Ended(&calls_[0]);
  guard_.Started(&calls_[1], "ipv4:10.0.0.1:1");  // never created: not ours
  EXPECT_EQ(guard_.open_calls(), 0);
}

TEST_F(CallGuardTest, UnixSockets_AreNotCounted) {
  for (int call = 0; call < 8; ++call) Open(call, "unix:");
  EXPECT_THAT(aborted_, IsEmpty());
  EXPECT_EQ(guard_.open_calls(), 8);
}

TEST(ConnectionName, PlainBrackets) {
  EXPECT_EQ(ConnectionName("ipv6:%5B2001:db8::1%5D:7000"), "ipv6:[2001:db8::1]:7000");
  EXPECT_EQ(ConnectionName("ipv4:10.0.0.1:7000"), "ipv4:10.0.0.1:7000");
  EXPECT_EQ(ConnectionName("unix:/run/x"), "");
}

}  // namespace
}  // namespace shardmesh
