// Ranks on two hosts, with a line between them that is slow, stops, or breaks: ranks 0 and 1 on the one, rank 2 on the
// other. What crosses goes through a relay.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/testing/relayed_rendezvous.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::RelayedRendezvous;
using ::shardmesh::testing::TcpRelay;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3, kFar = 2;
constexpr absl::Duration kPlenty = absl::Seconds(60);

enum class Kind { kGloo, kClear, kTls };

class TwoHostsGroup : public ::testing::TestWithParam<Kind> {
 protected:
  static absl::StatusOr<std::unique_ptr<Group>> Connect(const std::shared_ptr<Rendezvous>& rendezvous, int rank) {
    const std::string host = absl::StrCat("127.0.0.", rank + 1);
    if (GetParam() != Kind::kGloo) {
      SecureOptions secure = OptionsOf(rank, kRanks, GetParam() == Kind::kTls);
      secure.host = host;
      return SecureGroup::Connect(rendezvous, secure);
    }
    GlooOptions options;
    options.rank = rank;
    options.size = kRanks;
    options.key = "group";
    options.host = host;
    return GlooGroup::Connect(rendezvous, options);
  }
  // Calls body(group) for every rank, each on a thread of its own.
  void OnEveryRank(const std::function<void(Group&)>& body) {
    const auto common = std::make_shared<MemoryRendezvous>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto group = Connect(std::make_shared<RelayedRendezvous>(&relay_, common, rank, kFar), rank);
        ASSERT_OK(group.status());
        body(**group);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // All ranks gather until that fails; after some calls, in the middle of one, the line is broken. All end within
  // `most` of that, and name ranks of the other host.
  void Break(void (TcpRelay::*how)(), int64_t bytes, absl::Duration call_time, absl::Duration most) {
    std::atomic<int> calls = 0;
    std::thread breaker([&] {
      Await([&] { return calls >= 3 * kRanks; });
      const int64_t crossed = relay_.forwarded_bytes();
      Await([&] { return relay_.forwarded_bytes() > crossed + bytes / 2; });
      broken_ = MonotonicNow();
      (relay_.*how)();
    });
    OnEveryRank([&](Group& group) {
      std::vector<char> mine(bytes), all(bytes * kRanks);
      absl::Status status;
      for (; status.ok(); ++calls) status = group.AllGather(mine.data(), all.data(), bytes, call_time);
      const absl::Time end = MonotonicNow();
      EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted)) << status;
      const std::string message(status.message());
      if (group.rank() == kFar) {
        EXPECT_THAT(message, AnyOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("ranks 0, 1")));
      } else {
        EXPECT_THAT(message, HasSubstr("rank 2 "));
      }
      EXPECT_LT(end - broken_, most) << message;
    });
    breaker.join();
  }
  static void Await(const std::function<bool()>& condition) {
    const absl::Time until = MonotonicNow() + kPlenty;
    while (!condition() && MonotonicNow() < until) std::this_thread::yield();
  }

  TcpRelay relay_;
  absl::Time broken_;  // before the ranks can see it
};

constexpr const char* kKindNames[] = {"Gloo", "Clear", "Tls"};
INSTANTIATE_TEST_SUITE_P(All, TwoHostsGroup, ::testing::Values(Kind::kGloo, Kind::kClear, Kind::kTls),
                         [](const auto& info) { return kKindNames[static_cast<int>(info.param)]; });

TEST_P(TwoHostsGroup, ASlowLine_ChangesNoByte) {
  constexpr int64_t kBytes = 500000;
  constexpr absl::Duration kDelay = absl::Milliseconds(30);
  constexpr double kRate = 5e6;
  relay_.SetLine(kDelay, kRate);
  OnEveryRank([&](Group& group) {
    const int rank = group.rank();
    std::vector<char> mine(kRanks * kBytes), theirs(kRanks * kBytes);
    for (int64_t i = 0; i < kRanks * kBytes; ++i) mine[i] = static_cast<char>(101 * rank + i * 7 + i / 251);
    const absl::Time begin = MonotonicNow();
    ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), kBytes, kPlenty));
    // It was the relay that forwarded: headers, and behind them two pieces towards the far host, which share the line.
    // Of the two pieces that come from there, which share it, too, a SecureGroup sends one after the other.
    const int pieces = GetParam() == Kind::kGloo || rank == kFar ? 2 : 1;
    EXPECT_GT(MonotonicNow() - begin, kDelay + 0.9 * absl::Seconds(pieces * kBytes / kRate));
    for (int64_t i = 0; i < kRanks * kBytes; ++i) {
      const int64_t from = i / kBytes, at = rank * kBytes + i % kBytes;
      ASSERT_EQ(theirs[i], static_cast<char>(101 * from + at * 7 + at / 251)) << i;
    }
    std::vector<float> numbers(1000, static_cast<float>(rank + 1));
    ASSERT_OK(group.AllReduceSum(absl::MakeSpan(numbers), kPlenty));
    EXPECT_EQ(numbers[999], 6);
    ASSERT_OK(group.Broadcast(mine.data(), kBytes, kFar, kPlenty));
    EXPECT_EQ(mine[1], static_cast<char>(101 * kFar + 7));
  });
  EXPECT_GT(relay_.forwarded_bytes(), 6 * kBytes);  // 4 pieces of the all-to-all, 2 of the broadcast
}

// Small calls are mostly at their headers, large ones at the bytes behind them. The limits leave a busy machine room.
TEST_P(TwoHostsGroup, ALineThatStopsInASmallCall_IsNamedInTime) {
  Break(&TcpRelay::Stop, 100, absl::Seconds(1), absl::Seconds(15));
}
TEST_P(TwoHostsGroup, ALineThatStopsInALargeCall_IsNamedInTime) {
  relay_.SetLine(absl::ZeroDuration(), 30e6);
  Break(&TcpRelay::Stop, 3000000, absl::Seconds(2), absl::Seconds(15));
}

// Long before the call's time is up.
TEST_P(TwoHostsGroup, ALineThatBreaksInASmallCall_IsNamedAtOnce) {
  Break(&TcpRelay::Drop, 100, kPlenty, absl::Seconds(15));
}
TEST_P(TwoHostsGroup, ALineThatBreaksInALargeCall_IsNamedAtOnce) {
  relay_.SetLine(absl::ZeroDuration(), 30e6);
  Break(&TcpRelay::Drop, 3000000, kPlenty, absl::Seconds(15));
}

// A line on which a call takes longer than it may: all are told in time, in the middle of its bytes.
TEST_P(TwoHostsGroup, ALineThatIsTooSlow_IsNamedInTime) {
  constexpr int64_t kBytes = 16 << 20;
  relay_.SetLine(absl::ZeroDuration(), 1e6);
  OnEveryRank([&](Group& group) {
    std::vector<char> mine(kBytes), all(kBytes * kRanks);
    const absl::Time begin = MonotonicNow();
    const absl::Status status = group.AllGather(mine.data(), all.data(), kBytes, absl::Seconds(1));
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank"));
    EXPECT_LT(MonotonicNow() - begin, absl::Seconds(10)) << "of 32 that the bytes take at least";
  });
}

}  // namespace
}  // namespace shardmesh
