#include "bench/step/step_job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Four bf16 numbers a word, of random sign and mantissa, between 2^-11 and 2^-9.
void FillBf16(const Segment& slot, int64_t num_bytes, uint64_t seed) {
  auto* words = reinterpret_cast<uint64_t*>(slot.data());
  for (int64_t i = 0; i < num_bytes / 8; ++i) {
    words[i] = (Mix(seed + static_cast<uint64_t>(i)) & 0x80FF80FF80FF80FFu) | 0x3A003A003A003A00u;
  }
}

// Two fp32 numbers a word, of random sign and mantissa, between 2^-10 and 2^-9; in every `num_slots`th word, another
// one in each slot, 2^3 times as large: it decides the sum's sign, and no sum of up to 4 slots cancels.
void FillFp32(const Segment& slot, int64_t num_bytes, uint64_t seed, int index, int num_slots) {
  auto* words = reinterpret_cast<uint64_t*>(slot.data());
  for (int64_t i = 0; i < num_bytes / 8; ++i) {
    words[i] = (Mix(seed + static_cast<uint64_t>(i)) & 0x807FFFFF807FFFFFu) |
               (i % num_slots == index ? 0x3C0000003C000000u : 0x3A8000003A800000u);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepJob>> StepJob::Create(Memory& memory, int64_t num_elements, const StepShape& shape) {
  JobSpec spec;
  spec.name = "bench-step";
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(absl::StrCat("fsdp=", shape.ranks)));
  spec.num_slots = shape.slots;
  spec.gradient_format = shape.formats.gradients;
  spec.seed = 7;
  spec.publish_every = shape.publish_every;
  for (int64_t i = 0; i < num_elements / kTensorElements; ++i) {
    spec.parameters.push_back(
        {absl::StrCat("layers.", i, ".weight"), {kTensorElements}, shape.formats.weights, "", shape.formats.states});
  }
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  ASSIGN_OR_RETURN(HostMemory host, HostMemory::Create(memory, spec.name, shape.slots, plan));
  auto job = std::make_unique<StepJob>(StepJob{std::move(spec), std::move(plan), std::move(host), {}});
  for (int rank = 0; rank < shape.ranks; ++rank) {
    ASSIGN_OR_RETURN(ShardStorage storage, ShardStorage::Open(memory, absl::StrCat("shard-", rank), job->plan,
                                                              job->plan.PlaceOf(Rank(rank)).shard));
    job->shards.push_back(std::move(storage));
  }
  for (int s = 0; s < shape.slots; ++s) {
    const uint64_t seed = uint64_t{1} << (40 + s);
    const int64_t bytes = job->plan.gradient_window_bytes();
    if (shape.formats.gradients == Format::kFp32) {
      FillFp32(job->host.slot(s), bytes, seed, s, shape.slots);
    } else {
      FillBf16(job->host.slot(s), bytes, seed);
    }
  }
  return job;
}

std::vector<float> StepJob::InitialShard(int rank) const {
  std::vector<float> piece;
  const int shard = plan.PlaceOf(Rank(rank)).shard;
  piece.reserve(plan.InitialShardBytes(shard) / sizeof(float));
  for (const Bucket& bucket : plan.buckets()) {
    for (int64_t i = 0; i < bucket.size(shard); ++i) {
      piece.push_back(static_cast<float>((i * 7919 + rank * 31) % 4093 - 2046) * 0x1p-14f);
    }
  }
  return piece;
}

int64_t StepJob::FusedBytes(bool published) const {
  constexpr int64_t kGradient = 2, kWeight = 2, kMoment = 4;
  const int64_t window_writes = published ? 2 : 1;
  return plan.total_elements() * (kStepSlots * kGradient + 2 * kWeight + window_writes * kWeight + 2 * 2 * kMoment);
}

}  // namespace shardmesh::bench
