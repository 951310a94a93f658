#include "worker/pass.h"

#include <cmath>
#include <cstring>
#include <map>

#include "core/digest.h"
#include "core/matchers.h"
#include "core/philox.h"
#include "core/reduction.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

constexpr int kSteps = 5;
constexpr int kSkipped = 3;  // this step has apply == 0

float InitialValue(int tensor, int64_t e) { return RandomValue(1000, tensor, e) * 16; }
// A gradient as its format holds it.
float GradientValue(Format format, int slot, int64_t step, int tensor, int64_t e) {
  const float value = RandomValue(step * 128 + slot, tensor, e);
  return format == Format::kFp32 ? value : Bf16ToFloat(FloatToBf16Rne(value));
}

// Training as one plain loop over elements: no mesh, no chunks, no threads.
class Oracle {
 public:
  explicit Oracle(const JobSpec& job) : job_(job), key_(MakePhiloxKey(job.seed, DrawPurpose::kWeightRounding)) {
    tensors_.resize(job.parameters.size());
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (!job.parameters[t].tied_to.empty()) continue;
      const int64_t padded = (job.parameters[t].NumElements() + 63) / 64 * 64;
      tensors_[t].weights.assign(padded, 0);
      tensors_[t].m.assign(padded, 0);
      tensors_[t].v.assign(padded, 0);
      for (int64_t e = 0; e < job.parameters[t].NumElements(); ++e) {
        const float value = InitialValue(static_cast<int>(t), e);
        tensors_[t].weights[e] = job.parameters[t].format == Format::kFp32 ? value : Bf16ToFloat(FloatToBf16Rne(value));
      }
    }
  }

  void RunStep(int64_t step) {
    const AdamWScalars s = *ComputeAdamWScalars(job_.optimizer, step);
    const float scale = static_cast<float>(1.0 / job_.num_slots);
    for (size_t t = 0; t < tensors_.size(); ++t) {
      Tensor& x = tensors_[t];
      if (!job_.parameters[t].tied_to.empty()) continue;
      for (int64_t e = 0; e < job_.parameters[t].NumElements(); ++e) {
        const float g = TreeSum<float>(job_.num_slots,
                                       [&](int slot) {
                                         return GradientValue(job_.gradient_format, slot, step, static_cast<int>(t), e);
                                       }) *
                        scale;
        x.m[e] = std::fma(s.beta1, x.m[e], s.one_minus_beta1 * g);
        x.v[e] = std::fma(s.beta2, x.v[e], (s.one_minus_beta2 * g) * g);
        const float denominator = std::fma(std::sqrt(x.v[e]), s.inv_sqrt_bias2, s.eps);
        const float weight = std::fma(s.neg_step_size, x.m[e] / denominator, x.weights[e] * s.decay);
        x.weights[e] = Rounded(step, static_cast<int>(t), e, weight);
      }
    }
  }

  // The bytes of a tensor's weights as stored, padded to whole groups.
  std::vector<char> Stored(int tensor) const {
    const Tensor& x = tensors_[tensor];
    const int64_t bytes = BytesPerElement(job_.parameters[tensor].format);
    std::vector<char> stored(x.weights.size() * bytes);
    for (size_t e = 0; e < x.weights.size(); ++e) {
      const uint32_t bits = FloatBits(x.weights[e]);
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (bytes == 4) std::memcpy(&stored[e * 4], &bits, 4);
      if (bytes == 2) std::memcpy(&stored[e * 2], &half, 2);
    }
    return stored;
  }

  uint64_t Digest() const {
    uint64_t digest = 0;
    for (int t = 0; t < static_cast<int>(tensors_.size()); ++t) {
      const Tensor& x = tensors_[t];
      const int64_t n = static_cast<int64_t>(x.weights.size());
      digest += DigestRun(t, 0, 0, Stored(t).data(), n, static_cast<int>(BytesPerElement(job_.parameters[t].format)));
      digest += DigestRun(t, 1, 0, x.m.data(), n, 4) + DigestRun(t, 2, 0, x.v.data(), n, 4);
    }
    return digest;
  }

 private:
  struct Tensor {
    std::vector<float> weights, m, v;
  };
  float Rounded(int64_t step, int tensor, int64_t e, float weight) const {
    switch (job_.parameters[tensor].format) {
      case Format::kFp32:
        return weight;
      case Format::kBf16:
        return Bf16ToFloat(FloatToBf16Rne(weight));
      case Format::kBf16Sr:
        return Bf16ToFloat(FloatToBf16Sr(weight, Draw16(key_, step, tensor, e)));
    }
    return 0;
  }

  const JobSpec job_;
  const PhiloxKey key_;
  std::vector<Tensor> tensors_;
};

// Memory that outlives the worker which asked for it, as a keeper process holds it.
class KeptMemory final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    if (kept_.count(name) == 0) {
      ASSIGN_OR_RETURN(kept_[name], Segment::Create(name, num_bytes, data_offset));
    }
    return Segment::Map(UniqueFd(dup(kept_[name].fd())), num_bytes, data_offset, Segment::Access::kReadWrite);
  }

 private:
  std::map<std::string, Segment> kept_;
};

// All workers of a job, each with its storage, taking commands one after the other.
struct Group : TestHost {
  Group(const JobSpec& spec, int threads) : TestHost(spec), threads(threads) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      storages.push_back(nullptr);
      passes.push_back(nullptr);
      Restart(r);
    }
  }

  // A new life of a worker over the same memory.
  void Restart(int r) {
    passes[r].reset();
    storages[r] = std::make_unique<ShardStorage>(
        *ShardStorage::Open(kept, "shard-" + std::to_string(r), plan, plan.PlaceOf(Rank(r)).shard));
    passes[r] = std::make_unique<Pass>(job, plan, plan.PlaceOf(Rank(r)), host, *storages[r], threads);
  }

  uint64_t Execute(const Command& command) {
    ++seq;
    uint64_t sum = 0;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const uint64_t digest = passes[r]->Execute(command, seq, nullptr);
      if (plan.PlaceOf(Rank(r)).replica == 0) sum += digest;
    }
    return sum;
  }

  void PlaceWeights() {
    Command command;
    command.kind = CommandKind::kInit;
    command.publish = 0;
    ++seq;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      passes[r]->Execute(command, seq, InitialPiece(plan.PlaceOf(Rank(r)).shard).data());
    }
  }

  // With something in its padding, which must not arrive.
  std::vector<float> InitialPiece(int shard) const {
    std::vector<float> piece;
    for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
      const int64_t size = plan.buckets()[b].shard_elements, begin = shard * size, at = piece.size();
      piece.resize(at + size, 99.0f);
      for (const auto& run : plan.RunsIn(b, begin, begin + size)) {
        const int64_t real = std::min(run.num_elements, plan.placements()[run.tensor].num_elements - run.first_element);
        for (int64_t e = 0; e < real; ++e) {
          piece[at + run.bucket_offset - begin + e] = InitialValue(run.tensor, run.first_element + e);
        }
      }
    }
    return piece;
  }

  void WriteGradients(int64_t step) {
    for (int slot = 0; slot < job.num_slots; ++slot) {
      for (int t = 0; t < static_cast<int>(job.parameters.size()); ++t) {
        if (!job.parameters[t].tied_to.empty()) continue;
        const Placement& p = plan.placements()[t];
        const int64_t bytes = BytesPerElement(job.gradient_format);
        char* out = host.slot(slot).data() + plan.buckets()[p.bucket].gradient_offset + p.offset * bytes;
        for (int64_t e = 0; e < p.num_elements; ++e) {
          const uint32_t bits = FloatBits(GradientValue(job.gradient_format, slot, step, t, e));
          const uint16_t half = static_cast<uint16_t>(bits >> 16);
          std::memcpy(out + e * bytes, bytes == 4 ? static_cast<const void*>(&bits) : &half, bytes);
        }
      }
    }
  }

  Command StepCommand(int64_t step) const {
    Command command;
    command.kind = CommandKind::kStep;
    command.step = step;
    command.scalars = *ComputeAdamWScalars(job.optimizer, step);
    command.apply = step == kSkipped ? 0 : 1;
    command.parity = parity;
    command.publish = command.apply ? static_cast<int32_t>(step % 2) : -1;
    return command;
  }

  void RunStep(int64_t step) {
    WriteGradients(step);
    const Command command = StepCommand(step);
    Execute(command);
    if (command.apply) parity = 1 - parity;
  }

  uint64_t Digest() {
    Command command;
    command.kind = CommandKind::kDigest;
    command.parity = parity;
    return Execute(command);
  }

  std::vector<char> Window() const { return {host.window().data(), host.window().data() + plan.window_bytes()}; }
  std::vector<char> Publication(int i) const {
    return {host.publication(i).data(), host.publication(i).data() + plan.window_bytes()};
  }
  std::vector<char> TensorInWindow(int t) const {
    const Placement& p = plan.placements()[t];
    const int64_t bytes = BytesPerElement(job.parameters[t].format);
    const char* at = host.window().data() + plan.buckets()[p.bucket].weight_offset + p.offset * bytes;
    return {at, at + (p.num_elements + 63) / 64 * 64 * bytes};
  }

  KeptMemory kept;
  const int threads;
  std::vector<std::unique_ptr<ShardStorage>> storages;
  std::vector<std::unique_ptr<Pass>> passes;
  uint64_t seq = 0;
  int32_t parity = 0;
};

void ExpectEqualsOracle(Group& group, const Oracle& oracle, const std::string& what) {
  for (int t = 0; t < static_cast<int>(group.job.parameters.size()); ++t) {
    const int storage = group.job.StorageOf(t);
    ASSERT_EQ(group.TensorInWindow(t), oracle.Stored(storage)) << what << ": " << group.job.parameters[t].name;
  }
  ASSERT_EQ(group.Digest(), oracle.Digest()) << what;
}

TEST(PassTest, EveryMeshAndThreadCount_TrainsToTheOraclesBits) {
  Oracle oracle(MixedJob("fsdp=1", 3));
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::string> names;
  for (const char* mesh :
       {"fsdp=1", "fsdp=2", "fsdp=3", "fsdp=4", "ddp=2", "ddp=2,fsdp=2", "fsdp=3,ddp=2", "ddp=2,fsdp=4"}) {
    for (int threads : {1, 2}) {
      groups.push_back(std::make_unique<Group>(MixedJob(mesh, 3), threads));
      names.push_back(std::string(mesh) + " threads=" + std::to_string(threads));
      groups.back()->PlaceWeights();
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups.back(), oracle, names.back() + " initial"));
      EXPECT_EQ(groups.back()->Publication(0), groups.back()->Window());
    }
  }
  ASSERT_GT(groups[0]->plan.buckets().size(), 4u);
  for (int64_t step = 1; step <= kSteps; ++step) {
    if (step != kSkipped) oracle.RunStep(step);
    for (size_t i = 0; i < groups.size(); ++i) {
      const std::string what = names[i] + " step " + std::to_string(step);
      groups[i]->RunStep(step);
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups[i], oracle, what));
      EXPECT_EQ(groups[i]->Publication(step % 2) == groups[i]->Window(), step != kSkipped) << what;
    }
  }
}

TEST(PassTest, Fp32GradientsAndOneSlot_TrainToTheOraclesBits) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 1);
  job.gradient_format = Format::kFp32;
  Oracle oracle(job);
  Group group(job, 2);
  group.PlaceWeights();
  for (int64_t step = 1; step <= 2; ++step) {
    oracle.RunStep(step);
    group.RunStep(step);
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, "step " + std::to_string(step)));
  }
}

TEST(PassTest, SkippedStep_ChangesNoByte) {
  Group group(MixedJob("fsdp=2", 2), 2);
  group.PlaceWeights();
  group.RunStep(1);
  const std::vector<char> window = group.Window(), first = group.Publication(0), second = group.Publication(1);
  const uint64_t digest = group.Digest();
  const int64_t gathered = group.passes[0]->gathered_bytes();
  group.RunStep(kSkipped);
  EXPECT_EQ(group.Window(), window);
  EXPECT_EQ(group.Publication(0), first);
  EXPECT_EQ(group.Publication(1), second);
  EXPECT_EQ(group.Digest(), digest);
  EXPECT_EQ(group.passes[0]->gathered_bytes(), gathered);
}

TEST(PassTest, ReplicasShareTheWritingOfTheWindow) {
  Group one(MixedJob("fsdp=1", 1), 1), two(MixedJob("ddp=2", 1), 1);
  for (Group* group : {&one, &two}) {
    group->PlaceWeights();
    group->RunStep(1);
  }
  const int64_t a = two.passes[0]->gathered_bytes(), b = two.passes[1]->gathered_bytes();
  EXPECT_GT(a, 0);
  EXPECT_GT(b, 0);
  EXPECT_EQ(a + b, one.passes[0]->gathered_bytes());
}

// Executing a finished command again, from the same words, changes nothing: also after a restart.
TEST(PassTest, FinishedCommand_RepeatedIsTheSame) {
  Group group(MixedJob("fsdp=2", 2), 1);
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
  Oracle oracle(group.job);
  oracle.RunStep(1);
  oracle.RunStep(2);
  EXPECT_EQ(group.Window(), window);
  ExpectEqualsOracle(group, oracle, "repeated");
}

// Where the three streams of a range begin, spare included, and their bytes per element. Moves with a restart.
struct Streams {
  Streams(const Group& group, int range) {
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
  Image(const Group& group, int range) {
    const Streams streams(group, range);
    const int64_t places = group.storages[0]->ranges()[range].num_elements + kChunkElements;
    for (int s = 0; s < 3; ++s) copies[s].assign(streams.at[s], streams.at[s] + places * streams.bytes[s]);
  }
  std::vector<char> copies[3];
};

// Memory as a worker leaves it that is killed in the middle of the chunk after `done` whole ones: finished chunks are
// new, the open one is torn, the window holds the old weights from there on.
void Kill(Group& group, int range, const Image& before, const Image& after, const Command& command, int64_t done) {
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

TEST(PassTest, KilledInAnyChunk_TheRestartedWorkerFinishesWithTheSameBits) {
  Group group(MixedJob("fsdp=1", 2), 1);
  group.PlaceWeights();
  Oracle oracle(group.job);
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
