// Every pair of many views, and random ones, against local memories that are written out element by element.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <tuple>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/matchers.h"
#include "core/view/reshard.h"
#include "core/view/reshard_model.h"

namespace shardmesh {
namespace {

constexpr int64_t kUnwritten = -2;

// BoxesOf against the memory: every element of every box where the model has it, every element of the memory in a box.
void CheckBoxes(const ModelView& view, Rank rank) {
  ASSERT_OK_AND_ASSIGN(const std::vector<LocalBox> boxes, view.view.BoxesOf(rank));
  const std::vector<int64_t>& memory = view.memory.at(rank);
  const Dims strides = RowMajorStrides(view.view.shape());
  std::vector<int64_t> found(memory.size(), kPadding);
  for (const LocalBox& local : boxes) {
    ASSERT_OK(ValidateLocalBox(local, view.view.shape())) << view.name;
    const Dims inner = RowMajorStrides(local.box.sizes);
    for (int64_t i = 0; i < local.box.NumElements(); ++i) {
      int64_t id = 0, place = local.offset;
      for (size_t d = 0; d < inner.size(); ++d) {
        const int64_t step = i / inner[d] % local.box.sizes[d];
        id += (local.box.offsets[d] + step) * strides[d];
        place += step * local.strides[d];
      }
      ASSERT_LT(place, static_cast<int64_t>(memory.size())) << view.name << " rank " << rank.value();
      ASSERT_EQ(found[place], kPadding) << view.name << " rank " << rank.value() << ": two elements in one place";
      found[place] = id;
    }
  }
  ASSERT_EQ(found, memory) << view.name << " rank " << rank.value();
}

// Which rank must give an element: the reader if it has it, else of those that have it number (reader mod count).
Rank ExpectedSource(const std::vector<Rank>& holders, Rank reader) {
  if (absl::c_binary_search(holders, reader)) return reader;
  return holders[reader.value() % holders.size()];
}

std::map<int64_t, std::vector<Rank>> HoldersOf(const ModelView& view) {
  std::map<int64_t, std::vector<Rank>> holders;
  for (const auto& [rank, memory] : view.memory) {
    for (const int64_t id : memory) {
      if (id != kPadding) holders[id].push_back(rank);
    }
  }
  return holders;
}

void CheckMaximal(const std::vector<Copy>& copies) {
  std::set<std::tuple<Rank, int64_t, int64_t>> begins;
  for (const Copy& c : copies) begins.emplace(c.source, c.source_offset, c.destination_offset);
  for (const Copy& c : copies) {
    ASSERT_EQ(begins.count({c.source, c.source_offset + c.num_elements, c.destination_offset + c.num_elements}), 0)
        << "two copies could be one";
  }
}

// Runs the plan of one rank on the model's memories.
void CheckPlan(const ModelView& source, const ModelView& destination, Rank rank, bool check_source) {
  ASSERT_OK_AND_ASSIGN(const ReshardPlan plan, PlanReshard({source.view}, {destination.view}, rank));
  const auto holders = HoldersOf(source);
  const std::vector<int64_t>& want = destination.memory.at(rank);
  std::vector<int64_t> got(want.size(), kUnwritten);
  for (const Copy& copy : plan.copies) {
    ASSERT_EQ(copy.destination, rank);
    ASSERT_EQ(copy.tensor, 0);
    ASSERT_GE(copy.num_elements, 1);
    const std::vector<int64_t>& from = source.memory.at(copy.source);
    for (int64_t i = 0; i < copy.num_elements; ++i) {
      ASSERT_LT(copy.source_offset + i, static_cast<int64_t>(from.size()));
      ASSERT_LT(copy.destination_offset + i, static_cast<int64_t>(got.size()));
      int64_t& element = got[copy.destination_offset + i];
      ASSERT_EQ(element, kUnwritten) << "an element is written twice";
      element = from[copy.source_offset + i];
      ASSERT_TRUE(!check_source || copy.source == ExpectedSource(holders.at(element), rank));
    }
  }
  for (int64_t& element : got) element = element == kUnwritten ? kPadding : element;
  ASSERT_EQ(got, want);
  ASSERT_NO_FATAL_FAILURE(CheckMaximal(plan.copies));
  int64_t copies = 0, elements = 0;
  for (const SourceShare& share : plan.sources) {
    copies += share.num_copies;
    elements += share.num_elements;
  }
  ASSERT_EQ(copies, static_cast<int64_t>(plan.copies.size()));
  ASSERT_EQ(elements, plan.num_elements);
  ASSERT_EQ(plan.num_elements, static_cast<int64_t>(want.size()) - absl::c_count(want, kPadding));
}

void CheckAllRanks(const ModelView& source, const ModelView& destination, bool check_source = true) {
  for (const auto& [rank, memory] : destination.memory) {
    ASSERT_NO_FATAL_FAILURE(CheckPlan(source, destination, rank, check_source))
        << source.name << " -> " << destination.name << ", rank " << rank.value() << ", shape ["
        << absl::StrJoin(source.view.shape(), ", ") << "]";
  }
}

// A packed tensor: `cuts` split dimension `dim`, every part is placed by itself, the local parts are joined.
ModelView MakePacked(std::string name, const Dims& shape, int dim, const std::vector<int64_t>& cuts,
                     const ModelMesh& mesh, const std::vector<ModelPlacement>& by_part) {
  std::vector<NamedBox> parts;
  std::vector<std::vector<DimPlacement>> placements;
  for (size_t p = 0; p < by_part.size(); ++p) {
    NamedBox part{absl::StrCat("p", p), Box::Whole(shape)};
    part.box.offsets[dim] = cuts[p];
    part.box.sizes[dim] = cuts[p + 1] - cuts[p];
    parts.push_back(part);
    placements.push_back(by_part[p].ToPlacements(mesh.sizes));
  }
  const auto packed = PackedParts::Create(shape, parts, Gaps::kRefuse);
  ModelView made{std::move(name), TensorView::Packed(*packed, dim, mesh.ToMesh(), placements).value(), {}};
  for (size_t i = 0; i < mesh.ranks.size(); ++i) {
    std::vector<ModelArray> local;
    for (size_t p = 0; p < by_part.size(); ++p) {
      const ModelArray part = ModelArray::Whole(shape).Slice(dim, cuts[p], cuts[p + 1]);
      local.push_back(by_part[p].LocalOf(part, mesh.sizes, mesh.CoordinatesOf(i)));
    }
    made.memory[mesh.ranks[i]] = ModelArray::Join(local, dim).ids;
  }
  return made;
}

// Listed boxes: quarters of the first two dimensions, in column-major memory behind a gap; two ranks hold the last one.
ModelView MakeListed(const Dims& shape) {
  ModelView made{"listed quarters", TensorView::Listed(shape, {}).value(), {}};
  std::vector<RankBox> boxes;
  const int64_t rows = shape[0] / 3, columns = shape[1] / 2;
  for (int32_t rank = 0; rank < 5; ++rank) {
    const int quarter = std::min(rank, 3);
    RankBox held{Rank(rank), {Box::Whole(shape), 3, Dims(shape.size())}};
    for (int d = 0; d < 2; ++d) {
      const int64_t cut = d == 0 ? rows : columns;
      const bool high = (quarter >> d & 1) != 0;
      held.local.box.offsets[d] = high ? cut : 0;
      held.local.box.sizes[d] = high ? shape[d] - cut : cut;
    }
    int64_t stride = 1;
    for (size_t d = 0; d < shape.size(); stride *= held.local.box.sizes[d++]) held.local.strides[d] = stride;
    boxes.push_back(held);
    std::vector<int64_t>& memory = made.memory[Rank(rank)];
    memory.assign(3 + stride, kPadding);
    const Dims whole = RowMajorStrides(shape);
    const Dims inner = RowMajorStrides(held.local.box.sizes);
    for (int64_t i = 0; i < stride; ++i) {
      int64_t id = 0, place = 3;
      for (size_t d = 0; d < shape.size(); ++d) {
        const int64_t step = i / inner[d] % held.local.box.sizes[d];
        id += (held.local.box.offsets[d] + step) * whole[d];
        place += step * held.local.strides[d];
      }
      memory[place] = id;
    }
  }
  made.view = TensorView::Listed(shape, boxes).value();
  return made;
}

// Parallel to a mesh of which only dimensions b and c are seen: its a replicates.
ModelView MakeSliced(const Dims& shape) {
  const ModelMesh mesh({2, 2, 2});
  const ModelPlacement shards{{{1, 0}, {2, 1}}};
  ModelView made = MakeView("slice of a 3-D mesh", shape, mesh, shards);
  const std::vector<DimPlacement> seen = {DimPlacement::Shard(0), DimPlacement::Shard(1)};
  made.view = TensorView::Placed(shape, mesh.ToMesh().Slice({"b", "c"}).value(), seen).value();
  return made;
}

std::vector<ModelView> AllViews(const Dims& shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  ModelMesh shuffled({2, 3});
  shuffled.ranks = {Rank(4), Rank(0), Rank(7), Rank(1), Rank(9), Rank(2)};
  const int64_t half = shape[0] / 2, rows = shape[0], columns = shape[1];
  const ModelPlacement row{{{0, 0}}}, column{{{0, 1}}};
  const auto flat = [](std::vector<std::pair<int, int>> shards, std::vector<int> dims, int64_t granule,
                       int64_t space = 0, int64_t first = 0) {
    return ModelPlacement{std::move(shards), {}, std::move(dims), granule, space, first};
  };
  std::vector<ModelView> views;
  const auto add = [&](const char* name, const ModelMesh& mesh, const ModelPlacement& placement) {
    views.push_back(MakeView(name, shape, mesh, placement));
  };
  add("replicate", ModelMesh({3}), {});
  add("rows", ModelMesh({4}), row);
  add("rows, many empty", ModelMesh({11}), row);
  add("columns", ModelMesh({3}), column);
  add("hsdp", ModelMesh({2, 3}), {{{1, 0}}});
  add("hsdp, inner replicas", ModelMesh({3, 2}), row);
  add("tp rows", ModelMesh({2, 2}), {{{1, 0}}});
  add("tp columns", ModelMesh({2, 3}), {{{1, 1}}});
  add("fsdp over tp columns", ModelMesh({2, 2}), {{{0, 0}, {1, 1}}});
  add("fsdp over tp rows", ModelMesh({2, 2}), {{{1, 0}, {0, 0}}});
  add("fsdp over tp rows, uneven", ModelMesh({4, 2}), {{{1, 0}, {0, 0}}});
  add("hsdp over tp rows", ModelMesh({2, 2, 2}), {{{2, 0}, {1, 0}}});
  add("rows in the order 2, 0, 1", ModelMesh({2, 3, 2}), {{{2, 0}, {0, 0}, {1, 0}}});
  add("columns over tp columns", ModelMesh({3, 2}), {{{1, 1}, {0, 1}}});
  add("rows of rows", ModelMesh({3, 2}), {{{0, 0}, {1, 0}}});
  add("experts, fsdp inside", ModelMesh({2, 3}), {{{1, 0}, {0, 1}}});
  add("owned", ModelMesh({4}), {{}, {{0, 2}}});
  add("owned, replicated", ModelMesh({2, 3}), {{}, {{1, 1}}});
  add("flat", ModelMesh({3}), flat({}, {0}, 1));
  add("flat, granule 4", ModelMesh({4}), flat({}, {0}, 4));
  add("flat, granule above the size", ModelMesh({3}), flat({}, {0}, n + 3));
  add("flat hsdp", ModelMesh({2, 3}), flat({}, {1}, 2));
  add("flat over tp columns", ModelMesh({3, 2}), flat({{1, 1}}, {0}, 2));
  add("flat over tp rows", ModelMesh({3, 2}), flat({{1, 0}}, {0}, 1));
  add("flat over two dimensions", ModelMesh({2, 3}), flat({}, {0, 1}, 2));
  add("flat in a space", ModelMesh({4}), flat({}, {0}, 4, n + 21, 8));
  add("shuffled ranks", shuffled, {{{0, 1}, {1, 0}}});
  views.push_back(MakeSliced(shape));
  views.push_back(MakeListed(shape));
  views.push_back(MakePacked("qkv over tp", shape, 0, {0, half, half + 1, rows}, ModelMesh({3}), {row, row, row}));
  views.push_back(MakePacked("qkv, k and v on more ranks than heads", shape, 0, {0, half, half + 1, rows},
                             ModelMesh({2, 2}), {{{{0, 0}, {1, 0}}}, row, row}));
  views.push_back(MakePacked("gate-up over tp", shape, 1, {0, columns / 2, columns}, ModelMesh({2}), {column, column}));
  views.push_back(MakePacked("gate-up, fsdp over tp", shape, 1, {0, columns / 2, columns}, ModelMesh({2, 2}),
                             {{{{0, 0}, {1, 1}}}, {{{0, 0}, {1, 1}}}}));
  return views;
}

TEST(ReshardPropertyTest, EveryPairOfViews_EveryElementOnce) {
  for (const Dims& shape : {Dims{9, 5}, Dims{8, 6}, Dims{5, 4, 3}, Dims{2, 1}}) {
    const std::vector<ModelView> views = AllViews(shape);
    ASSERT_GE(views.size(), 20u);
    for (const ModelView& view : views) {
      for (const auto& [rank, memory] : view.memory) ASSERT_NO_FATAL_FAILURE(CheckBoxes(view, rank));
    }
    for (const ModelView& source : views) {
      for (const ModelView& destination : views) ASSERT_NO_FATAL_FAILURE(CheckAllRanks(source, destination));
    }
  }
}

class RandomViews {
 public:
  explicit RandomViews(unsigned seed) : rng_(seed) {}

  Dims Shape() {
    Dims shape;
    for (int d = Below(4); d-- > 0;) shape.push_back(Below(8));
    return shape;
  }

  ModelView View(const Dims& shape) {
    Coordinates sizes;
    for (int d = 1 + Below(3); d-- > 0;) sizes.push_back(1 + Below(4));
    ModelMesh mesh(sizes);
    if (Below(2) == 0) {
      for (Rank& rank : mesh.ranks) rank = Rank(rank.value() * 2 + 1);
      absl::c_shuffle(mesh.ranks, rng_);
    }
    ModelPlacement placement;
    placement.granule = 1 + Below(6);
    if (Below(3) == 0) {
      placement.first = placement.granule * Below(3);
      placement.space = placement.first + Box::Whole(shape).NumElements() + Below(9);
    }
    std::string name = absl::StrCat("mesh ", absl::StrJoin(sizes, "x"));
    for (int d = 0; d < static_cast<int>(sizes.size()); ++d) {
      const int kind = Below(6);
      if (kind < 3 && !shape.empty()) placement.shards.emplace_back(d, Below(static_cast<int>(shape.size())));
      if (kind == 3) placement.flat.push_back(d);
      if (kind == 4) placement.owners.emplace_back(d, Below(static_cast<int>(sizes[d])));
    }
    absl::c_shuffle(placement.shards, rng_);
    for (const DimPlacement& p : placement.ToPlacements(sizes)) absl::StrAppend(&name, " ", p.ToString());
    return MakeView(name, shape, mesh, placement);
  }

 private:
  int Below(int limit) { return static_cast<int>(rng_() % limit); }

  std::mt19937 rng_;
};

TEST(ReshardPropertyTest, RandomPlacements_EveryElementOnce) {
  const char* fixed = std::getenv("SHARDMESH_TEST_SEED");
  const unsigned seed = fixed != nullptr ? std::stoul(fixed) : std::random_device()();
  std::printf("seed %u (repeat with SHARDMESH_TEST_SEED)\n", seed);
  RandomViews random(seed);
  for (int round = 0; round < 12000; ++round) {
    const Dims shape = random.Shape();
    const ModelView source = random.View(shape), destination = random.View(shape);
    for (const auto& [rank, memory] : destination.memory) {
      ASSERT_NO_FATAL_FAILURE(CheckBoxes(destination, rank)) << "seed " << seed << " round " << round;
    }
    // Shuffled ranks number the replicas in another order than the model does.
    ASSERT_NO_FATAL_FAILURE(CheckAllRanks(source, destination, /*check_source=*/false))
        << "seed " << seed << " round " << round;
  }
}

}  // namespace
}  // namespace shardmesh
