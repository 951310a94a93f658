#include "worker/transport/gloo_group.h"

#include "worker/transport/testing/exchange_suite.h"
#include "worker/transport/testing/group_families.h"
#include "worker/transport/testing/group_suite.h"

namespace shardmesh {
namespace {

Groups Make(const std::vector<uint64_t>& epochs) { return MakeGlooGroups(epochs); }

INSTANTIATE_TEST_SUITE_P(Gloo, GroupSuite, testing::Values(GroupFamily{"gloo", Make}));
INSTANTIATE_TEST_SUITE_P(Gloo, ExchangeSuite, testing::Values(GroupFamily{"gloo", Make}));

TEST(GlooGroup, WithoutAllRanks_IsUnavailable) {
  GlooOptions options;
  options.size = 2;
  options.key = "alone";
  options.host = "127.0.0.1";
  options.timeout = absl::Milliseconds(200);
  const absl::Status status = GlooGroup::Connect(std::make_shared<MemoryRendezvous>(), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("rank 1"));
  options.rank = 2;
  EXPECT_EQ(GlooGroup::Connect(std::make_shared<MemoryRendezvous>(), options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(GlooGroup, WrongAddresses_AreUnavailable_AndNameTheRank) {
  for (const char* const address : {"", "xxx", "127.0.0.1", "127.0.0.1 0", "127.0.0.1 65536", "localhost 80", "::1"}) {
    auto rendezvous = std::make_shared<MemoryRendezvous>();
    ASSERT_OK(rendezvous->Set("group/key", std::string(32, 'k')));
    ASSERT_OK(rendezvous->Set("group/0", address));
    GlooOptions options;
    options.rank = 1;
    options.size = 2;
    options.key = "group";
    options.host = "127.0.0.1";
    options.timeout = absl::Seconds(5);
    const absl::Status status = GlooGroup::Connect(rendezvous, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("could not connect rank 0"));
  }
}

}  // namespace
}  // namespace shardmesh
