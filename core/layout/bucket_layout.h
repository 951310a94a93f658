// BucketLayout: where every tensor of a model lies when N workers hold a part each.
//
//   space    tensors that may share a bucket: of one `space` text (their formats), one granule size
//   bucket   consecutive tensors of a space, at least bucket_elements of them: gathered and reduced together.
//            One flat space; every tensor starts at a multiple of the granule; cut into N equal shards of whole
//            granules
//   owned    a bucket of whole matrices: each lies at one worker, its owner, which is chosen so that the cost of
//            their steps is balanced. Its shards have different sizes, and no padding
//
// Padding is what equal shards of whole granules cost. A bucket grows beyond bucket_elements until its padding is at
// most max_padding of it, so that of a whole space is, but for the space's last bucket (less than N granules).
//
// Tensors without elements lie in no bucket. Tied tensors share their owner's place. Buckets are numbered, and tensors
// lie in them, in the order of the tensors given. Cost and memory are proportional to the number of tensors, whatever
// N.
//
// A pure function of its arguments: every process computes the layout for itself and compares hashes. The hash depends
// on nothing else: not on the machine, its byte order, or a container's order. Immutable and thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/layout/granule.h"

namespace shardmesh {

inline constexpr int kMaxShards = 1 << 20;
inline constexpr int64_t kMaxLayoutElements = int64_t{1} << 46;

struct LayoutTensor {
  std::string name;
  std::vector<int64_t> shape;  // empty: a scalar
  std::string space;           // tensors of different spaces share no bucket
  Granule granule;
  std::string tied_to;  // the tensor whose storage this one shares, with the same shape; empty: its own
};

struct LayoutOptions {
  int64_t num_shards = 1;
  int64_t bucket_elements = int64_t{16} << 20;
  double max_padding = 0.001;  // of a bucket with granules of at most kFineGranule elements, and of others:
  double max_coarse_padding = 0.02;
};
inline constexpr int64_t kFineGranule = 4096;

// Where a tensor lies. In an owned bucket, `offset` counts from the start of the owner's shard.
struct TensorPlace {
  int32_t bucket = -1;  // -1: no elements
  int32_t owner = -1;   // the shard that holds it whole, in an owned bucket; otherwise -1
  int64_t offset = 0;
  int64_t num_elements = 0;     // of the tensor
  int64_t padded_elements = 0;  // of its whole granules
};

struct LayoutBucket {
  std::string space;
  int64_t granule_elements = 0;
  GranuleKind kind = GranuleKind::kFlat;
  bool owned = false;
  int64_t num_elements = 0;      // with padding
  int64_t shard_elements = 0;    // of every shard; in an owned bucket, of the largest
  int64_t padding = 0;           // elements of no tensor
  std::vector<int32_t> tensors;  // those with storage in it, ascending (in an owned bucket by owner, then offset)
};

// A stretch of one tensor inside a shard, in whole granules: the last may reach into padding. Elements of the tensor
// are counted as it is stored (core/layout/granule.h).
struct Stretch {
  int32_t tensor = 0;
  int64_t first_element = 0;  // in the tensor
  int64_t shard_offset = 0;   // from the start of the shard
  int64_t num_elements = 0;
};

// Padding of all tensors of one kind of granule.
struct KindPadding {
  GranuleKind kind = GranuleKind::kFlat;
  int64_t num_buckets = 0;
  int64_t num_elements = 0;  // without padding
  int64_t padding = 0;
};

class BucketLayout {
 public:
  BucketLayout(BucketLayout&&) = default;
  BucketLayout& operator=(BucketLayout&&) = default;

  // InvalidArgument: a bad or repeated name, a space that ValidateText (core/names/names.h) refuses, a shape or granule
  // that core/layout/granule.h refuses, a tie to an unknown or tied tensor or of another shape, or options out of
  // range.
  // ResourceExhausted: more than kMaxLayoutElements.
  static absl::StatusOr<BucketLayout> Create(std::vector<LayoutTensor> tensors, const LayoutOptions& options);

  absl::Span<const LayoutTensor> tensors() const { return tensors_; }
  absl::Span<const TensorPlace> places() const { return places_; }  // by tensor, tied ones included
  absl::Span<const LayoutBucket> buckets() const { return buckets_; }
  const LayoutOptions& options() const { return options_; }
  int64_t num_shards() const { return options_.num_shards; }
  const std::string& hash() const { return hash_; }  // 32 hexadecimal digits

  // What a shard holds of a bucket, ascending; padding behind the last granule of a tensor is left out.
  // REQUIRES: both exist.
  std::vector<Stretch> StretchesOf(int bucket, int64_t shard) const;

  // What lies in elements [begin, end) of a bucket with shards, ascending; offsets are from `begin`. Padding as above.
  // REQUIRES: the bucket exists and is not owned; begin and end are multiples of the granule within it.
  std::vector<Stretch> StretchesIn(int bucket, int64_t begin, int64_t end) const;

  // The index of a tensor. NotFound: no such name.
  absl::StatusOr<int> IndexOf(absl::string_view name) const;

  // The shards that hold a part of a tensor: [first, last]; {0, -1}: it has no elements.
  std::pair<int64_t, int64_t> ShardsOf(int tensor) const;

  std::vector<KindPadding> PaddingByKind() const;  // kinds that occur, in their order

 private:
  BucketLayout() = default;
  absl::Status IndexNames();
  absl::Status CutAll(std::vector<GranuleCut>& cuts) const;
  void PlaceShared(const std::vector<GranuleCut>& cuts);
  void PlaceOwned(const std::vector<GranuleCut>& cuts);
  absl::Status PlaceTies();
  bool IsFull(const LayoutBucket& bucket) const;
  int32_t NewBucket(int32_t tensor, const GranuleCut& cut);
  std::string Hash() const;

  LayoutOptions options_;
  std::vector<LayoutTensor> tensors_;
  std::vector<TensorPlace> places_;
  std::vector<LayoutBucket> buckets_;
  absl::flat_hash_map<absl::string_view, int32_t> index_of_;  // keys are the names in tensors_
  std::string hash_;
};

}  // namespace shardmesh
