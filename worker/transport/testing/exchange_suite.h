// ExchangeSuite: what every ExchangeGroup promises beyond group_suite.h. A family's groups are ExchangeGroups.
#pragma once

#include "core/base/matchers.h"
#include "worker/transport/exchange_group.h"
#include "worker/transport/testing/group_family.h"

namespace shardmesh {

class ExchangeSuite : public GroupSuite {
 protected:
  static char ByteOf(int64_t transfer, int64_t i) { return static_cast<char>(transfer * 31 + i * 7 + i / 251); }
};

// Several between the same two ranks, of all sizes, both ways, and none for some.
TEST_P(ExchangeSuite, Exchange_MovesPiecesOfAnySize) {
  for (const int size : Sizes({2, 3, 4})) {
    Groups groups = Make(size);
    OnEveryRank(groups, [&](Group& group) {
      auto& exchange = static_cast<ExchangeGroup&>(group);
      for (const int64_t large : {1000, 300'000}) {
        std::vector<std::vector<char>> memory;
        std::vector<PeerTransfer> transfers;
        for (int i = 0; i < 12; ++i) {
          const int from = i % size, to = (from + 1 + i % (size - 1)) % size;
          memory.emplace_back(i % 3 == 0 ? large : i + 1);
          if (from == group.rank()) {
            for (size_t e = 0; e < memory[i].size(); ++e) memory[i][e] = ByteOf(i, static_cast<int64_t>(e));
          }
          transfers.push_back({from, to, nullptr, static_cast<int64_t>(memory[i].size())});
          if (from == group.rank() || to == group.rank()) transfers[i].memory = memory[i].data();
        }
        ASSERT_OK(exchange.Exchange(transfers, kPlenty));
        for (int i = 0; i < 12; ++i) {
          for (size_t e = 0; e < memory[i].size() && transfers[i].memory != nullptr; ++e) {
            ASSERT_EQ(memory[i][e], ByteOf(i, static_cast<int64_t>(e))) << "transfer " << i << " of " << size;
          }
        }
      }
    });
  }
}

TEST_P(ExchangeSuite, OtherTransfersThanAPeers_AreAnErrorOnBoth) {
  Groups groups = Make(2);
  OnEveryRank(groups, [&](Group& group) {
    std::vector<char> memory(16);
    const int64_t first = group.rank() == 0 ? 5 : 6;  // of 11 in all
    const PeerTransfer transfers[] = {{0, 1, memory.data(), first}, {1, 0, memory.data(), 11 - first}};
    EXPECT_THAT(static_cast<ExchangeGroup&>(group).Exchange(transfers, kPlenty).code(),
                testing::AnyOf(absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted));
  });
}

TEST_P(ExchangeSuite, WrongTransfers_AreRefusedAndTheGroupGoesOn) {
  Groups groups = Make(2);
  OnEveryRank(groups, [&](Group& group) {
    auto& exchange = static_cast<ExchangeGroup&>(group);
    char byte = 0;
    for (const PeerTransfer& wrong :
         {PeerTransfer{0, 0, &byte, 1}, {0, 2, &byte, 1}, {-1, 0, &byte, 1}, {0, 1, nullptr, 1}, {0, 1, &byte, 0}}) {
      EXPECT_EQ(exchange.Exchange({wrong}, kPlenty).code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_OK(exchange.Barrier(kPlenty));
  });
}

}  // namespace shardmesh
