#include "core/mesh/reform.h"

#include <functional>
#include <string>

#include "core/base/matchers.h"
#include "core/job/plan.h"

namespace shardmesh {
namespace {

constexpr int64_t kMaxRanks = 64;

std::string MeshOf(const std::string& mesh, int64_t num_workers) {
  return MeshFor(ParseMeshSpec(mesh).value(), num_workers).ToString();
}

// Every mesh of up to three dimensions and 64 ranks, in all roles.
void ForEachMesh(const std::function<void(const MeshSpec&)>& check) {
  std::function<void(MeshSpec, int64_t)> extend = [&](const MeshSpec& mesh, int64_t ranks) {
    if (!mesh.dims.empty()) check(mesh);
    if (mesh.dims.size() == 3) return;
    for (int64_t size = 1; size * ranks <= kMaxRanks; ++size) {
      for (const DimRole role : {DimRole::kReplicate, DimRole::kShard}) {
        MeshSpec longer = mesh;
        longer.dims.push_back({std::string(1, static_cast<char>('a' + mesh.dims.size())), size, role});
        extend(longer, ranks * size);
      }
    }
  };
  extend({}, 1);
}

TEST(MeshFor, Examples) {
  EXPECT_EQ(MeshOf("ddp=2,fsdp=4", 9), "ddp=2,fsdp=4");
  EXPECT_EQ(MeshOf("ddp=2,fsdp=4", 8), "ddp=2,fsdp=4");
  for (const int workers : {7, 6}) EXPECT_EQ(MeshOf("ddp=2,fsdp=4", workers), "ddp=2,fsdp=3");
  for (const int workers : {5, 4}) EXPECT_EQ(MeshOf("ddp=2,fsdp=4", workers), "ddp=2,fsdp=2");
  EXPECT_EQ(MeshOf("ddp=2,fsdp=4", 3), "ddp=1,fsdp=3");
  EXPECT_EQ(MeshOf("ddp=2,fsdp=4", 2), "ddp=1,fsdp=2");
  EXPECT_EQ(MeshOf("ddp=2,fsdp=4", 1), "ddp=1,fsdp=1");
  EXPECT_EQ(MeshOf("ddp=3,fsdp=2", 5), "ddp=3,fsdp=1");
  EXPECT_EQ(MeshOf("ddp=2", 1), "ddp=1");
  EXPECT_EQ(MeshOf("fsdp=4", 3), "fsdp=3");
  EXPECT_EQ(MeshOf("fsdp=2,ddp=2,tp=2,replicate=2", 12), "fsdp=3,ddp=4,tp=1,replicate=1") << "names, order and roles";
}

// The rule as one would say it: the most replicas of which each still has half as many shards.
TEST(MeshFor, Property_IsTheRule) {
  ForEachMesh([](const MeshSpec& mesh) {
    const int64_t replicas = mesh.NumRanks(DimRole::kReplicate), shards = mesh.NumRanks(DimRole::kShard);
    for (int64_t workers = 1; workers < mesh.NumRanks(); ++workers) {
      const MeshSpec smaller = MeshFor(mesh, workers);
      int64_t want = 1;
      for (int64_t more = 2; more <= replicas; ++more) {
        if (2 * std::min(shards, workers / more) >= shards) want = more;
      }
      ASSERT_EQ(smaller.NumRanks(DimRole::kReplicate), want) << mesh.ToString() << " on " << workers;
      ASSERT_EQ(smaller.NumRanks(DimRole::kShard), std::min(shards, workers / want)) << mesh.ToString();
    }
    ASSERT_EQ(MeshFor(mesh, mesh.NumRanks()), mesh);
  });
}

TEST(MeshFor, Property_FitsIsEnoughAndIsStable) {
  ForEachMesh([](const MeshSpec& mesh) {
    const int64_t shards = mesh.NumRanks(DimRole::kShard);
    int64_t ranks_with_fewer = 0;
    for (int64_t workers = 1; workers <= mesh.NumRanks() + 1; ++workers) {
      const MeshSpec smaller = MeshFor(mesh, workers);
      const int64_t ranks = smaller.NumRanks();
      ASSERT_OK(smaller.Validate());
      ASSERT_LE(ranks, workers) << mesh.ToString();
      ASSERT_GE(ranks, std::min(shards, workers)) << mesh.ToString() << " on " << workers;
      ASSERT_GE(ranks, ranks_with_fewer) << mesh.ToString() << ": one more worker is never worse";
      ranks_with_fewer = ranks;
      ASSERT_LE(smaller.NumRanks(DimRole::kShard), shards);
      ASSERT_EQ(MeshFor(smaller, workers), smaller);
      ASSERT_EQ(smaller.dims.size(), mesh.dims.size());
      for (size_t i = 0; i < mesh.dims.size(); ++i) {
        ASSERT_EQ(smaller.dims[i].name, mesh.dims[i].name);
        ASSERT_EQ(smaller.dims[i].role, mesh.dims[i].role);
      }
    }
  });
}

// Whoever was left when a smaller mesh lost a member again has room for one holder of each of its shards.
TEST(MeshFor, Property_LostAgain_HasRoomForEveryShardThereWas) {
  ForEachMesh([](const MeshSpec& mesh) {
    for (int64_t before = 1; before <= mesh.NumRanks(); ++before) {
      const int64_t shards = MeshFor(mesh, before).NumRanks(DimRole::kShard);
      for (int64_t now = shards; now <= before; ++now) ASSERT_GE(MeshFor(mesh, now).NumRanks(), shards);
    }
  });
}

TEST(WithReplicas, KeepsTheShards) {
  const auto with = [](const char* mesh, int64_t replicas) {
    return WithReplicas(ParseMeshSpec(mesh).value(), replicas).ToString();
  };
  EXPECT_EQ(with("ddp=3,fsdp=2", 2), "ddp=2,fsdp=2");
  EXPECT_EQ(with("ddp=2,fsdp=3,replicate=2", 3), "ddp=3,fsdp=3,replicate=1");
  EXPECT_EQ(with("ddp=2,fsdp=3,replicate=2", 4), "ddp=2,fsdp=3,replicate=2");
}

TEST(ReplicaDomains, GroupsOfHosts_WithAReplicaOfEachShard) {
  const auto domains = [](const std::string& mesh, int64_t hosts) {
    return ReplicaDomains(ParseMeshSpec(mesh).value(), hosts);
  };
  EXPECT_EQ(domains("ddp=2,fsdp=2", 1), 1);
  EXPECT_EQ(domains("ddp=2,fsdp=2", 2), 2);
  EXPECT_EQ(domains("ddp=2,fsdp=2", 4), 2);
  EXPECT_EQ(domains("ddp=4,fsdp=2", 2), 2);
  EXPECT_EQ(domains("fsdp=2,ddp=2", 2), 1) << "each host has both replicas of a shard";
  EXPECT_EQ(domains("fsdp=4", 2), 1);
  EXPECT_EQ(domains("fsdp=1,ddp=2", 2), 2);
}

TEST(HostCounts, ReplicasApartFirst_ThenTheFewestHosts) {
  const auto counts = [](const std::string& mesh, int copies = 1) {
    return HostCounts(ParseMeshSpec(mesh).value(), copies);
  };
  EXPECT_EQ(counts("ddp=2,fsdp=2"), (std::vector<int64_t>{2, 4, 1}));
  EXPECT_EQ(counts("ddp=4,fsdp=2"), (std::vector<int64_t>{4, 8, 2, 1}));
  EXPECT_EQ(counts("fsdp=4"), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(counts("fsdp=2,ddp=2"), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(counts("fsdp=4", 2), (std::vector<int64_t>{2, 4, 1})) << "another host keeps the copies";
  EXPECT_EQ(counts("ddp=4,fsdp=2", 2), (std::vector<int64_t>{4, 8, 2, 1}));
  EXPECT_EQ(counts("fsdp=1", 2), (std::vector<int64_t>{1}));
}

TEST(CopyKeeper, IsAtTheSamePlaceOfTheNextHost) {
  EXPECT_EQ(CopyKeeper(0, 6, 3), 2);
  EXPECT_EQ(CopyKeeper(3, 6, 3), 5);
  EXPECT_EQ(CopyKeeper(5, 6, 3), 1);
  EXPECT_EQ(CopyKeeper(1, 2, 2), 0);
}

TEST(ShardOf, IsWhatThePlanSays) {
  for (const char* text :
       {"fsdp=3", "ddp=3", "ddp=2,fsdp=3", "fsdp=3,ddp=2", "fsdp=2,ddp=3,tp=2", "ddp=2,tp=3,replicate=2"}) {
    JobSpec job;
    job.name = "j";
    job.mesh = ParseMeshSpec(text).value();
    job.parameters = {{"w", {8}, WeightFormat::kFp32, ""}};
    ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
    for (int rank = 0; rank < plan.num_ranks(); ++rank) {
      EXPECT_EQ(ShardOf(job.mesh, rank), plan.PlaceOf(Rank(rank)).shard) << text << " rank " << rank;
    }
  }
}

}  // namespace
}  // namespace shardmesh
