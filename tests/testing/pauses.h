// Pauses: how long training stood still, by what was done to it, and the table of that. Thread-compatible.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace shardmesh::testing {

class Pauses {
 public:
  void Add(const std::string& cause, absl::Duration pause) { by_cause_[cause].push_back(pause); }
  // A row for each cause, in the order of their names: how often, the median, the 95th percentile and the worst.
  std::string Table() const;

 private:
  std::map<std::string, std::vector<absl::Duration>> by_cause_;
};

}  // namespace shardmesh::testing
