#include "client/cli/base/table.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace shardmesh {
namespace {

std::string Printable(absl::string_view cell) {
  std::string out;
  for (const char c : cell) {
    if (absl::ascii_iscntrl(c)) {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      out.push_back(c);
    }
  }
  return out;
}

// Code points of UTF-8 text: every byte but the continuations. Good enough for alignment.
size_t Width(absl::string_view text) {
  return absl::c_count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

struct Column {
  size_t width = 0;
  bool numbers = true;
};

}  // namespace

bool LooksLikeNumber(absl::string_view cell) {
  if (!absl::ConsumePrefix(&cell, "-")) absl::ConsumePrefix(&cell, "+");
  size_t digits = 0, points = 0;
  while (!cell.empty() && (absl::ascii_isdigit(cell[0]) || cell[0] == '.')) {
    ++(cell[0] == '.' ? points : digits);
    cell.remove_prefix(1);
  }
  if (digits == 0 || points > 1) return false;
  if (cell.empty() || cell == "%") return true;
  const bool spaced = absl::ConsumePrefix(&cell, " ");
  return (!spaced || !cell.empty()) && cell.size() <= 5 && absl::c_all_of(cell, absl::ascii_isalpha);
}

Table::Table(std::vector<std::string> header) { AddRow(std::move(header)); }

void Table::AddRow(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<Column> columns;
  for (const auto& row : rows_) {
    columns.resize(std::max(columns.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) {
      columns[c].width = std::max(columns[c].width, Width(row[c]));
      const bool neutral = &row == &rows_.front() || row[c].empty() || row[c] == "-";
      columns[c].numbers = columns[c].numbers && (neutral || LooksLikeNumber(row[c]));
    }
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string space(columns[c].width - Width(row[c]), ' ');
      const bool right = columns[c].numbers && rows_.size() > 1;
      absl::StrAppend(&line, c == 0 ? "" : "  ", right ? space : "", row[c], right ? "" : space);
    }
    absl::StrAppend(&out, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return out;
}

}  // namespace shardmesh
