// Pass: a worker that ends in the middle of a command finishes it in its next life.
#include <cstring>

#include "worker/pass.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

// Executing a finished command again, from the same words, changes nothing: also after a restart.
TEST(PassRestartTest, FinishedCommand_RepeatedIsTheSame) {
  PassGroup group(MixedJob("fsdp=2", 2), 1);
  group.PlaceWeights();
  group.RunStep(1);
  group.WriteGradients(2);
  const Command command = group.StepCommand(2);
  group.Execute(command);
  const std::vector<char> window = group.Window();
  group.Restart(0);
  group.passes[0]->Execute(command, group.seq, nullptr);
  group.passes[1]->Execute(command, group.seq, nullptr);
  group.parity = 1 - group.parity;
  TrainingOracle oracle(group.job);
  oracle.RunStep(1);
  oracle.RunStep(2);
  EXPECT_EQ(group.Window(), window);
  ExpectEqualsOracle(group, oracle, "repeated");
}

// Where the three streams of a range begin, spare included, and their bytes per element. Moves with a restart.
struct Streams {
  Streams(const PassGroup& group, int range) {
    const ShardStorage& storage = *group.storages[0];
    at[0] = storage.weights(range, 1, 0);
    at[1] = reinterpret_cast<char*>(storage.moment1(range, 1, 0));
    at[2] = reinterpret_cast<char*>(storage.moment2(range, 1, 0));
    bytes[0] = BytesPerElement(group.plan.buckets()[storage.ranges()[range].bucket].format);
  }
  char* at[3];
  int64_t bytes[3] = {0, 4, 4};
};

// A copy of them.
struct Image {
  Image(const PassGroup& group, int range) {
    const Streams streams(group, range);
    const int64_t places = group.storages[0]->ranges()[range].num_elements + kChunkElements;
    for (int s = 0; s < 3; ++s) copies[s].assign(streams.at[s], streams.at[s] + places * streams.bytes[s]);
  }
  std::vector<char> copies[3];
};

// Memory as a worker leaves it that is killed in the middle of the chunk after `done` whole ones: finished chunks are
// new, the open one is torn, the window holds the old weights from there on.
void Kill(PassGroup& group, int range, const Image& before, const Image& after, const Command& command, int64_t done) {
  const ShardStorage& storage = *group.storages[0];
  const StorageRange& r = storage.ranges()[range];
  const Streams streams(group, range);
  for (int s = 0; s < 3; ++s) std::memcpy(streams.at[s], before.copies[s].data(), before.copies[s].size());
  for (int64_t i = 0; i <= done; ++i) {
    const int64_t chunk = command.parity == 0 ? i : r.num_chunks() - 1 - i;
    const int64_t size = std::min(kChunkElements, r.num_elements - chunk * kChunkElements);
    const int64_t place = StorageRange::Base(1 - command.parity) + chunk * kChunkElements;
    for (int s = 0; s < 3; ++s) {
      const int64_t at = place * streams.bytes[s];
      if (i < done) std::memcpy(streams.at[s] + at, after.copies[s].data() + at, size * streams.bytes[s]);
      if (i == done) std::memset(streams.at[s] + at, 0xAB, (size - 1) * streams.bytes[s]);
    }
    if (i < done || storage.first_run(range, chunk) == storage.first_run(range, chunk + 1)) continue;
    const ChunkRun& run = storage.runs(range)[storage.first_run(range, chunk)];
    const Bucket& bucket = group.plan.buckets()[r.bucket];
    const int64_t at = bucket.weight_offset + (r.bucket_begin + run.offset) * streams.bytes[0];
    std::memset(group.host.window().data() + at, 0xCD, run.num_elements * streams.bytes[0]);
  }
  group.storages[0]->SetProgress(range, group.seq, done);
}

TEST(PassRestartTest, KilledInAnyChunk_TheRestartedWorkerFinishesWithTheSameBits) {
  PassGroup group(MixedJob("fsdp=1", 2), 1);
  group.PlaceWeights();
  TrainingOracle oracle(group.job);
  for (int64_t step : {1, 2}) {  // walking up, walking down
    group.WriteGradients(step);
    const Command command = group.StepCommand(step);
    std::vector<Image> before, after;
    const int ranges = static_cast<int>(group.storages[0]->ranges().size());
    for (int range = 0; range < ranges; ++range) before.emplace_back(group, range);
    group.Execute(command);
    const std::vector<char> window = group.Window();
    for (int range = 0; range < ranges; ++range) after.emplace_back(group, range);
    for (int range = 0; range < ranges; ++range) {
      for (int64_t done = 0; done < group.storages[0]->ranges()[range].num_chunks(); ++done) {
        Kill(group, range, before[range], after[range], command, done);
        EXPECT_NE(group.Window(), window);
        group.Restart(0);
        group.passes[0]->Execute(command, group.seq, nullptr);
        ASSERT_EQ(group.Window(), window) << "step " << step << " range " << range << " chunk " << done;
      }
    }
    group.parity = 1 - group.parity;
    oracle.RunStep(step);
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, "step " + std::to_string(step)));
  }
}

}  // namespace
}  // namespace shardmesh
