#include "worker/transport/local_group.h"

#include "worker/transport/testing/exchange_suite.h"
#include "worker/transport/testing/group_families.h"
#include "worker/transport/testing/group_suite.h"

namespace shardmesh {
namespace {

Groups Make(const std::vector<uint64_t>& epochs) { return MakeLocalGroups(epochs); }

INSTANTIATE_TEST_SUITE_P(Local, GroupSuite, testing::Values(GroupFamily{"local", Make}));
INSTANTIATE_TEST_SUITE_P(Local, ExchangeSuite, testing::Values(GroupFamily{"local", Make}));

TEST(NamedRank, IsTheFirstThatIsNotTheReaders) {
  EXPECT_EQ(NamedRank("rank 3 is gone: the connection was closed", 0), 3);
  EXPECT_EQ(NamedRank("rank 0 of group 'x' could not connect rank 12: late", 0), 12);
  EXPECT_EQ(NamedRank("ranks 0, 2 did not come to all-gather 7", 1), 0);
  EXPECT_EQ(NamedRank("the group was ended: worker w (rank 5, pid 1)", 5), -1);
  EXPECT_EQ(NamedRank("ranking and rank x and rank 99999999999999999999", 0), -1);
}

}  // namespace
}  // namespace shardmesh
