#include "worker/collectives/hosts_group.h"

#include "worker/collectives/gloo_group.h"
#include "worker/collectives/local_group.h"
#include "worker/collectives/symmetric_group.h"
#include "worker/collectives/testing/group_suite.h"

namespace shardmesh {
namespace {

using Epochs = std::vector<uint64_t>;
using MakeGroups = std::function<Groups(const Epochs& epochs, RankNames names, const std::string& key)>;

Groups MakeLocalGroups(const Epochs& epochs, RankNames names, const std::string&) {
  auto hub = std::make_shared<LocalHub>(static_cast<int>(epochs.size()), names);
  Groups groups;
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    groups.push_back(std::make_unique<LocalGroup>(hub, static_cast<int>(rank), epochs[rank]));
  }
  return groups;
}

Groups MakeSymmetricGroups(const Epochs& epochs, RankNames names, const std::string&) {
  auto memory = std::make_shared<SymmetricMemory>(
      SymmetricMemory::Create(static_cast<int>(epochs.size()), SymmetricMemory::Sizes()).value());
  Groups groups;
  for (size_t rank = 0; rank < epochs.size(); ++rank) {
    groups.push_back(
        SymmetricGroup::Join(memory, static_cast<int>(rank), epochs[rank], absl::ZeroDuration(), names).value());
  }
  return groups;
}

Groups MakeGlooGroups(const Epochs& epochs, RankNames names, const std::string& key) {
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

// Hosts of `places` ranks each.
GroupFamily Hosts(const std::string& name, int places, const MakeGroups& make_within, const MakeGroups& make_between) {
  GroupFamily family;
  family.name = absl::StrCat(name, places);
  family.lacks = [places](int size) {
    return size % places == 0 ? std::string() : absl::StrCat("every host has ", places);
  };
  family.make = [=](const Epochs& epochs) {
    const int hosts = static_cast<int>(epochs.size()) / places;
    std::vector<Groups> within, between;
    for (int host = 0; host < hosts; ++host) {
      const auto first = epochs.begin() + host * places;
      within.push_back(make_within({first, first + places}, HostsGroup::NamesWithin(host, places), ""));
    }
    for (int place = 0; place < places; ++place) {
      Epochs of_place;
      for (int host = 0; host < hosts; ++host) of_place.push_back(epochs[host * places + place]);
      between.push_back(make_between(of_place, HostsGroup::NamesBetween(place, places), absl::StrCat("place", place)));
    }
    Groups groups;
    for (int rank = 0; rank < hosts * places; ++rank) {
      groups.push_back(HostsGroup::Join(std::move(within[rank / places][rank % places]),
                                        std::move(between[rank % places][rank / places]))
                           .value());
    }
    return groups;
  };
  return family;
}

INSTANTIATE_TEST_SUITE_P(Hosts, GroupSuite,
                         testing::Values(Hosts("LocalLocal", 1, MakeLocalGroups, MakeLocalGroups),
                                         Hosts("LocalLocal", 2, MakeLocalGroups, MakeLocalGroups),
                                         Hosts("LocalLocal", 3, MakeLocalGroups, MakeLocalGroups),
                                         Hosts("SymmetricGloo", 2, MakeSymmetricGroups, MakeGlooGroups),
                                         Hosts("SymmetricGloo", 3, MakeSymmetricGroups, MakeGlooGroups)),
                         [](const auto& info) { return info.param.name; });

TEST(HostsGroup, WrongParts_AreRefused) {
  const auto part = [](int size, uint64_t epoch) {
    return std::make_unique<LocalGroup>(std::make_shared<LocalHub>(size), 0, epoch);
  };
  EXPECT_EQ(HostsGroup::Join(part(2, 1), part(2, 2)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostsGroup::Join(part(33, 1), part(32, 1)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_OK(HostsGroup::Join(part(32, 1), part(32, 1)).status());
}

}  // namespace
}  // namespace shardmesh
