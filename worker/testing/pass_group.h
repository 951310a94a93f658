// PassGroup: all workers of a job, each with its storage and its pass, taking commands one after the other, and the
// gradients and weights of training_oracle.h. Tests only.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/matchers.h"
#include "worker/control/group_table.h"
#include "worker/control/residency.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/pass.h"
#include "worker/step/gradient_norm.h"
#include "worker/testing/small_job.h"
#include "worker/testing/training_oracle.h"

namespace shardmesh {

inline constexpr int kSkippedStep = 3;  // its command does not apply it

// Memory that outlives the worker which asked for it, as a node process holds it.
class RetainedMemory final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    if (retained_.count(name) == 0) {
      ASSIGN_OR_RETURN(retained_[name], Segment::Create(name, num_bytes, data_offset));
    }
    return Segment::Map(UniqueFd(dup(retained_[name].fd())), num_bytes, data_offset, Segment::Access::kReadWrite);
  }

 private:
  std::map<std::string, Segment> retained_;
};

struct PassGroup : TestHost {
  PassGroup(const JobSpec& spec, int threads) : TestHost(spec), threads(threads) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      storages.push_back(nullptr);
      sums.push_back(nullptr);
      passes.push_back(nullptr);
      Restart(r);
    }
  }

  // A new incarnation of a worker over the same memory.
  void Restart(int r) {
    passes[r].reset();
    storages[r] = std::make_unique<ShardStorage>(
        *ShardStorage::Open(retained, "shard-" + std::to_string(r), plan, plan.PlaceOf(Rank(r)).shard));
    sums[r] = std::make_unique<GradientSums>(
        *GradientSums::Open(retained, "sums-" + std::to_string(r), plan, plan.PlaceOf(Rank(r)).shard));
    passes[r] = std::make_unique<Pass>(job, plan, plan.PlaceOf(Rank(r)), host, *storages[r], threads, &trace,
                                       GradientSums::Has(plan) ? sums[r].get() : nullptr);
    passes[r]->StreamCopies(r % 2 == 1);  // either way writes the same
  }

  uint64_t Execute(const Command& command) {
    Decide(command);
    uint64_t sum = 0;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const uint64_t digest = passes[r]->Execute(command, seq, nullptr);
      if (plan.PlaceOf(Rank(r)).replica == 0) sum += digest;
    }
    return sum;
  }

  // As the lead does (worker/step/step_commands.cc).
  void Decide(const Command& command) {
    ++seq;
    if (command.kind != CommandKind::kInit && command.kind != CommandKind::kStep) return;
    const int64_t count =
        command.kind == CommandKind::kInit ? plan.scales().num_maxima : plan.scales().num_stepped_maxima;
    for (int64_t i = 0; i < count; ++i) Maxima(host.control(), plan)[i] = 0;
  }

  // With bucket residency: what is decided when all slots have declared a bucket, and when a trainer acquired it.
  Command BucketCommand(CommandKind kind, int bucket) const {
    Command command;
    command.kind = kind;
    command.bucket = bucket;
    command.parity = parity;
    return command;
  }
  void Reduce() {
    for (int b = 0; b < static_cast<int>(plan.buckets().size()) && plan.bucketed(); ++b) {
      if (plan.buckets()[b].frozen) continue;
      Execute(BucketCommand(CommandKind::kReduceBucket, b));
      if (!passes[0]->GiveBackGradients(BucketCommand(CommandKind::kReduceBucket, b)).ok())
        ADD_FAILURE();  // EXPECT_OK would allocate
    }
  }
  void Hold(int bucket) {
    Execute(BucketCommand(CommandKind::kGatherBucket, bucket));
    ResidencyTable(host.control(), plan).bucket(bucket).held.store(kBucketHeld);
  }
  void Drop(int bucket) {
    ResidencyTable(host.control(), plan).bucket(bucket).held.store(kBucketAbsent);
    if (!passes[0]->GiveBackWeights(bucket).ok()) ADD_FAILURE();
  }
  void HoldAll() {
    for (int b = 0; b < static_cast<int>(plan.buckets().size()) && plan.bucketed(); ++b) Hold(b);
  }

  // What follows a command that wrote weights, where some are gathered in codes.
  void Gather(const Command& written) {
    if (written.kind == CommandKind::kInit ? !plan.scales().quantized : !plan.scales().steps_quantized) return;
    Command command = written;
    command.kind = CommandKind::kQuantize;
    command.parity = parity;
    Execute(command);
  }

  void PlaceWeights() {
    Command command;
    command.kind = CommandKind::kInit;
    command.first = 1;
    command.publish = 0;
    Decide(command);
    for (int r = 0; r < plan.num_ranks(); ++r) {
      passes[r]->Execute(command, seq, InitialShard(plan.PlaceOf(Rank(r)).shard).data());
    }
    Gather(command);
  }

  // With something in its padding, which must not arrive.
  std::vector<float> InitialShard(int shard) const {
    std::vector<float> initial;
    for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
      const Bucket& bucket = plan.buckets()[b];
      const int64_t size = bucket.size(shard), begin = bucket.begin(shard), at = initial.size();
      initial.resize(at + size, 99.0f);
      for (const auto& run : plan.RunsIn(b, begin, begin + size)) {
        for (int64_t e = 0; e < run.num_elements; ++e) {
          initial[at + run.bucket_offset - begin + e] = InitialValue(run.tensor, run.first_element + e);
        }
      }
    }
    return initial;
  }

  void WriteGradients(int64_t step) {
    for (int slot = 0; slot < job.num_slots; ++slot) WriteSlot(slot, step, host.slot(slot).data());
  }
  void WriteSlot(int slot, int64_t step, char* window) const {
    for (int t = 0; t < static_cast<int>(job.parameters.size()); ++t) {
      if (!job.parameters[t].tied_to.empty() || job.parameters[t].frozen) continue;
      const Placement& p = plan.placements()[t];
      const int64_t bytes = BytesPerElement(job.gradient_format);
      char* out = window + plan.buckets()[p.bucket].gradient_offset + p.offset * bytes;
      for (int64_t e = 0; e < p.num_elements; ++e) {
        const uint32_t bits = FloatBits(GradientValue(job.gradient_format, slot, step, t, e));
        const uint16_t half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(out + e * bytes, bytes == 4 ? static_cast<const void*>(&bits) : &half, bytes);
      }
    }
  }

  // What a step's command reads of its parameter groups.
  void WriteGroups(const Command& command, const HostMemory& to) const {
    const GroupTable groups(to.control(), plan);
    for (int g = 0; g < job.num_groups(); ++g) {
      OptimizerHyper hyper = job.group(g);
      if (rates) hyper.lr = rates(g, command.step);
      groups.scalars(command.groups)[g] = *ComputeStepScalars(hyper, command.step);
      groups.rates(command.groups)[g] = hyper.lr;
    }
  }

  Command StepCommand(int64_t step) const {
    Command command;
    command.kind = CommandKind::kStep;
    command.step = step;
    command.groups = static_cast<int32_t>(step % 2);
    WriteGroups(command, host);
    command.divide_scale = static_cast<float>(1.0 / job.num_slots);
    command.apply = step == kSkippedStep ? 0 : 1;
    command.parity = parity;
    command.publish = command.apply ? static_cast<int32_t>(step % 2) : -1;
    return command;
  }

  void RunStep(int64_t step) {
    WriteGradients(step);
    Reduce();
    Command command = StepCommand(step);
    if (command.apply && job.clip_norm > 0) {
      Command norm = command;
      norm.kind = CommandKind::kNorm;
      Execute(norm);
      command.clip = ClipFactor(job.clip_norm, GradientNorm(job, plan, SquareSums(host.control())));
    }
    Execute(command);
    if (!command.apply) return;
    parity = 1 - parity;
    Gather(command);
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
  // Codes, and scales behind them.
  std::vector<char> TensorIn(const Segment& segment, int t) const {
    const Placement& p = plan.placements()[t];
    const Bucket& bucket = plan.buckets()[p.bucket];
    const char* const begin = segment.data() + bucket.weight_offset;
    const char* const codes = begin + bucket.CodeOffset(p.offset);
    const char* const scales = begin + p.scale_offset;
    std::vector<char> bytes(codes, codes + bucket.CodeOffset(p.num_elements));
    bytes.insert(bytes.end(), scales, scales + GatheredScalesBytes(bucket.gather, p.scales.num_blocks));
    return bytes;
  }
  std::vector<char> TensorInWindow(int t) const { return TensorIn(host.window(), t); }

  GroupRates rates;  // by which steps are taken; unset: the job's
  RetainedMemory retained;
  Trace trace;
  const int threads;
  std::vector<std::unique_ptr<ShardStorage>> storages;
  std::vector<std::unique_ptr<GradientSums>> sums;
  std::vector<std::unique_ptr<Pass>> passes;
  uint64_t seq = 0;
  int32_t parity = 0;
};

// `oracle`: a TrainingOracle or a NumericsOracle.
template <class Oracle>
void ExpectEqualsOracle(PassGroup& group, const Oracle& oracle, const std::string& what) {
  for (int t = 0; t < static_cast<int>(group.job.parameters.size()); ++t) {
    const int storage = group.job.StorageOf(t);
    ASSERT_EQ(group.TensorInWindow(t), oracle.Stored(storage)) << what << ": " << group.job.parameters[t].name;
  }
  ASSERT_EQ(group.Digest(), oracle.Digest()) << what;
}

}  // namespace shardmesh
