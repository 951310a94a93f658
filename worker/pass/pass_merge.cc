// Of Pass: the sum of a subtree of slots, from what there is of it: results in windows of trainers, and sums of some.
#include <algorithm>

#include "core/base/reduction.h"
#include "core/base/status.h"
#include "worker/pass/pass.h"
#include "worker/step/pulled_slots.h"

namespace shardmesh {
namespace {
constexpr int64_t kElements = 1024;      // at a time: what lies between stays in the first cache
constexpr int64_t kUntilLook = 1 << 16;  // elements between two looks at what others want: some 20 us
constexpr int kMaxDepth = 8;             // of a tree over kMaxSlots leaves, its root included
}  // namespace

// One range of one command.
class Pass::Merger {
 public:
  Merger(const Pass& pass, const Command& command, const Frontier& sums, int range)
      : pass_(pass), sums_(sums), range_(pass.storage_.ranges()[range]), partial_(command.partial) {}

  // Elements [begin, begin + count) of the range. `scratch`: 2 * kMaxDepth * kElements numbers.
  void Sum(SlotRange slots, int64_t begin, int64_t count, float* scratch) {
    begin_ = begin;
    count_ = count;
    Node(slots, Of(partial_), scratch);
  }

 private:
  float* Of(int partial) const { return pass_.sums_->At(range_.bucket, range_.bucket_begin + begin_, partial); }
  const void* ResultAt(int source) const {
    const int window = -1 - source;
    const Bucket& bucket = pass_.plan_.buckets()[range_.bucket];
    return pass_.host_.window_of(window / kWindowsOfSeat, window % kWindowsOfSeat) + bucket.gradient_offset +
           (range_.bucket_begin + begin_) * BytesPerElement(pass_.job_.gradient_format);
  }

  void Add(Format format, const void* const* slots, int num_slots, float* sum) const {
    SlotSumRun run;
    run.slots = slots;
    run.num_slots = num_slots;
    run.sum = sum;
    run.num_elements = count_;
    pass_.sum_(format, run);
  }

  // The sum of a subtree: in `to`, or where it lies already. `scratch` has room for what is below.
  const float* Node(SlotRange slots, float* to, float* scratch) const {
    const bool whole = sums_.count[slots.first] == slots.count;
    if (whole && sums_.source[slots.first] >= 0) return Of(sums_.source[slots.first]);
    if (sums_.AllResults(slots)) {
      const void* results[kMaxSlots];
      for (int s = 0; s < slots.count; ++s) results[s] = ResultAt(sums_.source[slots.first + s]);
      Add(pass_.job_.gradient_format, results, slots.count, to);
      return to;
    }
    const int left = LeftLeaves(slots.count);
    float* const below = scratch + 2 * kElements;
    const void* const parts[] = {Node({slots.first, left}, scratch, below),
                                 Node({slots.first + left, slots.count - left}, scratch + kElements, below)};
    Add(Format::kFp32, parts, 2, to);
    return to;
  }

  const Pass& pass_;
  const Frontier& sums_;
  const StorageRange& range_;
  const int partial_;
  int64_t begin_ = 0, count_ = 0;
};

void Pass::MergeRange(const Command& command, int range) {
  const Frontier sums = PulledSlots(host_.control(), job_, plan_, command.step).Sums();
  Merger merger(*this, command, sums, range);
  alignas(64) float scratch[2 * kMaxDepth * kElements];
  const int64_t elements = storage_.ranges()[range].num_elements;
  const bool looks = while_merging_ && std::this_thread::get_id() == executing_;
  for (int64_t done = 0; done < elements; done += kElements) {
    if (looks && done % kUntilLook == 0) while_merging_();
    merger.Sum({command.first_slot, command.num_slots}, done, std::min(kElements, elements - done), scratch);
  }
}

// In a repeated commit some of the slots may count as merged: their windows were given back before, and may be written
// again by now.
absl::Status Pass::GiveBackWindows(const Command& command) {
  const auto give_back = [this](int window) {
    const int64_t bytes = plan_.gradient_window_bytes();
    return host_.slot(window / kWindowsOfSeat).Punch(window % kWindowsOfSeat * bytes, bytes);
  };
  if (command.kind == CommandKind::kStep) {
    for (int w = 0; w < job_.num_trainers * kWindowsOfSeat; ++w) RETURN_IF_ERROR(give_back(w));
  }
  if (command.kind != CommandKind::kMerge) return absl::OkStatus();
  const Frontier sums = PulledSlots(host_.control(), job_, plan_, command.step).Sums();
  for (int s = command.first_slot; s < command.first_slot + command.num_slots; ++s) {
    if (sums.count[s] == 1 && sums.source[s] < 0) RETURN_IF_ERROR(give_back(-1 - sums.source[s]));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
