#include "worker/lead/hosts/command_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "worker/testing/small_job.h"

namespace shardmesh {

bool operator==(const DataPart& a, const DataPart& b) {
  return std::tie(a.from, a.to, a.place, a.index, a.offset, a.bytes) ==
         std::tie(b.from, b.to, b.place, b.index, b.offset, b.bytes);
}

namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Hosts {
  Hosts(const JobSpec& spec, int num_hosts)
      : job(spec), plan(*Plan::Create(job)), ranks{0, num_hosts, plan.num_ranks() / num_hosts}, data(job, plan, ranks) {
    for (int h = 0; h < num_hosts; ++h) words.emplace_back();
    for (HostWords& host : words) views.push_back(&host);
  }
  bool Has(int host, int shard) const { return HostHas(plan, ranks, host, shard); }
  int num_buckets() const { return static_cast<int>(plan.buckets().size()); }

  const JobSpec job;
  const Plan plan;
  const HostRanks ranks;
  CommandData data;
  std::vector<HostWords> words;
  std::vector<const HostWords*> views;
};

// By host that they go to: which bytes come, each once. A failure where two parts overlap.
std::map<int, std::set<int64_t>> BytesTo(absl::Span<const DataPart> data) {
  std::map<int, std::set<int64_t>> bytes;
  for (const DataPart& part : data) {
    EXPECT_NE(part.from, part.to);
    for (int64_t b = part.offset; b < part.offset + part.bytes; ++b) {
      EXPECT_TRUE(bytes[part.to].insert(b).second) << "byte " << b << " comes to host " << part.to << " twice";
    }
  }
  return bytes;
}

std::vector<std::pair<std::string, int>> Meshes() {
  return {{"fsdp=2", 2}, {"ddp=2", 2}, {"ddp=2,fsdp=2", 2}, {"fsdp=2,ddp=2", 2}, {"ddp=2,fsdp=2", 4}, {"fsdp=3", 3}};
}

TEST(CommandData, Weights_EveryHostGetsWhatItLacks_Once) {
  for (const auto& [mesh, num_hosts] : Meshes()) {
    Hosts hosts(MixedJob(mesh, 2), num_hosts);
    for (int b = 0; b < hosts.num_buckets(); ++b) {
      const Bucket& bucket = hosts.plan.buckets()[b];
      const auto bytes = BytesTo(hosts.data.Weights(b, ~HostSet{0}));
      for (int h = 0; h < num_hosts; ++h) {
        std::set<int64_t> lacking;
        for (int p = 0; p < hosts.plan.num_shards(); ++p) {
          const int64_t end = bucket.weight_offset + bucket.CodeOffset(bucket.end(p));
          for (int64_t at = bucket.weight_offset + bucket.CodeOffset(bucket.begin(p)); at < end && !hosts.Has(h, p);
               ++at) {
            lacking.insert(at);
          }
        }
        const auto come = bytes.find(h);
        EXPECT_TRUE((come == bytes.end() ? std::set<int64_t>() : come->second) == lacking)
            << mesh << " bucket " << b << " host " << h;
      }
      for (const DataPart& part : hosts.data.Weights(b, ~HostSet{0})) EXPECT_EQ(part.place, DataPlace::kWeights);
      for (const DataPart& part : hosts.data.Weights(b, HostSet{1} << 1)) EXPECT_EQ(part.to, 1);  // of takers alone
    }
  }
}

TEST(CommandData, Gradients_FromTheFirstHostThatHasThem_ToEveryReplica) {
  Hosts hosts(MixedJob("ddp=2,fsdp=2", 2), 2);  // a replica of each shard on each host
  hosts.words[1].slots[0].gradient_shards = 0b11;
  hosts.words[0].slots[1].gradient_shards = 0b01;
  hosts.words[1].slots[1].gradient_shards = 0b11;
  const Bucket& bucket = hosts.plan.buckets()[0];
  const int64_t width = BytesPerElement(hosts.plan.gradient_format());
  const auto part = [&](int from, int to, int slot, int shard) {
    return DataPart{from,
                    to,
                    DataPlace::kSlot,
                    slot,
                    bucket.gradient_offset + bucket.begin(shard) * width,
                    bucket.gradients(shard) * width};
  };
  EXPECT_THAT(hosts.data.Gradients(hosts.views, {0, 0}),
              ElementsAre(part(1, 0, 0, 0), part(1, 0, 0, 1), part(0, 1, 1, 0), part(1, 0, 1, 1)));
  EXPECT_THAT(hosts.data.Gradients(hosts.views, {-1, 0}), ElementsAre(part(0, 1, 1, 0), part(1, 0, 1, 1)));
  EXPECT_THAT(hosts.data.Gradients(hosts.views, {-1, -1}), IsEmpty());
}

TEST(CommandData, Results_FromTheWindowOfASeat) {
  Hosts hosts(MixedJob("fsdp=2", 2), 2);  // each host has one shard
  const Bucket& bucket = hosts.plan.buckets()[0];
  const int64_t width = BytesPerElement(hosts.plan.gradient_format());
  const std::vector<SeatWindow> windows = {{3, 1, 0}};
  EXPECT_THAT(hosts.data.Results(windows, 0), ElementsAre(DataPart{0, 1, DataPlace::kSlot, 3,
                                                                   hosts.plan.gradient_window_bytes() +
                                                                       bucket.gradient_offset + bucket.begin(1) * width,
                                                                   bucket.gradients(1) * width}));
}

TEST(CommandData, Squares_EveryBlockIsOnEveryHost) {
  for (const auto& [mesh, num_hosts] : Meshes()) {
    Hosts hosts(MixedJob(mesh, 2), num_hosts);
    auto bytes = BytesTo(hosts.data.Squares());
    for (int h = 0; h < num_hosts; ++h) {
      int64_t lacking = 0;
      for (const Bucket& b : hosts.plan.buckets()) {
        for (int p = 0; p < hosts.plan.num_shards(); ++p) {
          if (!b.frozen && !hosts.Has(h, p)) lacking += b.size(p) / kBlockElements * 4;
        }
      }
      EXPECT_EQ(static_cast<int64_t>(bytes[h].size()), lacking) << mesh << " host " << h;
    }
  }
}

TEST(CommandData, Maxima_FromEachToEachOther) {
  JobSpec job = SmallJob("fsdp=3", 2);
  for (ParameterSpec& p : job.parameters) p.gather = GatherFormat::kFp8Tensor;
  Hosts hosts(job, 3);
  std::set<std::pair<int, int>> ways;
  for (const DataPart& part : hosts.data.Maxima()) {
    EXPECT_EQ(part.bytes, hosts.plan.scales().num_maxima * 4);
    ways.emplace(part.from, part.to);
  }
  EXPECT_EQ(ways.size(), 6u);
}

}  // namespace
}  // namespace shardmesh
