#include "core/layout/layout_reshard.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/layout/element_order.h"

namespace shardmesh {
namespace {

std::string Described(const LayoutTensor& tensor) {
  const std::string space = tensor.space.empty() ? "" : absl::StrCat(absl::CHexEscape(tensor.space), " ");
  return absl::StrCat(space, "[", absl::StrJoin(tensor.shape, ","), "] in ", tensor.granule.ToString());
}

absl::StatusOr<int> SourceOf(const BucketLayout& from, const LayoutTensor& tensor) {
  ASSIGN_OR_RETURN(const int index, from.IndexOf(tensor.name));
  const LayoutTensor& source = from.tensors()[index];
  if (source.shape == tensor.shape && source.space == tensor.space) return index;
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor \"", absl::CHexEscape(tensor.name), "\" is ", Described(source), " granules there and ",
      Described(tensor), " here; resharding keeps the shape and the format: export it and import it again"));
}

// Where element `first` of a tensor lies, and how many behind it lie in one row.
struct Found {
  int64_t shard = 0, offset = 0, num_elements = 0;
};

Found Locate(const BucketLayout& layout, int tensor, int64_t first) {
  const TensorPlace& place = layout.places()[tensor];
  if (place.owner >= 0) return {place.owner, place.offset + first, place.padded_elements - first};
  const int64_t shard_elements = layout.buckets()[place.bucket].shard_elements, at = place.offset + first;
  return {at / shard_elements, at % shard_elements, shard_elements - at % shard_elements};
}

// Elements that lie consecutively at both ends, from the tensor's storage here to its storage there.
struct Piece {
  int64_t source = ElementOrder::kPadding;  // kPadding: nothing is copied
  int64_t num_elements = 0;
};

// Both orders of one tensor.
class Orders {
 public:
  Orders(const LayoutTensor& from, const LayoutTensor& to, int64_t num_stored)
      : same_(from.granule == to.granule), num_stored_(num_stored), from_(from), to_(to) {}

  Piece From(int64_t stored) const {
    if (same_) return {stored, num_stored_ - stored};  // with the padding inside blocks
    const ElementOrder::Run here = to_.AtStored(stored);
    if (here.at == ElementOrder::kPadding) return {ElementOrder::kPadding, here.num_elements};
    const ElementOrder::Run there = from_.AtRowMajor(here.at);
    return {there.at, std::min(here.num_elements, there.num_elements)};
  }

 private:
  const bool same_;
  const int64_t num_stored_;
  const ElementOrder from_, to_;
};

bool Continues(const ShardCopy& last, const ShardCopy& next) {
  return last.source_bucket == next.source_bucket && last.destination_bucket == next.destination_bucket &&
         last.source_shard == next.source_shard && last.source_offset + last.num_elements == next.source_offset &&
         last.destination_offset + last.num_elements == next.destination_offset;
}

}  // namespace

absl::StatusOr<std::vector<ShardCopy>> CopiesInto(const BucketLayout& from, const BucketLayout& to, int64_t shard) {
  if (shard < 0 || shard >= to.num_shards()) {
    return absl::OutOfRangeError(absl::StrCat("shard ", shard, "; this layout has 0 to ", to.num_shards() - 1));
  }
  std::vector<ShardCopy> copies;
  for (int b = 0; b < static_cast<int>(to.buckets().size()); ++b) {
    for (const Stretch& stretch : to.StretchesOf(b, shard)) {
      const LayoutTensor& tensor = to.tensors()[stretch.tensor];
      ASSIGN_OR_RETURN(const int source, SourceOf(from, tensor));
      // Blocks have their padding inside; all others have it behind the last element.
      const TensorPlace& place = to.places()[stretch.tensor];
      const int64_t stored = tensor.granule.kind == GranuleKind::kBlock ? place.padded_elements : place.num_elements;
      const int64_t end = std::min(stretch.first_element + stretch.num_elements, stored);
      const Orders orders(from.tensors()[source], tensor, stored);
      for (int64_t at = stretch.first_element; at < end;) {
        const Piece piece = orders.From(at);
        if (piece.source == ElementOrder::kPadding) {
          at += piece.num_elements;
          continue;
        }
        const Found found = Locate(from, source, piece.source);
        const int64_t n = std::min({piece.num_elements, found.num_elements, end - at});
        const ShardCopy copy = {from.places()[source].bucket,
                                b,
                                found.shard,
                                found.offset,
                                stretch.shard_offset + at - stretch.first_element,
                                n};
        at += n;
        if (!copies.empty() && Continues(copies.back(), copy)) {
          copies.back().num_elements += n;
        } else if (copies.size() < kMaxShardCopies) {
          copies.push_back(copy);
        } else {
          return absl::ResourceExhaustedError(
              absl::StrCat("shard ", shard, " needs more than ", kMaxShardCopies,
                           " copies; use larger shards or granules in one of the layouts"));
        }
      }
    }
  }
  return copies;
}

absl::Status CheckReshard(const BucketLayout& from, const BucketLayout& to) {
  for (const LayoutTensor& tensor : to.tensors()) RETURN_IF_ERROR(SourceOf(from, tensor).status());
  return absl::OkStatus();
}

}  // namespace shardmesh
