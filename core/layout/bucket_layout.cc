#include "core/layout/bucket_layout.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/digest.h"
#include "core/base/status.h"
#include "core/layout/owner_balance.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 160)), "\""); }

absl::Status Validate(const LayoutOptions& options) {
  const auto is_share = [](double value) { return value > 0 && value <= 1; };
  if (options.num_shards < 1 || options.num_shards > kMaxShards) {
    return absl::InvalidArgumentError(absl::StrCat("num_shards is ", options.num_shards, "; it is 1 to ", kMaxShards));
  }
  if (options.bucket_elements < 1 || options.bucket_elements > kMaxLayoutElements) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket_elements is ", options.bucket_elements, "; it is 1 to ", kMaxLayoutElements));
  }
  if (!is_share(options.max_padding) || !is_share(options.max_coarse_padding)) {
    return absl::InvalidArgumentError(absl::StrCat("max_padding is ", options.max_padding, ", max_coarse_padding ",
                                                   options.max_coarse_padding, "; both are above 0 and at most 1"));
  }
  return absl::OkStatus();
}

// Buckets are shared by tensors of one space text and one granule.
using SpaceKey = std::tuple<absl::string_view, GranuleKind, int64_t>;

SpaceKey KeyOf(const LayoutTensor& tensor, const GranuleCut& cut) {
  return {tensor.space, tensor.granule.kind, cut.granule_elements};
}

}  // namespace

absl::StatusOr<BucketLayout> BucketLayout::Create(std::vector<LayoutTensor> tensors, const LayoutOptions& options) {
  RETURN_IF_ERROR(Validate(options));
  BucketLayout layout;
  layout.options_ = options;
  layout.tensors_ = std::move(tensors);
  layout.places_.resize(layout.tensors_.size());
  RETURN_IF_ERROR(layout.IndexNames());
  std::vector<GranuleCut> cuts(layout.tensors_.size());
  RETURN_IF_ERROR(layout.CutAll(cuts));
  layout.PlaceShared(cuts);
  layout.PlaceOwned(cuts);
  RETURN_IF_ERROR(layout.PlaceTies());
  layout.hash_ = layout.Hash();
  return layout;
}

absl::Status BucketLayout::IndexNames() {
  index_of_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    RETURN_IF_ERROR(ValidateName(tensors_[i].name));
    RETURN_IF_ERROR(
        Annotate(ValidateText("format", tensors_[i].space), absl::StrCat("tensor ", Quoted(tensors_[i].name))));
    const auto [other, fresh] = index_of_.emplace(tensors_[i].name, static_cast<int32_t>(i));
    if (fresh) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensors ", other->second, " and ", i, " are both named ",
                                                   Quoted(tensors_[i].name), "; names are unique"));
  }
  return absl::OkStatus();
}

absl::Status BucketLayout::CutAll(std::vector<GranuleCut>& cuts) const {
  int64_t total = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    absl::StatusOr<GranuleCut> cut = CutIntoGranules(tensors_[i].shape, tensors_[i].granule);
    if (!cut.ok()) return Annotate(cut.status(), absl::StrCat("tensor ", Quoted(tensors_[i].name)));
    cuts[i] = *cut;
    // What a tensor can take up: its granules, and shards that are filled up with one granule each.
    const double taken = static_cast<double>(cut->granule_elements) *
                         static_cast<double>(std::max<int64_t>(cut->num_granules, cut->owned ? 1 : num_shards()));
    if (taken > static_cast<double>(kMaxLayoutElements - total)) {
      return absl::ResourceExhaustedError(absl::StrCat("tensor ", Quoted(tensors_[i].name), " in granules of ",
                                                       cut->granule_elements, " elements on ", num_shards(),
                                                       " shards: the layout takes more than ", kMaxLayoutElements,
                                                       " elements; use fewer shards or smaller granules"));
    }
    total += cut->padded_elements();
  }
  return absl::OkStatus();
}

bool BucketLayout::IsFull(const LayoutBucket& bucket) const {
  if (bucket.num_elements < options_.bucket_elements) return false;
  if (bucket.owned) return true;
  const int64_t unit = bucket.granule_elements * num_shards();
  const int64_t padding = CeilDiv(bucket.num_elements, unit) * unit - bucket.num_elements;
  const double share = bucket.granule_elements <= kFineGranule ? options_.max_padding : options_.max_coarse_padding;
  return static_cast<double>(padding) <= share * static_cast<double>(bucket.num_elements);
}

int32_t BucketLayout::NewBucket(int32_t tensor, const GranuleCut& cut) {
  LayoutBucket bucket;
  bucket.space = tensors_[tensor].space;
  bucket.granule_elements = cut.owned ? 0 : cut.granule_elements;
  bucket.kind = tensors_[tensor].granule.kind;
  bucket.owned = cut.owned;
  buckets_.push_back(std::move(bucket));
  return static_cast<int32_t>(buckets_.size()) - 1;
}

// In order, into the open bucket of their space; a full bucket is closed.
void BucketLayout::PlaceShared(const std::vector<GranuleCut>& cuts) {
  std::map<SpaceKey, int32_t> open;
  for (int32_t i = 0; i < static_cast<int32_t>(tensors_.size()); ++i) {
    const GranuleCut& cut = cuts[i];
    TensorPlace& place = places_[i];
    place.num_elements = cut.num_elements;
    place.padded_elements = cut.padded_elements();
    if (cut.owned || cut.num_granules == 0 || !tensors_[i].tied_to.empty()) continue;
    auto [it, fresh] = open.emplace(KeyOf(tensors_[i], cut), -1);
    if (fresh || IsFull(buckets_[it->second])) it->second = NewBucket(i, cut);
    LayoutBucket& bucket = buckets_[it->second];
    place.bucket = it->second;
    place.offset = bucket.num_elements;
    bucket.tensors.push_back(i);
    bucket.num_elements += place.padded_elements;
    bucket.padding += place.padded_elements - place.num_elements;
  }
  for (LayoutBucket& bucket : buckets_) {
    bucket.shard_elements =
        CeilDiv(bucket.num_elements, bucket.granule_elements * num_shards()) * bucket.granule_elements;
    bucket.padding += bucket.shard_elements * num_shards() - bucket.num_elements;
    bucket.num_elements = bucket.shard_elements * num_shards();
  }
}

// Owners are balanced over all of them; each bucket then holds consecutive ones.
void BucketLayout::PlaceOwned(const std::vector<GranuleCut>& cuts) {
  std::vector<int32_t> owned;
  std::vector<OwnedMatrix> matrices;
  for (int32_t i = 0; i < static_cast<int32_t>(tensors_.size()); ++i) {
    if (!cuts[i].owned || !tensors_[i].tied_to.empty()) continue;
    const std::vector<int64_t>& shape = tensors_[i].shape;
    owned.push_back(i);
    matrices.push_back({NewtonSchulzCost(shape[shape.size() - 2], shape.back()), cuts[i].padded_elements()});
  }
  const std::vector<int32_t> owners = BalanceOwners(matrices, num_shards());
  std::map<absl::string_view, int32_t> open;                            // space -> bucket
  absl::flat_hash_map<std::pair<int32_t, int32_t>, int64_t> shard_end;  // (bucket, owner) -> elements
  for (size_t k = 0; k < owned.size(); ++k) {
    const int32_t i = owned[k];
    auto [it, fresh] = open.emplace(tensors_[i].space, -1);
    if (fresh || IsFull(buckets_[it->second])) it->second = NewBucket(i, cuts[i]);
    LayoutBucket& bucket = buckets_[it->second];
    TensorPlace& place = places_[i];
    int64_t& end = shard_end[{it->second, owners[k]}];
    place.bucket = it->second;
    place.owner = owners[k];
    place.offset = end;
    end += place.padded_elements;
    bucket.tensors.push_back(i);
    bucket.num_elements += place.padded_elements;
    bucket.shard_elements = std::max(bucket.shard_elements, end);
    bucket.padding += place.padded_elements - place.num_elements;
  }
  for (LayoutBucket& bucket : buckets_) {
    if (!bucket.owned) continue;
    std::sort(bucket.tensors.begin(), bucket.tensors.end(), [this](int32_t a, int32_t b) {
      return std::tie(places_[a].owner, places_[a].offset) < std::tie(places_[b].owner, places_[b].offset);
    });
  }
}

absl::Status BucketLayout::PlaceTies() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const LayoutTensor& tensor = tensors_[i];
    if (tensor.tied_to.empty()) continue;
    const std::string who = absl::StrCat("tensor ", Quoted(tensor.name), " is tied to ", Quoted(tensor.tied_to));
    const auto owner = index_of_.find(tensor.tied_to);
    if (owner == index_of_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, ", which is no tensor of this layout; tie it to one that is"));
    }
    const LayoutTensor& other = tensors_[owner->second];
    if (!other.tied_to.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, ", which is itself tied; tie both to ", Quoted(other.tied_to)));
    }
    if (other.shape != tensor.shape || other.space != tensor.space || !(other.granule == tensor.granule)) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, " but differs from it: shape [", absl::StrJoin(tensor.shape, ","), "] and [",
                       absl::StrJoin(other.shape, ","), "], space ", tensor.space, " and ", other.space, ", granule ",
                       tensor.granule.ToString(), " and ", other.granule.ToString()));
    }
    places_[i] = places_[owner->second];
  }
  return absl::OkStatus();
}

std::string BucketLayout::Hash() const {
  Hasher hasher;
  hasher.Add("shardmesh layout 1");
  hasher.Add(num_shards());
  for (const LayoutBucket& bucket : buckets_) {
    hasher.Add(bucket.space);
    for (const int64_t v : {bucket.granule_elements, int64_t{static_cast<int>(bucket.kind)}, int64_t{bucket.owned},
                            bucket.num_elements, bucket.shard_elements}) {
      hasher.Add(v);
    }
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    hasher.Add(tensors_[i].name);
    hasher.Add(tensors_[i].tied_to);
    if (places_[i].bucket < 0) hasher.Add(tensors_[i].space);  // others have it in their bucket
    hasher.Add(static_cast<int64_t>(tensors_[i].shape.size()));
    for (const int64_t size : tensors_[i].shape) hasher.Add(size);
    for (const int64_t v : {int64_t{static_cast<int>(tensors_[i].granule.kind)}, tensors_[i].granule.size,
                            int64_t{places_[i].bucket}, int64_t{places_[i].owner}, places_[i].offset}) {
      hasher.Add(v);
    }
  }
  return hasher.Hex();
}

std::vector<Stretch> BucketLayout::StretchesOf(int bucket_index, int64_t shard) const {
  const LayoutBucket& bucket = buckets_[bucket_index];
  const std::vector<int32_t>& tensors = bucket.tensors;
  std::vector<Stretch> stretches;
  if (bucket.owned) {
    auto it = std::partition_point(tensors.begin(), tensors.end(), [&](int32_t t) { return places_[t].owner < shard; });
    for (; it != tensors.end() && places_[*it].owner == shard; ++it) {
      stretches.push_back({*it, 0, places_[*it].offset, places_[*it].padded_elements});
    }
    return stretches;
  }
  return StretchesIn(bucket_index, shard * bucket.shard_elements, (shard + 1) * bucket.shard_elements);
}

std::vector<Stretch> BucketLayout::StretchesIn(int bucket, int64_t begin, int64_t end) const {
  const std::vector<int32_t>& tensors = buckets_[bucket].tensors;
  std::vector<Stretch> stretches;
  auto it = std::partition_point(tensors.begin(), tensors.end(),
                                 [&](int32_t t) { return places_[t].offset + places_[t].padded_elements <= begin; });
  for (; it != tensors.end() && places_[*it].offset < end; ++it) {
    const TensorPlace& place = places_[*it];
    const int64_t from = std::max(begin, place.offset), to = std::min(end, place.offset + place.padded_elements);
    stretches.push_back({*it, from - place.offset, from - begin, to - from});
  }
  return stretches;
}

absl::StatusOr<int> BucketLayout::IndexOf(absl::string_view name) const {
  const auto it = index_of_.find(name);
  if (it != index_of_.end()) return it->second;
  return absl::NotFoundError(
      absl::StrCat("no tensor is named ", Quoted(name), "; this layout has ", tensors_.size(),
                   tensors_.empty() ? std::string() : absl::StrCat(", the first ", Quoted(tensors_[0].name))));
}

std::pair<int64_t, int64_t> BucketLayout::ShardsOf(int tensor) const {
  const TensorPlace& place = places_[tensor];
  if (place.bucket < 0) return {0, -1};
  if (place.owner >= 0) return {place.owner, place.owner};
  const int64_t shard_elements = buckets_[place.bucket].shard_elements;
  return {place.offset / shard_elements, (place.offset + place.padded_elements - 1) / shard_elements};
}

std::vector<KindPadding> BucketLayout::PaddingByKind() const {
  std::map<GranuleKind, KindPadding> by_kind;
  for (const LayoutBucket& bucket : buckets_) {
    KindPadding& sum = by_kind[bucket.kind];
    sum.kind = bucket.kind;
    sum.num_buckets += 1;
    sum.num_elements += bucket.num_elements - bucket.padding;
    sum.padding += bucket.padding;
  }
  std::vector<KindPadding> sums;
  for (const auto& [kind, sum] : by_kind) sums.push_back(sum);
  return sums;
}

}  // namespace shardmesh
