#include "server/seats/assignment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <list>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Of a job that may be anywhere but on CUDA devices of several hosts, where only few may.
Demand Ranks(int64_t num_ranks) {
  Demand demand;
  demand.num_ranks = num_ranks;
  demand.host_counts.clear();
  for (int64_t count = 1; count <= num_ranks; ++count) {
    if (num_ranks % count == 0) demand.host_counts.push_back(count);
  }
  demand.refused[static_cast<int>(TopologyKind::kHostsCuda)] = "it swims";
  return demand;
}

Demand RanksBut(int64_t num_ranks, TopologyKind refused) {
  Demand demand = Ranks(num_ranks);
  demand.refused[static_cast<int>(refused)] = "it has feathers";
  return demand;
}

// Workers of hosts; each is named HOST and a number.
struct Fleet {
  void Add(const std::string& host, int count, bool spans_hosts, int num_jobs = 0) {
    AddNamed(host, host, count, {spans_hosts, false}, num_jobs);
  }
  void AddOnDevices(const std::string& host, int count, int num_jobs = 0) {
    AddNamed(host + "-gpu", host, count, {true, true}, num_jobs);
  }
  void AddNamed(const std::string& name, const std::string& host, int count, const WorkerTraits& traits, int num_jobs) {
    for (int i = 0; i < count; ++i) {
      WorkerIdentity worker;
      worker.name = absl::StrCat(name, i);
      worker.host_id = host;
      workers.push_back(worker);
      candidates.push_back({&workers.back(), num_jobs, traits});
    }
  }
  std::vector<std::string> Choose(const Demand& demand) const {
    std::vector<std::string> names;
    for (const WorkerIdentity& worker : ChooseMembers(demand, candidates).members) names.push_back(worker.name);
    return names;
  }
  std::vector<std::string> Choose(int64_t num_ranks) const { return Choose(Ranks(num_ranks)); }
  std::string WaitingFor(const Demand& demand) const { return ChooseMembers(demand, candidates).waiting_for; }

  std::list<WorkerIdentity> workers;
  std::vector<Candidate> candidates;
};

TEST(ChooseMembers, OneHostWithEnoughWorkers_IsTaken) {
  Fleet fleet;
  fleet.Add("a", 2, true);
  fleet.Add("b", 4, true, /*num_jobs=*/9);
  EXPECT_THAT(fleet.Choose(4), ElementsAre("b0", "b1", "b2", "b3"));
}

TEST(ChooseMembers, NoHostHasEnough_EquallyManyOnAsFewAsWillDo) {
  Fleet fleet;
  fleet.Add("a", 3, true);
  fleet.Add("b", 2, true);
  fleet.Add("c", 2, true, /*num_jobs=*/1);
  EXPECT_THAT(fleet.Choose(4), ElementsAre("a0", "a1", "b0", "b1"));
  EXPECT_THAT(fleet.Choose(6), ElementsAre("a0", "a1", "b0", "b1", "c0", "c1"));
  EXPECT_THAT(fleet.Choose(5), IsEmpty());  // 5 hosts with one each
}

TEST(ChooseMembers, HostCounts_AreTriedInTheirOrder) {
  Demand demand = Ranks(4);
  demand.host_counts = {2, 4, 1};  // of ddp=2,fsdp=2
  Fleet fleet;
  fleet.Add("a", 4, true);
  EXPECT_THAT(fleet.Choose(demand), ElementsAre("a0", "a1", "a2", "a3"));
  fleet.Add("b", 2, true, /*num_jobs=*/9);
  EXPECT_THAT(fleet.Choose(demand), ElementsAre("a0", "a1", "b0", "b1"));
  fleet.AddOnDevices("c", 4);
  fleet.AddOnDevices("d", 2);
  EXPECT_THAT(fleet.Choose(demand), ElementsAre("c-gpu0", "c-gpu1", "c-gpu2", "c-gpu3")) << "devices, before all else";
}

TEST(ChooseMembers, WorkersThatOthersDoNotReach_StayOnOneHost) {
  Fleet fleet;
  fleet.Add("a", 2, true);
  fleet.Add("b", 2, false);
  EXPECT_THAT(fleet.Choose(4), IsEmpty());
  EXPECT_THAT(fleet.WaitingFor(Ranks(4)),
              HasSubstr("4 live workers on one host, or evenly on several with group addresses; host a has 2"));
  EXPECT_THAT(fleet.Choose(2), ElementsAre("a0", "a1"));
}

TEST(ChooseMembers, WorkersOnDevices_AreNotMixedWithOthers) {
  Fleet fleet;
  fleet.Add("a", 2, true);
  fleet.AddOnDevices("a", 2);
  fleet.AddOnDevices("b", 3, /*num_jobs=*/1);
  EXPECT_THAT(fleet.Choose(2), ElementsAre("a-gpu0", "a-gpu1"));
  EXPECT_THAT(fleet.Choose(3), ElementsAre("b-gpu0", "b-gpu1", "b-gpu2"));
  EXPECT_THAT(fleet.Choose(4), IsEmpty());  // two on each host would do, were they on processors
  EXPECT_EQ(fleet.WaitingFor(Ranks(4)),
            "4 live workers on one host, or evenly on several with group addresses; host b has 3 on CUDA devices, host "
            "a has 2 on CUDA devices, host a has 2 on processors; several hosts together are not asked: it swims");
}

TEST(ChooseMembers, DevicesComeFirst_HoweverBusy) {
  Fleet fleet;
  fleet.Add("a", 2, true);
  fleet.AddOnDevices("b", 2, /*num_jobs=*/9);
  EXPECT_THAT(fleet.Choose(2), ElementsAre("b-gpu0", "b-gpu1"));
  EXPECT_TRUE(ChooseMembers(Ranks(2), fleet.candidates).on_devices);
}

TEST(ChooseMembers, JobThatDevicesCannotDo_IsOnProcessors) {
  Fleet fleet;
  fleet.AddOnDevices("a", 4);
  const auto demand = [](int64_t ranks) { return RanksBut(ranks, TopologyKind::kHostCuda); };
  EXPECT_EQ(
      fleet.WaitingFor(demand(3)),
      "3 live workers on one host; none is there on processors; 4 on CUDA devices are not asked: it has feathers");
  fleet.Add("a", 2, false, /*num_jobs=*/5);
  EXPECT_THAT(fleet.Choose(demand(2)), ElementsAre("a0", "a1"));
  const Choice choice = ChooseMembers(demand(2), fleet.candidates);
  EXPECT_FALSE(choice.on_devices);
  EXPECT_EQ(choice.passed_over, 4);
  EXPECT_EQ(fleet.WaitingFor(demand(3)),
            "3 live workers on one host; host a has 2 on processors; 4 on CUDA devices are not asked: it has feathers");
}

TEST(ChooseMembers, JobThatSeveralHostsCannotDo_WaitsForOneHost_AndSaysWhy) {
  Fleet fleet;
  fleet.Add("a", 2, true);
  fleet.Add("b", 1, true);
  const Demand demand = RanksBut(4, TopologyKind::kHostsCpu);
  EXPECT_EQ(fleet.WaitingFor(demand), "4 live workers on one host; host a has 2, host b has 1") << "too few anyhow";
  fleet.AddNamed("b-more", "b", 1, {true, false}, 0);
  EXPECT_THAT(fleet.Choose(4), ElementsAre("a0", "a1", "b-more0", "b0"));
  EXPECT_THAT(fleet.Choose(demand), IsEmpty());
  EXPECT_EQ(fleet.WaitingFor(demand),
            "4 live workers on one host; host a has 2, host b has 2; several hosts together are not asked: it has "
            "feathers");
  fleet.AddNamed("b-late", "b", 2, {true, false}, 0);
  EXPECT_THAT(fleet.Choose(demand), ElementsAre("b-late0", "b-late1", "b-more0", "b0"));
}

TEST(ChooseMembers, JobThatProcessorsOfOneHostCannotDo_IsOnSeveral) {
  Fleet fleet;
  fleet.Add("a", 4, true);
  fleet.Add("b", 2, true);
  EXPECT_THAT(fleet.Choose(RanksBut(4, TopologyKind::kHostCpu)), ElementsAre("a0", "a1", "b0", "b1"));
}

TEST(ChooseMembers, JobThatDevicesOfSeveralHostsCanDo_IsThere_WithoutWorkersOnProcessors) {
  Fleet fleet;
  fleet.AddOnDevices("a", 2);
  fleet.Add("b", 4, true);
  Demand anywhere;
  anywhere.num_ranks = 4;
  anywhere.host_counts = {1, 2, 4};
  EXPECT_THAT(fleet.Choose(anywhere), ElementsAre("b0", "b1", "b2", "b3"));  // one host comes before several
  Fleet devices;
  devices.AddOnDevices("a", 2);
  devices.Add("a", 2, true);
  devices.AddOnDevices("b", 3, /*num_jobs=*/9);
  EXPECT_THAT(devices.Choose(anywhere), ElementsAre("a-gpu0", "a-gpu1", "b-gpu0", "b-gpu1"));
}

TEST(ChooseMembers, ManyHosts_ThoseWithMostAreNamed) {
  Fleet fleet;
  for (const char* host : {"a", "b", "c", "d", "e"}) fleet.Add(host, host[0] - 'a' + 1, false);
  EXPECT_EQ(fleet.WaitingFor(Ranks(9)),
            "9 live workers on one host; host e has 5, host d has 4, host c has 3, others have no more");
}

}  // namespace
}  // namespace shardmesh
