#include "worker/collectives/local_group.h"

#include "worker/collectives/testing/group_suite.h"

namespace shardmesh {
namespace {

Groups MakeLocalGroups(const std::vector<uint64_t>& epochs) {
  auto hub = std::make_shared<LocalHub>(static_cast<int>(epochs.size()));
  Groups groups;
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    groups.push_back(std::make_unique<LocalGroup>(hub, static_cast<int>(rank), epochs[rank]));
  }
  return groups;
}

INSTANTIATE_TEST_SUITE_P(Local, GroupSuite, testing::Values(GroupFamily{"local", MakeLocalGroups}));

}  // namespace
}  // namespace shardmesh
