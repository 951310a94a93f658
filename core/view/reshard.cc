#include "core/view/reshard.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

// One dimension of a box that two memories share.
struct Step {
  int64_t size = 1;
  int64_t source = 0, destination = 0;  // strides
};
using Steps = absl::InlinedVector<Step, 4>;

// Whether a dimension of stride `outer` continues one of `size` elements of stride `inner`.
bool Spans(int64_t outer, int64_t inner, int64_t size) { return outer % size == 0 && outer / size == inner; }

// The dimensions of the box that both hold, as few as say the same, ordered by the destination's memory, fastest last.
Steps JointSteps(const LocalBox& source, const LocalBox& destination) {
  Steps steps;
  for (size_t d = 0; d < source.box.sizes.size(); ++d) {
    if (source.box.sizes[d] == 1) continue;
    steps.push_back({source.box.sizes[d], source.strides[d], destination.strides[d]});
  }
  absl::c_stable_sort(steps, [](const Step& a, const Step& b) { return a.destination > b.destination; });
  Steps merged;
  for (const Step& step : steps) {
    if (!merged.empty() && Spans(merged.back().source, step.source, step.size) &&
        Spans(merged.back().destination, step.destination, step.size)) {
      merged.back() = {merged.back().size * step.size, step.source, step.destination};
    } else {
      merged.push_back(step);
    }
  }
  return merged;
}

bool InOrder(const Copy& a, const Copy& b) {
  return std::tie(a.destination, a.source, a.tensor, a.destination_offset) <
         std::tie(b.destination, b.source, b.tensor, b.destination_offset);
}

// Whether `b`, the next in order, goes on where `a` ends, on both sides.
bool GoesOn(const Copy& a, const Copy& b) {
  return a.source == b.source && a.source_offset + a.num_elements == b.source_offset &&
         a.destination_offset + a.num_elements == b.destination_offset;
}

class Planner {
 public:
  explicit Planner(int64_t max_copies) : max_copies_(max_copies) {}

  // Adds the copies of one tensor to one rank.
  absl::Status Add(Rank rank, int32_t tensor, const TensorView& source, const TensorView& destination) {
    const auto boxes = destination.BoxesOf(rank);
    if (absl::IsNotFound(boxes.status())) return absl::OkStatus();
    RETURN_IF_ERROR(boxes.status());
    RETURN_IF_ERROR(source.CanBeSource());
    takes_part_ = true;
    const size_t first = copies_.size();
    for (const LocalBox& wanted : *boxes) {
      int64_t found = 0;
      const bool fits = source.ForEachSource(wanted.box, rank, [&](Rank from, const LocalBox& held) {
        found += held.box.NumElements();
        return Copies({from, rank, tensor}, held, wanted.Part(held.box));
      });
      if (!fits) return TooMany();
      if (found != wanted.box.NumElements()) return Lacking(rank, wanted.box, found);
    }
    Join(first);
    return absl::OkStatus();
  }

  ReshardPlan Finish() && {
    absl::c_sort(copies_, InOrder);
    ReshardPlan plan;
    for (const Copy& copy : copies_) {
      if (plan.sources.empty() || plan.sources.back().source != copy.source) plan.sources.push_back({copy.source});
      ++plan.sources.back().num_copies;
      plan.sources.back().num_elements += copy.num_elements;
      plan.num_elements += copy.num_elements;
    }
    plan.copies = std::move(copies_);
    return plan;
  }

  bool takes_part() const { return takes_part_; }

 private:
  // Appends the runs that the two memories of one box share; false, and nothing is appended, if they would be too many.
  bool Copies(Copy copy, const LocalBox& source, const LocalBox& destination) {
    Steps steps = JointSteps(source, destination);
    copy.source_offset = source.offset;
    copy.destination_offset = destination.offset;
    copy.num_elements = 1;
    if (!steps.empty() && steps.back().source == 1 && steps.back().destination == 1) {
      copy.num_elements = steps.back().size;
      steps.pop_back();
    }
    int64_t runs = 1;
    for (const Step& step : steps) runs *= step.size;
    count_ = static_cast<int64_t>(copies_.size()) + runs;
    if (count_ > max_copies_) return false;
    Runs(steps, 0, copy);
    return true;
  }

  void Runs(const Steps& steps, size_t d, Copy copy) {
    if (d == steps.size()) return copies_.push_back(copy);
    const Copy first = copy;
    for (int64_t i = 0; i < steps[d].size; ++i) {
      copy.source_offset = first.source_offset + i * steps[d].source;
      copy.destination_offset = first.destination_offset + i * steps[d].destination;
      Runs(steps, d + 1, copy);
    }
  }

  // Puts the copies from `first` on in order and makes one of those that go on from each other.
  void Join(size_t first) {
    std::sort(copies_.begin() + first, copies_.end(), InOrder);
    size_t end = first;
    for (size_t i = first; i < copies_.size(); ++i) {
      if (end > first && GoesOn(copies_[end - 1], copies_[i])) {
        copies_[end - 1].num_elements += copies_[i].num_elements;
      } else {
        copies_[end++] = copies_[i];
      }
    }
    copies_.resize(end);
  }

  absl::Status TooMany() const {
    return absl::ResourceExhaustedError(
        absl::StrCat("reshard: ", count_, " copies or more are needed; max_copies is ", max_copies_,
                     ". Raise it, plan fewer tensors at a time, or shard slower dimensions: the runs are longer"));
  }

  absl::Status Lacking(Rank rank, const Box& wanted, int64_t found) const {
    return absl::InvalidArgumentError(absl::StrCat("reshard: the source has ", found, " of the ", wanted.NumElements(),
                                                   " elements ", wanted.ToString(), " that rank ", rank.value(),
                                                   " wants; list boxes that have the rest"));
  }

  const int64_t max_copies_;
  std::vector<Copy> copies_;
  int64_t count_ = 0;  // copies with the last box
  bool takes_part_ = false;
};

}  // namespace

absl::StatusOr<ReshardPlan> PlanReshard(absl::Span<const TensorView> source, absl::Span<const TensorView> destination,
                                        Rank rank, int64_t max_copies, absl::Span<const std::string> names) {
  if (!names.empty() && names.size() != source.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("reshard: ", names.size(), " names of ", source.size(), " tensors; give one for each"));
  }
  const auto which = [names, num_tensors = source.size()](size_t t) {
    if (!names.empty()) return absl::StrCat("tensor ", QuotedName(names[t]));
    return num_tensors == 1 ? std::string("the tensor") : absl::StrCat("tensor ", t);
  };
  if (source.size() != destination.size()) {
    return absl::InvalidArgumentError(absl::StrCat("reshard: ", source.size(), " tensors at the source and ",
                                                   destination.size(), " at the destination; give the same list"));
  }
  Planner planner(max_copies);
  for (size_t t = 0; t < source.size(); ++t) {
    if (source[t].shape() != destination[t].shape()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "reshard: ", which(t), " is [", absl::StrJoin(source[t].shape(), ", "), "] at the source and [",
          absl::StrJoin(destination[t].shape(), ", "), "] at the destination; give the same list of tensors"));
    }
    const absl::Status added = planner.Add(rank, static_cast<int32_t>(t), source[t], destination[t]);
    if (!added.ok()) return Annotate(added, which(t));
  }
  if (!source.empty() && !planner.takes_part()) {
    return absl::NotFoundError(absl::StrCat("reshard: rank ", rank.value(), " has no part in any of the ",
                                            source.size(), " tensors of the destination; name one that has"));
  }
  return std::move(planner).Finish();
}

absl::StatusOr<std::vector<Copy>> Intersect(const Dims& shape, std::vector<RankBox> source,
                                            std::vector<RankBox> destination, int64_t max_copies) {
  std::vector<Rank> ranks;
  for (const RankBox& box : destination) ranks.push_back(box.rank);
  absl::c_sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  ASSIGN_OR_RETURN(const TensorView from, TensorView::Listed(shape, std::move(source)));
  ASSIGN_OR_RETURN(const TensorView to, TensorView::Listed(shape, std::move(destination)));
  Planner planner(max_copies);
  for (const Rank rank : ranks) RETURN_IF_ERROR(planner.Add(rank, 0, from, to));
  return std::move(planner).Finish().copies;
}

}  // namespace shardmesh
