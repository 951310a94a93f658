// Large pieces of a SecureGroup, both ways at once, and what ends them in the middle.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "worker/transport/secure/testing/secure_ranks.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kPlenty = absl::Seconds(60);

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kLarge = 8 << 20;
#else
constexpr int64_t kLarge = 64 << 20;
#endif

class SecureBulk : public ::testing::TestWithParam<bool> {
 protected:
  static std::vector<std::unique_ptr<SecureGroup>> Make(int size) {
    std::vector<SecureOptions> options;
    for (int rank = 0; rank < size; ++rank) options.push_back(OptionsOf(rank, size, GetParam()));
    std::vector<std::unique_ptr<SecureGroup>> groups;
    for (auto& group : ConnectAll(std::make_shared<MemoryRendezvous>(), options)) {
      EXPECT_OK(group.status());
      groups.push_back(*std::move(group));
    }
    return groups;
  }
  static void OnEveryRank(std::vector<std::unique_ptr<SecureGroup>>& groups,
                          const std::function<void(SecureGroup&)>& body) {
    std::vector<std::thread> threads;
    for (auto& group : groups) threads.emplace_back([&] { body(*group); });
    for (std::thread& thread : threads) thread.join();
  }
  static uint64_t WordOf(int from, int to, int64_t i) {
    return static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(from * 1000 + to);
  }
};
INSTANTIATE_TEST_SUITE_P(All, SecureBulk, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Tls" : "Clear"; });

// More than any buffer between them holds: a rank that sent first and took then would wait for ever.
TEST_P(SecureBulk, LargePieces_CrossBothWaysAtOnce) {
  for (const int size : {2, 3}) {
    auto groups = Make(size);
    OnEveryRank(groups, [&](SecureGroup& group) {
      const int64_t words = kLarge / 8 / (size - 1) + 5;
      std::vector<uint64_t> mine(static_cast<size_t>(words * size)), theirs(mine.size());
      for (int to = 0; to < size; ++to) {
        for (int64_t i = 0; i < words; ++i) mine[static_cast<size_t>(to * words + i)] = WordOf(group.rank(), to, i);
      }
      ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), words * 8, kPlenty));
      for (int from = 0; from < size; ++from) {
        for (int64_t i = 0; i < words; ++i) {
          ASSERT_EQ(theirs[static_cast<size_t>(from * words + i)], WordOf(from, group.rank(), i)) << from << ", " << i;
        }
      }
    });
  }
}

// The peer is in the group and does not come to the call; what ends the wait comes from another thread.
TEST_P(SecureBulk, Abort_FromAnotherThread_EndsALargeCall) {
  auto groups = Make(2);
  std::vector<char> memory(2 * kLarge);
  const absl::Time begin = MonotonicNow();
  std::atomic<bool> begun = false;
  std::thread aborter([&] {
    while (!begun) std::this_thread::yield();
    groups[0]->Abort("the job was closed");
  });
  begun = true;
  EXPECT_THAT(groups[0]->AllGather(memory.data(), memory.data(), kLarge, kPlenty),
              StatusIs(Code::kAborted, HasSubstr("the job was closed")));
  aborter.join();
  EXPECT_THAT(groups[1]->AllGather(memory.data() + kLarge, memory.data(), kLarge, kPlenty),
              StatusIs(Code::kAborted, HasSubstr("the job was closed")));
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(20));
}

// All are in the middle of bytes that come and go; every rank hears why.
TEST_P(SecureBulk, Abort_InTheMiddleOfLargePieces_IsHeardByAll) {
  auto groups = Make(3);
  std::atomic<int> calls = 0;
  std::thread aborter([&] {
    const absl::Time until = MonotonicNow() + kPlenty;
    while (calls < 4 && MonotonicNow() < until) std::this_thread::yield();
    groups[1]->Abort("enough");
  });
  OnEveryRank(groups, [&](SecureGroup& group) {
    std::vector<char> mine(kLarge / 8), all(3 * kLarge / 8);
    absl::Status status;
    for (; status.ok(); ++calls) status = group.AllGather(mine.data(), all.data(), kLarge / 8, kPlenty);
    EXPECT_THAT(status, StatusIs(Code::kAborted, HasSubstr("enough")));
  });
  aborter.join();
}

// Its large pieces do not go before the peer has come, so that the news of the end finds its way.
TEST_P(SecureBulk, ARankThatComesLate_HearsWhyTheGroupEnded) {
  auto groups = Make(2);
  std::vector<char> memory(2 * kLarge);
  EXPECT_THAT(groups[0]->AllGather(memory.data(), memory.data(), kLarge, absl::Milliseconds(100)),
              StatusIs(Code::kUnavailable, HasSubstr("rank 1 did not come to all-gather 1")));
  EXPECT_THAT(groups[1]->AllGather(memory.data() + kLarge, memory.data(), kLarge, kPlenty),
              StatusIs(Code::kAborted, HasSubstr("rank 1 did not come to all-gather 1")));
}

// Pieces of all sizes around those at which something changes: what goes at once, a record, a chunk.
TEST_P(SecureBulk, PiecesOfEverySize) {
  auto groups = Make(2);
  OnEveryRank(groups, [&](SecureGroup& group) {
    for (const int64_t around : {int64_t{48}, int64_t{16 << 10}, int64_t{512 << 10}, int64_t{1 << 20}}) {
      for (int64_t bytes = around - 150; bytes < around + 60; bytes += around < 1000 ? 1 : 7) {
        if (bytes < 1) continue;
        std::vector<char> mine(static_cast<size_t>(2 * bytes), static_cast<char>(bytes + group.rank())),
            theirs(mine.size() + 1, 'e');
        mine[static_cast<size_t>(2 * bytes - 1)] = mine[static_cast<size_t>(bytes - 1)] = 'z';
        ASSERT_OK(group.AllToAll(mine.data(), theirs.data(), bytes, kPlenty));
        const int64_t theirs_begin = (1 - group.rank()) * bytes;
        ASSERT_EQ(theirs[static_cast<size_t>(theirs_begin + bytes - 1)], 'z');
        ASSERT_TRUE(bytes == 1 ||
                    theirs[static_cast<size_t>(theirs_begin)] == static_cast<char>(bytes + 1 - group.rank()));
        ASSERT_EQ(theirs[static_cast<size_t>(2 * bytes)], 'e');
      }
    }
  });
}

}  // namespace
}  // namespace shardmesh
