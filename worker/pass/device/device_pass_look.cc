// Of DevicePass: the second look at gradients, as on processors (worker/pass/pass_check.cc). Slots are memory that
// trainers write, and a process that has lost its slot may write there still (ControlBlock::looks_again). All gradients
// were finite when they were declared, so the sums of squares of what a command read are numbers. The device sums, and
// the host looks.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/format/finite.h"
#include "worker/pass/check.h"
#include "worker/pass/device/device_pass.h"

namespace shardmesh {
namespace {

bool AllFinite(const float* begin, const float* end) {
  bool finite = true;
  for (const float* sum = begin; sum != end; ++sum) finite &= std::isfinite(*sum);  // no branch: in vectors
  return finite;
}

}  // namespace

// A sum of squares is infinite for numbers above 1.8e19, too.
absl::StatusOr<bool> DevicePass::AreNumbers(const Bucket& bucket, int64_t element, int64_t num_elements) const {
  const int64_t bytes = BytesPerElement(job_.gradient_format);
  std::vector<float> gradients(static_cast<size_t>(num_elements));  // at least as large as any format needs
  for (int s = 0; s < job_.num_slots; ++s) {
    const uint8_t* const from = host_.device()->slots[s].data() + bucket.gradient_offset + element * bytes;
    RETURN_IF_ERROR(host_.device()->Copy(gradients.data(), from, num_elements * bytes));
    if (!AllFiniteBelow(gradients.data(), job_.gradient_format, num_elements, job_.num_slots)) return false;
  }
  return true;
}

// A norm's sums are in the control block, of jobs that clip; a step's are here.
absl::Status DevicePass::OpenLook() {
  if (!look_at_.empty()) return absl::OkStatus();
  std::vector<int64_t> at(plan_.buckets().size());
  int64_t sums = 0, begin = 0, end = 0;
  int bucket = -1;
  for (const StorageRange& range : cut_.ranges()) {  // a bucket's follow each other
    if (range.frozen) continue;
    if (range.bucket != bucket) {
      sums += end - begin;
      bucket = range.bucket;
      begin = end = range.bucket_begin / kBlockElements;
      at[bucket] = sums - begin;
    }
    end = (range.bucket_begin + range.num_elements) / kBlockElements;
  }
  sums += end - begin;
  ASSIGN_OR_RETURN(look_sums_, PinnedBlock::Create(steps_, sums * static_cast<int64_t>(sizeof(float))));
  look_at_ = std::move(at);
  return absl::OkStatus();
}

const float* DevicePass::LookSums(int bucket) const {
  return reinterpret_cast<const float*>(look_sums_.data()) + look_at_[bucket];
}

// Of a chunk whose sums are not all finite, the first run whose gradients are no numbers.
absl::StatusOr<std::optional<Damage>> DevicePass::LookAt(int range, int64_t chunk) const {
  const StorageRange& r = cut_.ranges()[range];
  for (int i = cut_.first_run(range, chunk); i < cut_.first_run(range, chunk + 1); ++i) {
    const ChunkRun& run = cut_.runs(range)[i];
    const int64_t element = r.bucket_begin + run.offset;
    ASSIGN_OR_RETURN(const bool numbers, AreNumbers(plan_.buckets()[r.bucket], element, run.num_elements));
    if (!numbers) return Damage{Damage::kGradients, run.tensor, run.first_element};
  }
  return std::nullopt;
}

// Replicas share the chunks, as they do the sums (SquarePassRange).
absl::Status DevicePass::LookAgain(const std::function<const float*(int bucket)>& sums) {
  for (int range = 0; range < static_cast<int>(cut_.ranges().size()); ++range) {
    const StorageRange& r = cut_.ranges()[range];
    if (r.frozen) continue;
    const float* const of_range = sums(r.bucket) + r.bucket_begin / kBlockElements;
    const int64_t blocks = r.num_elements / kBlockElements, of_chunk = r.chunk_elements / kBlockElements;
    for (int64_t chunk = share_.index; chunk < r.num_chunks(); chunk += share_.count) {
      if (AllFinite(of_range + chunk * of_chunk, of_range + std::min((chunk + 1) * of_chunk, blocks))) continue;
      ASSIGN_OR_RETURN(const std::optional<Damage> damage, LookAt(range, chunk));
      if (damage.has_value()) TellDamage(*damage, host_.control()->members[rank_.value()].damage);
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
