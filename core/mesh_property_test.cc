// Random programs of mesh operations against a brute-force model that knows no strides.
#include <map>
#include <optional>
#include <random>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/matchers.h"
#include "core/mesh.h"

namespace shardmesh {
namespace {

using Coordinates = std::vector<int64_t>;

// A mesh as an explicit table from coordinates to rank. Dimensions that were sliced away keep their place, named "".
struct Model {
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  std::map<Coordinates, Rank> table;

  std::vector<size_t> Places(bool visible) const {
    std::vector<size_t> places;
    for (size_t d = 0; d < names.size(); ++d) {
      if (names[d].empty() != visible) places.push_back(d);
    }
    return places;
  }
  size_t PlaceOf(const std::string& name) const { return absl::c_find(names, name) - names.begin(); }

  Coordinates Part(const Coordinates& c, const std::vector<size_t>& places) const {
    Coordinates part;
    for (const size_t p : places) part.push_back(c[p]);
    return part;
  }
};

// Ranks that agree on `fixed` are one list; lists in the order of `fixed`, ranks in the order of `running`.
std::vector<std::vector<Rank>> GroupBy(const Model& m, const std::vector<size_t>& fixed,
                                       const std::vector<size_t>& running) {
  std::map<Coordinates, std::map<Coordinates, Rank>> lists;
  for (const auto& [c, rank] : m.table) lists[m.Part(c, fixed)][m.Part(c, running)] = rank;
  std::vector<std::vector<Rank>> result;
  for (const auto& [key, list] : lists) {
    result.emplace_back();
    for (const auto& [c, rank] : list) result.back().push_back(rank);
  }
  return result;
}

std::vector<size_t> GroupKey(const Model& m, size_t along) {
  std::vector<size_t> key = m.Places(false);
  for (const size_t p : m.Places(true)) {
    if (p != along) key.push_back(p);
  }
  return key;
}

Model SliceModel(Model m, const std::vector<std::string>& kept) {
  for (std::string& name : m.names) {
    if (!absl::c_linear_search(kept, name)) name.clear();
  }
  return m;
}

// The model with its dimensions in the order of `places`.
Model Permuted(const Model& m, const std::vector<size_t>& places) {
  Model out;
  for (const size_t p : places) {
    out.names.push_back(m.names[p]);
    out.sizes.push_back(m.sizes[p]);
  }
  for (const auto& [c, rank] : m.table) out.table[m.Part(c, places)] = rank;
  return out;
}

Model TransposeModel(const Model& m, const std::vector<std::string>& names) {
  std::vector<size_t> places;
  size_t next = 0;
  for (size_t d = 0; d < m.names.size(); ++d) places.push_back(m.names[d].empty() ? d : m.PlaceOf(names[next++]));
  return Permuted(m, places);
}

Model FlattenModel(const Model& m, const std::vector<std::string>& names, const std::string& into) {
  std::vector<size_t> parts;
  for (const std::string& name : names) parts.push_back(m.PlaceOf(name));
  const size_t place = *absl::c_min_element(parts);
  Model out;
  std::vector<size_t> rest;  // places that stay, and `place` for the new one
  for (size_t d = 0; d < m.names.size(); ++d) {
    if (d != place && absl::c_linear_search(parts, d)) continue;
    rest.push_back(d);
    out.names.push_back(d == place ? into : m.names[d]);
    out.sizes.push_back(m.sizes[d]);
    if (d == place) {
      for (const size_t p : parts) out.sizes.back() *= p == place ? 1 : m.sizes[p];
    }
  }
  for (const auto& [c, rank] : m.table) {
    Coordinates moved;
    for (const size_t d : rest) {
      moved.push_back(d == place ? 0 : c[d]);
      if (d != place) continue;
      for (const size_t p : parts) moved.back() = moved.back() * m.sizes[p] + c[p];
    }
    out.table[moved] = rank;
  }
  return out;
}

Model UnflattenModel(const Model& m, const std::string& name, const std::vector<int64_t>& sizes,
                     const std::vector<std::string>& names) {
  const size_t place = m.PlaceOf(name);
  Model out = m;
  out.names.erase(out.names.begin() + place);
  out.sizes.erase(out.sizes.begin() + place);
  out.names.insert(out.names.begin() + place, names.begin(), names.end());
  out.sizes.insert(out.sizes.begin() + place, sizes.begin(), sizes.end());
  out.table.clear();
  for (const auto& [c, rank] : m.table) {
    Coordinates digits;
    int64_t rest = c[place];
    for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) digits.insert(digits.begin(), rest % sizes[d]);
    Coordinates split = c;
    split.erase(split.begin() + place);
    split.insert(split.begin() + place, digits.begin(), digits.end());
    out.table[split] = rank;
  }
  return out;
}

class Programs {
 public:
  explicit Programs(unsigned seed) : rng_(seed) {}

  // One random program; every mesh on its way must equal its model.
  void Run() {
    trace_.clear();
    Start();
    ASSERT_NO_FATAL_FAILURE(Compare());
    const int steps = 1 + Below(6);
    for (int s = 0; s < steps; ++s) {
      ASSERT_NO_FATAL_FAILURE(Apply(Below(4)));
      ASSERT_NO_FATAL_FAILURE(Compare());
    }
  }

 private:
  int Below(int limit) { return static_cast<int>(rng_() % limit); }
  std::string FreshName() { return absl::StrCat("n", fresh_++); }

  void Start() {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    int64_t total = 1;
    const int num_dims = 1 + Below(5);
    for (int d = 0; d < num_dims; ++d) {
      shape.push_back(1 + Below(total > 24 ? 2 : 4));
      total *= shape.back();
      names.push_back(FreshName());
    }
    std::vector<Rank> ranks;
    for (int r = 0; r < total; ++r) ranks.push_back(Rank(r));
    if (Below(2) == 0) {
      for (Rank& r : ranks) r = Rank(r.value() * 3 + 5);
      absl::c_shuffle(ranks, rng_);
    }
    mesh_ = Mesh::Create(shape, names, ranks).value();
    model_ = Model{names, shape, {}};
    for (int64_t i = 0; i < total; ++i) {
      Coordinates c(shape.size());
      int64_t rest = i;
      for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) c[d] = rest % shape[d];
      model_.table[c] = ranks[i];
    }
    absl::StrAppend(&trace_, mesh_->DebugString());
  }

  std::vector<std::string> RandomNames(bool all) {
    std::vector<std::string> names = mesh_->Names();
    absl::c_shuffle(names, rng_);
    if (!all) names.resize(1 + Below(static_cast<int>(names.size())));
    return names;
  }

  void Apply(int operation) {
    const std::vector<std::string> names = RandomNames(/*all=*/operation == 1);
    absl::StrAppend(&trace_, "; op ", operation, " ", absl::StrJoin(names, ","));
    absl::StatusOr<Mesh> next = absl::InternalError("not run");
    if (operation == 0) {
      next = mesh_->Slice(names);
      model_ = SliceModel(model_, names);
    } else if (operation == 1) {
      next = mesh_->Transpose(names);
      model_ = TransposeModel(model_, names);
    } else if (operation == 2) {
      const std::string into = Below(3) == 0 ? names[0] : FreshName();
      next = mesh_->Flatten(names, into);
      model_ = FlattenModel(model_, names, into);
    } else {
      return Split(names[0]);
    }
    ASSERT_OK(next) << trace_;
    mesh_ = *next;
  }

  void Split(const std::string& name) {
    int64_t rest = mesh_->SizeOf(name).value();
    std::vector<int64_t> sizes;
    for (int64_t f = 2; f <= rest; ++f) {
      for (; rest % f == 0; rest /= f) sizes.push_back(f);
    }
    if (Below(3) == 0) sizes.push_back(1);
    if (sizes.empty()) sizes.push_back(1);
    while (sizes.size() > 1 && sizes.size() + mesh_->Names().size() - 1 > kMaxMeshDims) {
      sizes[0] *= sizes.back();
      sizes.pop_back();
    }
    absl::c_shuffle(sizes, rng_);
    std::vector<std::string> names;
    for (size_t i = 0; i < sizes.size(); ++i) names.push_back(FreshName());
    absl::StrAppend(&trace_, " into ", absl::StrJoin(sizes, "x"));
    auto next = mesh_->Unflatten(name, sizes, names);
    ASSERT_OK(next) << trace_;
    mesh_ = *next;
    model_ = UnflattenModel(model_, name, sizes, names);
  }

  void Compare() {
    const std::vector<size_t> hidden = model_.Places(false), visible = model_.Places(true);
    const std::vector<std::vector<Rank>> instances = GroupBy(model_, hidden, visible);
    ASSERT_EQ(mesh_->Instances(), instances) << trace_;
    ASSERT_EQ(mesh_->NumInstances(), static_cast<int64_t>(instances.size())) << trace_;
    std::vector<std::string> names;
    for (const size_t p : visible) names.push_back(model_.names[p]);
    ASSERT_EQ(mesh_->Names(), names) << trace_;
    ASSERT_EQ(mesh_->Sizes(), model_.Part(model_.sizes, visible)) << trace_;
    std::map<std::string, std::vector<std::vector<Rank>>> groups;
    for (const size_t p : visible) {
      groups[model_.names[p]] = GroupBy(model_, GroupKey(model_, p), {p});
      ASSERT_EQ(mesh_->Groups(model_.names[p]).value(), groups[model_.names[p]]) << trace_;
    }
    for (const auto& [c, rank] : model_.table) {
      ASSERT_EQ(mesh_->CoordinatesOf(rank).value(), model_.Part(c, visible)) << trace_;
      const int64_t instance = mesh_->InstanceOf(rank).value();
      ASSERT_TRUE(absl::c_linear_search(instances[instance], rank)) << trace_;
      ASSERT_EQ(mesh_->RankAt(model_.Part(c, visible), instance).value(), rank) << trace_;
      const std::string& along = names[Below(static_cast<int>(names.size()))];
      const auto group = mesh_->GroupOf(rank, along).value();
      ASSERT_TRUE(absl::c_linear_search(group, rank) && absl::c_linear_search(groups[along], group)) << trace_;
    }
  }

  std::mt19937 rng_;
  int fresh_ = 0;
  std::string trace_;
  std::optional<Mesh> mesh_;
  Model model_;
};

TEST(MeshPropertyTest, RandomPrograms_EqualTheBruteForceModel) {
  const char* fixed = std::getenv("SHARDMESH_TEST_SEED");
  const unsigned seed = fixed != nullptr ? std::stoul(fixed) : std::random_device()();
  std::printf("seed %u (repeat with SHARDMESH_TEST_SEED)\n", seed);
  Programs programs(seed);
  for (int round = 0; round < 12000; ++round) {
    ASSERT_NO_FATAL_FAILURE(programs.Run()) << "seed " << seed << " round " << round;
  }
}

}  // namespace
}  // namespace shardmesh
