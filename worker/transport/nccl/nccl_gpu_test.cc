// NcclGroup with NCCL itself, on as many devices as there are; skipped where there is none.
#include <cstring>
#include <iostream>

#include "core/base/matchers.h"
#include "core/base/reduction.h"
#include "gtest/gtest.h"
#include "worker/transport/nccl/testing/nccl_fixture.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kPlenty = absl::Seconds(60);

int Devices() {
  int devices = 0;
  while (devices < kMaxGroupRanks && DeviceRuntime::Open(devices).ok()) ++devices;
  return devices;
}

float NumberOf(int slot, int64_t i) { return static_cast<float>((i * 2654435761u + slot * 40503u) % 100003) / 7.0f; }

TEST(NcclGpuTest, EveryCall_OnEveryDevice) {
  const int size = Devices();
  if (size == 0) GTEST_SKIP() << "SKIPPED: " << DeviceRuntime::Open(0).status();
  const auto nccl = NcclLibrary::Load();
  if (!nccl.ok()) GTEST_SKIP() << "SKIPPED: " << nccl.status();
  for (const DeviceSum sum : {DeviceSum{nullptr}, NcclGroup::BuiltDeviceSum()}) {
    const Joined groups = JoinNccl(
        size, kPlenty, [&](NcclGroup::Options& options) { options.sum = sum; }, -1, "");
    OnThreads(size, [&](int rank) {
      ASSERT_OK(groups[rank].status());
      NcclGroup& group = **groups[rank];
      constexpr int64_t kElements = 100003;
      std::vector<char> mine(kElements, static_cast<char>(rank + 1)), all(size * kElements);
      ASSERT_OK(group.AllGather(mine.data(), all.data(), kElements, kPlenty));
      for (int64_t i = 0; i < size * kElements; ++i) ASSERT_EQ(all[i], static_cast<char>(i / kElements + 1));
      std::vector<char> theirs(size * kElements);
      ASSERT_OK(group.AllToAll(all.data(), theirs.data(), kElements, kPlenty));
      for (int64_t i = 0; i < size * kElements; ++i) ASSERT_EQ(theirs[i], static_cast<char>(rank + 1));
      ASSERT_OK(group.Broadcast(mine.data(), kElements, size - 1, kPlenty));
      ASSERT_EQ(mine[kElements - 1], static_cast<char>(size));
      const auto own = group.Allocate(kElements, kPlenty), gathered = group.Allocate(size * kElements, kPlenty);
      ASSERT_OK(own.status());
      ASSERT_OK(gathered.status());
      if (rank == 0) std::cout << "symmetric windows: " << (group.windows() ? "yes" : "no") << "\n";
      const auto device = DeviceRuntime::Open(rank);
      ASSERT_OK(device.status());
      DeviceRuntime::Scope scope(**device);
      const auto copy = [&](void* to, const void* from, int64_t bytes) {
        ASSERT_OK((*device)->Copy(to, from, bytes));
        absl::StatusOr<bool> idle = false;
        while (idle.ok() && !*idle) idle = (*device)->Idle();
        ASSERT_OK(idle.status());
      };
      copy(*own, mine.data(), kElements);
      ASSERT_OK(group.AllGather(*own, *gathered, kElements, kPlenty));
      copy(all.data(), *gathered, size * kElements);
      for (int64_t i = 0; i < size * kElements; ++i) ASSERT_EQ(all[i], static_cast<char>(size)) << i;
      // Three slots of this rank.
      std::vector<int> holders(3 * size);
      for (size_t s = 0; s < holders.size(); ++s) holders[s] = static_cast<int>(s) % size;
      std::vector<std::vector<float>> slots;
      std::vector<const void*> given;
      for (int s = rank; s < 3 * size; s += size) {
        slots.emplace_back(size * kElements);
        for (int64_t i = 0; i < size * kElements; ++i) slots.back()[i] = NumberOf(s, i);
      }
      for (const auto& slot : slots) given.push_back(slot.data());
      std::vector<float> piece(kElements);
      ASSERT_OK(group.ReduceScatter({Format::kFp32, holders, given, kElements}, piece.data(), kPlenty));
      for (int64_t i = 0; i < kElements; ++i) {
        ASSERT_EQ(FloatBits(piece[i]),
                  FloatBits(TreeSum<float>(3 * size, [&](int s) { return NumberOf(s, rank * kElements + i); })))
            << i;
      }
    });
  }
}

}  // namespace
}  // namespace shardmesh
