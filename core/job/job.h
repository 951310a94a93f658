// JobSpec: everything about a job that its results depend on, with canonical parameter names and every default filled
// in. Two equal specs train to the same bits. A plain value; functions are pure and thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/format/format.h"
#include "core/format/gather_format.h"
#include "core/format/numeric_formats.h"
#include "core/job/optimizer.h"
#include "core/layout/granule.h"  // kMaxTensorElements
#include "core/mesh/mesh_spec.h"

namespace shardmesh {

inline constexpr int kMaxSlots = 128;
inline constexpr int kMaxHostRanks = 64;  // of one job, on one host or several
inline constexpr int kMaxParameters = 100'000;
inline constexpr int kMaxGroups = 4096;
// The last step: 17 years at 1000 a second. What workers tell each other of steps has no room for later ones.
inline constexpr int64_t kMaxStep = (int64_t{1} << 39) - 1;
inline constexpr int kMaxIdBytes = 128;
inline constexpr int64_t kMaxJobElements = int64_t{1} << 42;
inline constexpr int64_t kMinBucketElements = 1024;
inline constexpr int64_t kMaxBucketElements = int64_t{1} << 32;
inline constexpr int64_t kDefaultBucketElements = int64_t{16} << 20;
inline constexpr int kMaxPublishEvery = 1 << 30;
inline constexpr int kPublishOnDemand = -1;
inline constexpr int kDefaultPublications = 3;  // the newest, the one that is written, and one that readers still have
inline constexpr int kMaxPublications = 8;
inline constexpr int kMaxCheckEvery = 1 << 30;
inline constexpr int64_t kMaxMuonElements = int64_t{1} << 31;  // of one matrix
inline constexpr int kMaxPrefetchBuckets = 1 << 20;
inline constexpr int kMaxTrainers = 64;  // of a job whose slots are pulled
inline constexpr int64_t kDefaultSlotTimeoutMs = 600'000;
inline constexpr int64_t kMaxSlotTimeoutMs = int64_t{24} * 3600 * 1000;
inline constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of one slot

struct ParameterSpec {
  std::string name;            // canonical, unique in the job
  std::vector<int64_t> shape;  // empty: a scalar
  WeightFormat format = WeightFormat::kFp32;
  std::string tied_to;  // canonical name of the parameter whose storage this one shares; empty: its own
  StateFormat states = StateFormat::kFp32;      // of its optimizer states
  GatherFormat gather = GatherFormat::kStored;  // in windows, publications and pulls
  int group = 0;        // whose optimizer steps it; a tied one is stepped by its owner's, whatever it says
  bool frozen = false;  // never stepped: it has no gradient and no states; a tied one is frozen with its owner
  // Its name as it was first given, for who wants that back; empty: the canonical one. No result depends on it, and
  // jobs that differ in it alone are one.
  std::string given = {};

  const std::string& original_name() const { return given.empty() ? name : given; }

  int64_t NumElements() const;  // REQUIRES: the job's Validate() is OK
};

enum class NonFinitePolicy {
  kSkip,  // the step is counted and changes nothing
  kFail,  // the slot is refused and may be written again
};

// What a host keeps of gathered weights and of gradients while a job trains. The same bits either way.
enum class Residency {
  kFull,    // all weights in the parameter window, whole gradient windows
  kBucket,  // buckets in use: weights are gathered when a trainer acquires a bucket, gradients summed when it is
            // declared
};
// "full", "bucket". Parse: InvalidArgument, with the names that there are.
absl::string_view ResidencyName(Residency residency);
absl::StatusOr<Residency> ParseResidency(absl::string_view name);

// What happens to a job that loses a shard of which no other copy is left.
enum class OnLoss {
  kFail,        // it is FAILED until it is deleted
  kCheckpoint,  // it goes back to its newest whole checkpoint by itself
};
// "fail", "checkpoint". Parse: InvalidArgument, with the names that there are.
absl::string_view OnLossName(OnLoss on_loss);
absl::StatusOr<OnLoss> ParseOnLoss(absl::string_view name);

// Who computes which slot. The same bits either way.
enum class SlotMode {
  kAssigned,  // the trainer that attached to it
  // Any trainer takes the next one that is open, writes its gradients and finishes it (worker/control/pulled_words.h).
  kPulled,
};

struct JobSpec {
  std::string name;
  MeshSpec mesh;
  int num_slots = 1;
  std::vector<ParameterSpec> parameters;  // the order is the tensor index of random draws
  Format gradient_format = Format::kBf16;
  // Of parameter group 0, and of groups 1, 2, ..., each with an optimizer of its own. Their learning rates are those of
  // steps that set none.
  OptimizerHyper optimizer = OptimizerHyper::Defaults(OptimizerKind::kAdamW);
  std::vector<OptimizerHyper> more_groups;
  uint64_t seed = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kSkip;
  int64_t bucket_elements = kDefaultBucketElements;
  double clip_norm = 0;  // gradients are scaled so that the norm of all is at most this; 0: not scaled
  // A version is published at each multiple of it, and at step 0; kPublishOnDemand: when somebody asks.
  int publish_every = 1;
  // Versions that a host has room for, in use by readers or not; 1 to kMaxPublications.
  int publications = kDefaultPublications;
  // Against silent corruption; 0: not looked for. In each step one chunk of weights and states of so many is computed
  // twice, and compared with what was written when it is read next; the replicas of a job that has them are compared
  // after each multiple (docs/failure.md).
  int check_every = 0;
  Residency residency = Residency::kFull;
  // With kBucket: buckets that a trainer may hold, and declare, beyond the one that it works on; 1 or more.
  int prefetch_buckets = 1;
  SlotMode slot_mode = SlotMode::kAssigned;
  int num_trainers = 0;  // with kPulled: that may take part at a time, 1 to kMaxTrainers; else 0
  // With kPulled: a slot that was taken and is not finished for so long is open again.
  int64_t slot_timeout_ms = kDefaultSlotTimeoutMs;
  // Each slot says how many tokens its gradients are the sum over, and a step divides by those of all slots; else the
  // sum is divided by the number of slots.
  bool token_weights = false;
  OnLoss on_loss = OnLoss::kFail;
  // Of each shard, 1 or 2: with 2 another host, of a job on several, keeps its weights and states as they were after one
  // of the last steps.
  int copies = 1;

  // InvalidArgument or ResourceExhausted: the first wrong value, with its name and what would be right. What a topology
  // or another feature excludes is refused by CheckSupported (core/job/support.h).
  absl::Status Validate() const;

  bool pulled() const { return slot_mode == SlotMode::kPulled; }
  // How many may write gradients, each with windows of its own: trainers, or slots.
  int num_writers() const { return pulled() ? num_trainers : num_slots; }
  int num_groups() const { return 1 + static_cast<int>(more_groups.size()); }
  const OptimizerHyper& group(int index) const { return index == 0 ? optimizer : more_groups[index - 1]; }

  // Of a parameter that is not tied: its optimizer states; whether Muon steps it, whole matrix by whole matrix.
  int NumStatesOf(const ParameterSpec& parameter) const;
  bool IsMuon(const ParameterSpec& parameter) const;

  // Validate(hyper), as the optimizer of a group: with more than one, the message names it.
  absl::Status ValidateGroup(int index, const OptimizerHyper& hyper) const;

  // The index of the parameter that owns the storage of `index` (itself unless tied). REQUIRES: Validate() is OK.
  int StorageOf(int index) const;
};

// InvalidArgument: a tied parameter and its owner are not alike in what they share.
absl::Status CheckTie(const ParameterSpec& tied, const ParameterSpec& owner);

// InvalidArgument unless `id` is 1 to kMaxIdBytes of [A-Za-z0-9._-]; `what` names it in the message ("job name").
absl::Status ValidateId(absl::string_view what, absl::string_view id);

// The first difference between two specs, for people ("parameter 3 "head.w": shape [10,64] there, [10,32] here");
// empty when they are equal. `there` is the older one.
std::string Difference(const JobSpec& there, const JobSpec& here);

}  // namespace shardmesh
