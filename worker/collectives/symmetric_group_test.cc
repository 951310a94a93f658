#include "worker/collectives/symmetric_group.h"

#include "worker/collectives/testing/group_suite.h"

namespace shardmesh {
namespace {

constexpr SymmetricMemory::Sizes kSizes = {4 << 20, 8 << 20, 1 << 16};

// Each rank with a mapping of its own, as if they were processes.
Groups MakeSymmetricGroups(const std::vector<uint64_t>& epochs, absl::Duration spin) {
  const int size = static_cast<int>(epochs.size());
  Groups groups;
  int fd = -1;
  for (int rank = 0; rank < size; ++rank) {
    auto memory =
        rank == 0 ? SymmetricMemory::Create(size, kSizes) : SymmetricMemory::Map(UniqueFd(dup(fd)), size, kSizes);
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

}  // namespace
}  // namespace shardmesh
