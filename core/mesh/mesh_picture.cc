#include "core/mesh/mesh_picture.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace shardmesh {
namespace {

using Cells = std::vector<std::string>;

std::string Plural(int64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

// "... 3 more rows" as a line of its own, nothing when all are shown.
std::string LeftOut(int64_t all, int64_t shown, absl::string_view noun) {
  return all <= shown ? "" : absl::StrCat("... ", all - shown, " more ", noun, all - shown == 1 ? "" : "s", "\n");
}

// Columns two spaces apart, aligned to the right but for the labels in the first one.
std::string Aligned(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const Cells& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string out;
  for (const Cells& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - row[c].size(), ' ');
      if (c == 0) absl::StrAppend(&line, row[c], padding);
      if (c > 0) absl::StrAppend(&line, "  ", padding, row[c]);
    }
    absl::StrAppend(&out, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return out;
}

// A row of a table: ranks that differ in the last coordinate.
struct Row {
  std::string label;
  int64_t instance;
  std::vector<int64_t> coordinates;  // all but the last
};

std::string Table(const Mesh& mesh, const MeshAxis& across, std::string corner, std::vector<Row> rows) {
  const int64_t columns = std::min(across.size, kMaxPictureColumns);
  std::vector<Cells> cells = {{std::move(corner)}};
  for (int64_t c = 0; c < columns; ++c) cells[0].push_back(absl::StrCat(across.name, "=", c));
  for (Row& row : rows) {
    Cells& line = cells.emplace_back(Cells{std::move(row.label)});
    row.coordinates.push_back(0);
    for (int64_t& c = row.coordinates.back(); c < columns; ++c) {
      line.push_back(absl::StrCat(mesh.RankAt(row.coordinates, row.instance).value().value()));
    }
  }
  if (columns < across.size) {
    for (Cells& line : cells) line.push_back("...");
  }
  return absl::StrCat(Aligned(cells), LeftOut(across.size, columns, "column"));
}

// One dimension: a row for each instance.
std::string Lines(const Mesh& mesh, const MeshAxis& across) {
  const bool one = mesh.NumInstances() == 1;
  std::vector<Row> rows;
  for (int64_t i = 0; i < std::min(mesh.NumInstances(), kMaxPictureRows); ++i) {
    rows.push_back({one ? "rank" : absl::StrFormat("%8d", i), i, {}});
  }
  const auto shown = static_cast<int64_t>(rows.size());
  return absl::StrCat("\n", Table(mesh, across, one ? "" : "instance", std::move(rows)),
                      LeftOut(mesh.NumInstances(), shown, "instance"));
}

// A table for each instance and each choice of all coordinates but the last two.
std::string Tables(const Mesh& mesh, const std::vector<MeshAxis>& axes) {
  const MeshAxis& down = axes[axes.size() - 2];
  const int64_t per_instance = mesh.NumRanksPerInstance() / down.size / axes.back().size;
  const int64_t all = mesh.NumInstances() * per_instance, shown = std::min(all, kMaxPictureTables);
  std::string out;
  for (int64_t t = 0; t < shown; ++t) {
    const int64_t instance = t / per_instance;
    std::vector<int64_t> outer(axes.size() - 2);
    Cells corner(outer.size());
    int64_t rest = t % per_instance;
    for (size_t d = outer.size(); d-- > 0; rest /= axes[d].size) {
      outer[d] = rest % axes[d].size;
      corner[d] = absl::StrCat(axes[d].name, "=", outer[d]);
    }
    if (mesh.NumInstances() > 1) corner.insert(corner.begin(), absl::StrCat("instance ", instance));
    std::vector<Row> rows;
    for (int64_t i = 0; i < std::min(down.size, kMaxPictureRows); ++i) {
      rows.push_back({absl::StrCat(down.name, "=", i), instance, outer});
      rows.back().coordinates.push_back(i);
    }
    absl::StrAppend(&out, "\n", Table(mesh, axes.back(), absl::StrJoin(corner, ", "), std::move(rows)),
                    LeftOut(down.size, kMaxPictureRows, "row"));
  }
  return absl::StrCat(out, all > shown ? "\n" : "", LeftOut(all, shown, "table"));
}

}  // namespace

std::string Picture(const Mesh& mesh) {
  const std::vector<MeshAxis> axes = mesh.Axes();
  const std::string shape = absl::StrJoin(
      axes, " x ", [](std::string* out, const MeshAxis& axis) { absl::StrAppend(out, axis.name, "=", axis.size); });
  return absl::StrCat("mesh ", shape, ": ", Plural(mesh.NumInstances(), "instance"), " of ",
                      Plural(mesh.NumRanksPerInstance(), "rank"), "\n",
                      axes.size() == 1 ? Lines(mesh, axes[0]) : Tables(mesh, axes));
}

}  // namespace shardmesh
