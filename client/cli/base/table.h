// Table: aligned columns for people. Columns of numbers are right-aligned, all others left-aligned.
//
//   version  bytes  holder            Table table({"version", "bytes", "holder"});
//         9   1024  reader-a          table.AddRow({"9", "1024", "reader-a"});
//        10     16  -                 table.AddRow({"10", "16", "-"});
//
// For machines there is --json. Not thread-safe; a plain value.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace shardmesh {

class Table {
 public:
  explicit Table(std::vector<std::string> header);

  // Missing cells are empty; cells beyond the header add columns without one.
  void AddRow(std::vector<std::string> cells);

  // Header and rows, each ended by a newline, columns two spaces apart, no spaces at the ends of lines. Control bytes
  // in cells are written as \xNN, so no value can move a terminal's cursor. A column is one of numbers when every cell
  // but
  // "" and "-" is a number, maybe with a unit or "%" behind ("-3", "1.5", "64 KiB", "12%").
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the header is the first
};

// True for digits with at most one ".", an optional sign, and an optional unit of letters or "%" after at most one
// space.
bool LooksLikeNumber(absl::string_view cell);

}  // namespace shardmesh
