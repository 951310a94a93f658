#include "core/mesh/communicator_key.h"

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<Rank> ToRanks(const std::vector<int>& numbers) {
  std::vector<Rank> ranks;
  for (const int r : numbers) ranks.push_back(Rank(r));
  return ranks;
}

// Digests of 64-bit little-endian integers by libxxhash itself.
TEST(CommunicatorKeyTest, GoldenValues) {
  std::vector<int> many(1024);
  for (int r = 0; r < 1024; ++r) many[r] = r;
  EXPECT_EQ(CommunicatorKey(ToRanks({0, 2, 4, 6})), "5f1414844d59b7743e25e6e20571bdb4");
  EXPECT_EQ(CommunicatorKey(ToRanks({1, 3, 5, 7})), "e9d81240796fc61f80b0881fe209ffb2");
  EXPECT_EQ(CommunicatorKey(ToRanks({2147483647})), "43e9d60aaed68832d328dba914bd2267");
  EXPECT_EQ(CommunicatorKey(ToRanks(many)), "a7c82e7d7c10c4d34ff81631ac5dc651");
  EXPECT_EQ(CommunicatorKey({}), "99aa06d3014798d86001c324468d497f");
}

TEST(CommunicatorKeyTest, EqualSetsAlone_HaveEqualKeys) {
  EXPECT_EQ(CommunicatorKey(ToRanks({6, 0, 4, 2})), CommunicatorKey(ToRanks({0, 2, 4, 6})));
  EXPECT_EQ(CommunicatorKey(ToRanks({1, 0, 1})), CommunicatorKey(ToRanks({0, 1})));
  EXPECT_NE(CommunicatorKey(ToRanks({0, 1})), CommunicatorKey(ToRanks({0, 1, 2})));
  EXPECT_NE(CommunicatorKey(ToRanks({256})), CommunicatorKey(ToRanks({1})));
}

TEST(CommunicatorsTest, EqualRanksOfSeveralMeshes_ShareOne) {
  const Mesh cube = Mesh::Create({2, 2, 2}, {"ddp", "fsdp", "x"}).value();
  const Mesh slice = cube.Slice({"ddp", "fsdp"}).value().Slice({"fsdp"}).value();
  const Mesh turned = cube.Flatten({"fsdp", "ddp"}, "dp").value();  // the same groups, in another order
  ASSERT_OK_AND_ASSIGN(const std::vector<Communicator> list,
                       Communicators({{cube, {"ddp", "fsdp"}}, {turned, {"dp"}}, {slice, {"fsdp"}}, {cube, {"fsdp"}}}));
  ASSERT_EQ(list.size(), 6u);
  EXPECT_EQ(list[0].ranks, ToRanks({0, 2, 4, 6}));
  EXPECT_EQ(list[0].key, CommunicatorKey(list[0].ranks));
  EXPECT_THAT(list[0].uses, ElementsAre(Communicator::Use{0, 0}, Communicator::Use{1, 0}));
  EXPECT_THAT(list[1].uses, ElementsAre(Communicator::Use{0, 1}, Communicator::Use{1, 1}));
  EXPECT_EQ(list[3].ranks, ToRanks({1, 3}));
  EXPECT_THAT(list[3].uses, ElementsAre(Communicator::Use{2, 1}, Communicator::Use{3, 1}));
}

TEST(CommunicatorsTest, UnknownDimension_IsNamed) {
  const Mesh line = Mesh::Create({2}, {"a"}).value();
  EXPECT_THAT(Communicators({{line, {"a"}}, {line, {"b"}}}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("named \"b\"; this mesh has a")));
  EXPECT_TRUE(Communicators({}).value().empty());
}

}  // namespace
}  // namespace shardmesh
