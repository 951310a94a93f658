// What NcclGroup asks of NCCL, in which order, and what becomes of a group whose NCCL fails or hangs.
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/reduction.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/transport/nccl/testing/nccl_fixture.h"

namespace shardmesh {
namespace {

using testing::AnyOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr absl::Duration kPlenty = absl::Seconds(60), kShort = absl::Milliseconds(300);

class NcclCallsTest : public testing::Test {
 protected:
  NcclCallsTest() { TheStandIn().Reset(); }
  ~NcclCallsTest() override {
    EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
    EXPECT_EQ(TheStandIn().Allocations(), 0);
    TheStandIn().Reset();
  }

  // "Name count type peer" of a rank's calls, those of one group in brackets, after it joined.
  static std::vector<std::string> Calls(int rank) {
    std::vector<std::string> calls;
    int group = 0;
    for (const StandInCall& call : TheStandIn().Calls(rank)) {
      if (call.name == "CommInitRankConfig") continue;
      std::string text = call.name;
      if (call.count > 0)
        absl::StrAppend(&text, " ", call.count, " ", call.type == 0 ? "int8" : absl::StrCat(call.type));
      if (call.peer >= 0) absl::StrAppend(&text, " ", call.peer);
      if (call.group != group && group != 0) calls.push_back("]");
      if (call.group != group && call.group != 0) calls.push_back("[");
      group = call.group;
      calls.push_back(text);
    }
    if (group != 0) calls.push_back("]");
    return calls;
  }
  static std::vector<std::string> NamesOf(int rank) {
    std::vector<std::string> names;
    for (const StandInCall& call : TheStandIn().Calls(rank)) names.push_back(call.name);
    return names;
  }
  // Every rank of a group does `body`; then the group is gone.
  static void OnEveryRank(int size, const std::function<void(NcclGroup&)>& body,
                          const std::function<void(NcclGroup::Options&)>& adjust = {}) {
    NcclGroups groups = MakeNcclGroups(size, adjust);
    OnThreads(size, [&](int rank) { body(*groups[rank]); });
    last_calls = {};
    for (int rank = 0; rank < size; ++rank) last_calls.push_back(Calls(rank));
  }
  static std::vector<std::vector<std::string>> last_calls;
};
std::vector<std::vector<std::string>> NcclCallsTest::last_calls;

// ---- What goes well. ----

TEST_F(NcclCallsTest, Barrier_IsTheAllGatherOfHeaders) {
  OnEveryRank(3, [](NcclGroup& group) { EXPECT_OK(group.Barrier(kPlenty)); });
  for (const auto& calls : last_calls) EXPECT_THAT(calls, ElementsAre("AllGather 48 int8"));
}

TEST_F(NcclCallsTest, AllGather_IsOneAllGatherOfBytes) {
  OnEveryRank(2, [](NcclGroup& group) {
    char mine[10] = {}, all[20];
    EXPECT_OK(group.AllGather(mine, all, 10, kPlenty));
    EXPECT_OK(group.AllGather(mine, all, 0, kPlenty));
  });
  for (const auto& calls : last_calls) {
    EXPECT_THAT(calls, ElementsAre("AllGather 48 int8", "AllGather 10 int8", "AllGather 48 int8"));
  }
}

TEST_F(NcclCallsTest, AllGather_BeyondTheStaging_IsMadeInParts) {
  OnEveryRank(
      2,
      [](NcclGroup& group) {
        std::vector<char> mine(70000), all(140000);
        EXPECT_OK(group.AllGather(mine.data(), all.data(), 70000, kPlenty));
      },
      [](NcclGroup::Options& options) { options.staging_bytes = 1 << 16; });
  EXPECT_THAT(last_calls[0],
              ElementsAre("AllGather 48 int8", "AllGather 32768 int8", "AllGather 32768 int8", "AllGather 4464 int8"));
}

TEST_F(NcclCallsTest, AllToAll_IsOneGroupOfSendsAndReceives) {
  OnEveryRank(3, [](NcclGroup& group) {
    char mine[21] = {}, theirs[21];
    EXPECT_OK(group.AllToAll(mine, theirs, 7, kPlenty));
  });
  for (const auto& calls : last_calls) {
    EXPECT_THAT(calls, ElementsAre("AllGather 48 int8", "[", "Send 7 int8 0", "Send 7 int8 1", "Send 7 int8 2",
                                   "Recv 7 int8 0", "Recv 7 int8 1", "Recv 7 int8 2", "]"));
  }
}

TEST_F(NcclCallsTest, Broadcast_IsFromItsRoot) {
  OnEveryRank(3, [](NcclGroup& group) {
    char memory[9] = {};
    EXPECT_OK(group.Broadcast(memory, 9, 2, kPlenty));
  });
  for (const auto& calls : last_calls) EXPECT_THAT(calls, ElementsAre("AllGather 48 int8", "Broadcast 9 int8 2"));
}

float NumberOf(int slot, int64_t i) { return std::sin(static_cast<float>(slot * 1000 + i)) * std::pow(10.0f, i % 7); }

// Slots of `holders` with 100 elements for each of two ranks: the pieces, and how far each is from the tree sum, as a
// part of the numbers' magnitudes.
std::pair<std::vector<float>, float> Reduce(NcclGroup& group, Format format, const std::vector<int>& holders) {
  constexpr int kElements = 100;
  std::vector<std::vector<uint32_t>> memory;
  std::vector<const void*> mine;
  const auto stored = [&](int s, int64_t i) {
    return format == Format::kFp32 ? NumberOf(s, i) : Bf16ToFloat(FloatToBf16Rne(NumberOf(s, i)));
  };
  for (size_t s = 0; s < holders.size(); ++s) {
    if (holders[s] != group.rank()) continue;
    memory.emplace_back(2 * kElements);
    for (int i = 0; i < 2 * kElements; ++i) {
      const float number = stored(static_cast<int>(s), i);
      const uint16_t half = FloatToBf16Rne(number);
      if (format == Format::kFp32) std::memcpy(&memory.back()[i], &number, 4);
      if (format == Format::kBf16) std::memcpy(reinterpret_cast<uint16_t*>(memory.back().data()) + i, &half, 2);
    }
  }
  for (const auto& each : memory) mine.push_back(each.data());
  std::vector<float> piece(kElements);
  EXPECT_OK(group.ReduceScatter({format, holders, mine, kElements}, piece.data(), kPlenty));
  float worst = 0;
  for (int i = 0; i < kElements; ++i) {
    const int64_t at = group.rank() * kElements + i;
    const auto slots = static_cast<int>(holders.size());
    const float sum = TreeSum<float>(slots, [&](int s) { return stored(s, at); });
    const float magnitude = TreeSum<float>(slots, [&](int s) { return std::abs(stored(s, at)); });
    worst = std::max(worst, std::abs(piece[i] - sum) / magnitude);
  }
  return {piece, worst};
}

TEST_F(NcclCallsTest, ReduceScatter_Exact_SendsEverySlotToItsOwners_AndLetsNcclAddNothing) {
  OnEveryRank(2, [](NcclGroup& group) { EXPECT_EQ(Reduce(group, Format::kFp32, {0, 1, 1}).second, 0); });
  EXPECT_THAT(last_calls[0], ElementsAre("AllGather 48 int8", "[", "Send 400 int8 0", "Send 400 int8 1",
                                         "Recv 400 int8 0", "Recv 400 int8 1", "Recv 400 int8 1", "]"));
  EXPECT_THAT(last_calls[1],
              ElementsAre("AllGather 48 int8", "[", "Send 400 int8 0", "Send 400 int8 1", "Send 400 int8 0",
                          "Send 400 int8 1", "Recv 400 int8 0", "Recv 400 int8 1", "Recv 400 int8 1", "]"));
}

TEST_F(NcclCallsTest, ReduceScatter_Fast_LetsNcclAdd) {
  const auto fast = [](NcclGroup::Options& options) { options.fast = true; };
  std::vector<float> worst(2);
  OnEveryRank(
      2,
      [&](NcclGroup& group) {
        EXPECT_EQ(group.name(), "nccl-fast");
        worst[group.rank()] = Reduce(group, Format::kFp32, {0, 0, 1, 1}).second;
        EXPECT_LT(worst[group.rank()], 1e-6f);
      },
      fast);
  EXPECT_GT(worst[0] + worst[1], 0) << "another order, so other bits: it is not the exact sum";
  for (const auto& calls : last_calls) {
    EXPECT_THAT(calls, ElementsAre("AllGather 48 int8", "ReduceScatter 100 7", "ReduceScatter 100 7"));
  }
  TheStandIn().Reset();
  OnEveryRank(
      2,
      [](NcclGroup& group) {
        EXPECT_LT(Reduce(group, Format::kBf16, {1, 0}).second, 0.01f);
      },
      fast);
  for (const auto& calls : last_calls) EXPECT_THAT(calls, ElementsAre("AllGather 48 int8", "ReduceScatter 100 9"));
}

TEST_F(NcclCallsTest, Leaving_EndsInGoodOrder) {
  OnEveryRank(2, [](NcclGroup& group) { EXPECT_OK(group.Barrier(kPlenty)); });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(NamesOf(rank), ElementsAre("CommInitRankConfig", "AllGather", "CommFinalize", "CommDestroy"));
  }
  EXPECT_THAT(NamesOf(-1), ElementsAre("GetUniqueId"));
}

// ---- What goes wrong. ----

TEST_F(NcclCallsTest, Leaving_NcclFails_Aborts) {
  TheStandIn().Plan("CommFinalize", 1, 1, StandIn::Fault::kFail, kNcclSystemError);
  OnEveryRank(2, [](NcclGroup&) {});
  EXPECT_THAT(NamesOf(1), ElementsAre("CommInitRankConfig", "CommFinalize", "CommAbort"));
}

// A call of three ranks that ends in an error: every rank's (but the one that has all it needs), its text, in time, and
// with an aborted communicator.
void EndsInErrors(const std::string& function, int nth, StandIn::Fault fault, NcclResult result,
                  const std::string& expected, int unhurt = -1) {
  NcclGroups groups = MakeNcclGroups(3);
  TheStandIn().Plan(function, 1, nth, fault, result);
  const absl::Time begin = MonotonicNow();
  OnThreads(3, [&](int rank) {
    std::vector<char> mine(300), all(300);
    const absl::Duration limit = fault == StandIn::Fault::kHang ? kShort : kPlenty;
    const absl::Status status = function == "Send" || function == "Recv"
                                    ? groups[rank]->AllToAll(mine.data(), all.data(), 100, limit)
                                    : groups[rank]->AllGather(mine.data(), all.data(), 100, limit);
    if (rank == unhurt) {
      EXPECT_OK(status);
    } else {
      EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(expected));
    }
    const absl::Status later = groups[rank]->Barrier(kPlenty);
    EXPECT_EQ(later.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(later.message()), HasSubstr(expected));
    // No group of calls was left open.
    int open = 0;
    for (const StandInCall& call : TheStandIn().Calls(rank)) open += call.name == "CommAbort" && call.group != 0;
    EXPECT_EQ(open, 0);
  });
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(20));  // of 60
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<std::string> names;
    for (const StandInCall& call : TheStandIn().Calls(rank)) names.push_back(call.name);
    EXPECT_EQ(std::count(names.begin(), names.end(), "CommAbort"), 1) << rank;
    EXPECT_EQ(names.back(), "CommAbort");
  }
}

TEST_F(NcclCallsTest, NcclFailsLater_IsUnavailable_WithItsWords) {
  EndsInErrors("AllGather", 2, StandIn::Fault::kAsyncError, kNcclRemoteError,
               "NCCL failed on rank 1 in all-gather 1 of 100 bytes in epoch 5: remote process exited or there was a "
               "network error (the stand-in was told to)");
}

TEST_F(NcclCallsTest, NcclFailsInTheHeaders_IsUnavailable) {
  EndsInErrors("AllGather", 1, StandIn::Fault::kAsyncError, kNcclSystemError, "NCCL failed on rank 1");
}

TEST_F(NcclCallsTest, NcclRefuses_IsUnavailable) {
  EndsInErrors("AllGather", 2, StandIn::Fault::kFail, kNcclUnhandledCudaError, "NCCL failed on rank 1");
}

TEST_F(NcclCallsTest, NcclRefusesASend_TheGroupOfCallsIsClosed) {
  EndsInErrors("Send", 2, StandIn::Fault::kFail, kNcclInvalidUsage, "NCCL failed on rank 1");
}

TEST_F(NcclCallsTest, NcclHangs_EndsInTime) {
  EndsInErrors("AllGather", 2, StandIn::Fault::kHang, kNcclSuccess,
               "NCCL did not end all-gather 1 of 100 bytes in epoch 5 within 300ms");
  TheStandIn().Reset();
  EndsInErrors("Recv", 1, StandIn::Fault::kHang, kNcclSuccess, "NCCL did not end all-to-all 1", 2);
}

TEST_F(NcclCallsTest, NcclHangsInTheHeaders_NobodyIsBlamed) {
  EndsInErrors("AllGather", 1, StandIn::Fault::kHang, kNcclSuccess, "every rank is there, and waits for NCCL");
}

TEST_F(NcclCallsTest, ModeOrStagingThatDiffers_IsNamed) {
  const std::function<void(NcclGroup::Options&)> odd[] = {
      [](NcclGroup::Options& options) { options.fast = options.rank == 1; },
      [](NcclGroup::Options& options) { options.staging_bytes = options.rank == 1 ? 1 << 20 : 1 << 21; }};
  for (const auto& adjust : odd) {
    OnEveryRank(
        2,
        [](NcclGroup& group) {
          const absl::Status status = group.Barrier(kPlenty);
          EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted));
          EXPECT_THAT(std::string(status.message()), HasSubstr("both are the same on all ranks"));
        },
        adjust);
  }
}

TEST_F(NcclCallsTest, StagingTooSmallForTheSlots_SaysHowMuchIsNeeded) {
  OnEveryRank(
      2,
      [](NcclGroup& group) {
        const std::vector<int> holders(300, 0);
        const std::vector<float> slot(2);
        const std::vector<const void*> mine(group.rank() == 0 ? 300 : 0, slot.data());
        float piece = 0;
        const absl::Status status = group.ReduceScatter({Format::kFp32, holders, mine, 1}, &piece, kPlenty);
        EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kResourceExhausted, absl::StatusCode::kAborted));
        EXPECT_THAT(std::string(status.message()), HasSubstr("300 slots and 2 ranks; give it 230656"));
      },
      [](NcclGroup::Options& options) { options.staging_bytes = 1 << 16; });
}

// ---- Joining. ----

TEST_F(NcclCallsTest, Join_ARankThatDoesNotCome_IsNamedInTime) {
  for (const int absent : {0, 2}) {
    const absl::Time begin = MonotonicNow();
    const Joined joined = JoinNccl(3, kShort, {}, absent);
    EXPECT_LT(MonotonicNow() - begin, absl::Seconds(20));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == absent) continue;
      const absl::Status status = joined[rank].status();
      EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted)) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("group 'group' was not formed within 300ms; rank ", absent, " did not join")));
    }
  }
}

TEST_F(NcclCallsTest, Join_NcclHangs_EndsInTime) {
  TheStandIn().Plan("CommInitRankConfig", 1, 1, StandIn::Fault::kHang, kNcclSuccess);
  const Joined joined = JoinNccl(2, kShort);
  EXPECT_EQ(joined[1].status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(joined[1].status().message()), HasSubstr("every rank is there, and waits for NCCL"));
  EXPECT_THAT(NamesOf(1), ElementsAre("CommInitRankConfig", "CommAbort"));
}

TEST_F(NcclCallsTest, Join_NcclFails_IsUnavailable_AndPeersHear) {
  TheStandIn().Plan("CommInitRankConfig", 1, 1, StandIn::Fault::kFail, kNcclUnhandledCudaError);
  TheStandIn().Plan("CommInitRankConfig", 0, 1, StandIn::Fault::kHang, kNcclSuccess);
  const Joined joined = JoinNccl(2, kPlenty);
  EXPECT_EQ(joined[1].status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(joined[1].status().message()), HasSubstr("NCCL failed on rank 1 while it joined: "));
  EXPECT_EQ(joined[0].status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(NamesOf(0), Contains("CommAbort"));
  EXPECT_THAT(NamesOf(1), Not(Contains("CommAbort"))) << "it has no communicator";
}

TEST_F(NcclCallsTest, Join_WrongOptions_AreRefused) {
  const std::function<void(NcclGroup::Options&)> wrong[] = {
      [](NcclGroup::Options& options) { options.size = 0; }, [](NcclGroup::Options& options) { options.rank = 1; },
      [](NcclGroup::Options& options) { options.staging_bytes = 100; },
      [](NcclGroup::Options& options) { options.name = ""; },
      [](NcclGroup::Options& options) { options.get = nullptr; }};
  for (const auto& adjust : wrong) {
    EXPECT_EQ(JoinNccl(1, kPlenty, adjust)[0].status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(NcclCallsTest, Join_NoRoomForTheStaging_IsResourceExhausted) {
  const Joined joined =
      JoinNccl(1, kPlenty, [](NcclGroup::Options& options) { options.staging_bytes = int64_t{1} << 40; });
  EXPECT_EQ(joined[0].status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace shardmesh
