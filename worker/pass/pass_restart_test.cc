// Pass: a worker that ends in the middle of a command finishes it in its next incarnation.
#include <algorithm>
#include <cstring>

#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
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

// A copy of the streams of a range, spares included.
struct Image {
  Image(const PassGroup& group, int range) {
    const ShardStorage& storage = *group.storages[0];
    for (int s = 0; s < kStreams; ++s) {
      const char* begin = storage.StreamBegin(range, s);
      streams[s].assign(begin, begin + storage.StreamBytes(range, s));
    }
  }
  std::vector<char> streams[kStreams];
};

// Memory as a worker leaves it that is killed in the middle of the chunk after `done` whole ones: finished chunks are
// new, the open one is torn, the window holds the old weights from there on.
void Kill(PassGroup& group, int range, const Image& before, const Image& after, const Command& command, int64_t done) {
  const ShardStorage& storage = *group.storages[0];
  const StorageRange& r = storage.ranges()[range];
  for (int s = 0; s < kStreams; ++s) {
    std::copy(before.streams[s].begin(), before.streams[s].end(), storage.StreamBegin(range, s));
  }
  for (int64_t i = 0; i <= done; ++i) {
    const int64_t chunk = command.parity == 0 ? i : r.num_chunks() - 1 - i;
    const int64_t size = std::min(r.chunk_elements, r.num_elements - chunk * r.chunk_elements);
    const int64_t place = r.Base(1 - command.parity) + chunk * r.chunk_elements;
    for (int s = 0; s < kStreams; ++s) {
      const int64_t at = r.parts[s].BytesOf(place), bytes = r.parts[s].BytesOf(size);
      char* const to = storage.StreamBegin(range, s) + at;
      if (bytes == 0) continue;  // there is no such stream
      if (i < done) std::memcpy(to, after.streams[s].data() + at, bytes);
      if (i == done) std::memset(to, 0xAB, bytes - 1);
    }
    if (i < done || storage.first_run(range, chunk) == storage.first_run(range, chunk + 1)) continue;
    const ChunkRun& run = storage.runs(range)[storage.first_run(range, chunk)];
    const Bucket& bucket = group.plan.buckets()[r.bucket];
    if (bucket.quantized()) continue;  // its codes are not written yet
    const int64_t at = bucket.weight_offset + bucket.CodeOffset(r.bucket_begin + run.offset);
    std::memset(group.host.window().data() + at, 0xCD, bucket.CodeOffset(run.num_elements));
  }
  group.storages[0]->SetProgress(range, group.seq, done);
}

// Of a range that is a matrix: a worker that is killed while it makes the update makes it again. Afterwards the scratch
// has this matrix's update, as while its chunks are stepped.
void KillWhileOrthogonalizing(PassGroup& group, int range, const Image& before, const Command& command) {
  ShardStorage& storage = *group.storages[0];
  for (int s = 0; s < kStreams; ++s) {
    std::copy(before.streams[s].begin(), before.streams[s].end(), storage.StreamBegin(range, s));
  }
  std::memset(storage.scratch(), 0xEE, storage.scratch_space().num_bytes());
  storage.SetProgress(range, group.seq, 0);
  storage.SetUpdateReady(range, group.seq - 1);
  group.Restart(0);
  group.passes[0]->Execute(command, group.seq, nullptr);
  EXPECT_TRUE(group.storages[0]->UpdateIsReady(range, group.seq));
}

// The table of maxima as such a worker leaves it: those of the chunks that are done, here and in all other ranges.
void KillMaxima(PassGroup& group, int open_range, const Command& command, int64_t done) {
  std::atomic<uint32_t>* const maxima = Maxima(group.host.control(), group.plan);
  for (int64_t i = 0; i < group.plan.scales().num_maxima; ++i) maxima[i] = 0;
  const ShardStorage& storage = *group.storages[0];
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    const StorageRange& r = storage.ranges()[range];
    const Bucket& bucket = group.plan.buckets()[r.bucket];
    for (int64_t i = 0; bucket.quantized() && i < (range == open_range ? done : r.num_chunks()); ++i) {
      const int64_t chunk = command.parity == 0 ? i : r.num_chunks() - 1 - i;
      for (int k = storage.first_run(range, chunk); k < storage.first_run(range, chunk + 1); ++k) {
        const ChunkRun& run = storage.runs(range)[k];
        const Placement& tensor = group.plan.placements()[run.tensor];
        const StoredRun weights = storage.weights(range, 1 - command.parity, run.offset);
        GatheredRun gathered{bucket.gather, &tensor.scales,    bucket.format(),
                             weights.codes, run.first_element, run.num_elements};
        gathered.row_elements = bucket.row_elements;
        if (bucket.weights == WeightFormat::kInt8Row) gathered.row_scales = static_cast<const float*>(weights.extra);
        RaiseMaxima(gathered, maxima + tensor.first_maximum);
      }
    }
  }
}

std::vector<uint32_t> MaximaOf(const PassGroup& group) {
  const std::atomic<uint32_t>* const maxima = Maxima(group.host.control(), group.plan);
  return {maxima, maxima + group.plan.scales().num_maxima};
}

// A worker that is killed while it writes the codes of any chunk writes all of them in its next incarnation.
void KillGatherInEveryChunk(PassGroup& group, const Command& step) {
  group.Gather(step);
  Command command = step;
  command.kind = CommandKind::kQuantize;
  command.parity = group.parity;
  const std::vector<char> window = group.Window(), publication = group.Publication(step.publish);
  const auto tear = [&](const Segment& segment, int range, const ChunkRun& run) {
    const StorageRange& r = group.storages[0]->ranges()[range];
    const Bucket& bucket = group.plan.buckets()[r.bucket];
    if (!bucket.quantized()) return;
    const Placement& tensor = group.plan.placements()[run.tensor];
    char* const begin = segment.data() + bucket.weight_offset;
    std::memset(begin + bucket.CodeOffset(r.bucket_begin + run.offset), 0xCD, bucket.CodeOffset(run.num_elements));
    const int64_t scales = tensor.scales.num_blocks, all = GatheredScalesBytes(bucket.gather, scales);
    std::memset(begin + tensor.scale_offset, 0xCD, scales * GatheredScaleBytes(bucket.gather));
    if (bucket.gather != GatherFormat::kNf4) return;
    std::memset(begin + tensor.scale_offset + Nf4FactorsOffset(scales), 0xCD, all - Nf4FactorsOffset(scales));
  };
  for (int range = 0; range < static_cast<int>(group.storages[0]->ranges().size()); ++range) {
    for (size_t i = 0; i < group.storages[0]->runs(range).size(); ++i) {
      const ChunkRun run = group.storages[0]->runs(range)[i];
      tear(group.host.window(), range, run);
      tear(group.host.publication(step.publish), range, run);
      group.Restart(0);
      group.passes[0]->Execute(command, group.seq, nullptr);
      ASSERT_EQ(group.Window(), window);
      ASSERT_EQ(group.Publication(step.publish), publication);
    }
  }
}

// With the search for silent corruption, which must not take what a kill left for that.
// `first_seq`: of the commands.
template <class Oracle>
void KillInEveryChunk(JobSpec job, uint64_t first_seq = 0) {
  job.check_every = 2;
  PassGroup group(job, 1);
  group.seq = first_seq;
  group.PlaceWeights();
  group.HoldAll();
  Oracle oracle(group.job);
  for (int64_t step : {1, 2}) {  // walking up, walking down
    group.WriteGradients(step);
    group.Reduce();  // from here on the sums are what the step is executed from, again and again
    const Command command = group.StepCommand(step);
    std::vector<Image> before, after;
    const int ranges = static_cast<int>(group.storages[0]->ranges().size());
    for (int range = 0; range < ranges; ++range) before.emplace_back(group, range);
    group.Execute(command);
    const std::vector<char> window = group.Window();
    const std::vector<uint32_t> maxima = MaximaOf(group);
    for (int range = 0; range < ranges; ++range) after.emplace_back(group, range);
    for (int range = 0; range < ranges; ++range) {
      if (group.storages[0]->ranges()[range].matrix >= 0) {
        KillWhileOrthogonalizing(group, range, before[range], command);
        ASSERT_EQ(group.Window(), window) << "step " << step << " matrix of range " << range;
      }
      for (int64_t done = 0; done < group.storages[0]->ranges()[range].num_chunks(); ++done) {
        Kill(group, range, before[range], after[range], command, done);
        KillMaxima(group, range, command, done);
        if (maxima.empty()) {
          EXPECT_NE(group.Window(), window);
        }
        group.Restart(0);
        group.passes[0]->Execute(command, group.seq, nullptr);
        ASSERT_EQ(MaximaOf(group), maxima) << "step " << step << " range " << range << " chunk " << done;
        ASSERT_EQ(group.Window(), window) << "step " << step << " range " << range << " chunk " << done;
      }
    }
    group.parity = 1 - group.parity;
    if (group.plan.scales().quantized) {
      ASSERT_NO_FATAL_FAILURE(KillGatherInEveryChunk(group, command));
    }
    oracle.RunStep(step);
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, "step " + std::to_string(step)));
  }
  EXPECT_EQ(group.host.control()->members[0].damage.load(), 0u);
}

TEST(PassRestartTest, KilledInAnyChunk_TheRestartedWorkerFinishesWithTheSameBits) {
  KillInEveryChunk<TrainingOracle>(MixedJob("fsdp=1", 2));
}

// Progress words have 44 bits of the command's number.
TEST(PassRestartTest, KilledNextToTheWrapOfSequenceNumbers) {
  KillInEveryChunk<TrainingOracle>(MixedJob("fsdp=1", 2), (uint64_t{1} << 44) - 2);
}

TEST(PassRestartTest, KilledWithBucketResidency_TheRestartedWorkerFinishesWithTheSameBits) {
  JobSpec job = MixedJob("fsdp=1", 3);
  job.residency = Residency::kBucket;
  KillInEveryChunk<TrainingOracle>(job);
}

// Until the slots' pages are given back a bucket can be summed again.
TEST(PassRestartTest, KilledInAReduction_TheRestartedWorkerMakesTheSameSums) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 3);
  job.residency = Residency::kBucket;
  PassGroup group(job, 1);
  group.PlaceWeights();
  group.WriteGradients(1);
  for (int b = 0; b < static_cast<int>(group.plan.buckets().size()); ++b) {
    const int64_t elements = group.plan.buckets()[b].shard_elements;
    const int64_t first = group.plan.PlaceOf(Rank(1)).shard * elements;
    const auto sums = [&] {
      const float* const begin = group.sums[1]->At(b, first);
      return std::vector<float>(begin, begin + elements);
    };
    const Command command = group.BucketCommand(CommandKind::kReduceBucket, b);
    group.Execute(command);
    const std::vector<float> whole = sums();
    std::fill_n(group.sums[1]->At(b, first), elements / 2, -7.5f);  // torn
    group.Restart(1);
    EXPECT_NE(sums(), whole);
    group.passes[1]->Execute(command, group.seq, nullptr);
    EXPECT_EQ(sums(), whole) << "bucket " << b;
  }
}

TEST(PassRestartTest, KilledWithQuantizedStates_TheRestartedWorkerFinishesWithTheSameBits) {
  JobSpec job = MixedJob("fsdp=1", 2);
  int i = 0;
  for (ParameterSpec& p : job.parameters) {
    if (!p.tied_to.empty()) continue;
    p.format = i % 2 == 0 ? WeightFormat::kBf16Plus8Sr : WeightFormat::kBf16Plus16;
    p.states = static_cast<StateFormat>(i++ % 6);
  }
  for (ParameterSpec& p : job.parameters) {
    if (p.tied_to == "a") p.format = job.parameters[0].format, p.states = job.parameters[0].states;
  }
  KillInEveryChunk<NumericsOracle>(job);
}

// Rows of one length share a bucket, and its chunks are several rows, one, or a tensor.
TEST(PassRestartTest, KilledWithInt8Rows_TheRestartedWorkerFinishesWithTheSameBits) {
  JobSpec job = SmallJob("fsdp=1", 2);
  job.seed = 3;
  const std::vector<std::vector<int64_t>> shapes = {{300, 64}, {31, 64}, {5, 5120}, {3, 2048}, {7, 19}, {9001}, {}};
  for (const std::vector<int64_t>& shape : shapes) {
    const auto states = static_cast<StateFormat>(job.parameters.size() % 6);
    job.parameters.push_back({"p" + std::to_string(job.parameters.size()), shape, WeightFormat::kInt8Row, "", states});
  }
  KillInEveryChunk<NumericsOracle>(job);
}

TEST(PassRestartTest, KilledWithInt8RowsInOtherCodes_TheRestartedWorkerFinishesWithTheSameBits) {
  JobSpec job = SmallJob("fsdp=1", 2);
  job.seed = 4;
  job.parameters.clear();
  for (const GatherFormat gather : {GatherFormat::kFp8Tensor, GatherFormat::kFp8Row, GatherFormat::kFp8Block,
                                    GatherFormat::kMx8, GatherFormat::kNf4}) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{140, 64}, {7, 1024}, {7, 19}}) {
      if (!ScaleBlocksOf(gather, shape).ok()) continue;
      const std::string name = "p" + std::to_string(job.parameters.size());
      job.parameters.push_back({name, shape, WeightFormat::kInt8Row, "", StateFormat::kDyn8, gather});
    }
  }
  KillInEveryChunk<NumericsOracle>(job);
}

TEST(PassRestartTest, KilledWithMuon_TheRestartedWorkerFinishesWithTheSameBits) {
  JobSpec job = SmallJob("fsdp=1", 2);
  job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  const std::vector<std::vector<int64_t>> shapes = {{90, 130}, {130, 61}, {7, 19}, {1, 300}, {80, 80}};
  for (const std::vector<int64_t>& shape : shapes) {
    const int i = static_cast<int>(job.parameters.size());
    job.parameters.push_back({"p" + std::to_string(i), shape, static_cast<WeightFormat>(i % 5), "",
                              static_cast<StateFormat>(i % 6), GatherFormat::kStored, 1});
  }
  job.parameters.push_back({"more", {64, 64}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1});
  job.parameters.push_back({"again", {33, 5}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1});
  KillInEveryChunk<NumericsOracle>(job);
}

TEST(PassRestartTest, KilledWithQuantizedGathers_TheRestartedWorkerFinishesWithTheSameBits) {
  JobSpec job = MixedJob("fsdp=1", 2);
  int i = 0;
  for (ParameterSpec& p : job.parameters) {
    if (p.NumElements() == 0 || p.name == "d") continue;  // those stay as they are stored
    const GatherFormat gathers[] = {GatherFormat::kFp8Block, GatherFormat::kFp8Tensor, GatherFormat::kInt8Row,
                                    GatherFormat::kFp8Row,   GatherFormat::kNf4,       GatherFormat::kMx8};
    do p.gather = gathers[i++ % 6];
    while (!ScaleBlocksOf(p.gather, p.shape).ok());
  }
  for (ParameterSpec& p : job.parameters) {
    if (p.tied_to == "a") p.gather = job.parameters[0].gather;
  }
  KillInEveryChunk<NumericsOracle>(job);
}

}  // namespace
}  // namespace shardmesh
