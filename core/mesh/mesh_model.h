// MeshModel: a mesh by brute force, for tests: a table of the coordinates of every rank. It knows no strides and no
// rank maps, and checks definitions where core/mesh/mesh.h computes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "core/base/ids.h"

namespace shardmesh {

class MeshModel {
 public:
  using Names = std::vector<std::string>;
  using Lists = std::vector<std::vector<Rank>>;

  // `ranks` in row-major order.
  MeshModel(const std::vector<int64_t>& sizes, Names names, std::vector<Rank> ranks)
      : names_(std::move(names)), sizes_(sizes), ranks_(std::move(ranks)), rows_(ranks_.size()) {
    for (size_t r = 0; r < rows_.size(); ++r) {
      size_t rest = r;
      for (size_t d = sizes_.size(); d-- > 0; rest /= sizes_[d]) rows_[r][d] = static_cast<uint8_t>(rest % sizes_[d]);
    }
  }

  Names names() const { return At<std::string>(names_, Columns(true)); }
  std::vector<int64_t> sizes() const { return At<int64_t>(sizes_, Columns(true)); }
  const std::vector<Rank>& ranks() const { return ranks_; }
  std::vector<int64_t> CoordinatesOf(size_t r) const { return At<int64_t>(rows_[r], Columns(true)); }

  Lists Instances() const { return ListsOf(Columns(false), Columns(true)); }

  Lists Groups(const Names& names) const {
    std::vector<size_t> fixed = Columns(false), running = ColumnsOf(names);
    for (const size_t d : Columns(true)) {
      if (!absl::c_linear_search(running, d)) fixed.push_back(d);
    }
    return ListsOf(fixed, running);
  }

  void Slice(const Names& kept) {
    std::vector<size_t> columns, order = ColumnsOf(kept);
    size_t next = 0;
    for (size_t d = 0; d < names_.size(); ++d) {
      const bool hidden = names_[d].empty() || !absl::c_linear_search(kept, names_[d]);
      if (hidden) names_[d].clear();
      if (!hidden) columns.push_back(order[next++]);
      if (hidden && sizes_[d] > 1) columns.push_back(d);
    }
    Rearrange(columns);
  }

  void Transpose(const Names& names) {
    std::vector<size_t> columns, order = ColumnsOf(names);
    size_t next = 0;
    for (size_t d = 0; d < names_.size(); ++d) columns.push_back(names_[d].empty() ? d : order[next++]);
    Rearrange(columns);
  }

  void Flatten(const Names& names, const std::string& into) {
    const std::vector<size_t> parts = ColumnsOf(names);
    const size_t place = *absl::c_min_element(parts);
    std::vector<int> flat(rows_.size());
    int64_t size = 1;
    for (const size_t p : parts) {
      for (size_t r = 0; r < rows_.size(); ++r) flat[r] = flat[r] * static_cast<int>(sizes_[p]) + rows_[r][p];
      size *= sizes_[p];
    }
    for (size_t r = 0; r < rows_.size(); ++r) rows_[r][place] = static_cast<uint8_t>(flat[r]);
    sizes_[place] = size;
    names_[place] = into;
    std::vector<size_t> columns;
    for (size_t d = 0; d < names_.size(); ++d) {
      if (d == place || !absl::c_linear_search(parts, d)) columns.push_back(d);
    }
    Rearrange(columns);
  }

  void Unflatten(const std::string& name, const std::vector<int64_t>& sizes, const Names& names) {
    const size_t place = ColumnsOf({name})[0], extra = sizes.size() - 1;
    for (Row& row : rows_) {
      int64_t rest = row[place];
      std::copy_backward(row.begin() + place + 1, row.begin() + names_.size(), row.begin() + names_.size() + extra);
      for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) row[place + d] = static_cast<uint8_t>(rest % sizes[d]);
    }
    names_.erase(names_.begin() + place);
    sizes_.erase(sizes_.begin() + place);
    names_.insert(names_.begin() + place, names.begin(), names.end());
    sizes_.insert(sizes_.begin() + place, sizes.begin(), sizes.end());
  }

  // By the definition: within every class of ranks that instances of the parts connect, the coordinates in all parts
  // are a bijection onto their product, and ranks of one instance of a part have the same coordinates in the others.
  // REQUIRES: the parts have the same ranks, in the same order.
  static std::optional<MeshModel> Concatenate(const std::vector<MeshModel>& parts) {
    MeshModel joined({}, {}, parts[0].ranks_);
    joined.rows_.resize(joined.ranks_.size());
    const std::vector<int> classes = Classes(parts);
    for (const MeshModel& part : parts) {
      const size_t first = joined.names_.size();
      const std::vector<size_t> columns = part.Columns(true);
      for (size_t r = 0; r < joined.rows_.size(); ++r) {
        for (size_t i = 0; i < columns.size(); ++i) joined.rows_[r][first + i] = part.rows_[r][columns[i]];
      }
      for (const size_t d : columns) {
        joined.names_.push_back(part.names_[d]);
        joined.sizes_.push_back(part.sizes_[d]);
      }
    }
    int64_t product = 1;
    for (const int64_t size : joined.sizes_) product *= size;
    std::map<int, std::set<Row>> cells;
    std::map<int, int> sizes;
    for (size_t r = 0; r < classes.size(); ++r) {
      cells[classes[r]].insert(joined.rows_[r]);
      ++sizes[classes[r]];
    }
    for (const auto& [label, size] : sizes) {
      if (size != product || static_cast<int64_t>(cells[label].size()) != product) return std::nullopt;
    }
    size_t first = 0;
    for (const MeshModel& part : parts) {
      const std::vector<int> instances = part.InstanceNumbers();
      const size_t last = first + part.Columns(true).size();
      std::map<int, Row> rest;  // of an instance: the coordinates in the other parts
      for (size_t r = 0; r < instances.size(); ++r) {
        Row others = joined.rows_[r];
        std::fill(others.begin() + first, others.begin() + last, 0);
        if (rest.emplace(instances[r], others).first->second != others) return std::nullopt;
      }
      first = last;
    }
    joined.NumberInstances(classes);
    return joined;
  }

  // The model of the ranks `retained` (indices, ascending), nullopt unless every instance with any of them has the same
  // product of coordinates.
  std::optional<MeshModel> Restrict(const std::vector<size_t>& kept) const {
    const std::vector<int> instances = InstanceNumbers();
    const std::vector<size_t> columns = Columns(true);
    std::map<int, std::set<std::vector<int64_t>>> cells;
    std::vector<std::set<int64_t>> used(columns.size());
    for (const size_t r : kept) {
      const std::vector<int64_t> c = CoordinatesOf(r);
      cells[instances[r]].insert(c);
      for (size_t d = 0; d < c.size(); ++d) used[d].insert(c[d]);
    }
    size_t product = 1;
    for (const auto& coordinates : used) product *= coordinates.size();
    for (const auto& [instance, set] : cells) {  // each lies within the product of all, so the number decides
      if (set.size() != product) return std::nullopt;
    }
    MeshModel out({}, names(), {});
    std::vector<int> classes;
    for (const auto& coordinates : used) out.sizes_.push_back(static_cast<int64_t>(coordinates.size()));
    for (const size_t r : kept) {
      out.ranks_.push_back(ranks_[r]);
      Row row{};
      for (size_t d = 0; d < used.size(); ++d) {
        row[d] = static_cast<uint8_t>(std::distance(used[d].begin(), used[d].find(rows_[r][columns[d]])));
      }
      out.rows_.push_back(row);
      classes.push_back(static_cast<int>(std::distance(cells.begin(), cells.find(instances[r]))));
    }
    out.AddHidden(classes, static_cast<int64_t>(cells.size()));
    return out;
  }

 private:
  using Row = std::array<uint8_t, 24>;  // the coordinates of a rank, zeros behind

  template <typename T, typename List>
  static std::vector<T> At(const List& list, const std::vector<size_t>& columns) {
    std::vector<T> out;
    for (const size_t d : columns) out.push_back(list[d]);
    return out;
  }

  std::vector<size_t> Columns(bool visible) const {
    std::vector<size_t> columns;
    for (size_t d = 0; d < names_.size(); ++d) {
      if (names_[d].empty() != visible) columns.push_back(d);
    }
    return columns;
  }

  std::vector<size_t> ColumnsOf(const Names& names) const {
    std::vector<size_t> columns;
    for (const std::string& name : names) columns.push_back(absl::c_find(names_, name) - names_.begin());
    return columns;
  }

  void Rearrange(const std::vector<size_t>& columns) {
    for (Row& row : rows_) {
      Row moved{};
      for (size_t i = 0; i < columns.size(); ++i) moved[i] = row[columns[i]];
      row = moved;
    }
    names_ = At<std::string>(names_, columns);
    sizes_ = At<int64_t>(sizes_, columns);
  }

  // Ranks that agree in `fixed` are one list; lists in the order of `fixed`, ranks in the order of `running`. Together
  // these are all columns, so that no two ranks agree in them.
  Lists ListsOf(const std::vector<size_t>& fixed, const std::vector<size_t>& running) const {
    std::vector<Rank> in_order(ranks_.size());
    std::vector<size_t> columns = fixed;
    columns.insert(columns.end(), running.begin(), running.end());
    for (size_t r = 0; r < ranks_.size(); ++r) in_order[Number(rows_[r], columns)] = ranks_[r];
    size_t size = 1;
    for (const size_t d : running) size *= sizes_[d];
    Lists lists;
    for (size_t i = 0; i < in_order.size(); i += size) lists.emplace_back(&in_order[i], &in_order[i] + size);
    return lists;
  }

  // How many coordinates along `columns` come before those of the row, in lexicographic order.
  int Number(const Row& row, const std::vector<size_t>& columns) const {
    int number = 0;
    for (const size_t d : columns) number = number * static_cast<int>(sizes_[d]) + row[d];
    return number;
  }

  std::vector<int> InstanceNumbers() const {
    std::vector<int> numbers;
    const std::vector<size_t> hidden = Columns(false);
    for (const Row& row : rows_) numbers.push_back(Number(row, hidden));
    return numbers;
  }

  // Equal labels for ranks that instances of the parts connect.
  static std::vector<int> Classes(const std::vector<MeshModel>& parts) {
    std::vector<int> labels(parts[0].ranks_.size());
    for (size_t r = 0; r < labels.size(); ++r) labels[r] = static_cast<int>(r);
    for (bool changed = true; changed;) {
      changed = false;
      for (const MeshModel& part : parts) {
        const std::vector<int> instances = part.InstanceNumbers();
        std::map<int, int> least;
        for (size_t r = 0; r < labels.size(); ++r) {
          int& label = least.emplace(instances[r], labels[r]).first->second;
          label = std::min(label, labels[r]);
        }
        for (size_t r = 0; r < labels.size(); ++r) {
          changed = changed || labels[r] != least[instances[r]];
          labels[r] = least[instances[r]];
        }
      }
    }
    return labels;
  }

  // Adds the column of the instances: the classes in the order of their ranks at coordinates 0.
  void NumberInstances(const std::vector<int>& classes) {
    std::map<int, int> numbers;
    for (size_t r = 0; r < rows_.size(); ++r) {
      if (rows_[r] == Row{}) numbers.emplace(classes[r], static_cast<int>(numbers.size()));
    }
    std::vector<int> column;
    for (const int label : classes) column.push_back(numbers[label]);
    AddHidden(column, static_cast<int64_t>(numbers.size()));
  }

  // Puts a column in front that was sliced away.
  void AddHidden(const std::vector<int>& column, int64_t size) {
    for (size_t r = 0; r < rows_.size(); ++r) {
      std::copy_backward(rows_[r].begin(), rows_[r].end() - 1, rows_[r].end());
      rows_[r][0] = static_cast<uint8_t>(column[r]);
    }
    names_.insert(names_.begin(), "");
    sizes_.insert(sizes_.begin(), size);
  }

  Names names_;  // of the columns; "" for those that were sliced away
  std::vector<int64_t> sizes_;
  std::vector<Rank> ranks_;  // in the root's order
  std::vector<Row> rows_;    // by rank
};

}  // namespace shardmesh
