// Memory that the ranks of an NcclGroup allocate together.
#include <algorithm>

#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/transport/nccl/testing/nccl_fixture.h"

namespace shardmesh {
namespace {

using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr absl::Duration kPlenty = absl::Seconds(60), kShort = absl::Milliseconds(300);

class NcclWindowsTest : public testing::Test {
 protected:
  NcclWindowsTest() { TheStandIn().Reset(); }
  ~NcclWindowsTest() override {
    EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
    EXPECT_EQ(TheStandIn().Allocations(), 0);
    TheStandIn().Reset();
  }
  static void OnEveryRank(int size, const std::function<void(NcclGroup&)>& body) {
    NcclGroups groups = MakeNcclGroups(size);
    OnThreads(size, [&](int rank) { body(*groups[rank]); });
  }
};

// What the ranks of a group gather in memory of theirs that they allocated together: in one all-gather, in place.
void GatherInPlace(NcclGroup& group) {
  const auto mine = group.Allocate(10, kPlenty), all = group.Allocate(10 * group.size(), kPlenty);
  ASSERT_OK(mine.status());
  ASSERT_OK(all.status());
  std::fill_n(*mine, 10, static_cast<char>('a' + group.rank()));
  ASSERT_OK(group.AllGather(*mine, *all, 10, kPlenty));
  for (int i = 0; i < 10 * group.size(); ++i) ASSERT_EQ((*all)[i], 'a' + i / 10) << i;
}

TEST_F(NcclWindowsTest, AllocatedMemory_IsInWindows_AndMovedInPlace) {
  OnEveryRank(2, [](NcclGroup& group) {
    GatherInPlace(group);
    EXPECT_TRUE(group.windows());
  });
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> names;
    for (const StandInCall& call : TheStandIn().Calls(rank)) names.push_back(call.name);
    EXPECT_THAT(names, ElementsAre("CommInitRankConfig", "AllGather", "CommWindowRegister", "AllGather",
                                   "CommWindowRegister", "AllGather", "AllGather", "CommWindowDeregister",
                                   "CommWindowDeregister", "CommFinalize", "CommDestroy"));
  }
}

TEST_F(NcclWindowsTest, AllocatedMemory_WithoutWindows_IsMovedInPlaceAllTheSame) {
  TheStandIn().SetWindows(false);
  OnEveryRank(3, [](NcclGroup& group) {
    GatherInPlace(group);
    EXPECT_FALSE(group.windows());
  });
}

TEST_F(NcclWindowsTest, AllocatedMemory_NoRoomOnOneRank_IsResourceExhaustedOnAll_AndTheGroupGoesOn) {
  TheStandIn().SetMemoryOf(1, 16384);
  OnEveryRank(2, [](NcclGroup& group) {
    const absl::Status status = group.Allocate(20000, kPlenty).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("not every rank of group 'group' has 20480 bytes"));
    EXPECT_EQ(group.Allocate(0, kPlenty).status().code(), absl::StatusCode::kInvalidArgument);
    GatherInPlace(group);
  });
}

TEST_F(NcclWindowsTest, AllocatedMemory_OfDifferentSizes_NamesBothRanks) {
  OnEveryRank(2, [](NcclGroup& group) {
    const absl::Status status = group.Allocate(10 + group.rank(), kPlenty).status();
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted)) << status;
    EXPECT_THAT(std::string(status.message()), testing::AllOf(HasSubstr("rank 0"), HasSubstr("rank 1")));
  });
}

TEST_F(NcclWindowsTest, AllocatedMemory_RegistrationThatFailsOrHangs_EndsTheGroup) {
  for (const StandIn::Fault fault : {StandIn::Fault::kFail, StandIn::Fault::kHang, StandIn::Fault::kAsyncError}) {
    TheStandIn().Plan("CommWindowRegister", 1, 1, fault, kNcclSystemError);
    OnEveryRank(2, [](NcclGroup& group) {
      const absl::Status status = group.Allocate(10, kShort).status();
      EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted)) << status;
      EXPECT_EQ(group.Barrier(kPlenty).code(), absl::StatusCode::kAborted);
    });
  }
}

}  // namespace
}  // namespace shardmesh
