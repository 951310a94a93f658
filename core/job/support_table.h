// The table of what a job may have where, and of which features exclude each other: the only place that decides a
// refusal. Everybody else asks it through core/job/support.h. `shardctl support` prints it, docs/support.md shows that
// output, and a test compares the two. Pure, thread-safe.
//
// To support a feature on one more topology, replace kNo in its row by the label of the test that shows it.
#pragma once

#include <array>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// In the order of the table. A job needs some by its specification: FeaturesOf (core/job/support.h) says which. The
// others are asked of it later, by the call of CheckSupported that names the feature.
enum class Feature {
  kTraining,
  kConnectedTrainers,
  kClipNorm,
  kPublishEvery,
  kLeases,
  kTokenWeights,
  kCheckpointSave,
  kMappedReaders,
  kCheckEvery,
  kMuon,
  kQuantizedGathers,
  kRestore,
  kPublishOnDemand,
  kBucketResidency,
  kPulledSlots,
  kRestart,
  kReform,
  kReshard,
  // A format of weights, not a row of the table: it works wherever training does, but not with every feature.
  kInt8RowWeights,
};
inline constexpr int kNumFeatures = 18;  // rows of the table

// The columns of the table.
enum class TopologyKind { kHostCpu, kHostsCpu, kHostCuda, kHostsCuda };
inline constexpr int kNumTopologyKinds = 4;

struct TopologyKindRow {
  absl::string_view name;     // the head of the column
  absl::string_view refuses;  // "which REFUSES yet"
};
inline constexpr std::array<TopologyKindRow, kNumTopologyKinds> kTopologyKinds = {{
    {"CPU, one host", "jobs on one host do not support"},
    {"CPU, several hosts", "jobs on several hosts do not support"},
    {"CUDA, one host", "workers on a CUDA device do not support"},
    {"CUDA, several hosts", "workers on CUDA devices of several hosts do not support"},
}};

inline constexpr absl::string_view kNo = "";

struct FeatureRow {
  Feature feature;
  absl::string_view name;     // the head of the row
  absl::string_view job;      // what a refusal says of the job: "job j JOB, which ..."
  absl::string_view instead;  // what works on the same topology; empty: nothing like it
  // By TopologyKind: the label of a test that shows it. kNo: refused.
  std::array<absl::string_view, kNumTopologyKinds> tests;
};

// clang-format off
inline constexpr std::array<FeatureRow, kNumFeatures + 1> kFeatures = {{
    {Feature::kTraining, "training", "trains", "",
     {"//tests/contract/training:mesh_invariance_test",
      "//tests/contract/training:several_hosts_test",
      "//tests/contract/training:device_invariance_test",
      kNo}},
    {Feature::kConnectedTrainers, "connected trainers", "has connected trainers", "attach trainers",
     {"//tests/contract/training:mesh_invariance_test",
      "//tests/contract/training:several_hosts_test",
      "//tests/contract/training:device_invariance_test",
      kNo}},
    {Feature::kClipNorm, "clip_norm", "has clip_norm", "leave it out",
     {"//tests/contract/training:mesh_invariance_test",
      "//tests/contract/training:several_hosts_test",
      "//worker/pass/device:device_pass_test",
      kNo}},
    {Feature::kPublishEvery, "publish_every", "has publish_every", "set it to -1",
     {"//tests/contract/versions:versions_test",
      "//tests/contract/training:supported_features_test",
      "//tests/contract/training:supported_features_test",
      kNo}},
    {Feature::kLeases, "leases", "is asked for a lease", "pull versions without one",
     {"//tests/contract/versions:versions_test",
      "//tests/contract/training:supported_features_test",
      "//tests/contract/training:supported_features_test",
      kNo}},
    {Feature::kTokenWeights, "token weights", "has token weights", "leave them out",
     {"//tests/contract/training:pulled_slots_test",
      "//tests/contract/training:hosts_features_test",
      "//tests/contract/training:supported_features_test",
      kNo}},
    {Feature::kCheckpointSave, "checkpoint save", "is asked to save a checkpoint", "pull its weights",
     {"//tests/contract/checkpoint:checkpoint_test",
      "//tests/contract/training:supported_features_test",
      "//tests/contract/checkpoint:device_checkpoint_test",
      kNo}},
    {Feature::kMappedReaders, "mapped readers", "is asked to let a reader map versions", "pull versions",
     {"//tests/contract/versions:versions_test",
      "//tests/contract/training:supported_features_test",
      "//tests/contract/training:device_invariance_test",
      kNo}},
    {Feature::kCheckEvery, "check_every", "has check_every", "leave it out",
     {"//tests/contract/faults:silent_corruption_test",
      "//worker/lead/hosts:host_faults_test",
      "//worker/pass/device:device_checks_test",
      kNo}},
    {Feature::kMuon, "Muon", "is stepped by Muon", "take another optimizer for it",
     {"//tests/contract/training:muon_and_rows_test",
      "//worker/lead/hosts:host_lead_test",
      kNo,
      kNo}},
    {Feature::kQuantizedGathers, "quantized gathers", "has quantized gathers", "gather it as stored",
     {"//tests/contract/training:gather_formats_test",
      "//tests/contract/training:several_hosts_test",
      kNo,
      kNo}},
    {Feature::kRestore, "restore", "is asked to restore a checkpoint", "push weights as initial ones",
     {"//tests/contract/checkpoint:checkpoint_test",
      "//tests/contract/training:hosts_features_test",
      "//tests/contract/checkpoint:device_checkpoint_test",
      kNo}},
    {Feature::kPublishOnDemand, "publish on demand", "is asked to publish on demand", "set publish_every",
     {"//tests/contract/versions:versions_test",
      "//tests/contract/training:hosts_features_test",
      "//tests/contract/training:device_invariance_test",
      kNo}},
    {Feature::kBucketResidency, "bucket residency", "has bucket residency", "take full residency",
     {"//tests/contract/training:residency_test",
      "//tests/contract/training:hosts_features_test",
      kNo,
      kNo}},
    {Feature::kPulledSlots, "pulled slots", "has pulled slots", "take assigned slots",
     {"//tests/contract/training:pulled_slots_test",
      "//tests/contract/training:hosts_features_test",
      kNo,
      kNo}},
    {Feature::kRestart, "restart of a killed worker", "is asked to survive the restart of a worker",
     "restore a checkpoint into a new job",
     {"//tests/contract/recovery:restart_test",
      "//tests/contract/recovery:hosts_restart_test",
      kNo,
      kNo}},
    {Feature::kReform, "re-form after a loss", "is asked to re-form", "restore a checkpoint into a new job",
     {"//tests/contract/recovery:reform_test",
      "//tests/contract/recovery:hosts_reform_test",
      kNo,
      kNo}},
    {Feature::kReshard, "online reshard", "is asked to change its mesh", "restore a checkpoint on the other mesh",
     {"//tests/contract/recovery:reshard_test",
      "//tests/contract/recovery:hosts_reform_test",
      kNo,
      kNo}},
    {Feature::kInt8RowWeights, "int8_row weights", "has int8_row weights", "", {}},
}};
// clang-format on

// Two features of one job that exclude each other on every topology.
struct RefusedPair {
  Feature first, second;
  absl::string_view because;
  absl::string_view instead;
  bool never = false;  // no implementation could change it
};
inline constexpr RefusedPair kRefusedPairs[] = {
    {Feature::kMuon, Feature::kInt8RowWeights,
     "int8_row has a scale for each row, and Muon's update is orthogonal as a whole matrix alone",
     "take bf16_sr, or another optimizer", /*never=*/true},
};

// Whether two features of one job exclude each other on every topology. `who` begins the message: "job j".
//   Unimplemented: they do. InvalidArgument: they always will.
absl::Status CheckTogether(absl::string_view who, Feature first, Feature second);

constexpr bool TableIsInOrder() {
  for (int i = 0; i < static_cast<int>(kFeatures.size()); ++i) {
    if (static_cast<int>(kFeatures[i].feature) != i) return false;
  }
  return true;
}
static_assert(TableIsInOrder());

constexpr const FeatureRow& RowOf(Feature feature) { return kFeatures[static_cast<int>(feature)]; }
constexpr bool Works(Feature feature, TopologyKind kind) {
  return !RowOf(feature).tests[static_cast<int>(kind)].empty();
}

}  // namespace shardmesh
