// Contract 1 with frozen parameters: the others learn the reference kernel's bits on every mesh, which are, where
// gradients are not clipped, those that they learn beside parameters that are stepped; frozen weights stay what they
// were in every version; and slots have no memory for their gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Variant;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSlots = 3;  // of the variants
constexpr int64_t kSteps = 6;

// One of each format, a tied pair and one without elements are frozen.
JobSpec FrozenJob(const std::string& name) {
  JobSpec spec = testing::OddJob(name, "fsdp=1", kSlots);
  for (ParameterSpec& p : spec.parameters) {
    p.frozen = p.name == "embed.weight" || p.name == "head.weight" || p.name == "layers.0.weight" ||
               p.name == "layers.1.weight" || p.name == "layers.1.empty";
  }
  return spec;
}

// The same weights as the reference where a parameter is frozen as said.
void ExpectSameWeights(const JobSpec& spec, const Learnt& learnt, const Learnt& reference, bool frozen) {
  for (const ParameterSpec& p : spec.parameters) {
    if (p.frozen != frozen) continue;
    EXPECT_EQ(learnt.weights.at(p.name), reference.weights.at(p.name)) << p.name;
  }
}

TEST(FrozenParameters, EveryMesh_LearnsTheReferencesBits) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  int index = 0;
  for (const double clip_norm : {0.0, 0.5}) {
    JobSpec spec = FrozenJob("frozen");
    spec.clip_norm = clip_norm;
    const Learnt reference = testing::ReferenceOf(spec, kSteps), initial = testing::ReferenceOf(spec, 0);
    JobSpec all = spec;
    for (ParameterSpec& p : all.parameters) p.frozen = false;
    const Learnt beside = testing::ReferenceOf(all, kSteps);
    for (const Variant& variant : testing::VariantsOfThreeSlots()) {
      SCOPED_TRACE(absl::StrCat(testing::Describe(variant), " clip ", clip_norm));
      spec.name = absl::StrCat("job-", index++);
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, spec, variant, kSteps));
      ASSERT_EQ(learnt, reference);
      ExpectSameWeights(spec, learnt, initial, /*frozen=*/true);
      if (clip_norm == 0) ExpectSameWeights(spec, learnt, beside, /*frozen=*/false);
    }
  }
}

TEST(FrozenParameters, EveryVersionAndWindow_HasThemAsTheyWere) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = FrozenJob("frozen");
  spec.mesh = ParseMeshSpec("ddp=2,fsdp=2").value();
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto attached, job->Attach({Slot(0), Slot(1), Slot(2)}));
  ASSERT_OK(attached->AwaitWeights(absl::Seconds(20)));
  EXPECT_THAT(
      attached->gradient(Slot(0), "embed.weight"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"embed.weight\" is frozen: it has no gradient")));
  EXPECT_THAT(attached->gradient(Slot(0), "head.weight"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("frozen")));
  for (int64_t step = 0; step <= 4; ++step) {  // through both publications, and twice
    ASSERT_OK(testing::TrainTo(*attached, step));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, step));
    const Learnt reference = testing::ReferenceOf(spec, step);
    ASSERT_EQ(learnt, reference);
    for (const ParameterSpec& p : spec.parameters) {
      ASSERT_OK_AND_ASSIGN(const ConstTensorView view, attached->parameter(p.name));
      const std::string bytes(static_cast<const char*>(view.data), view.num_elements * BytesPerElement(view.format));
      EXPECT_EQ(bytes, reference.weights.at(p.name)) << p.name << " step " << step;
    }
  }
}

// A frozen mask of -inf is one of the usual weights. A trained one would make everything NaN.
TEST(FrozenParameters, InitialWeightsThatAreNotFinite_OnlyFrozenOnesMayHave) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = FrozenJob("frozen");
  spec.mesh = ParseMeshSpec("fsdp=2").value();
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  auto weights = testing::InitialWeights(spec);
  weights.at("embed.weight").back() = -std::numeric_limits<float>::infinity();
  weights.at("layers.0.bias")[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(job->Initialize(weights, absl::Seconds(30)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("initial weights of \"layers.0.bias\" at element 1 are not finite")));
  weights.at("layers.0.bias")[1] = 0;
  ASSERT_OK(job->Initialize(weights, absl::Seconds(30)));
}

// In nf4 one of them would make the whole tensor NaN.
TEST(FrozenParameters, InNf4_TheyAreFinite) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = FrozenJob("frozen");
  spec.mesh = ParseMeshSpec("fsdp=2").value();
  spec.parameters.push_back({"base", {40, 50}, WeightFormat::kNf4});
  spec.parameters.back().frozen = true;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  auto weights = testing::InitialWeights(spec);
  weights.at("base")[700] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(job->Initialize(weights, absl::Seconds(30)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("initial weights of \"base\" at element 700 are not finite"),
                             HasSubstr("or store it as fp32 or bf16, which may have any"))));
  weights = testing::InitialWeights(spec);
  ASSERT_OK(job->Initialize(weights, absl::Seconds(30)));
}

// The gradient that is not finite is the one that is named, not that of a frozen parameter before it.
TEST(FrozenParameters, NonFiniteGradients_AreNamed_WhoeverWritesThem) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = FrozenJob("frozen");
  spec.mesh = ParseMeshSpec("fsdp=2").value();
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  for (const bool attached : {true, false}) {
    const std::vector<Slot> slots = {Slot(0), Slot(1), Slot(2)};
    ASSERT_OK_AND_ASSIGN(const auto session, attached ? job->Attach(slots) : job->Connect(slots));
    ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
    ASSERT_OK(testing::WriteGradients(*session, session->committed_step().next()));
    ASSERT_OK_AND_ASSIGN(const TensorView bias, session->gradient(Slot(1), "layers.0.bias"));
    static_cast<uint16_t*>(bias.data)[0] = 0x7FC0;  // NaN
    ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, session->Step());
    EXPECT_TRUE(reply.skipped());
    EXPECT_THAT(reply.skip_reason(), HasSubstr("slot 1: gradient of \"layers.0.bias\""));
  }
}

TEST(FrozenParameters, SlotsAndShards_AreSmallerByTheirBytes) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  constexpr int64_t kElements = int64_t{1} << 20;
  v1::GetStatusReply::Job with, without;
  for (const bool frozen : {false, true}) {
    JobSpec spec = testing::TinyJob(frozen ? "frozen" : "all", "fsdp=1", kSlots, kElements);
    spec.parameters.push_back({"f", {kElements}, WeightFormat::kFp32});
    spec.bucket_elements = kElements;  // a bucket for each
    spec.parameters[1].frozen = frozen;
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(0)).GetStatus(absl::Seconds(10)));
    for (const v1::GetStatusReply::Job& each : status.jobs()) {
      if (each.name() == spec.name) (frozen ? without : with) = each;
    }
    ASSERT_OK(testing::Delete(client, spec.name));
  }
  EXPECT_EQ(with.slot_bytes() - without.slot_bytes(), kSlots * kElements * 2);
  EXPECT_EQ(with.window_bytes(), without.window_bytes());
  EXPECT_EQ(with.publication_bytes(), without.publication_bytes());
  EXPECT_GE(with.shard_bytes() - without.shard_bytes(), kElements * 8);  // two states, and spares
}

}  // namespace
}  // namespace shardmesh
