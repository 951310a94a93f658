#include "core/job/job.h"

#include <cmath>
#include <functional>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::StrEq;

JobSpec GoodJob() {
  JobSpec job;
  job.name = "train-1.a_B";
  job.mesh = *ParseMeshSpec("ddp=2,fsdp=2");
  job.num_slots = 4;
  job.parameters = {
      {"w", {3, 5}, WeightFormat::kBf16Sr}, {"b", {}, WeightFormat::kFp32}, {"t", {3, 5}, WeightFormat::kBf16Sr, "w"}};
  return job;
}

struct Case {
  std::function<void(JobSpec&)> change;
  absl::StatusCode code;
  const char* message;
};

TEST(JobTest, GoodJob_IsValid) {
  EXPECT_OK(GoodJob().Validate());
  EXPECT_EQ(GoodJob().parameters[0].NumElements(), 15);
  EXPECT_EQ(GoodJob().parameters[1].NumElements(), 1);
  EXPECT_EQ(GoodJob().StorageOf(0), 0);
  EXPECT_EQ(GoodJob().StorageOf(2), 0);
}

TEST(JobTest, BadValue_ErrorNamesItAndWhatWouldBeRight) {
  using Code = absl::StatusCode;
  constexpr int64_t kMany = int64_t{1} << 40;
  const std::vector<Case> cases = {
      {[](JobSpec& j) { j.name = ""; }, Code::kInvalidArgument, "job name \"\" is not 1 to 128 characters of A-Z"},
      {[](JobSpec& j) { j.name = "a b"; }, Code::kInvalidArgument, "job name \"a b\""},
      {[](JobSpec& j) { j.name = "a\n\xff"; }, Code::kInvalidArgument, "\"a\\n\\xff\""},
      {[](JobSpec& j) { j.name = std::string(129, 'x'); }, Code::kInvalidArgument, "128"},
      {[](JobSpec& j) { j.mesh.dims.clear(); }, Code::kInvalidArgument, "mesh"},
      {[](JobSpec& j) { j.mesh.dims[0].size = 0; }, Code::kInvalidArgument, "ddp"},
      {[](JobSpec& j) { j.num_slots = 0; }, Code::kInvalidArgument, "slots is 0; it is 1 to 128"},
      {[](JobSpec& j) { j.num_slots = -3; }, Code::kInvalidArgument, "slots is -3"},
      {[](JobSpec& j) { j.num_slots = kMaxSlots + 1; }, Code::kInvalidArgument, "slots is 129"},
      {[](JobSpec& j) { j.parameters.clear(); }, Code::kInvalidArgument, "has no parameters; give at least one"},
      {[](JobSpec& j) { j.parameters.resize(kMaxParameters + 1); }, Code::kResourceExhausted, "at most 100000"},
      {[](JobSpec& j) { j.parameters[1].name = ""; }, Code::kInvalidArgument, "parameter 1 has no name"},
      {[](JobSpec& j) { j.parameters[1].name = "w"; }, Code::kAlreadyExists,
       "parameters 0 and 1 have one canonical name \"w\""},
      {[](JobSpec& j) { j.parameters[1].given = "w"; }, Code::kAlreadyExists,
       "parameters 0 and 1 have one original name \"w\""},
      {[](JobSpec& j) { j.parameters[1].given = "a..b"; }, Code::kInvalidArgument, "parameter 1 \"b\": given: "},
      {[](JobSpec& j) {
         j.parameters[0].shape = {3, -5};
       },
       Code::kInvalidArgument, "parameter 0 \"w\": size -5"},
      {[](JobSpec& j) {
         j.parameters[0].shape = {0, -5};
       },
       Code::kInvalidArgument, "size -5"},
      {[](JobSpec& j) { j.parameters[0].shape.assign(17, 1); }, Code::kInvalidArgument, "17 dimensions; at most 16"},
      {[](JobSpec& j) {
         j.parameters[0].shape = {kMany, 2};
       },
       Code::kResourceExhausted, "shape [1099511627776,2] has more than 2^40"},
      {[](JobSpec& j) {
         j.parameters[0].shape = {INT64_MAX, INT64_MAX};
       },
       Code::kResourceExhausted, "more than 2^40"},
      {[](JobSpec& j) {
         for (const char* name : {"x", "y", "z", "u", "v"}) j.parameters.push_back({name, {kMany}});
       },
       Code::kResourceExhausted, "the job has more than 2^42 elements"},
      {[](JobSpec& j) { j.parameters[2].tied_to = "q"; }, Code::kInvalidArgument,
       "parameter \"t\" is tied to \"q\", which is no parameter with its own storage"},
      {[](JobSpec& j) { j.parameters[2].tied_to = "t"; }, Code::kInvalidArgument, "is tied to \"t\", which is no"},
      {[](JobSpec& j) { j.parameters[0].tied_to = "t"; }, Code::kInvalidArgument,
       "\"w\" is tied to \"t\", which is no"},
      {[](JobSpec& j) { j.parameters[2].shape = {15}; }, Code::kInvalidArgument,
       "another shape or format: [15] bf16_sr, not [3,5] bf16_sr"},
      {[](JobSpec& j) { j.parameters[2].format = WeightFormat::kFp32; }, Code::kInvalidArgument,
       "[3,5] fp32, not [3,5]"},
      {[](JobSpec& j) { j.parameters[2].states = StateFormat::kDyn8; }, Code::kInvalidArgument,
       "[3,5] bf16_sr with dyn8 states, not [3,5] bf16_sr"},
      {[](JobSpec& j) { j.parameters[2].frozen = true; }, Code::kInvalidArgument,
       "parameter \"t\" is frozen, but is tied to \"w\", which is not; freeze both or neither"},
      {[](JobSpec& j) { j.parameters[0].frozen = true; }, Code::kInvalidArgument,
       "parameter \"t\" is not frozen, but is tied to \"w\", which is; freeze"},
      {[](JobSpec& j) {
         j.parameters[1].format = WeightFormat::kInt8Row;
         j.parameters[1].gather = GatherFormat::kFp8Block;
       },
       Code::kInvalidArgument, "parameter 1 \"b\": shape [] cannot be gathered as fp8_block, which codes matrices"},
      {[](JobSpec& j) { j.parameters[1].format = WeightFormat::kNf4; }, Code::kInvalidArgument,
       "parameter 1 \"b\" has nf4 weights and is trained, but no step writes nf4; freeze it, or store it as int8_row"},
      {[](JobSpec& j) {
         j.parameters[1].format = WeightFormat::kNf4;
         j.parameters[1].frozen = true;
         j.parameters[1].gather = GatherFormat::kFp8Row;
       },
       Code::kInvalidArgument, "has nf4 weights, which are gathered as nf4, not as fp8_row; gather it as stored"},
      {[](JobSpec& j) { j.parameters[1].group = 1; }, Code::kInvalidArgument,
       "parameter 1 \"b\": group 1 is none of the job's: 0 to 0"},
      {[](JobSpec& j) { j.parameters[2].group = -7; }, Code::kInvalidArgument, "parameter 2 \"t\": group -7 is none"},
      {[](JobSpec& j) { j.more_groups.assign(kMaxGroups, j.optimizer); }, Code::kResourceExhausted,
       "4097 parameter groups; at most 4096"},
      {[](JobSpec& j) {
         j.more_groups.assign(2, j.optimizer);
         j.more_groups[1].lr = std::nan("");
       },
       Code::kInvalidArgument, "group 2: adamw: AdamW: lr is nan"},
      {[](JobSpec& j) {
         j.more_groups.assign(2, j.optimizer);
         j.optimizer.lr = -0.5;
       },
       Code::kInvalidArgument, "group 0: adamw: AdamW: lr is -0.5"},
      {[](JobSpec& j) { j.parameters[0].gather = GatherFormat::kMx8; }, Code::kInvalidArgument,
       "parameter 0 \"w\": shape [3,5] cannot be gathered as mx8, which codes rows of multiples of 32"},
      {[](JobSpec& j) { j.parameters[0].gather = GatherFormat::kFp8Row; }, Code::kInvalidArgument,
       "[3,5] bf16_sr, not [3,5] bf16_sr gathered as fp8_row"},
      {[](JobSpec& j) { j.optimizer = OptimizerHyper::Defaults(OptimizerKind::kMuon); }, Code::kInvalidArgument,
       "parameter \"b\" is stepped by muon (group 0), but has the shape []; muon steps matrices: reshape it"},
      {[](JobSpec& j) {
         j.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
         j.parameters[0] = {"w", {2, 3, 4}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1};
       },
       Code::kInvalidArgument, "parameter \"w\" is stepped by muon (group 1), but has the shape [2,3,4]"},
      {[](JobSpec& j) {
         j.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
         j.parameters[0] = {"w", {3, 4}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kStored, 1};
       },
       Code::kInvalidArgument,
       "parameter \"w\" (group 1) is stepped by Muon and has int8_row weights, which cannot go together: int8_row has "
       "a "
       "scale for each row, and Muon's update is orthogonal as a whole matrix alone; take bf16_sr, or another"},
      {[](JobSpec& j) {
         j.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
         j.parameters[0] = {"w", {1 << 16, 1 << 16}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored,
                            1};
       },
       Code::kResourceExhausted, "[65536,65536]; matrices of muon have at most 2^31 elements"},
      {[](JobSpec& j) {
         j.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
         j.more_groups[0].eps = 0;
       },
       Code::kInvalidArgument, "group 1: muon: eps is 0"},
      {[](JobSpec& j) {
         j.optimizer = OptimizerHyper::Defaults(OptimizerKind::kSgd);
         j.optimizer.nesterov = true;
       },
       Code::kInvalidArgument, "nesterov"},
      {[](JobSpec& j) { j.gradient_format = Format::kBf16Sr; }, Code::kInvalidArgument,
       "gradient format is bf16_sr; it is fp32 or bf16"},
      {[](JobSpec& j) { j.optimizer.beta1 = 1; }, Code::kInvalidArgument, "beta1"},
      {[](JobSpec& j) { j.optimizer.lr = std::nan(""); }, Code::kInvalidArgument, "lr"},
      {[](JobSpec& j) { j.bucket_elements = 1023; }, Code::kInvalidArgument,
       "bucket_elements is 1023; it is 1024 to 4294967296"},
      {[](JobSpec& j) { j.bucket_elements = kMaxBucketElements + 1; }, Code::kInvalidArgument, "4294967297"},
      {[](JobSpec& j) { j.clip_norm = -1; }, Code::kInvalidArgument, "clip_norm is -1; it is 0"},
      {[](JobSpec& j) { j.clip_norm = std::nan(""); }, Code::kInvalidArgument, "clip_norm is nan"},
      {[](JobSpec& j) { j.clip_norm = 1e39; }, Code::kInvalidArgument, "clip_norm is 1e+39"},
      {[](JobSpec& j) { j.publish_every = 0; }, Code::kInvalidArgument,
       "publish_every is 0; it is 1 to 1073741824, or -1 (on demand)"},
      {[](JobSpec& j) { j.publish_every = kMaxPublishEvery + 1; }, Code::kInvalidArgument, "1073741825"},
      {[](JobSpec& j) { j.publish_every = -2; }, Code::kInvalidArgument, "publish_every is -2"},
      {[](JobSpec& j) { j.publications = 0; }, Code::kInvalidArgument, "publications is 0; it is 1 to 8"},
      {[](JobSpec& j) { j.publications = 9; }, Code::kInvalidArgument, "publications is 9"},
      {[](JobSpec& j) { j.check_every = -1; }, Code::kInvalidArgument,
       "check_every is -1; it is 0 (nothing is checked)"},
      {[](JobSpec& j) { j.check_every = kMaxCheckEvery + 1; }, Code::kInvalidArgument, "1073741825"},
      {[](JobSpec& j) { j.prefetch_buckets = 0; }, Code::kInvalidArgument, "prefetch_buckets is 0; it is 1 to 1048576"},
  };
  for (const Case& c : cases) {
    JobSpec job = GoodJob();
    c.change(job);
    EXPECT_THAT(job.Validate(), StatusIs(c.code, HasSubstr(c.message)));
  }
}

TEST(JobTest, GroupsOfAnyOptimizers_AreAccepted) {
  JobSpec job = GoodJob();
  for (const OptimizerKind kind : {OptimizerKind::kMuon, OptimizerKind::kLion, OptimizerKind::kSgd}) {
    job.more_groups.push_back(OptimizerHyper::Defaults(kind));
  }
  job.parameters = {{"matrix", {3, 5}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kFp8Block, 1},
                    {"none", {0, 5}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1},
                    {"bias", {5}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kStored, 2},
                    {"scale", {}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kInt8Row, 3},
                    {"frozen", {7}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1, true},
                    {"tied", {5}, WeightFormat::kInt8Row, "bias", StateFormat::kFp32, GatherFormat::kStored, 1}};
  EXPECT_OK(job.Validate());
  EXPECT_EQ(job.NumStatesOf(job.parameters[0]), 1);
  EXPECT_TRUE(job.IsMuon(job.parameters[0]));
  EXPECT_EQ(job.NumStatesOf(job.parameters[3]), 0);
  EXPECT_FALSE(job.IsMuon(job.parameters[4]));
}

TEST(JobTest, LargestValues_AreAccepted) {
  JobSpec job = GoodJob();
  job.name = std::string(kMaxIdBytes, 'x');
  job.num_slots = kMaxSlots;
  job.bucket_elements = kMaxBucketElements;
  job.publish_every = kMaxPublishEvery;
  job.parameters = {{"w", {kMaxTensorElements}}};
  job.more_groups.assign(kMaxGroups - 1, job.optimizer);
  job.parameters[0].group = kMaxGroups - 1;
  EXPECT_OK(job.Validate());
}

TEST(JobTest, OriginalNames_AreNoDifference) {
  JobSpec original = GoodJob();
  original.parameters[1].given = "_orig_mod.b";
  EXPECT_OK(original.Validate());
  EXPECT_EQ(original.parameters[1].original_name(), "_orig_mod.b");
  EXPECT_EQ(original.parameters[0].original_name(), "w");
  EXPECT_EQ(Difference(GoodJob(), original), "");
  EXPECT_EQ(Difference(original, GoodJob()), "");
}

TEST(JobTest, Difference_NamesEveryField) {
  const std::vector<Case> cases = {
      {[](JobSpec& j) { j.name = "other"; }, {}, "job name: train-1.a_B there, other here"},
      {[](JobSpec& j) { j.mesh.dims[1].size = 3; }, {}, "mesh: ddp=2,fsdp=2 there, ddp=2,fsdp=3 here"},
      {[](JobSpec& j) { j.num_slots = 5; }, {}, "slots: 4 there, 5 here"},
      {[](JobSpec& j) { j.gradient_format = Format::kFp32; }, {}, "gradient format: bf16 there, fp32 here"},
      {[](JobSpec& j) { j.seed = UINT64_MAX; }, {}, "seed: 0 there, 18446744073709551615 here"},
      {[](JobSpec& j) { j.optimizer.lr = 0.5; }, {}, "optimizer lr: 0.001 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.lr = std::nextafter(1e-3, 1); },
       {},
       "optimizer lr: 0.001 there, 0.0010000000000000002 here"},
      {[](JobSpec& j) { j.optimizer.beta1 = 0.5; }, {}, "optimizer beta1: 0.9 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.beta2 = 0.5; }, {}, "optimizer beta2: 0.999 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.eps = 0.5; }, {}, "optimizer eps: 1e-08 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.weight_decay = 0.5; }, {}, "optimizer weight_decay: 0.01 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.kind = OptimizerKind::kLion; }, {}, "optimizer: adamw there, lion here"},
      {[](JobSpec& j) { j.optimizer.amsgrad = true; }, {}, "optimizer amsgrad: 0 there, 1 here"},
      {[](JobSpec& j) { j.optimizer.maximize = true; }, {}, "optimizer maximize: 0 there, 1 here"},
      {[](JobSpec& j) { j.optimizer.momentum = 0.5; }, {}, "optimizer momentum: 0 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.dampening = 0.5; }, {}, "optimizer dampening: 0 there, 0.5 here"},
      {[](JobSpec& j) { j.optimizer.nesterov = true; }, {}, "optimizer nesterov: 0 there, 1 here"},
      {[](JobSpec& j) { j.more_groups = {j.optimizer}; }, {}, "number of parameter groups: 1 there, 2 here"},
      {[](JobSpec& j) { j.parameters[1].group = 3; }, {}, "parameter 1 \"b\": group: 0 there, 3 here"},
      {[](JobSpec& j) { j.parameters[1].frozen = true; }, {}, "parameter 1 \"b\": frozen: 0 there, 1 here"},
      {[](JobSpec& j) { j.parameters[0].states = StateFormat::kDyn8; },
       {},
       "parameter 0 \"w\": states: fp32 there, dyn8 here"},
      {[](JobSpec& j) { j.parameters[1].gather = GatherFormat::kFp8Tensor; },
       {},
       "parameter 1 \"b\": gather: stored there, fp8_tensor here"},
      {[](JobSpec& j) { j.non_finite = NonFinitePolicy::kFail; }, {}, "non-finite policy: skip there, fail here"},
      {[](JobSpec& j) { j.bucket_elements = 2048; }, {}, "bucket_elements: 16777216 there, 2048 here"},
      {[](JobSpec& j) { j.clip_norm = 2; }, {}, "clip_norm: 0 there, 2 here"},
      {[](JobSpec& j) { j.publish_every = 2; }, {}, "publish_every: 1 there, 2 here"},
      {[](JobSpec& j) { j.publications = 2; }, {}, "publications: 3 there, 2 here"},
      {[](JobSpec& j) { j.check_every = 2; }, {}, "check_every: 0 there, 2 here"},
      {[](JobSpec& j) { j.residency = Residency::kBucket; }, {}, "residency: full there, bucket here"},
      {[](JobSpec& j) { j.prefetch_buckets = 3; }, {}, "prefetch_buckets: 1 there, 3 here"},
      {[](JobSpec& j) { j.on_loss = OnLoss::kCheckpoint; }, {}, "on_loss: fail there, checkpoint here"},
      {[](JobSpec& j) { j.parameters.pop_back(); }, {}, "number of parameters: 3 there, 2 here"},
      {[](JobSpec& j) { j.parameters[0].name = "v"; }, {}, "name of parameter 0: \"w\" there, \"v\" here"},
      {[](JobSpec& j) { j.parameters[0].shape = {15}; }, {}, "parameter 0 \"w\": shape: [3,5] there, [15] here"},
      {[](JobSpec& j) { j.parameters[0].format = WeightFormat::kFp32; },
       {},
       "parameter 0 \"w\": format: bf16_sr there, fp32 here"},
      {[](JobSpec& j) { j.parameters[2].tied_to = ""; }, {}, "parameter 2 \"t\": tied to: \"w\" there, \"\" here"},
  };
  EXPECT_THAT(Difference(GoodJob(), GoodJob()), StrEq(""));
  JobSpec grouped = GoodJob(), other = GoodJob();
  grouped.more_groups.assign(2, grouped.optimizer);
  other.more_groups = grouped.more_groups;
  EXPECT_THAT(Difference(grouped, other), StrEq(""));
  other.more_groups[1].eps = 0.5;
  EXPECT_THAT(Difference(grouped, other), StrEq("optimizer of group 2 eps: 1e-08 there, 0.5 here"));
  for (const Case& c : cases) {
    JobSpec job = GoodJob();
    c.change(job);
    EXPECT_THAT(Difference(GoodJob(), job), StrEq(c.message));
  }
}

TEST(JobTest, OnLossIsParsed) {
  for (const OnLoss on_loss : {OnLoss::kFail, OnLoss::kCheckpoint}) {
    ASSERT_OK_AND_ASSIGN(const OnLoss parsed, ParseOnLoss(OnLossName(on_loss)));
    EXPECT_EQ(parsed, on_loss);
  }
  EXPECT_THAT(ParseOnLoss("retry"),
              StatusIs(absl::StatusCode::kInvalidArgument, "on_loss is \"retry\"; it is fail or checkpoint"));
}

TEST(JobTest, ResidenciesAreParsed) {
  for (const Residency residency : {Residency::kFull, Residency::kBucket}) {
    ASSERT_OK_AND_ASSIGN(const Residency parsed, ParseResidency(ResidencyName(residency)));
    EXPECT_EQ(parsed, residency);
  }
  EXPECT_THAT(ParseResidency("Full"),
              StatusIs(absl::StatusCode::kInvalidArgument, "\"Full\" is no residency; there are full, bucket"));
}

}  // namespace
}  // namespace shardmesh
