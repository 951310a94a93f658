#include "worker/job/unclaimed_sessions.h"

#include <thread>

#include "core/base/matchers.h"
#include "worker/control/control_block.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Code = absl::StatusCode;

constexpr uint64_t kSeven = uint64_t{1} << 32 | 7, kNine = uint64_t{1} << 32 | 9;  // sessions of rank 0

struct GivenUp {
  std::map<uint64_t, std::vector<int>> all;
  std::function<void(uint64_t, const std::vector<int>&)> function() {
    return [this](uint64_t session, const std::vector<int>& slots) { all[session] = slots; };
  }
};
bool Never() { return false; }

TEST(UnclaimedSessions, EachComesBackOnce_WithItsSlots) {
  UnclaimedSessions unclaimed;
  EXPECT_FALSE(unclaimed.Knows(9));
  unclaimed.Expect({{kSeven, {0, 2}}, {kNine, {1}}});
  EXPECT_TRUE(unclaimed.Knows(9));
  EXPECT_FALSE(unclaimed.Knows(8));
  EXPECT_THAT(unclaimed.Claim(kSeven, {0}),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("session 7"), HasSubstr("0,2"))));
  EXPECT_OK(unclaimed.Claim(kSeven, {2, 0}));
  EXPECT_THAT(unclaimed.Claim(kSeven, {0, 2}), StatusIs(Code::kNotFound, HasSubstr("attach again")));
  EXPECT_THAT(unclaimed.Claim(kSeven + 1, {0, 2}), StatusIs(Code::kNotFound, HasSubstr("session 8")));
  EXPECT_OK(unclaimed.Claim(kNine, {1}));
  EXPECT_TRUE(unclaimed.Knows(9));  // its number is in use
}

TEST(UnclaimedSessions, WhoseProcessIsGone_IsGivenUp) {
  UnclaimedSessions unclaimed;
  unclaimed.Expect({{kSeven, {0, 2}}, {kNine, {1}}});
  GivenUp given_up;
  bool nine_lives = true;
  const auto lives = [&](const std::vector<int>& slots) { return nine_lives && slots[0] == 1; };
  unclaimed.AwaitClaims([&] { return !given_up.all.empty(); }, lives, given_up.function());
  EXPECT_THAT(given_up.all, ElementsAre(Pair(kSeven, ElementsAre(0, 2))));
  EXPECT_THAT(unclaimed.Claim(kSeven, {0, 2}), StatusIs(Code::kNotFound, HasSubstr("not waited for")));
  nine_lives = false;
  unclaimed.AwaitClaims(Never, lives, given_up.function());
  EXPECT_THAT(given_up.all, ElementsAre(Pair(kSeven, ElementsAre(0, 2)), Pair(kNine, ElementsAre(1))));
}

TEST(UnclaimedSessions, OneWhoseTrainerAttachesAnewIsForgotten) {
  UnclaimedSessions unclaimed;
  unclaimed.Expect({{kSeven, {0, 2}}, {kNine, {1}}});
  uint64_t session = 0;
  EXPECT_THAT(unclaimed.Forget(2, session), ElementsAre(0, 2));
  EXPECT_EQ(session, kSeven);
  EXPECT_TRUE(unclaimed.Forget(0, session).empty());
  EXPECT_THAT(unclaimed.Claim(kSeven, {0, 2}), StatusIs(Code::kNotFound, HasSubstr("not waited for")));
  EXPECT_OK(unclaimed.Claim(kNine, {1}));
}

TEST(UnclaimedSessions, TheWaitEndsWithTheLastOne) {
  UnclaimedSessions unclaimed;
  unclaimed.Expect({{kSeven, {0}}});
  GivenUp given_up;
  std::thread waits([&] {
    unclaimed.AwaitClaims(
        Never, [](const std::vector<int>&) { return true; }, given_up.function());
  });
  EXPECT_OK(unclaimed.Claim(kSeven, {0}));
  waits.join();
  EXPECT_TRUE(given_up.all.empty());
}

}  // namespace
}  // namespace shardmesh
