#include "core/layout/stored_view.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/layout/layout_boxes.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

absl::Status CheckCount(absl::string_view name, int64_t boxes) {
  if (boxes <= kMaxStoredViewBoxes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the view of tensor ", QuotedName(name), " has ", boxes,
                                                   " boxes or more; at most ", kMaxStoredViewBoxes,
                                                   " are listed: use larger blocks, or fewer replicas"));
}

}  // namespace

absl::StatusOr<TensorView> ViewOf(const StoredPlan& plan, absl::string_view name) {
  ASSIGN_OR_RETURN(const std::vector<StoredPart> parts, plan.PartsOf(name));
  ASSIGN_OR_RETURN(const int index, plan.layout().IndexOf(name));  // of a tie: all but the name is as its owner's
  const LayoutTensor& tensor = plan.layout().tensors()[index];
  const TensorPlace& place = plan.layout().places()[index];
  if (tensor.granule.kind == GranuleKind::kBlock) {
    RETURN_IF_ERROR(CheckCount(name, place.padded_elements / (tensor.granule.size * tensor.granule.size)));
  }
  std::vector<RankBox> boxes;
  std::vector<Rank> boxless;
  auto part = parts.begin();
  for (int64_t shard = 0; shard < plan.layout().num_shards(); ++shard) {
    std::vector<LocalBox> held;  // a shard has one stretch of a tensor at most
    if (part != parts.end() && part->shard == shard) {
      held = BoxesOfStretch(tensor, place.num_elements, (part++)->stretch);
    }
    const std::vector<Rank> ranks = plan.RanksOf(shard);
    RETURN_IF_ERROR(CheckCount(name, static_cast<int64_t>(boxes.size() + held.size() * ranks.size())));
    for (const Rank rank : ranks) {
      for (const LocalBox& local : held) boxes.push_back({rank, local});
      if (held.empty()) boxless.push_back(rank);
    }
  }
  return TensorView::Listed(Dims(tensor.shape.begin(), tensor.shape.end()), std::move(boxes), std::move(boxless));
}

}  // namespace shardmesh
