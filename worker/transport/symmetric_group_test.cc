#include "worker/transport/symmetric_group.h"

#include <unistd.h>

#include <algorithm>

#include "worker/transport/testing/group_suite.h"

namespace shardmesh {
namespace {

constexpr SymmetricMemory::Sizes kSizes = {4 << 20, 8 << 20, 1 << 16};

// Each rank with a mapping of its own, as if they were processes.
Groups MakeSymmetricGroups(const std::vector<uint64_t>& epochs, absl::Duration spin,
                           const SymmetricMemory::Sizes& sizes = kSizes) {
  const int size = static_cast<int>(epochs.size());
  Groups groups;
  int fd = -1;
  for (int rank = 0; rank < size; ++rank) {
    auto memory =
        rank == 0 ? SymmetricMemory::Create(size, sizes) : SymmetricMemory::Map(UniqueFd(dup(fd)), size, sizes);
    if (rank == 0) fd = memory->fd();
    auto shared = std::make_shared<SymmetricMemory>(std::move(memory).value());
    groups.push_back(SymmetricGroup::Join(std::move(shared), rank, epochs[rank], spin).value());
  }
  return groups;
}

INSTANTIATE_TEST_SUITE_P(Symmetric, GroupSuite,
                         testing::Values(GroupFamily{"sleeping",
                                                     [](const auto& epochs) {
                                                       return MakeSymmetricGroups(epochs, absl::ZeroDuration());
                                                     }},
                                         GroupFamily{"spinning",
                                                     [](const auto& epochs) {
                                                       return MakeSymmetricGroups(epochs, absl::Microseconds(50));
                                                     }}),
                         [](const auto& info) { return info.param.name; });

// What the suite does with private memory, with buffers in the heaps.
class SymmetricHeapsTest : public GroupSuite {
 protected:
  static constexpr int kRanks = 3;

  // What a rank has in the heaps.
  struct Buffers {
    float *slot = nullptr, *piece = nullptr, *shared = nullptr;  // of 3 n, n and 3 n elements
  };

  static Groups Make(int64_t n) {
    return MakeSymmetricGroups({1, 1, 1}, absl::ZeroDuration(), {24 * n + (8 << 20), 12 * n + (8 << 20), 1 << 16});
  }
  static Buffers Allocate(Group& group, int64_t n) {
    SymmetricMemory& memory = static_cast<SymmetricGroup&>(group).memory();
    const auto floats = [](const absl::StatusOr<char*>& bytes) { return reinterpret_cast<float*>(bytes.value()); };
    return {floats(memory.Allocate(group.rank(), 12 * n)), floats(memory.Allocate(group.rank(), 4 * n)),
            floats(memory.AllocateShared(12 * n))};
  }
  static void ExpectSums(const float* all, int64_t elements, int turn) {
    for (int64_t i = 0; i < elements; ++i) {
      const float sum = TreeSum<float>(kRanks, [&](int slot) { return SuiteNumber(slot + turn, i); });
      ASSERT_EQ(FloatBits(all[i]), FloatBits(sum)) << i;
    }
  }
};

// Few elements, and so many that results are written past the caches.
TEST_F(SymmetricHeapsTest, ReduceScatterAndAllGather_WhereverTheResultIs) {
  const int holders[] = {0, 1, 2};
  for (const int64_t n : {1001, 1400003}) {
    Groups groups = Make(n);
    OnEveryRank(groups, [&](Group& group) {
      const Buffers own = Allocate(group, n);
      std::vector<float> copy(3 * n);
      float* const place = own.shared + group.rank() * n;
      const void* const slots[] = {own.slot};
      struct Way {
        float *piece, *all;
      };
      int turn = 0;
      for (const Way way : {Way{place, own.shared}, {own.piece, own.shared}, {own.piece, copy.data()}}) {
        ++turn;
        for (int64_t i = 0; i < 3 * n; ++i) own.slot[i] = SuiteNumber(group.rank() + turn, i);
        ASSERT_OK(group.ReduceScatter({Format::kFp32, holders, slots, n}, way.piece, kPlenty));
        ASSERT_OK(group.AllGather(way.piece, way.all, 4 * n, kPlenty));
        ExpectSums(way.all, 3 * n, turn);
        ASSERT_OK(group.Barrier(kPlenty));  // before the shared result is written again
      }
    });
  }
}

// Nothing is moved then, but everybody waits for everybody's piece.
TEST_F(SymmetricHeapsTest, AllGather_InPlaceInTheSharedHeap_ManyTimes) {
  constexpr int64_t kElements = 7;
  Groups groups = Make(kElements);
  OnEveryRank(groups, [&](Group& group) {
    float* const all = Allocate(group, kElements).shared;
    for (int turn = 0; turn < 1000; ++turn) {
      std::fill_n(all + group.rank() * kElements, kElements, static_cast<float>(turn + group.rank()));
      ASSERT_OK(group.AllGather(all + group.rank() * kElements, all, 4 * kElements, kPlenty));
      for (int64_t i = 0; i < 3 * kElements; ++i) ASSERT_EQ(all[i], static_cast<float>(turn + i / kElements));
      ASSERT_OK(group.Barrier(kPlenty));
    }
  });
}

}  // namespace
}  // namespace shardmesh
