#include "core/layout/stored_view.h"

#include <map>
#include <set>

#include "core/base/matchers.h"
#include "core/view/reshard.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

Mesh Hsdp() { return Mesh::Create({2, 3}, {"ddp", "fsdp"}).value(); }

StoredPlan PlanOf(std::vector<LayoutTensor> tensors, const Mesh& mesh = Hsdp()) {
  return StoredPlan::Create(std::move(tensors), {}, mesh, {"ddp"}).value();
}

std::vector<LayoutTensor> EveryKind() {
  return {{"f", {33, 17}, "a", {GranuleKind::kFlat, 64}, ""},     {"r", {21, 5, 4}, "a", {GranuleKind::kRows, 2}, ""},
          {"b", {2, 37, 20}, "a", {GranuleKind::kBlock, 8}, ""},  {"w", {9, 11}, "a", {GranuleKind::kWhole, 0}, ""},
          {"v", {3, 8, 8}, "a", {GranuleKind::kWhole, 0}, ""},    {"s", {}, "a", {GranuleKind::kFlat, 64}, ""},
          {"t", {2, 37, 20}, "a", {GranuleKind::kBlock, 8}, "b"}, {"e", {0, 4}, "a", {GranuleKind::kFlat, 64}, ""}};
}

// Where an element lies in its tensor's storage, by the definition of the granules (core/layout/granule.h).
int64_t StoredAt(const LayoutTensor& tensor, const std::vector<int64_t>& element) {
  const auto& shape = tensor.shape;
  int64_t at = 0;
  if (tensor.granule.kind != GranuleKind::kBlock) {
    for (size_t d = 0; d < shape.size(); ++d) at = at * shape[d] + element[d];
    return at;
  }
  const size_t row = shape.size() - 2, column = shape.size() - 1;
  const int64_t side = tensor.granule.size;
  for (size_t d = 0; d < row; ++d) at = at * shape[d] + element[d];
  for (const size_t d : {row, column}) at = at * ((shape[d] + side - 1) / side) + element[d] / side;
  return (at * side + element[row] % side) * side + element[column] % side;
}

// Calls visit(element, its place in memory) for every element of a box.
template <typename Visit>
void ForEachElement(const LocalBox& local, Visit visit) {
  const int64_t count = local.box.NumElements();
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> element(local.box.sizes.size());
    int64_t rest = i, at = local.offset;
    for (size_t d = element.size(); d-- > 0; rest /= local.box.sizes[d]) {
      element[d] = local.box.offsets[d] + rest % local.box.sizes[d];
      at += rest % local.box.sizes[d] * local.strides[d];
    }
    visit(element, at);
  }
}

TEST(StoredViewTest, EveryKindOfGranule_LiesWhereThePlanSays) {
  const StoredPlan plan = PlanOf(EveryKind());
  for (size_t i = 0; i < plan.layout().tensors().size(); ++i) {
    const LayoutTensor& tensor = plan.layout().tensors()[i];
    const std::string& name = tensor.name;
    const TensorPlace& place = plan.layout().places()[i];
    ASSERT_OK_AND_ASSIGN(const TensorView view, ViewOf(plan, name));
    EXPECT_OK(view.CanBeSource());
    std::map<int, std::set<std::vector<int64_t>>> seen;  // by replica
    for (int rank = 0; rank < 6; ++rank) {
      ASSERT_OK_AND_ASSIGN(const std::vector<LocalBox> boxes, view.BoxesOf(Rank(rank)));
      for (const LocalBox& local : boxes) {
        ForEachElement(local, [&](const std::vector<int64_t>& element, int64_t at) {
          const LayoutBucket& bucket = plan.layout().buckets()[place.bucket];
          const int64_t shard = rank % 3, begin = bucket.owned ? 0 : shard * bucket.shard_elements;
          EXPECT_EQ(begin + at, place.offset + StoredAt(tensor, element)) << name;
          EXPECT_EQ(bucket.owned ? shard : -1, place.owner) << name;
          EXPECT_TRUE(seen[rank / 3].insert(element).second) << name;
        });
      }
    }
    for (const int replica : {0, 1}) EXPECT_EQ(seen[replica].size(), static_cast<size_t>(place.num_elements)) << name;
    EXPECT_THAT(view.BoxesOf(Rank(6)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("6")));
  }
}

TEST(StoredViewTest, RankThatHoldsNothing_HasAPartWithoutBoxes) {
  const StoredPlan plan = PlanOf(EveryKind());
  const TensorView scalar = ViewOf(plan, "s").value(), whole = ViewOf(plan, "w").value();
  int holders = 0;
  for (int rank = 0; rank < 6; ++rank) {
    const ReshardPlan copies = PlanReshard({whole}, {whole}, Rank(rank)).value();
    EXPECT_EQ(copies.num_elements, whole.BoxesOf(Rank(rank))->empty() ? 0 : 99);
    holders += static_cast<int>(scalar.BoxesOf(Rank(rank))->size());
  }
  EXPECT_EQ(holders, 2);
  EXPECT_THAT(ViewOf(plan, "e")->BoxesOf(Rank(5)).value(), IsEmpty());
}

TEST(StoredViewTest, ReplicaReadsItself) {
  const TensorView view = ViewOf(PlanOf({{"w", {100, 64}, "a", {}, ""}}), "w").value();
  for (int rank = 0; rank < 6; ++rank) {
    const ReshardPlan plan = PlanReshard({view}, {view}, Rank(rank)).value();
    ASSERT_EQ(plan.sources.size(), 1u);
    EXPECT_EQ(plan.sources[0].source, Rank(rank));
  }
}

TEST(StoredViewTest, UnknownNamesAndTooManyBoxes_AreRefused) {
  EXPECT_THAT(ViewOf(PlanOf(EveryKind()), "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"x\"")));
  const auto too_many = StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("at most 1048576"));
  const LayoutTensor blocks = {"w", {1 << 14, 1 << 13}, "a", {GranuleKind::kBlock, 8}, ""};  // 2^21 of them
  EXPECT_THAT(ViewOf(PlanOf({blocks}), "w"), too_many);
  const LayoutTensor half = {"w", {1 << 13, 1 << 13}, "a", {GranuleKind::kBlock, 8}, ""};  // and replicas
  EXPECT_THAT(ViewOf(PlanOf({half}), "w"), too_many);
}

}  // namespace
}  // namespace shardmesh
