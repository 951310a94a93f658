// Of DevicePass: the second look at gradients, as on processors (worker/pass/pass_check.cc): slots are memory that
// trainers write, and a process that has lost its slot may write there still (ControlBlock::looks_again). All were finite
// when they were declared, so the sums of squares of what a command read are numbers. The device sums, and the host looks.
#include <cmath>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/types/span.h"
#include "core/base/status.h"
#include "core/format/finite.h"
#include "worker/pass/check.h"
#include "worker/pass/device/device_pass.h"

namespace shardmesh {

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

// Replicas share the chunks, as they do the sums (SquarePassRange).
absl::Status DevicePass::LookAgain(const std::function<const float*(int bucket)>& sums) {
  for (int r = 0; r < static_cast<int>(cut_.ranges().size()); ++r) {
    const StorageRange& range = cut_.ranges()[r];
    if (range.frozen) continue;
    const Bucket& bucket = plan_.buckets()[range.bucket];
    for (int64_t chunk = share_.index; chunk < range.num_chunks(); chunk += share_.count) {
      for (int i = cut_.first_run(r, chunk); i < cut_.first_run(r, chunk + 1); ++i) {
        const ChunkRun& run = cut_.runs(r)[i];
        const int64_t element = range.bucket_begin + run.offset;
        const int64_t blocks = (run.num_elements + kBlockElements - 1) / kBlockElements;
        const auto of_run =
            absl::MakeConstSpan(sums(range.bucket) + element / kBlockElements, static_cast<size_t>(blocks));
        if (absl::c_all_of(of_run, [](float sum) { return std::isfinite(sum); })) continue;
        ASSIGN_OR_RETURN(const bool numbers, AreNumbers(bucket, element, run.num_elements));
        if (numbers) continue;
        TellDamage({Damage::kGradients, run.tensor, run.first_element}, host_.control()->members[rank_.value()].damage);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
