#include "server/store/shared_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Strings = SharedList<std::string>;

TEST(SharedList, Empty_HasNothing_HoweverItWasMade) {
  const Strings none, no_values = std::vector<std::string>();
  Strings cleared = {"a"};
  cleared.clear();
  for (const Strings& list : {none, no_values, cleared}) {
    EXPECT_THAT(list, IsEmpty());
    EXPECT_EQ(list.size(), 0u);
    EXPECT_EQ(list.begin(), list.end());
    EXPECT_TRUE(list.SharesWith(none));
    EXPECT_THAT(list.ToVector(), IsEmpty());
  }
}

TEST(SharedList, Copies_Share_AndAreEqual) {
  const Strings list = {"a", "b"};
  const Strings copy = list, same_values = std::vector<std::string>{"a", "b"};
  EXPECT_TRUE(copy.SharesWith(list));
  EXPECT_EQ(&copy[1], &list[1]);
  EXPECT_FALSE(same_values.SharesWith(list));
  EXPECT_EQ(copy, list);
  EXPECT_EQ(same_values, list);
  EXPECT_NE(list, (Strings{"a"}));
  EXPECT_NE(list, (Strings{"a", "c"}));
}

TEST(SharedList, Replaced_CopiesOfBeforeStayAsTheyWere) {
  Strings list = {"a", "b"};
  const Strings copy = list;
  std::vector<std::string> changed = list.ToVector();
  changed[0] = "z";
  list = std::move(changed);
  EXPECT_THAT(list, ElementsAre("z", "b"));
  EXPECT_THAT(copy, ElementsAre("a", "b"));
}

}  // namespace
}  // namespace shardmesh
