#include "bench/step/three_passes.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

// Its own multiple of 64 KiB + 4 KiB for every stream, as the product does.
absl::StatusOr<Segment> NewSegment(const char* name, int64_t bytes, int stream) {
  return Segment::Create(name, bytes + StreamOffset(stream), StreamOffset(stream));
}

OptimizerContext ContextOf(const JobSpec& spec, const Command& command, Format gradients) {
  OptimizerContext context;
  context.hyper = spec.optimizer;
  context.scalars = ComputeStepScalars(spec.optimizer, command.step).value();
  context.weights = WeightFormat::kBf16Sr;
  context.gradients = gradients;
  context.seed = spec.seed;
  context.step = command.step;
  return context;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ThreePasses>> ThreePasses::Create(const StepJob& job) {
  std::unique_ptr<ThreePasses> passes(new ThreePasses(job));
  ASSIGN_OR_RETURN(passes->weights_, NewSegment("weights", job.plan.window_bytes(), 3));
  for (int rank = 0; rank < kRanks; ++rank) {
    const int shard = job.plan.PlaceOf(Rank(rank)).shard;
    std::vector<Piece> pieces;
    int64_t at = 0;
    for (int b = 0; b < static_cast<int>(job.plan.buckets().size()); ++b) {
      const Bucket& bucket = job.plan.buckets()[b];
      for (const Run& run : job.plan.RunsIn(b, bucket.begin(shard), bucket.end(shard))) {
        pieces.push_back({b, run, at});
        at += run.num_elements;
      }
    }
    passes->pieces_.push_back(std::move(pieces));
    const int64_t bytes = at * static_cast<int64_t>(sizeof(float));
    ASSIGN_OR_RETURN(Segment m, NewSegment("moment1", bytes, 1));
    ASSIGN_OR_RETURN(Segment v, NewSegment("moment2", bytes, 2));
    ASSIGN_OR_RETURN(Segment sum, NewSegment("sum", bytes, 4));
    passes->moment1_.push_back(std::move(m));
    passes->moment2_.push_back(std::move(v));
    passes->sum_.push_back(std::move(sum));
  }
  return passes;
}

void ThreePasses::Initialize() {
  std::memcpy(weights_.data(), job_.host.window().data(), job_.plan.window_bytes());
  for (int rank = 0; rank < kRanks; ++rank) {
    std::memset(moment1_[rank].data(), 0, moment1_[rank].data_bytes());
    std::memset(moment2_[rank].data(), 0, moment2_[rank].data_bytes());
  }
}

char* ThreePasses::NewPrivateCopy(const StepJob& job) {
  const int64_t bytes = job.plan.window_bytes();
  void* copy = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return nullptr;
  madvise(copy, bytes, MADV_HUGEPAGE);
  std::memset(copy, 1, bytes);
  return static_cast<char*>(copy);
}

void ThreePasses::Step(WorkerTeam::Member& member, int64_t step, char* private_copy) {
  const int rank = member.rank();
  Command command;
  command.step = step;
  float* const sum = reinterpret_cast<float*>(sum_[rank].data());
  for (const Piece& piece : pieces_[rank]) {
    const void* gradients[kStepSlots];
    for (int s = 0; s < kStepSlots; ++s) {
      gradients[s] =
          job_.host.slot(s).data() + job_.plan.buckets()[piece.bucket].gradient_offset + piece.run.bucket_offset * 2;
    }
    reduce_(Format::kBf16, {gradients, kStepSlots, 1.0f / kStepSlots, sum + piece.at, piece.run.num_elements});
  }
  member.Barrier();
  const OptimizerContext context = ContextOf(job_.spec, command, Format::kFp32);
  for (const Piece& piece : pieces_[rank]) {
    const void* gradient = sum + piece.at;
    OptimizerRun run;
    run.gradients = &gradient;
    run.num_slots = 1;
    run.weights_in = run.weights_out = {
        weights_.data() + job_.plan.buckets()[piece.bucket].weight_offset + piece.run.bucket_offset * 2, nullptr};
    run.states_in[0] = run.states_out[0] = {reinterpret_cast<float*>(moment1_[rank].data()) + piece.at, nullptr};
    run.states_in[1] = run.states_out[1] = {reinterpret_cast<float*>(moment2_[rank].data()) + piece.at, nullptr};
    run.num_elements = piece.run.num_elements;
    run.first_element = static_cast<uint64_t>(piece.run.first_element);
    run.tensor = static_cast<uint32_t>(piece.run.tensor);
    step_(context, run);
  }
  member.Barrier();
  std::memcpy(private_copy, weights_.data(), job_.plan.window_bytes());
}

bool ThreePasses::Gathered(const char* private_copy) const {
  return std::memcmp(private_copy, weights_.data(), job_.plan.window_bytes()) == 0;
}

absl::Status ThreePasses::CompareShard(int rank, int parity) const {
  const ShardStorage& storage = job_.shards[rank];
  int64_t at = 0;
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    const int64_t n = storage.ranges()[range].num_elements;
    const auto* m = reinterpret_cast<const float*>(moment1_[rank].data()) + at;
    const auto* v = reinterpret_cast<const float*>(moment2_[rank].data()) + at;
    if (std::memcmp(storage.state(0, range, parity, 0).codes, m, n * sizeof(float)) != 0 ||
        std::memcmp(storage.state(1, range, parity, 0).codes, v, n * sizeof(float)) != 0) {
      return absl::InternalError(absl::StrCat("the optimizer states of rank ", rank, " differ in range ", range));
    }
    at += n;
  }
  return absl::OkStatus();
}

absl::Status ThreePasses::CompareWithJob(int parity) const {
  if (std::memcmp(weights_.data(), job_.host.window().data(), job_.plan.window_bytes()) != 0) {
    return absl::InternalError("the weights of the engine's step and of the three passes differ");
  }
  for (int rank = 0; rank < kRanks; ++rank) RETURN_IF_ERROR(CompareShard(rank, parity));
  return absl::OkStatus();
}

void StepInPlace(StepJob& job, int rank, const Command& command) {
  static const OptimizerStepFn kernel = BestOptimizerStep();
  const OptimizerContext context = ContextOf(job.spec, command, Format::kBf16);
  ShardStorage& storage = job.shards[rank];
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    const StorageRange& r = storage.ranges()[range];
    const Bucket& bucket = job.plan.buckets()[r.bucket];
    for (const ChunkRun& part : storage.runs(range)) {
      const void* gradients[kStepSlots];
      const int64_t at = (r.bucket_begin + part.offset) * 2;
      for (int s = 0; s < kStepSlots; ++s) gradients[s] = job.host.slot(s).data() + bucket.gradient_offset + at;
      OptimizerRun run;
      run.gradients = gradients;
      run.num_slots = kStepSlots;
      run.divide_scale = 1.0f / kStepSlots;
      run.weights_in = run.weights_out = storage.weights(range, command.parity, part.offset);
      for (int s = 0; s < 2; ++s)
        run.states_in[s] = run.states_out[s] = storage.state(s, range, command.parity, part.offset);
      run.copies[0] = job.host.window().data() + bucket.weight_offset + at;
      run.num_copies = 1;
      run.num_elements = part.num_elements;
      run.first_element = static_cast<uint64_t>(part.first_element);
      run.tensor = static_cast<uint32_t>(part.tensor);
      kernel(context, run);
    }
  }
}

}  // namespace shardmesh::bench
