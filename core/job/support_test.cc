#include "core/job/support.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardmesh {
namespace {

using Code = absl::StatusCode;
using ::testing::HasSubstr;

// A job with nothing but training: versions are not even published.
JobSpec PlainJob() {
  JobSpec job;
  job.name = "j";
  job.mesh = *ParseMeshSpec("fsdp=4");
  job.num_slots = 2;
  job.publish_every = kPublishOnDemand;
  job.parameters = {{"a", {8, 8}, WeightFormat::kFp32}, {"b", {64, 4}, WeightFormat::kBf16Sr}};
  return job;
}

Plan PlanOf(const JobSpec& job) { return *Plan::Create(job); }

// Makes the job need a feature by its specification. False: the feature is asked of a job later.
bool Need(Feature feature, JobSpec& job) {
  switch (feature) {
    case Feature::kTraining:
      return true;
    case Feature::kClipNorm:
      job.clip_norm = 1;
      return true;
    case Feature::kPublishEvery:
      job.publish_every = 3;
      return true;
    case Feature::kTokenWeights:
      job.token_weights = true;
      return true;
    case Feature::kCheckEvery:
      job.check_every = 10;
      return true;
    case Feature::kMuon:
      job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
      job.parameters[0].group = 1;
      return true;
    case Feature::kQuantizedGathers:
      job.parameters[1].gather = GatherFormat::kFp8Tensor;
      return true;
    case Feature::kBucketResidency:
      job.residency = Residency::kBucket;
      return true;
    case Feature::kPulledSlots:
      job.slot_mode = SlotMode::kPulled;
      job.num_trainers = 2;
      return true;
    default:
      return false;
  }
}

// What a refusal says the job has or is asked for.
std::string WhatIsSaid(Feature feature) {
  if (feature == Feature::kMuon) return "has parameter \"a\", which is stepped by Muon";
  if (feature == Feature::kQuantizedGathers) return "has parameter \"b\", which is gathered as fp8_tensor";
  return std::string(RowOf(feature).job);
}

Topology At(TopologyKind kind) {
  const bool several = kind == TopologyKind::kHostsCpu || kind == TopologyKind::kHostsCuda;
  const bool device = kind == TopologyKind::kHostCuda || kind == TopologyKind::kHostsCuda;
  return {several ? 2 : 1, 4, device};
}

bool Trains(TopologyKind kind) { return Works(Feature::kTraining, kind); }

// The message of a cell, composed from the table alone.
std::string Expected(Feature feature, TopologyKind kind) {
  const auto works = [&](TopologyKind other) { return Works(feature, other) && Trains(other); };
  std::vector<std::string> ways;
  if (!RowOf(feature).instead.empty()) ways.emplace_back(RowOf(feature).instead);
  const Topology at = At(kind);
  const bool several = at.hosts > 1;
  if (several && works(at.device ? TopologyKind::kHostCuda : TopologyKind::kHostCpu)) {
    ways.emplace_back("take workers of one host");
  }
  if (at.device && works(several ? TopologyKind::kHostsCpu : TopologyKind::kHostCpu)) {
    ways.emplace_back("start the workers with --device cpu");
  }
  const bool none = ways.size() == (RowOf(feature).instead.empty() ? 0 : 1);
  if (several && at.device && none && works(TopologyKind::kHostCpu)) {
    ways.emplace_back("take workers of one host with --device cpu");
  }
  std::string text =
      absl::StrCat("job j ", WhatIsSaid(feature), ", which ", kTopologyKinds[static_cast<int>(kind)].refuses, " yet");
  for (size_t i = 0; i < ways.size(); ++i) absl::StrAppend(&text, i == 0 ? "; " : ", or ", ways[i]);
  return text;
}

void ForEachCell(const std::function<void(Feature, TopologyKind)>& visit) {
  for (int f = 0; f < kNumFeatures; ++f) {
    for (int t = 0; t < kNumTopologyKinds; ++t) {
      SCOPED_TRACE(absl::StrCat(kFeatures[f].name, " on ", kTopologyKinds[t].name));
      visit(static_cast<Feature>(f), static_cast<TopologyKind>(t));
    }
  }
}

TEST(Support, EveryCell_IsWhatTheTableSays_AndTheMessageSaysWhatWouldWork) {
  ForEachCell([](Feature feature, TopologyKind kind) {
    JobSpec job = PlainJob();
    const bool needed = Need(feature, job);
    const Plan plan = PlanOf(job);
    const absl::Status status =
        needed ? CheckSupported(job, plan, At(kind)) : CheckSupported(job, plan, At(kind), feature);
    // Where nothing trains, that is what is said of a job that needs more.
    const Feature said = needed && !Trains(kind) ? Feature::kTraining : feature;
    if (Works(said, kind)) {
      EXPECT_OK(status);
      return;
    }
    EXPECT_EQ(status.code(), Code::kUnimplemented);
    if (said == feature) {
      EXPECT_EQ(status.message(), Expected(feature, kind));
    }
  });
}

TEST(Support, WeightsStoredAsNf4_OnADevice_SaysHowElseToStoreThem) {
  JobSpec job = PlainJob();
  job.parameters[1].format = WeightFormat::kNf4;
  job.parameters[1].frozen = true;
  EXPECT_OK(CheckSupported(job, PlanOf(job), At(TopologyKind::kHostsCpu)));
  EXPECT_THAT(CheckSupported(job, PlanOf(job), At(TopologyKind::kHostCuda)),
              StatusIs(Code::kUnimplemented,
                       "job j has parameter \"b\", which is gathered as nf4, which workers on a CUDA device do not "
                       "support yet; store it as bf16, or start the workers with --device cpu"));
}

TEST(Support, MessagesInFull) {
  JobSpec job = PlainJob();
  const auto refusal = [&](const Topology& at) { return CheckSupported(job, PlanOf(job), at); };
  EXPECT_OK(refusal({1, 4, true}));
  EXPECT_THAT(
      refusal({2, 4, true}),
      StatusIs(Code::kUnimplemented,
               "job j trains, which workers on CUDA devices of several hosts do not support yet; take workers of "
               "one host, or start the workers with --device cpu"));
  job.residency = Residency::kBucket;
  EXPECT_THAT(refusal({1, 4, true}),
              StatusIs(Code::kUnimplemented,
                       "job j has bucket residency, which workers on a CUDA device do not support yet; take full "
                       "residency, or start the workers with --device cpu"));
  job = PlainJob();
  Need(Feature::kMuon, job);
  EXPECT_THAT(
      refusal({1, 4, true}),
      StatusIs(Code::kUnimplemented,
               "job j has parameter \"a\", which is stepped by Muon, which workers on a CUDA device do not support "
               "yet; take another optimizer for it, or start the workers with --device cpu"));
  job = PlainJob();
  job.on_loss = OnLoss::kCheckpoint;
  EXPECT_THAT(refusal({1, 4, true}),
              StatusIs(Code::kUnimplemented,
                       "job j has on_loss=checkpoint, which workers on a CUDA device do not support yet; leave it out, "
                       "or start the workers with --device cpu"));
  EXPECT_OK(refusal({2, 4, false}));
  job = PlainJob();
  EXPECT_THAT(CheckSupported(job, PlanOf(job), {2, 4, true}, Feature::kReform),
              StatusIs(Code::kUnimplemented,
                       "job j is asked to re-form, which workers on CUDA devices of several hosts do not support yet; "
                       "restore a checkpoint into a new job, or start the workers with --device cpu"));
}

// An alternative that refuses the job for something else is not offered.
TEST(Support, WhatWouldWork_WorksForAllThatTheJobHas) {
  ForEachCell([](Feature feature, TopologyKind kind) {
    JobSpec job = PlainJob();
    Need(Feature::kBucketResidency, job);
    if (!CheckTogether("job j", feature, Feature::kBucketResidency).ok()) return;
    const Plan plan = PlanOf(job);
    const absl::Status status = CheckSupported(job, plan, At(kind), feature);
    const Topology at = At(kind);
    if (status.ok()) return;
    const auto offers = [&](const char* way) { return absl::StrContains(status.message(), way); };
    std::vector<Topology> offered;
    if (offers("take workers of one host with --device cpu")) {
      offered.push_back({1, 4, false});
    } else if (offers("take workers of one host")) {
      offered.push_back({1, 4, at.device});
    }
    if (offers("start the workers with --device cpu")) offered.push_back({at.hosts, 4, false});
    for (const Topology& other : offered) {
      EXPECT_OK(CheckSupported(job, plan, other)) << status;
      EXPECT_OK(CheckSupported(job, plan, other, feature)) << status;
    }
  });
}

TEST(Support, Limits_AreToldWithTheNumber) {
  JobSpec job = PlainJob();
  job.num_slots = kMaxDeviceSlots;
  EXPECT_OK(CheckSupported(job, PlanOf(job), {1, 4, true}));
  job.num_slots = kMaxDeviceSlots + 1;
  EXPECT_OK(CheckSupported(job, PlanOf(job), {1, 4, false}));
  EXPECT_THAT(
      CheckSupported(job, PlanOf(job), {1, 4, true}),
      StatusIs(Code::kUnimplemented,
               "job j has 65 slots, which workers on a CUDA device do not support yet; take at most 64, or start "
               "the workers with --device cpu"));
  EXPECT_THAT(
      CheckSupported(PlainJob(), PlanOf(PlainJob()), {1, kMaxHostRanks + 1, false}),
      StatusIs(Code::kUnimplemented, "job j has 65 ranks, which jobs on one host do not support yet; take at most 64"));
}

TEST(FeaturesOf, EachFeatureByItsFieldAndNoOther) {
  for (int f = 0; f < kNumFeatures; ++f) {
    JobSpec job = PlainJob();
    FeatureSet expected;
    expected.set(static_cast<size_t>(Feature::kTraining));
    if (Need(static_cast<Feature>(f), job)) expected.set(f);
    EXPECT_EQ(FeaturesOf(job, PlanOf(job)), expected) << kFeatures[f].name;
  }
}

// int8_row weights travel as they are stored, whatever it is called; a frozen matrix is stepped by nobody.
TEST(FeaturesOf, FormatsThatNeedNothing) {
  JobSpec job = PlainJob();
  job.parameters[1].format = WeightFormat::kInt8Row;
  job.parameters[1].gather = GatherFormat::kInt8Row;
  Need(Feature::kMuon, job);
  job.parameters[0].frozen = true;
  EXPECT_EQ(FeaturesOf(job, PlanOf(job)).count(), 1u);
}

const RefusedPair* FindPair(Feature a, Feature b) {
  for (const RefusedPair& pair : kRefusedPairs) {
    if ((pair.first == a && pair.second == b) || (pair.first == b && pair.second == a)) return &pair;
  }
  return nullptr;
}

TEST(CheckTogether, EveryPairBothWays) {
  for (const FeatureRow& a : kFeatures) {
    for (const FeatureRow& b : kFeatures) {
      const RefusedPair* const pair = FindPair(a.feature, b.feature);
      const absl::Status status = CheckTogether("job j", a.feature, b.feature);
      SCOPED_TRACE(absl::StrCat(a.name, " with ", b.name));
      if (pair == nullptr) {
        EXPECT_OK(status);
        continue;
      }
      EXPECT_THAT(status, StatusIs(pair->never ? Code::kInvalidArgument : Code::kUnimplemented,
                                   absl::StrCat("job j ", RowOf(pair->first).job, " and ", RowOf(pair->second).job,
                                                pair->never ? ", which cannot go together: "
                                                            : ", which do not go together yet: ",
                                                pair->because, "; ", pair->instead)));
    }
  }
}

// A job that has the one is refused the other when it is asked for it, before the topology is looked at.
TEST(CheckTogether, PairsOfAFieldAndARequest_AreRefusedWhenAsked) {
  for (const RefusedPair& pair : kRefusedPairs) {
    for (const auto& [has, asked] : {std::pair(pair.first, pair.second), std::pair(pair.second, pair.first)}) {
      JobSpec job = PlainJob(), unused = PlainJob();
      if (!Need(has, job) || Need(asked, unused) || asked == Feature::kInt8RowWeights) continue;
      EXPECT_EQ(CheckSupported(job, PlanOf(job), {1, 4, false}, asked), CheckTogether("job j", has, asked));
    }
  }
}

// Both are fields: no specification has them.
TEST(CheckTogether, PairsOfTwoFields_AreRefusedByValidate) {
  for (const RefusedPair& pair : kRefusedPairs) {
    JobSpec job = PlainJob();
    if (pair.second == Feature::kInt8RowWeights || pair.first == Feature::kInt8RowWeights) continue;
    if (!Need(pair.first, job) || !Need(pair.second, job)) continue;
    EXPECT_EQ(job.Validate(), CheckTogether("job j", pair.first, pair.second));
  }
}

TEST(SupportTable, RowsAndPairsSayAllThatTheirMessagesNeed) {
  std::set<absl::string_view> names;
  for (const FeatureRow& row : kFeatures) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.job.empty()) << row.name;
    for (absl::string_view test : row.tests) {
      EXPECT_TRUE(test.empty() || (absl::StartsWith(test, "//") && absl::StrContains(test, ":"))) << test;
    }
  }
  for (const RefusedPair& pair : kRefusedPairs) {
    EXPECT_FALSE(pair.because.empty());
    EXPECT_FALSE(pair.instead.empty());
    EXPECT_EQ(pair.never, pair.first == Feature::kMuon) << "a reason that no implementation changes";
  }
}

}  // namespace
}  // namespace shardmesh
