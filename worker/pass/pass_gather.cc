// Of Pass: weights on their way into windows and publications in codes, and buckets of jobs with bucket residency.
#include <algorithm>
#include <cstring>

#include "core/base/status.h"
#include "worker/pass/pass.h"

namespace shardmesh {

GatheredRun Pass::GatheredOf(int range, int parity, const ChunkRun& run) const {
  const Bucket& bucket = plan_.buckets()[storage_.ranges()[range].bucket];
  GatheredRun gathered;
  gathered.gather = bucket.gather;
  gathered.blocks = &plan_.placements()[run.tensor].scales;
  gathered.format = bucket.format();
  const StoredRun weights = storage_.weights(range, parity, run.offset);
  gathered.values = weights.codes;
  if (bucket.weights == WeightFormat::kInt8Row) {
    gathered.row_scales = static_cast<const float*>(weights.extra);
    gathered.row_elements = bucket.row_elements;
  }
  if (bucket.weights == WeightFormat::kNf4) gathered.nf4_scales = static_cast<const float*>(weights.extra);
  gathered.first_element = run.first_element;
  gathered.num_elements = run.num_elements;
  if (!nf4_means_.empty()) gathered.mean = nf4_means_[run.tensor];
  return gathered;
}

void Pass::FindNf4Means(const Command& command) {
  const std::atomic<uint32_t>* const maxima = Maxima(host_.control(), plan_);
  team_.ForEach(static_cast<int>(nf4_tensors_.size()), [&](int i) {
    const Placement& tensor = plan_.placements()[nf4_tensors_[i]];
    const bool wanted = command.kind == CommandKind::kGatherBucket
                            ? tensor.bucket == command.bucket
                            : !plan_.buckets()[tensor.bucket].frozen || command.first != 0;
    if (!wanted) return;
    nf4_means_[nf4_tensors_[i]] = Nf4Mean(maxima + tensor.first_maximum, tensor.scales.num_blocks);
  });
}

void Pass::RaiseRun(int range, int parity, const ChunkRun& run) {
  RaiseMaxima(GatheredOf(range, parity, run),
              Maxima(host_.control(), plan_) + plan_.placements()[run.tensor].first_maximum);
}

void Pass::QuantizeRange(const Command& command, int range) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const std::atomic<uint32_t>* const maxima = Maxima(host_.control(), plan_);
  const bool gathers_bucket = command.kind == CommandKind::kGatherBucket;
  int64_t written = 0;
  for (int64_t chunk = share_.index; chunk < r.num_chunks(); chunk += share_.count) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      const Placement& tensor = plan_.placements()[run.tensor];
      const Segment* segments[1 + kMaxPublications];
      GatheredPlace places[1 + kMaxPublications];
      const int num_places = Places(command, r.bucket, segments);
      for (int p = 0; p < num_places; ++p) {
        char* const begin = segments[p]->data() + bucket.weight_offset;
        char* const codes = begin + bucket.CodeOffset(r.bucket_begin + run.offset);
        places[p] = {reinterpret_cast<uint8_t*>(codes), begin + tensor.scale_offset};
      }
      if (num_places == 0) continue;
      EncodeGathered(GatheredOf(range, command.parity, run), maxima + tensor.first_maximum, places, num_places);
      const bool in_window = gathers_bucket || (command.kind == CommandKind::kQuantize && InWindow(r.bucket));
      if (command.first == 0 && in_window) written += bucket.CodeOffset(run.num_elements);
    }
  }
  gathered_bytes_.fetch_add(written, std::memory_order_relaxed);
}

// The window has the whole version in the bytes that are published; each rank of the host copies as much of it as
// another.
void Pass::PublishShare(const Command& command) {
  constexpr int64_t kPiece = 1 << 20;
  const int64_t bytes = plan_.window_bytes(), pieces = (bytes + kPiece - 1) / kPiece;
  const int64_t rank = rank_.value() - ranks_.first(), ranks = ranks_.per_host;
  const int64_t begin = pieces * rank / ranks, end = pieces * (rank + 1) / ranks;
  team_.ForEach(static_cast<int>(end - begin), [&](int i) {
    const int64_t at = (begin + i) * kPiece;
    std::memcpy(host_.publication(command.publish).data() + at, host_.window().data() + at,
                std::min(kPiece, bytes - at));
  });
}

// Chunk by chunk, so that the slots' streams are read as the step would.
void Pass::ReduceRange(int range) {
  const StorageRange& r = storage_.ranges()[range];
  const void* slots[kMaxSlots];
  const int64_t bytes = BytesPerElement(job_.gradient_format);
  const int64_t begin = plan_.buckets()[r.bucket].gradient_offset + r.bucket_begin * bytes;
  for (int64_t done = 0; done < r.num_elements; done += kChunkElements) {
    for (int s = 0; s < job_.num_slots; ++s) slots[s] = host_.slot(s).data() + begin + done * bytes;
    SlotSumRun run;
    run.slots = slots;
    run.num_slots = job_.num_slots;
    run.sum = sums_->At(r.bucket, r.bucket_begin + done);
    run.num_elements = std::min(kChunkElements, r.num_elements - done);
    run.streamed = true;
    sum_(job_.gradient_format, run);
  }
}

void Pass::GatherRange(const Command& command, int range) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  if (bucket.quantized()) return QuantizeRange(command, range);
  const bool gathers_bucket = command.kind == CommandKind::kGatherBucket;
  const Segment& to = gathers_bucket ? host_.window() : host_.publication(command.publish);
  char* const weights = to.data() + bucket.weight_offset;
  int64_t written = 0;
  for (int64_t chunk = share_.index; chunk < r.num_chunks(); chunk += share_.count) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      const int64_t bytes = bucket.CodeOffset(run.num_elements);
      std::memcpy(weights + bucket.CodeOffset(r.bucket_begin + run.offset),
                  storage_.weights(range, command.parity, run.offset).codes, bytes);
      if (bucket.weights == WeightFormat::kInt8Row) CopyScales(command, range, command.parity, run);
      if (gathers_bucket) written += bytes;
    }
  }
  gathered_bytes_.fetch_add(written, std::memory_order_relaxed);
}

absl::Status Pass::GiveBackGradients(const Command& command) {
  if (!plan_.bucketed()) return absl::OkStatus();
  if (plan_.pulled()) return GiveBackWindows(command);
  if (command.kind != CommandKind::kReduceBucket) return absl::OkStatus();
  const int64_t begin = plan_.buckets()[command.bucket].gradient_offset;
  for (int s = 0; s < job_.num_slots; ++s) {
    RETURN_IF_ERROR(host_.slot(s).Punch(begin, plan_.GradientPageBytes(command.bucket)));
  }
  return absl::OkStatus();
}

absl::Status Pass::GiveBackWeights(int bucket) {
  RETURN_IF_ERROR(host_.window().Punch(plan_.buckets()[bucket].weight_offset, plan_.WeightPageBytes(bucket)));
  absent_.Show(bucket, host_.window().data());
  return absl::OkStatus();
}

}  // namespace shardmesh
