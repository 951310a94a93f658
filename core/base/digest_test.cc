#include "core/base/digest.h"

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

std::string HashOf(std::initializer_list<absl::string_view> texts) {
  Hasher hasher;
  for (absl::string_view text : texts) hasher.Add(text);
  return hasher.Hex();
}

TEST(HasherTest, Value_IsGolden) {
  Hasher hasher;
  hasher.Add("shardmesh");
  hasher.Add(-1);
  EXPECT_EQ(hasher.Hex(), "5d24314bee875da971927ea2f1702a00");
}

TEST(HasherTest, ValuesAreFramed) {
  EXPECT_NE(HashOf({"ab", "c"}), HashOf({"a", "bc"}));
  EXPECT_NE(HashOf({"ab"}), HashOf({"ab", ""}));
  EXPECT_NE(HashOf({"a", "b"}), HashOf({"b", "a"}));
  Hasher one, two;
  one.Add(1);
  two.Add(int64_t{1});
  EXPECT_EQ(one.Hex(), two.Hex());
}

}  // namespace
}  // namespace shardmesh
