// Plan: where every element of a job lies. A pure function of the job's specification: each process computes it for
// itself and compares hashes, so nothing per-rank is ever sent.
//
//   job      = a BucketLayout (core/layout/bucket_layout.h): a space for each set of formats and number of states,
//   other ones
//              for what is frozen and for what Muon steps. Granules:
//                kBlockElements    so that no block of a quantized state is cut
//                whole rows        of int8_row weights, as many as are whole blocks too; of a tensor that has no more
//                                  than those, all of it. A tensor of one dimension is one row
//                the matrix        that Muon steps: one shard has it whole, chosen by core/layout/owner_balance.h
//   shard s  = elements [begin(s), end(s)) of every bucket: equal parts, of an owned bucket the matrices of shard s
//   window   = every bucket as bytes, each starting at a multiple of the page size (parameter window: the codes of its
//              gather format, and behind them the scales of its tensors, tensor after tensor; gradient window: in the
//              job's gradient format, without frozen buckets)
//
// So all-gather and reduce-scatter on a bucket need no copy-in and no copy-out. Padding holds zeros, always.
// Immutable after Create, thread-safe. Ranges are half-open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/job/job.h"
#include "core/layout/bucket_layout.h"

namespace shardmesh {

inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kBlockElements = 256;  // the longest block with a scale of its own (core/format/numeric_formats.h)

// Where a rank stands: which shard it holds, and which replica of it.
struct ShardPlace {
  int shard = 0;
  int replica = 0;
};

// A parameter's storage. Tied parameters have the placement of their owner; one without elements lies at the start of
// a bucket of its formats, and as frozen as it.
struct Placement {
  int bucket = 0;
  int64_t offset = 0;         // elements from the bucket's start, a multiple of kBlockElements
  int64_t num_elements = 0;   // without padding
  ScaleBlocks scales;         // of its gather format
  int64_t scale_offset = 0;   // bytes from the bucket's start in a window to its scales, in the order of their blocks
  int64_t first_maximum = 0;  // of its scales, in the table of largest magnitudes
};

struct Bucket {
  WeightFormat weights = WeightFormat::kFp32;
  StateFormat states = StateFormat::kFp32;
  int64_t num_elements = 0;     // with padding; shard_elements * shards where it is not owned
  int64_t shard_elements = 0;   // a multiple of kBlockElements; of an owned bucket: of its largest shard
  int64_t padding = 0;          // elements of no parameter
  int64_t weight_offset = 0;    // bytes from the start of the parameter window, a multiple of kPageBytes
  int64_t gradient_offset = 0;  // bytes from the start of a gradient window, a multiple of kPageBytes
  int64_t first_block = 0;      // blocks of kBlockElements in the buckets before that are not frozen
  GatherFormat gather = GatherFormat::kStored;
  int64_t weight_bytes = 0;  // in the parameter window and in versions: codes and scales, to a multiple of 16
  bool frozen = false;       // of parameters that are never stepped: no gradients, no states
  int num_states = 0;        // of its optimizers
  int64_t granule_elements = kBlockElements;  // what no shard and no chunk of storage cuts; a multiple of it
  int64_t row_elements = 1;                   // of int8_row weights
  // Of whole matrices, which Muon steps: where each shard's elements begin, and the end of all. Empty: equal shards.
  std::vector<int64_t> shard_begins;

  bool owned() const { return !shard_begins.empty(); }
  // A shard's elements: [begin, end).
  int64_t begin(int shard) const { return owned() ? shard_begins[shard] : shard * shard_elements; }
  int64_t end(int shard) const { return begin(shard + 1); }
  int64_t size(int shard) const { return end(shard) - begin(shard); }

  // Whether what windows hold is made of the stored weights, in a command of its own (worker/pass/pass.h). Otherwise it
  // is what is stored: fp32, bf16, or the codes and scales of int8_row.
  bool quantized() const { return IsQuantized(weights, gather); }
  // Of its weights as an optimizer step gives them to readers; where it is not quantized, that of windows and
  // publications.
  Format format() const { return GatheredFormat(weights); }
  // Bytes in a window from the bucket's start to an element's code. REQUIRES: a multiple of kBlockElements.
  int64_t CodeOffset(int64_t element) const { return GatheredCodeBytes(format(), gather, element); }
  int64_t gradients(int shard) const { return frozen ? 0 : size(shard); }  // elements of a shard's gradient
};

// A stretch of one tensor inside a shard.
struct Run {
  int tensor = 0;             // index of the owner in JobSpec::parameters
  int64_t first_element = 0;  // in the tensor, a multiple of kBlockElements
  int64_t bucket_offset = 0;  // elements from the bucket's start, a multiple of kBlockElements
  int64_t num_elements = 0;   // the tensor's last may be no multiple of kBlockElements
};

// How gradients come, as the job says; the layout does not depend on it.
struct SlotPlan {
  int num_slots = 1, num_groups = 1;  // slots; parameter groups
  int prefetch_buckets = 1;
  int num_trainers = 0;  // that pull slots; 0: slots are assigned

  int num_writers() const { return num_trainers > 0 ? num_trainers : num_slots; }
  // Gradient windows of a writer (JobSpec::num_writers), one behind the other, each of gradient_window_bytes(). A
  // trainer that pulls has two: what it has finished is summed from one while it writes the other.
  int windows_each() const { return num_trainers > 0 ? 2 : 1; }
  // With pulled slots: gradients, written or summed, that may be alive at a time on the way to the sum of all: 3.25 for
  // each trainer, and no fewer than one trainer needs. Who asks for a slot beyond them waits, unless nobody is at one.
  int live_gradients() const;
  // Sums of some slots that a worker has room for: as many, with that of a trainer that need not wait, and the one that
  // is being made.
  int num_partials() const { return num_trainers > 0 ? live_gradients() + 2 : 0; }
};

// Of weights that are gathered quantized.
struct ScalePlan {
  bool quantized = false, steps_quantized = false;  // some bucket is; some bucket is that is not frozen
  // Scales that are made of a largest magnitude that several shards may share; mx8 has none of them. Those of frozen
  // weights, which are placed once, come last.
  int64_t num_maxima = 0, num_stepped_maxima = 0;
};

class Plan {
 public:
  // Errors as JobSpec::Validate(), which is called first.
  static absl::StatusOr<Plan> Create(const JobSpec& job);

  int num_shards() const { return num_shards_; }
  int num_replicas() const { return num_replicas_; }
  int num_ranks() const { return num_shards_ * num_replicas_; }
  absl::Span<const Bucket> buckets() const { return buckets_; }
  absl::Span<const Placement> placements() const { return placements_; }  // by tensor index, tied ones included
  const std::string& hash() const { return hash_; }                       // 32 hexadecimal digits
  int64_t window_bytes() const { return window_bytes_; }                  // of the parameter window, whole pages
  int64_t gradient_window_bytes() const { return gradient_window_bytes_; }
  int64_t version_bytes() const { return version_bytes_; }    // every bucket's weights and scales, without page gaps
  int64_t total_elements() const { return total_elements_; }  // of all buckets, with padding
  Format gradient_format() const { return gradient_format_; }
  bool bucketed() const { return bucketed_; }              // Residency::kBucket
  bool pulled() const { return slots_.num_trainers > 0; }  // SlotMode::kPulled
  const SlotPlan& slots() const { return slots_; }
  const ScalePlan& scales() const { return scales_; }
  // Blocks of kBlockElements whose gradients are squared for the norm; 0 where it is not asked for.
  int64_t norm_blocks() const { return clips_ ? gradient_elements_ / kBlockElements : 0; }

  // REQUIRES: rank is in [0, num_ranks). Mesh coordinates along shard dimensions number the shards, along replicate
  // dimensions the replicas, both in mesh order, the first dimension slowest.
  ShardPlace PlaceOf(Rank rank) const;
  // The rank that holds `shard` as its `replica`.
  Rank RankOf(ShardPlace place) const;

  // The stretches of tensors in elements [begin, end) of a bucket, ascending; stretches of padding are left out.
  // REQUIRES: begin and end are multiples of kBlockElements within the bucket.
  std::vector<Run> RunsIn(int bucket, int64_t begin, int64_t end) const;

  // The rows and columns of a tensor in an owned bucket.
  std::pair<int64_t, int64_t> MatrixOf(int tensor) const;

  // Bytes of the pages of a bucket in the parameter window, from its weight_offset, and in a gradient window, from its
  // gradient_offset: no other bucket lies in them. REQUIRES: the bucket exists.
  int64_t WeightPageBytes(int bucket) const;
  int64_t GradientPageBytes(int bucket) const;

  // Bytes of a shard's gradient (see shard.proto): of its gradient, and of its weights as fp32, frozen ones included.
  int64_t GradientShardBytes(int shard) const;
  int64_t InitialShardBytes(int shard) const;

 private:
  explicit Plan(BucketLayout layout) : layout_(std::make_shared<const BucketLayout>(std::move(layout))) {}
  void AddBuckets(const JobSpec& job);
  int BucketOfNoElements(const JobSpec& job, const ParameterSpec& parameter);
  absl::Status PlaceScales(const JobSpec& job);

  std::shared_ptr<const BucketLayout> layout_;            // shared by copies
  std::vector<int64_t> shard_strides_, replica_strides_;  // by mesh dimension; 0 where the role is the other
  std::vector<int64_t> mesh_sizes_;
  int num_shards_ = 1, num_replicas_ = 1;
  std::vector<Bucket> buckets_;
  std::vector<Placement> placements_;
  std::string hash_;
  int64_t window_bytes_ = 0, gradient_window_bytes_ = 0, version_bytes_ = 0, total_elements_ = 0;
  int64_t gradient_elements_ = 0;  // of all buckets that are not frozen
  ScalePlan scales_;
  SlotPlan slots_;
  Format gradient_format_ = Format::kBf16;
  bool clips_ = false, bucketed_ = false;
};

}  // namespace shardmesh
