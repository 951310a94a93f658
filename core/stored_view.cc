#include "core/stored_view.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layout_boxes.h"
#include "core/names.h"
#include "core/status.h"

namespace shardmesh {
namespace {

absl::Status CheckCount(absl::string_view name, int64_t boxes) {
  if (boxes <= kMaxStoredViewBoxes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the view of tensor ", QuotedName(name), " has ", boxes,
                                                   " boxes or more; at most ", kMaxStoredViewBoxes,
                                                   " are listed: use larger blocks, or fewer replicas"));
}

// All blocks of a tensor, in the order in which they are stored one after the other from 0 on: those of the one shard
// that holds the tensor alone.
absl::StatusOr<std::vector<ShardBox>> AllBlocks(const LayoutTensor& tensor) {
  ASSIGN_OR_RETURN(const BucketLayout alone,
                   BucketLayout::Create({{tensor.name, tensor.shape, tensor.space, tensor.granule, ""}}, {}));
  return BoxesOfShard(alone, 0);
}

// What a stretch of whole blocks holds.
std::vector<LocalBox> BlocksIn(const std::vector<ShardBox>& blocks, int64_t block_elements, const Stretch& stretch) {
  std::vector<LocalBox> boxes;
  const int64_t first = stretch.first_element / block_elements;
  for (int64_t i = 0; i < stretch.num_elements / block_elements; ++i) {
    boxes.push_back(blocks[first + i].local);
    boxes.back().offset = stretch.shard_offset + i * block_elements;
  }
  return boxes;
}

// What a stretch of row-major elements holds of a tensor; its end may reach into padding.
std::vector<LocalBox> RangesIn(const Dims& shape, int64_t num_elements, const Stretch& stretch) {
  std::vector<LocalBox> boxes;
  const int64_t end = std::min(stretch.first_element + stretch.num_elements, num_elements);
  int64_t at = stretch.shard_offset;
  for (Box& box : BoxesOfFlatRange(shape, std::min(stretch.first_element, end), end)) {
    Dims strides = RowMajorStrides(box.sizes);
    const int64_t elements = box.NumElements();
    boxes.push_back({std::move(box), at, std::move(strides)});
    at += elements;
  }
  return boxes;
}

}  // namespace

absl::StatusOr<TensorView> ViewOf(const StoredPlan& plan, absl::string_view name) {
  ASSIGN_OR_RETURN(const std::vector<StoredPart> parts, plan.PartsOf(name));
  ASSIGN_OR_RETURN(const int index, plan.layout().IndexOf(name));  // of a tie: all but the name is as its owner's
  const LayoutTensor& tensor = plan.layout().tensors()[index];
  const TensorPlace& place = plan.layout().places()[index];
  const Dims shape(tensor.shape.begin(), tensor.shape.end());
  const bool is_block = tensor.granule.kind == GranuleKind::kBlock;
  const int64_t block_elements = is_block ? tensor.granule.size * tensor.granule.size : 1;
  std::vector<ShardBox> blocks;
  if (is_block && !parts.empty()) {
    RETURN_IF_ERROR(CheckCount(name, place.padded_elements / block_elements));
    ASSIGN_OR_RETURN(blocks, AllBlocks(tensor));
  }
  std::vector<RankBox> boxes;
  std::vector<Rank> boxless;
  auto part = parts.begin();
  for (int64_t shard = 0; shard < plan.layout().num_shards(); ++shard) {
    std::vector<LocalBox> held;  // a shard has one stretch of a tensor at most
    if (part != parts.end() && part->shard == shard) {
      const Stretch& stretch = (part++)->stretch;
      held = is_block ? BlocksIn(blocks, block_elements, stretch) : RangesIn(shape, place.num_elements, stretch);
    }
    const std::vector<Rank> ranks = plan.RanksOf(shard);
    RETURN_IF_ERROR(CheckCount(name, static_cast<int64_t>(boxes.size() + held.size() * ranks.size())));
    for (const Rank rank : ranks) {
      for (const LocalBox& local : held) boxes.push_back({rank, local});
      if (held.empty()) boxless.push_back(rank);
    }
  }
  return TensorView::Listed(shape, std::move(boxes), std::move(boxless));
}

}  // namespace shardmesh
