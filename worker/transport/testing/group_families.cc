#include "worker/transport/testing/group_families.h"

#include <memory>
#include <thread>
#include <utility>

#include "core/base/matchers.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/local_group.h"
#include "worker/transport/symmetric_group.h"

namespace shardmesh {

Groups MakeLocalGroups(const std::vector<uint64_t>& epochs, RankNames names) {
  auto hub = std::make_shared<LocalHub>(static_cast<int>(epochs.size()), names);
  Groups groups;
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    groups.push_back(std::make_unique<LocalGroup>(hub, static_cast<int>(rank), epochs[rank]));
  }
  return groups;
}

Groups MakeSymmetricGroups(const std::vector<uint64_t>& epochs, RankNames names) {
  auto memory = std::make_shared<SymmetricMemory>(
      SymmetricMemory::Create(static_cast<int>(epochs.size()), SymmetricMemory::Sizes()).value());
  Groups groups;
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    groups.push_back(
        SymmetricGroup::Join(memory, static_cast<int>(rank), epochs[rank], absl::ZeroDuration(), names).value());
  }
  return groups;
}

Groups MakeGlooGroups(const std::vector<uint64_t>& epochs, RankNames names, const std::string& key) {
  auto rendezvous = std::make_shared<MemoryRendezvous>();
  Groups groups(epochs.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    threads.emplace_back([&, rank] {
      GlooOptions options;
      options.rank = static_cast<int>(rank);
      options.size = static_cast<int>(epochs.size());
      options.epoch = epochs[rank];
      options.names = names;
      options.key = key;
      options.host = "127.0.0.1";
      auto group = GlooGroup::Connect(rendezvous, options);
      ASSERT_OK(group.status());
      groups[rank] = std::move(group).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return groups;
}

}  // namespace shardmesh
