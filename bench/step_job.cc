#include "bench/step_job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kTensorElements = int64_t{4} << 20;

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Four bf16 numbers a word, of random sign and mantissa, between 2^-11 and 2^-9.
void FillGradients(const Segment& slot, int64_t num_bytes, uint64_t seed) {
  auto* words = reinterpret_cast<uint64_t*>(slot.data());
  for (int64_t i = 0; i < num_bytes / 8; ++i) {
    words[i] = (Mix(seed + static_cast<uint64_t>(i)) & 0x80FF80FF80FF80FFu) | 0x3A003A003A003A00u;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepJob>> StepJob::Create(Memory& memory, int64_t num_elements) {
  JobSpec spec;
  spec.name = "bench-step";
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(absl::StrCat("fsdp=", kRanks)));
  spec.num_slots = kStepSlots;
  spec.gradient_format = Format::kBf16;
  spec.seed = 7;
  spec.publish_every = kStepPublishEvery;
  for (int64_t i = 0; i < num_elements / kTensorElements; ++i) {
    spec.parameters.push_back({absl::StrCat("layers.", i, ".weight"), {kTensorElements}, WeightFormat::kBf16Sr, ""});
  }
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  ASSIGN_OR_RETURN(HostMemory host, HostMemory::Create(memory, spec.name, kStepSlots, plan));
  auto job = std::make_unique<StepJob>(StepJob{std::move(spec), std::move(plan), std::move(host), {}});
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSIGN_OR_RETURN(ShardStorage storage, ShardStorage::Open(memory, absl::StrCat("shard-", rank), job->plan,
                                                              job->plan.PlaceOf(Rank(rank)).shard));
    job->shards.push_back(std::move(storage));
  }
  for (int s = 0; s < kStepSlots; ++s) {
    FillGradients(job->host.slot(s), job->plan.gradient_window_bytes(), uint64_t{1} << (40 + s));
  }
  return job;
}

std::vector<float> StepJob::InitialPiece(int rank) const {
  std::vector<float> piece;
  piece.reserve(plan.InitialPieceBytes() / sizeof(float));
  for (const Bucket& bucket : plan.buckets()) {
    for (int64_t i = 0; i < bucket.shard_elements; ++i) {
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
