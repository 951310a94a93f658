#include "core/job/support.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

// What of a job is refused, as the message says it.
struct Refusal {
  std::string what;     // "has bucket residency"
  std::string instead;  // what works on the same topology; empty: nothing
};

// The name of the first parameter whose bucket is such; empty: none.
template <typename Is>
const ParameterSpec* FirstParameter(const JobSpec& job, const Plan& plan, Is is) {
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    if (is(plan.buckets()[plan.placements()[i].bucket])) return &job.parameters[i];
  }
  return nullptr;
}

// By itself, should it lose a shard.
bool GoesBack(const JobSpec& job) { return job.on_loss == OnLoss::kCheckpoint || job.copies > 1; }

// What would work in place of the feature, on the same topology.
std::string InsteadOf(const JobSpec& job, const Plan& plan, Feature feature) {
  const ParameterSpec* const p = FirstParameter(job, plan, [](const Bucket& b) { return b.quantized(); });
  if (feature == Feature::kQuantizedGathers && p != nullptr && p->format == WeightFormat::kNf4) return "store it as bf16";
  if (feature == Feature::kReform && GoesBack(job)) return "leave it out";
  return std::string(RowOf(feature).instead);
}

// What the job says of the feature, with the name of a parameter where the feature is one of parameters.
std::string WhatOf(const JobSpec& job, const Plan& plan, Feature feature) {
  const auto named = [](const ParameterSpec& p) { return absl::StrCat("has parameter \"", absl::CHexEscape(p.name)); };
  if (feature == Feature::kMuon) {
    const ParameterSpec* const p = FirstParameter(job, plan, [](const Bucket& b) { return b.owned(); });
    if (p != nullptr) return absl::StrCat(named(*p), "\", which is stepped by Muon");
  }
  if (feature == Feature::kQuantizedGathers) {
    const ParameterSpec* const p = FirstParameter(job, plan, [](const Bucket& b) { return b.quantized(); });
    if (p != nullptr) return absl::StrCat(named(*p), "\", which is gathered as ", GatherFormatName(GatherOf(p->format, p->gather)));
  }
  if (feature == Feature::kReform && GoesBack(job)) {
    return job.on_loss == OnLoss::kCheckpoint ? "has on_loss=checkpoint" : "has copies=2";
  }
  return std::string(RowOf(feature).job);
}

std::optional<Refusal> FirstOverLimit(const JobSpec& job, const Topology& topology) {
  for (const SupportLimit& limit : kSupportLimits) {
    const bool ranks = limit.counted == Counted::kRanks;
    const int count = ranks ? topology.ranks : job.num_slots;
    if (!(topology.device ? limit.on_devices : limit.on_cpu) || count <= limit.most) continue;
    return Refusal{absl::StrCat("has ", count, ranks ? " ranks" : " slots"), absl::StrCat("take at most ", limit.most)};
  }
  return std::nullopt;
}

std::optional<Refusal> FirstRefusal(const JobSpec& job, const Plan& plan, const FeatureSet& features,
                                    const Topology& topology) {
  for (int i = 0; i < kNumFeatures; ++i) {
    const auto feature = static_cast<Feature>(i);
    if (!features[i] || Works(feature, topology.kind())) continue;
    return Refusal{WhatOf(job, plan, feature), InsteadOf(job, plan, feature)};
  }
  return FirstOverLimit(job, topology);
}

// Other topologies that support all these features, as what a user would do: "take workers of one host".
std::vector<std::string> Elsewhere(const JobSpec& job, const Plan& plan, const FeatureSet& features,
                                   const Topology& topology) {
  std::vector<std::string> ways;
  const auto add = [&](const Topology& other, const char* way) {
    if (!FirstRefusal(job, plan, features, other).has_value()) ways.emplace_back(way);
  };
  const bool several = topology.hosts > 1;
  if (several) add({1, topology.ranks, topology.device}, "take workers of one host");
  if (topology.device) add({topology.hosts, topology.ranks, false}, "start the workers with --device cpu");
  if (several && topology.device && ways.empty()) {
    add({1, topology.ranks, false}, "take workers of one host with --device cpu");
  }
  return ways;
}

absl::Status CheckAll(const JobSpec& job, const Plan& plan, const FeatureSet& asked, const FeatureSet& all,
                      const Topology& topology) {
  const std::optional<Refusal> refusal = FirstRefusal(job, plan, asked, topology);
  if (!refusal.has_value()) return absl::OkStatus();
  std::vector<std::string> ways = Elsewhere(job, plan, all, topology);
  if (!refusal->instead.empty()) ways.insert(ways.begin(), refusal->instead);
  const TopologyKindRow& kind = kTopologyKinds[static_cast<int>(topology.kind())];
  return absl::UnimplementedError(absl::StrCat("job ", job.name, " ", refusal->what, ", which ", kind.refuses, " yet",
                                               ways.empty() ? "" : "; ", absl::StrJoin(ways, ", or ")));
}

}  // namespace

FeatureSet FeaturesOf(const JobSpec& job, const Plan& plan) {
  FeatureSet features;
  const auto set = [&](Feature feature, bool has) { features.set(static_cast<size_t>(feature), has); };
  set(Feature::kTraining, true);
  set(Feature::kClipNorm, job.clip_norm > 0);
  set(Feature::kPublishEvery, job.publish_every != kPublishOnDemand);
  set(Feature::kTokenWeights, job.token_weights);
  set(Feature::kCheckEvery, job.check_every > 0);
  set(Feature::kMuon, absl::c_any_of(plan.buckets(), [](const Bucket& bucket) { return bucket.owned(); }));
  set(Feature::kQuantizedGathers,
      absl::c_any_of(plan.buckets(), [](const Bucket& bucket) { return bucket.quantized(); }));
  set(Feature::kBucketResidency, job.residency == Residency::kBucket);
  set(Feature::kPulledSlots, job.pulled());
  set(Feature::kReform, GoesBack(job));
  return features;
}

absl::Status CheckSupported(const JobSpec& job, const Plan& plan, const Topology& topology) {
  const FeatureSet features = FeaturesOf(job, plan);
  return CheckAll(job, plan, features, features, topology);
}

absl::Status CheckSupported(const JobSpec& job, const Plan& plan, const Topology& topology, Feature feature) {
  FeatureSet all = FeaturesOf(job, plan);
  for (int i = 0; i < kNumFeatures; ++i) {
    if (!all[i]) continue;
    RETURN_IF_ERROR(CheckTogether(absl::StrCat("job ", job.name), static_cast<Feature>(i), feature));
  }
  FeatureSet asked;
  asked.set(static_cast<size_t>(feature));
  all |= asked;
  return CheckAll(job, plan, asked, all, topology);
}

}  // namespace shardmesh
