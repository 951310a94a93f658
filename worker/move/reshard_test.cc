// Shards of one mesh become those of another one: what is copied is what an undisturbed job on that mesh has, in every
// format, and both train on to the same bits.
#include "worker/move/reshard.h"

#include <cstring>
#include <random>
#include <string>

#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

constexpr int64_t kBefore = 4, kSteps = 6;

OptimizerHyper Of(OptimizerKind kind) {
  OptimizerHyper hyper = OptimizerHyper::Defaults(kind);
  hyper.lr = 0.02;
  return hyper;
}

// All formats of weights, states and gathered codes, three states (AMSGrad), matrices of Muon, frozen parameters, and
// sizes that fill no block, several chunks, or nothing.
JobSpec EverythingJob(const std::string& mesh) {
  JobSpec job = SmallJob(mesh, 2);
  job.seed = 31;
  job.gradient_format = Format::kBf16;
  job.bucket_elements = 30'000;
  job.optimizer = Of(OptimizerKind::kAdam);
  job.optimizer.amsgrad = true;
  job.more_groups = {Of(OptimizerKind::kMuon), Of(OptimizerKind::kSgd)};
  job.parameters.clear();
  const std::vector<int64_t> shapes[] = {{}, {7, 19}, {67, 96}, {kChunkElements + 300}, {130, 256}};
  const GatherFormat gathers[] = {GatherFormat::kStored,   GatherFormat::kFp8Tensor, GatherFormat::kFp8Row,
                                  GatherFormat::kFp8Block, GatherFormat::kMx8,       GatherFormat::kNf4};
  for (int i = 0; i < 72; ++i) {
    ParameterSpec p{"p" + std::to_string(i), shapes[i % 5], static_cast<WeightFormat>(i % 6)};
    p.states = static_cast<StateFormat>(i / 6 % 6);
    if (p.format != WeightFormat::kInt8Row && ScaleBlocksOf(gathers[i % 6], p.shape).ok()) p.gather = gathers[i % 6];
    if (i % 11 == 3) p.group = 2;
    p.frozen = i % 13 == 5;
    job.parameters.push_back(p);
  }
  for (int i = 0; i < 5; ++i) {
    ParameterSpec matrix{"m" + std::to_string(i), shapes[1 + i % 2], static_cast<WeightFormat>(i)};
    matrix.states = static_cast<StateFormat>(i);
    matrix.group = 1;
    job.parameters.push_back(matrix);
  }
  job.parameters.push_back({"none", {0, 4}, WeightFormat::kFp32});
  return job;
}

// As between two processes: in messages of any size.
void Send(ReshardBytes& from, ReshardBytes& to, std::mt19937& random) {
  ASSERT_EQ(from.num_bytes(), to.num_bytes());
  std::vector<char> bytes;
  while (true) {
    const absl::Span<char> next = from.Next(1 + static_cast<int64_t>(random() % 20'000));
    if (next.empty()) break;
    bytes.insert(bytes.end(), next.begin(), next.end());
  }
  for (size_t at = 0; at < bytes.size();) {
    const absl::Span<char> next = to.Next(1 + static_cast<int64_t>(random() % 20'000));
    ASSERT_FALSE(next.empty());
    std::memcpy(next.data(), bytes.data() + at, next.size());
    at += next.size();
  }
  ASSERT_TRUE(to.Next(1).empty());
  ASSERT_EQ(from.digest(), to.digest());
}

// Every rank of `after` takes each shard from somebody, or from itself, where it is a rank of before.
void Reshard(const PassGroup& before, const std::vector<int32_t>& was, PassGroup& after, std::mt19937& random) {
  for (int rank = 0; rank < after.plan.num_ranks(); ++rank) {
    for (int shard = 0; shard < before.plan.num_shards(); ++shard) {
      const int source = SourceOf(before.plan, {was, {}}, shard, rank);
      ASSERT_GE(source, 0);
      const ShardStorage& from = *before.storages[was[source]];
      const std::vector<ReshardPiece> pieces = PiecesOf(from, *after.storages[rank]);
      if (source == rank) {
        CopyPieces(from, before.parity, *after.storages[rank], 0, pieces);
        continue;
      }
      ReshardBytes bytes(from, before.parity, ReshardBytes::Side::kFrom, pieces);
      ReshardBytes to(*after.storages[rank], 0, ReshardBytes::Side::kTo, pieces);
      ASSERT_NO_FATAL_FAILURE(Send(bytes, to, random));
    }
  }
}

void Restore(PassGroup& group, int64_t step) {
  Command command;
  command.kind = CommandKind::kRestore;
  command.step = step;
  command.first = 1;
  command.publish = 1;
  for (int64_t i = 0; i < group.plan.scales().num_maxima; ++i) Maxima(group.host.control(), group.plan)[i] = 0;
  group.Execute(command);
  if (!group.plan.scales().quantized) return;
  command.kind = CommandKind::kQuantize;
  group.Execute(command);
}

struct Case {
  const char *before, *after;
  std::vector<int32_t> was;  // by rank of after
};

TEST(ReshardTest, EveryFormat_FromMeshToMesh_TrainsOnToTheSameBits) {
  const Case cases[] = {{"ddp=2,fsdp=2", "ddp=2,fsdp=1", {0, 3}},
                        {"ddp=2,fsdp=2", "fsdp=3", {2, 1, -1}},
                        {"ddp=2,fsdp=4", "ddp=2,fsdp=3", {0, 5, 2, 3, 6, 7}},
                        {"fsdp=1", "fsdp=5", {0, -1, -1, -1, -1}},
                        {"fsdp=3", "fsdp=2", {2, 0, 1}},  // rank 2 has left, after it gave its shard
                        {"ddp=2,fsdp=2", "ddp=2,fsdp=2", {3, 0, -1, -1}}};
  std::mt19937 random(1);
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.before) + " to " + c.after);
    PassGroup before(EverythingJob(c.before), 1), after(EverythingJob(c.after), 1),
        undisturbed(EverythingJob(c.after), 1);
    before.PlaceWeights();
    undisturbed.PlaceWeights();
    for (int64_t step = 1; step <= kBefore; ++step) {
      before.RunStep(step);
      undisturbed.RunStep(step);
    }
    ASSERT_NO_FATAL_FAILURE(Reshard(before, c.was, after, random));
    Restore(after, kBefore);
    ASSERT_EQ(after.Digest(), undisturbed.Digest());
    ASSERT_EQ(after.Window(), undisturbed.Window());
    ASSERT_EQ(after.Publication(1), after.Window());
    for (int64_t step = kBefore + 1; step <= kSteps; ++step) {
      after.RunStep(step);
      undisturbed.RunStep(step);
      ASSERT_EQ(after.Digest(), undisturbed.Digest()) << "step " << step;
      ASSERT_EQ(after.Window(), undisturbed.Window()) << "step " << step;
      ASSERT_EQ(after.Publication(step % 2), undisturbed.Publication(step % 2)) << "step " << step;
    }
  }
}

TEST(ReshardTest, PiecesAreEveryElementOnce) {
  for (const auto& [from_mesh, to_mesh] : {std::pair("fsdp=4", "fsdp=3"), {"fsdp=1", "fsdp=7"}, {"fsdp=5", "fsdp=1"}}) {
    const Plan from = *Plan::Create(EverythingJob(from_mesh)), to = *Plan::Create(EverythingJob(to_mesh));
    for (int t = 0; t < to.num_shards(); ++t) {
      const ShardStorage target = *ShardStorage::Cut(to, t, StorageCut());
      std::map<int, std::map<int64_t, int64_t>> copied, wanted;  // by tensor: elements from each
      for (int f = 0; f < from.num_shards(); ++f) {
        const ShardStorage source = *ShardStorage::Cut(from, f, StorageCut());
        for (const ReshardPiece& piece : PiecesOf(source, target)) {
          ASSERT_TRUE(copied[piece.tensor].emplace(piece.first_element, piece.num_elements).second);
        }
      }
      for (int range = 0; range < static_cast<int>(target.ranges().size()); ++range) {
        for (const ChunkRun& run : target.runs(range)) wanted[run.tensor][run.first_element] = run.num_elements;
      }
      ASSERT_EQ(copied.size(), wanted.size());
      for (const auto& [tensor, runs] : wanted) {
        for (const auto& [first, count] : runs) {  // as pieces that touch
          int64_t at = first;
          for (auto it = copied[tensor].find(at); it != copied[tensor].end() && at < first + count;
               it = copied[tensor].find(at)) {
            at += it->second;
          }
          ASSERT_EQ(at, first + count) << tensor;
        }
      }
    }
  }
}

TEST(ReshardTest, Sources_AreTheRankItself_OrThoseThatHeldTheShardInTurn) {
  const Plan before = *Plan::Create(SmallJob("ddp=2,fsdp=2", 1));  // rank 0 and 2 have shard 0
  const std::vector<int32_t> was = {3, -1, 2, 0};
  EXPECT_EQ(SourceOf(before, {was, {}}, 1, 0), 0);
  EXPECT_EQ(SourceOf(before, {was, {}}, 0, 2), 2);
  EXPECT_EQ(SourceOf(before, {was, {}}, 0, 3), 3);
  EXPECT_EQ(SourceOf(before, {was, {}}, 0, 0), 2);
  EXPECT_EQ(SourceOf(before, {was, {}}, 0, 1), 3);
  EXPECT_EQ(SourceOf(before, {was, {}}, 1, 1), 0);
  EXPECT_EQ(SourceOf(before, {{0, 2, 9, -1}, {}}, 1, 0), -1);
}

TEST(ReshardTest, ARankThatIsNeitherAMemberNorLeaves_IsLost) {
  const Plan before = *Plan::Create(SmallJob("ddp=2,fsdp=2", 1));
  EXPECT_FALSE(IsAnyLost(before, {{3, -1, 2, 0, 1}, {}}));
  EXPECT_FALSE(IsAnyLost(before, {{3, -1}, {2, 0, 1}}));
  EXPECT_TRUE(IsAnyLost(before, {{3, -1, 2}, {0}}));
  EXPECT_TRUE(IsAnyLost(before, {{0, 3}, {1, -1}}));
}

}  // namespace
}  // namespace shardmesh
