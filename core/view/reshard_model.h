// Test model of views: local memories as explicit lists of element numbers, made by cutting and joining arrays as torch
// does, with no box and no offset arithmetic. Tests only.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/view/view.h"

namespace shardmesh {

inline constexpr int64_t kPadding = -1;

// A dense array whose elements are the row-major numbers that they have in the whole tensor.
struct ModelArray {
  Dims shape;
  std::vector<int64_t> ids;

  static ModelArray Whole(const Dims& shape) {
    ModelArray whole{shape, std::vector<int64_t>(Box::Whole(shape).NumElements())};
    std::iota(whole.ids.begin(), whole.ids.end(), 0);
    return whole;
  }

  // Elements [begin, end) along `dim`.
  ModelArray Slice(int dim, int64_t begin, int64_t end) const {
    int64_t inner = 1;
    for (size_t d = dim + 1; d < shape.size(); ++d) inner *= shape[d];
    ModelArray part{shape, {}};
    part.shape[dim] = end - begin;
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) / inner % shape[dim];
      if (at >= begin && at < end) part.ids.push_back(ids[i]);
    }
    return part;
  }

  // Piece `index` of torch.chunk(ways, dim), or none of it if there are fewer pieces.
  ModelArray Chunk(int dim, int64_t ways, int64_t index) const {
    const int64_t n = shape[dim], each = (n + ways - 1) / ways;
    std::vector<std::pair<int64_t, int64_t>> pieces;
    for (int64_t begin = 0; begin < n; begin += each) pieces.emplace_back(begin, std::min(n, begin + each));
    if (index >= static_cast<int64_t>(pieces.size())) return Slice(dim, n, n);
    return Slice(dim, pieces[index].first, pieces[index].second);
  }

  // torch.cat along `dim`.
  static ModelArray Join(const std::vector<ModelArray>& parts, int dim) {
    ModelArray all{parts[0].shape, {}};
    int64_t outer = 1;
    for (int d = 0; d < dim; ++d) outer *= all.shape[d];
    all.shape[dim] = 0;
    for (const ModelArray& part : parts) all.shape[dim] += part.shape[dim];
    for (int64_t o = 0; o < outer; ++o) {
      for (const ModelArray& part : parts) {
        const size_t row = part.ids.size() / outer;
        all.ids.insert(all.ids.end(), part.ids.begin() + o * row, part.ids.begin() + (o + 1) * row);
      }
    }
    return all;
  }
};

// What placements mean, step by step in the order of execution.
struct ModelPlacement {
  std::vector<std::pair<int, int>> shards;      // (mesh dimension, tensor dimension), the first cuts first
  std::vector<std::pair<int, int64_t>> owners;  // (mesh dimension, coordinate)
  std::vector<int> flat;                        // mesh dimensions, slowest first
  int64_t granule = 1, space = 0, first = 0;    // of the flat ones

  // A rank's memory.
  ModelArray LocalOf(ModelArray array, const Coordinates& sizes, const Coordinates& at) const {
    for (const auto& [mesh_dim, coordinate] : owners) {
      if (at[mesh_dim] != coordinate) return ModelArray{{0}, {}};
    }
    for (const auto& [mesh_dim, dim] : shards) array = array.Chunk(dim, sizes[mesh_dim], at[mesh_dim]);
    if (flat.empty()) return array;
    std::vector<int64_t> all(std::max<int64_t>(space, array.ids.size()), kPadding);
    std::copy(array.ids.begin(), array.ids.end(), all.begin() + first);
    int64_t ways = 1, index = 0;
    for (const int d : flat) {
      ways *= sizes[d];
      index = index * sizes[d] + at[d];
    }
    while (static_cast<int64_t>(all.size()) % (ways * granule) != 0) all.push_back(kPadding);
    const int64_t each = static_cast<int64_t>(all.size()) / ways;
    return {{each}, {all.begin() + index * each, all.begin() + (index + 1) * each}};
  }

  // The same as the product says it.
  std::vector<DimPlacement> ToPlacements(const Coordinates& sizes) const {
    std::vector<DimPlacement> placements(sizes.size());
    for (auto shard = shards.begin(); shard != shards.end(); ++shard) {
      int64_t factor = 1;  // of what lies further right but cuts earlier
      for (auto earlier = shards.begin(); earlier != shard; ++earlier) {
        if (earlier->second == shard->second && earlier->first > shard->first) factor *= sizes[earlier->first];
      }
      placements[shard->first] =
          factor == 1 ? DimPlacement::Shard(shard->second) : DimPlacement::StridedShard(shard->second, factor);
    }
    for (const auto& [mesh_dim, coordinate] : owners) placements[mesh_dim] = DimPlacement::Owned(coordinate);
    for (const int d : flat) placements[d] = DimPlacement::FlatIn(granule, space, first);
    return placements;
  }
};

// A mesh as a list of ranks, the first dimension slowest.
struct ModelMesh {
  Coordinates sizes;
  std::vector<Rank> ranks;

  explicit ModelMesh(Coordinates mesh_sizes) : sizes(std::move(mesh_sizes)) {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    for (int64_t r = 0; r < n; ++r) ranks.push_back(Rank(static_cast<int32_t>(r)));
  }

  Coordinates CoordinatesOf(size_t position) const {
    Coordinates at(sizes.size());
    auto rest = static_cast<int64_t>(position);
    for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) at[d] = rest % sizes[d];
    return at;
  }

  // Its dimensions are named a, b, c, ...
  Mesh ToMesh() const {
    std::vector<std::string> names;
    for (size_t d = 0; d < sizes.size(); ++d) names.emplace_back(1, static_cast<char>('a' + d));
    return Mesh::Create(sizes, names, ranks).value();
  }
};

// A view, and what every rank's memory must hold: numbers of elements, or kPadding.
struct ModelView {
  std::string name;
  TensorView view;
  std::map<Rank, std::vector<int64_t>> memory;
};

inline ModelView MakeView(std::string name, const Dims& shape, const ModelMesh& mesh, const ModelPlacement& placement) {
  auto view = TensorView::Placed(shape, mesh.ToMesh(), placement.ToPlacements(mesh.sizes));
  ModelView made{std::move(name), std::move(view).value(), {}};
  for (size_t i = 0; i < mesh.ranks.size(); ++i) {
    made.memory[mesh.ranks[i]] = placement.LocalOf(ModelArray::Whole(shape), mesh.sizes, mesh.CoordinatesOf(i)).ids;
  }
  return made;
}

}  // namespace shardmesh
