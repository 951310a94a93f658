// Random programs of mesh operations: every mesh on their way equals a brute-force model (core/mesh/mesh_model.h).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/matchers.h"
#include "core/mesh/communicator_key.h"
#include "core/mesh/mesh.h"
#include "core/mesh/mesh_model.h"

namespace shardmesh {
namespace {

using Names = std::vector<std::string>;
using Lists = std::vector<std::vector<Rank>>;

enum Operation { kSlice, kTranspose, kFlatten, kUnflatten, kConcatenate, kRestrict, kNumOperations };

struct Pair {
  Mesh mesh;
  MeshModel model;
};

class Programs {
 public:
  explicit Programs(unsigned seed) : rng_(seed) {}

  void Run() {
    Start();
    ASSERT_NO_FATAL_FAILURE(Compare());
    for (int steps = 1 + Below(6); steps > 0; --steps) {
      ASSERT_NO_FATAL_FAILURE(Apply(static_cast<Operation>(Below(kNumOperations))));
      ASSERT_NO_FATAL_FAILURE(Compare());
    }
    if (Below(4) == 0) CompareCommunicators();
  }

  // How often an operation that may fail did so, and did not.
  struct Outcomes {
    int done = 0, refused = 0;
  };
  Outcomes concatenated, restricted;

 private:
  int Below(int limit) { return static_cast<int>(rng_() % limit); }
  std::string FreshName() { return absl::StrCat("n", fresh_++); }
  const Pair& Now() const { return family_.back(); }
  const Pair& Any() { return family_[Below(static_cast<int>(family_.size()))]; }

  Names RandomNames(const Mesh& mesh, bool all = false) {
    Names names = mesh.Names();
    absl::c_shuffle(names, rng_);
    if (!all) names.resize(1 + Below(static_cast<int>(names.size())));
    return names;
  }

  void Start() {
    trace_.clear();
    std::vector<int64_t> shape;
    Names names;
    int64_t total = 1;
    const int num_dims = 1 + Below(5);
    for (int d = 0; d < num_dims; ++d) {
      shape.push_back(1 + Below(total > 8 ? 2 : 4));
      total *= shape.back();
      names.push_back(FreshName());
    }
    std::vector<Rank> ranks;
    for (int r = 0; r < total; ++r) ranks.push_back(Rank(r));
    if (Below(2) == 0) {
      for (Rank& r : ranks) r = Rank(r.value() * 3 + 5);
      absl::c_shuffle(ranks, rng_);
    }
    family_ = {{Mesh::Create(shape, names, ranks).value(), MeshModel(shape, names, ranks)}};
    absl::StrAppend(&trace_, Now().mesh.DebugString());
  }

  void Apply(Operation operation) {
    absl::StrAppend(&trace_, "; op ", operation);
    if (operation == kUnflatten) return Unflatten();
    if (operation == kConcatenate) return Concatenate();
    if (operation == kRestrict) return Restrict();
    const Names names = RandomNames(Now().mesh, /*all=*/operation == kTranspose);
    absl::StrAppend(&trace_, " ", absl::StrJoin(names, ","));
    MeshModel model = Now().model;
    if (operation == kSlice) {
      model.Slice(names);
      return Keep(Now().mesh.Slice(names), model);
    }
    if (operation == kTranspose) {
      model.Transpose(names);
      return Keep(Now().mesh.Transpose(names), model);
    }
    const bool keep_rest = Below(2) == 0;
    const Names all = Now().mesh.Names();
    const std::string into = Below(3) > 0 ? FreshName()
                             : keep_rest  ? names[0]
                                          : all[Below(static_cast<int>(all.size()))];
    if (!keep_rest) model.Slice(names);
    model.Flatten(names, into);
    Keep(Now().mesh.Flatten(names, into, keep_rest), model);
  }

  void Keep(const absl::StatusOr<Mesh>& mesh, const MeshModel& model) {
    ASSERT_OK(mesh) << trace_;
    family_.push_back({*mesh, model});
  }

  void Unflatten() {
    const std::string name = RandomNames(Now().mesh)[0];
    int64_t rest = Now().mesh.SizeOf(name).value();
    std::vector<int64_t> sizes;
    for (int64_t f = 2; f <= rest; ++f) {
      for (; rest % f == 0; rest /= f) sizes.push_back(f);
    }
    if (sizes.empty() || Below(3) == 0) sizes.push_back(1);
    while (sizes.size() > 1 && sizes.size() + Now().mesh.Names().size() - 1 > kMaxMeshDims) {
      sizes[0] *= sizes.back();
      sizes.pop_back();
    }
    absl::c_shuffle(sizes, rng_);
    Names names;
    for (size_t i = 0; i < sizes.size(); ++i) names.push_back(FreshName());
    absl::StrAppend(&trace_, " ", name, " into ", absl::StrJoin(sizes, "x"));
    MeshModel model = Now().model;
    model.Unflatten(name, sizes, names);
    Keep(Now().mesh.Unflatten(name, sizes, names), model);
  }

  // Dimensions of one mesh dealt to several parts, which always fit; or slices of whatever meshes there are.
  void Concatenate() {
    const bool dealt = Below(2) == 0;
    const Pair whole = Any();
    Names names = RandomNames(whole.mesh, /*all=*/true);
    std::vector<Mesh> parts;
    std::vector<MeshModel> models;
    std::set<std::string> taken;
    size_t num_dims = 0;
    for (int limit = 1 + Below(3); limit > 0 && num_dims < 6 && !names.empty(); --limit) {
      Pair part = dealt ? whole : Any();
      Names kept = RandomNames(part.mesh);
      if (dealt) {
        kept.assign(names.end() - 1 - Below(static_cast<int>(names.size())), names.end());
        names.resize(names.size() - kept.size());
      }
      const bool clash = absl::c_any_of(kept, [&](const std::string& name) { return taken.count(name) > 0; });
      part.mesh = part.mesh.Slice(kept).value();
      part.model.Slice(kept);
      if (clash || num_dims + kept.size() > kMaxMeshDims || Below(3) == 0) {
        const std::string into = FreshName();
        part.mesh = part.mesh.Flatten(kept, into).value();
        part.model.Flatten(kept, into);
      }
      absl::StrAppend(&trace_, " ", part.mesh.DebugString());
      for (const std::string& name : part.mesh.Names()) taken.insert(name);
      num_dims = taken.size();
      parts.push_back(part.mesh);
      models.push_back(part.model);
    }
    const auto model = MeshModel::Concatenate(models);
    const auto mesh = Mesh::Concatenate(parts);
    ASSERT_EQ(mesh.ok(), model.has_value()) << trace_ << "\n" << mesh.status();
    ASSERT_TRUE(mesh.ok() || !dealt) << trace_ << "\n" << mesh.status();
    ++(mesh.ok() ? concatenated.done : concatenated.refused);
    if (mesh.ok()) return Keep(mesh, *model);
    ASSERT_THAT(mesh, StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr("the parts with ")));
  }

  // Survivors at random coordinates, and sometimes one rank more or less.
  void Restrict() {
    const MeshModel& model = Now().model;
    const size_t num_ranks = model.ranks().size();
    std::vector<std::vector<bool>> chosen;
    for (const int64_t size : model.sizes()) {
      chosen.emplace_back(size);
      for (int64_t c = 0; c < size; ++c) chosen.back()[c] = Below(4) > 0;
    }
    std::vector<bool> instances;
    for (int64_t i = 0; i < Now().mesh.NumInstances(); ++i) instances.push_back(Below(4) > 0);
    std::set<size_t> kept;
    for (size_t r = 0; r < num_ranks; ++r) {
      const std::vector<int64_t> c = model.CoordinatesOf(r);
      bool survives = instances[Now().mesh.InstanceOf(model.ranks()[r]).value()];
      for (size_t d = 0; d < c.size(); ++d) survives = survives && chosen[d][c[d]];
      if (survives) kept.insert(r);
    }
    const size_t flipped = Below(static_cast<int>(num_ranks));
    if (kept.empty() || (Below(3) == 0 && kept.erase(flipped) == 0) || kept.empty()) kept.insert(flipped);

    std::vector<Rank> survivors;
    for (const size_t r : kept) survivors.push_back(model.ranks()[r]);
    absl::c_shuffle(survivors, rng_);
    const auto rest = model.Restrict({kept.begin(), kept.end()});
    const auto mesh = Now().mesh.Restrict(survivors);
    absl::StrAppend(&trace_, " to ", survivors.size());
    ASSERT_EQ(mesh.ok(), rest.has_value()) << trace_ << "\n" << mesh.status();
    ++(mesh.ok() ? restricted.done : restricted.refused);
    if (!mesh.ok()) {
      ASSERT_THAT(mesh, StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr("no full grid")));
      return;
    }
    family_ = {{*mesh, *rest}};  // no more one root with those before
  }

  void Compare() {
    const auto& [mesh, model] = Now();
    const Lists instances = model.Instances();
    ASSERT_EQ(mesh.Instances(), instances) << trace_;
    ASSERT_EQ(mesh.NumInstances(), static_cast<int64_t>(instances.size())) << trace_;
    const Names names = model.names();
    ASSERT_EQ(mesh.Names(), names) << trace_;
    ASSERT_EQ(mesh.Sizes(), model.sizes()) << trace_;
    const Names along = RandomNames(mesh);
    const Lists groups = model.Groups(along), lines = model.Groups({along[0]});
    ASSERT_EQ(mesh.Groups(along).value(), groups) << trace_;
    ASSERT_EQ(mesh.Groups({along[0]}).value(), lines) << trace_;
    for (int sample = 0; sample < 2; ++sample) {
      const size_t r = Below(static_cast<int>(model.ranks().size()));
      const Rank rank = model.ranks()[r];
      const std::vector<int64_t> coordinates = model.CoordinatesOf(r);
      ASSERT_EQ(mesh.CoordinatesOf(rank).value(), coordinates) << trace_;
      const int64_t instance = mesh.InstanceOf(rank).value();
      ASSERT_TRUE(absl::c_linear_search(instances[instance], rank)) << trace_;
      ASSERT_EQ(mesh.RankAt(coordinates, instance).value(), rank) << trace_;
      const auto group = mesh.GroupOf(rank, along[0]).value();
      ASSERT_TRUE(absl::c_linear_search(group, rank) && absl::c_linear_search(lines, group)) << trace_;
    }
  }

  // Groups of the meshes of one root share a communicator when they are equal sets.
  void CompareCommunicators() {
    std::vector<MeshGroups> asked;
    std::map<std::set<Rank>, std::vector<Communicator::Use>> uses;
    for (size_t a = 0; a < 3; ++a) {
      const Pair& pair = Any();
      asked.push_back({pair.mesh, RandomNames(pair.mesh)});
      const Lists groups = pair.model.Groups(asked.back().names);
      for (size_t g = 0; g < groups.size(); ++g) uses[{groups[g].begin(), groups[g].end()}].push_back({a, g});
    }
    const auto communicators = Communicators(asked);
    ASSERT_OK(communicators) << trace_;
    ASSERT_EQ(communicators->size(), uses.size()) << trace_;
    for (const Communicator& communicator : *communicators) {
      ASSERT_EQ(communicator.uses, (uses[{communicator.ranks.begin(), communicator.ranks.end()}])) << trace_;
      std::vector<Rank> ranks = communicator.ranks;
      absl::c_shuffle(ranks, rng_);
      ASSERT_EQ(CommunicatorKey(ranks), communicator.key) << trace_;
    }
  }

  std::mt19937 rng_;
  int fresh_ = 0;
  std::string trace_;
  std::vector<Pair> family_;  // the meshes so far that have one root; the last is the current one
};

// In shards, so that they run side by side.
class MeshPropertyTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(MeshPropertyTest, RandomPrograms_EqualTheBruteForceModel) {
  const char* fixed = std::getenv("SHARDMESH_TEST_SEED");
  const unsigned seed = fixed != nullptr ? std::stoul(fixed) : std::random_device()();
  std::printf("seed %u (repeat with SHARDMESH_TEST_SEED)\n", seed);
  constexpr int kPrograms = 30000;
  Programs programs(seed + GetParam());
  for (int round = 0; round < kPrograms; ++round) {
    ASSERT_NO_FATAL_FAILURE(programs.Run()) << "seed " << seed << " round " << round;
  }
  for (const Programs::Outcomes& outcomes : {programs.concatenated, programs.restricted}) {
    EXPECT_GT(outcomes.done, kPrograms / 20);
    EXPECT_GT(outcomes.refused, kPrograms / 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, MeshPropertyTest, ::testing::Range(0u, 4u));

}  // namespace
}  // namespace shardmesh
