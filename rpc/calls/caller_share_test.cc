#include "rpc/calls/caller_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/matchers.h"
#include "rpc/calls/fair_share.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CallerShareTest, KeyOfPeer_IsTheAddress_WithoutThePort_EmptyOfThisHost) {
  const auto own = [](const std::string& address) { return address == "10.0.0.1" || address == "fe80::1"; };
  const std::pair<const char*, const char*> cases[] = {
      {"ipv4:10.0.0.7:4711", "address 10.0.0.7"},
      {"ipv4:10.0.0.7:4712", "address 10.0.0.7"},
      {"ipv6:[2001:db8::7]:4711", "address 2001:db8::7"},
      {"ipv6:%5B2001:0db8::7%5D:4712", "address 2001:db8::7"},
      {"ipv6:%5Bfe80::7%25eth0%5D:4711", "address fe80::7"},
      {"ipv6:[::ffff:10.0.0.7]:4711", "address 10.0.0.7"},
      {"ipv4:127.0.0.1:4711", ""},
      {"ipv4:127.9.0.1:4711", ""},
      {"ipv6:%5B::1%5D:4711", ""},
      {"ipv6:[::ffff:127.0.0.1]:4711", ""},
      {"ipv4:10.0.0.1:4711", ""},
      {"ipv6:%5Bfe80::1%25eth0%5D:4711", ""},
      {"unix:/run/worker.sock", ""},
      {"unix-abstract:x", ""},
      {"", "peer "},
      {"ipv4:", "peer ipv4:"},
      {"ipv6:]1[", "peer ipv6:]1["},
  };
  for (const auto& [peer, key] : cases) EXPECT_EQ(KeyOfPeer(peer, own), key) << peer;
}

TEST(CallerShareTest, TheLastQuarterIsForThoseWhoHaveLess) {
  const auto check = [](const char* caller, int64_t own, int64_t used) {
    return CheckShare(caller, {own, used, 100}, "things", "release some");
  };
  EXPECT_OK(check("a", 75, 75));
  EXPECT_THAT(check("a", 76, 76),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("caller \"a\" has 76 of 100 things"), HasSubstr("release some"))));
  EXPECT_OK(check("b", 0, 76));
  EXPECT_OK(check("b", 24, 99));
  EXPECT_THAT(check("b", 25, 99), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("25 of 100")));
  EXPECT_OK(check("", 99, 99));
}

}  // namespace
}  // namespace shardmesh
