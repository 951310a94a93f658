#include "worker/transport/hosts_group.h"

#include "worker/transport/local_group.h"
#include "worker/transport/testing/group_families.h"
#include "worker/transport/testing/group_suite.h"

namespace shardmesh {
namespace {

using Epochs = std::vector<uint64_t>;
using MakeGroups = std::function<Groups(const Epochs& epochs, RankNames names, const std::string& key)>;

Groups MakeLocal(const Epochs& epochs, RankNames names, const std::string&) { return MakeLocalGroups(epochs, names); }
Groups MakeSymmetric(const Epochs& epochs, RankNames names, const std::string&) {
  return MakeSymmetricGroups(epochs, names);
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
                         testing::Values(Hosts("LocalLocal", 1, MakeLocal, MakeLocal),
                                         Hosts("LocalLocal", 2, MakeLocal, MakeLocal),
                                         Hosts("LocalLocal", 3, MakeLocal, MakeLocal),
                                         Hosts("SymmetricGloo", 2, MakeSymmetric, MakeGlooGroups),
                                         Hosts("SymmetricGloo", 3, MakeSymmetric, MakeGlooGroups)),
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
