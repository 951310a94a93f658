// Pass: frozen parameters: placed once, in the window and every publication, and not touched again.
#include <algorithm>
#include <cstring>
#include <string>

#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

// MixedJob, every second parameter frozen (and what is tied to one), in formats with remainders, quantized states and
// codes for readers too.
JobSpec HalfFrozen(const std::string& mesh) {
  JobSpec job = MixedJob(mesh, 3);
  job.parameters[2].format = WeightFormat::kBf16Plus8Sr;
  job.parameters[2].states = StateFormat::kDyn8;
  job.parameters[4].format = WeightFormat::kBf16Plus16;
  job.parameters[4].gather = job.parameters[7].gather = GatherFormat::kFp8Tensor;
  job.parameters[6].format = job.parameters[8].format = WeightFormat::kInt8Row;
  job.parameters[8].gather = job.parameters[9].gather = GatherFormat::kNf4;
  for (size_t t = 0; t < job.parameters.size(); t += 2) job.parameters[t].frozen = true;
  job.parameters[5].frozen = true;  // tied to parameter 0
  job.parameters.push_back({"base", {300, 97}, WeightFormat::kNf4});
  job.parameters.back().frozen = true;
  return job;
}

TEST(PassFrozenTest, EveryMesh_TrainsTheOthersToTheReferencesBits) {
  for (const double clip_norm : {0.0, 0.5}) {
    for (const auto& [mesh, threads] : {std::pair("fsdp=1", 1), {"fsdp=3", 2}, {"ddp=2,fsdp=2", 1}, {"ddp=3", 2}}) {
      JobSpec job = HalfFrozen(mesh);
      job.clip_norm = clip_norm;
      PassGroup group(job, threads);
      NumericsOracle oracle(job);
      group.PlaceWeights();
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, mesh));
      EXPECT_EQ(group.Publication(0), group.Window());
      for (int64_t step = 1; step <= 2; ++step) {
        oracle.RunStep(step);
        group.RunStep(step);
        ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, mesh));
        EXPECT_EQ(group.Publication(static_cast<int>(step % 2)), group.Window()) << mesh << " step " << step;
      }
    }
  }
}

// Steps write no byte of them: what is put there instead stays, wherever it is.
TEST(PassFrozenTest, AfterTheInitialWeights_NoByteIsWritten) {
  PassGroup group(HalfFrozen("ddp=2,fsdp=2"), 1);
  group.PlaceWeights();
  std::vector<std::pair<char*, int64_t>> places;
  for (const Bucket& bucket : group.plan.buckets()) {
    const int64_t bytes = bucket.weight_bytes;
    if (!bucket.frozen) continue;
    places.emplace_back(group.host.window().data() + bucket.weight_offset, bytes);
    for (int i = 0; i < group.host.num_publications(); ++i) {
      places.emplace_back(group.host.publication(i).data() + bucket.weight_offset, bytes);
    }
  }
  for (const auto& storage : group.storages) {
    for (int range = 0; range < static_cast<int>(storage->ranges().size()); ++range) {
      if (!storage->ranges()[range].frozen) continue;
      for (int s = 0; s < kStreams; ++s) {
        places.emplace_back(storage->StreamBegin(range, s), storage->StreamBytes(range, s));
      }
    }
  }
  ASSERT_GT(places.size(), 20u);
  for (const auto& [at, bytes] : places) std::memset(at, 0x5A, bytes);
  for (int64_t step = 1; step <= 2; ++step) group.RunStep(step);
  for (const auto& [at, bytes] : places) {
    EXPECT_TRUE(std::all_of(at, at + bytes, [](char c) { return c == 0x5A; }));
  }
}

TEST(PassFrozenTest, GradientWindow_IsSmallerByTheirBytes) {
  const JobSpec frozen = HalfFrozen("fsdp=1");
  JobSpec all = frozen;
  for (ParameterSpec& p : all.parameters) p.frozen = p.format == WeightFormat::kNf4;  // which no step writes
  const PassGroup a(all, 1), b(frozen, 1);
  int64_t elements = 0, steppable = 0;
  for (const Bucket& bucket : b.plan.buckets()) {
    elements += bucket.num_elements;
    steppable += bucket.gradients(0) * b.plan.num_shards();
  }
  EXPECT_EQ(b.plan.GradientShardBytes(0), steppable * 2);
  EXPECT_EQ(b.plan.InitialShardBytes(0), elements * 4);
  EXPECT_LT(b.plan.gradient_window_bytes(), a.plan.gradient_window_bytes());
  EXPECT_LT(b.storages[0]->num_bytes(), a.storages[0]->num_bytes());
}

// A worker that ends in any chunk of the initial weights places all of them in its next incarnation.
TEST(PassFrozenTest, KilledInAnyChunkOfTheInitialWeights_TheRestartedWorkerFinishesWithTheSameBits) {
  PassGroup group(HalfFrozen("fsdp=1"), 1);
  NumericsOracle oracle(group.job);
  group.PlaceWeights();
  const std::vector<char> window = group.Window();
  const std::vector<char> publications[] = {group.Publication(0), group.Publication(1)};
  Command command;
  command.kind = CommandKind::kInit;
  command.first = 1;
  command.publish = 0;
  const std::vector<float> initial = group.InitialShard(0);
  const int ranges = static_cast<int>(group.storages[0]->ranges().size());
  for (int killed = 0; killed < ranges; ++killed) {
    for (int64_t chunk = 0; chunk < group.storages[0]->ranges()[killed].num_chunks(); ++chunk) {
      // Ranges behind are as they were made, this one is torn from the chunk on, and so is what was copied of it.
      for (int range = killed; range < ranges; ++range) {
        const ShardStorage& storage = *group.storages[0];
        const StorageRange& r = storage.ranges()[range];
        const Bucket& bucket = group.plan.buckets()[r.bucket];
        const int64_t from = range == killed ? chunk * r.chunk_elements : 0;
        for (int s = 0; s < kStreams; ++s) {
          const int64_t at = r.parts[s].BytesOf(r.Base(0) + from);
          if (storage.StreamBytes(range, s) == 0) continue;
          std::memset(storage.StreamBegin(range, s) + at, range == killed ? 0xAB : 0,
                      r.parts[s].BytesOf(r.num_elements - from));
        }
        for (const ChunkRun& run : storage.runs(range)) {
          if (run.offset < from) continue;
          const int64_t bytes = bucket.CodeOffset(run.num_elements);
          const int64_t at = bucket.weight_offset + bucket.CodeOffset(r.bucket_begin + run.offset);
          std::memset(group.host.window().data() + at, 0xCD, bytes);
          std::memset(group.host.publication(0).data() + at, 0xCD, bytes);
          if (bucket.frozen) std::memset(group.host.publication(1).data() + at, 0xCD, bytes);
        }
      }
      ASSERT_NE(group.Window(), window);
      group.Restart(0);
      group.passes[0]->Execute(command, group.seq, initial.data());
      group.Gather(command);
      ASSERT_EQ(group.Window(), window) << "range " << killed << " chunk " << chunk;
      ASSERT_EQ(group.Publication(0), publications[0]);
      ASSERT_EQ(group.Publication(1), publications[1]);
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, "initial"));
    }
  }
  oracle.RunStep(1);
  group.RunStep(1);
  ExpectEqualsOracle(group, oracle, "step 1");
}

}  // namespace
}  // namespace shardmesh
