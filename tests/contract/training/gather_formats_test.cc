// Contract 1, of what readers get: weights that are gathered in codes are, on every mesh and for attached and connected
// trainers, those that kernels/encode/encode.h gives for the whole tensor: to quantize and then shard is to shard and
// then quantize, bit for bit. (tests/parity compares Encode with torchao's float8 and MX formats, so
// this compares jobs with them.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
using ::shardmesh::testing::Trainer;
using ::shardmesh::testing::Variant;

constexpr int kSlots = 3;
constexpr int64_t kSteps = 8;
constexpr GatherFormat kGathers[] = {GatherFormat::kFp8Tensor, GatherFormat::kFp8Row,  GatherFormat::kFp8Block,
                                     GatherFormat::kMx8,       GatherFormat::kInt8Row, GatherFormat::kNf4};

// Shapes that no number of shards divides, in every gather format that takes them.
JobSpec JobOf(const std::string& name) {
  const std::vector<std::pair<std::vector<int64_t>, WeightFormat>> tensors = {
      {{131, 160}, WeightFormat::kBf16Plus16}, {{37, 53}, WeightFormat::kBf16Sr},
      {{5, 96}, WeightFormat::kFp32},          {{4099}, WeightFormat::kBf16Plus8Sr},
      {{67, 160}, WeightFormat::kInt8Row},     {{37, 53}, WeightFormat::kInt8Row},
      {{1100}, WeightFormat::kInt8Row},        {{}, WeightFormat::kFp32}};
  JobSpec spec = testing::OddJob(name, "fsdp=1", kSlots);
  for (const GatherFormat gather : kGathers) {
    for (const auto& [shape, format] : tensors) {
      if (!ScaleBlocksOf(gather, shape).ok()) continue;
      const std::string tensor = absl::StrCat(GatherFormatName(gather), ".", shape.size(), ".", spec.parameters.size());
      spec.parameters.push_back({tensor, shape, format, "", StateFormat::kDyn8, gather});
    }
  }
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{131, 160}, {4099}, {257, 300}, {}}) {
    const std::string tensor = absl::StrCat("base.", shape.size(), ".", spec.parameters.size());
    spec.parameters.push_back({tensor, shape, WeightFormat::kNf4, "", StateFormat::kFp32, GatherFormat::kNf4});
    spec.parameters.back().frozen = true;
  }
  const ParameterSpec last = spec.parameters[spec.parameters.size() - 5];
  spec.parameters.push_back({"tied", last.shape, last.format, last.name, last.states, last.gather});
  return spec;
}

TEST(GatherFormats, EveryMesh_GathersTheBitsOfTheWholeTensor) {
  const std::vector<Trainer> attached = {{{0, 1, 2}, true}}, connected = {{{0, 1, 2}, false}};
  const std::vector<Trainer> two = {{{2, 0}, true}, {{1}, true}}, mixed = {{{1}, true}, {{0, 2}, false}};
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8, .threads = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  const JobSpec quantized = JobOf("quantized");
  const Learnt expected = testing::ReferenceOf(quantized, kSteps);
  for (const Variant& variant : std::vector<Variant>{{"fsdp=1", attached},
                                                     {"fsdp=3", mixed, 1024},
                                                     {"ddp=3", connected},
                                                     {"fsdp=8", two, 1024},
                                                     {"ddp=2,fsdp=2,abcd=2", mixed},
                                                     {"ddp=2,fsdp=2,abcd=2", two, kDefaultBucketElements}}) {
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, quantized, variant, kSteps));
    EXPECT_EQ(learnt.digest, expected.digest) << testing::Describe(variant);
    for (const auto& [name, bytes] : expected.weights) {
      EXPECT_TRUE(learnt.weights.at(name) == bytes) << name << " of " << testing::Describe(variant);
    }
  }
}

// Trainers see in their windows what readers pull.
TEST(GatherFormats, WindowsHoldWhatIsPublished) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = JobOf("windows");
  spec.mesh = *ParseMeshSpec("ddp=2,fsdp=2,abcd=2");
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  int64_t last = 0;
  for (const bool attach : {true, false}) {
    const std::vector<Slot> slots = {Slot(0), Slot(1), Slot(2)};
    ASSERT_OK_AND_ASSIGN(const auto session, attach ? job->Attach(slots) : job->Connect(slots));
    ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
    for (int i = 0; i < 3; ++i) {
      ASSERT_OK(testing::TrainTo(*session, ++last));
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, last));
      for (const ParameterSpec& p : spec.parameters) {
        ASSERT_OK_AND_ASSIGN(const ConstTensorView view, session->parameter(p.name));
        EXPECT_EQ(view.gather, p.gather);
        const std::string bytes =
            absl::StrCat(absl::string_view(static_cast<const char*>(view.data), view.data_bytes()),
                         absl::string_view(static_cast<const char*>(view.scales), view.scale_bytes()));
        EXPECT_TRUE(bytes == learnt.weights.at(p.name)) << p.name << " step " << last;
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
