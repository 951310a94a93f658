// Rival: a Python program that measures other packages for a benchmark, on all cores: one line asked, one answered
// (bench/optimizer/optimizer_rivals.py). Killed with the object. For one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "bench/harness/process.h"

namespace shardmesh::bench {

class Rival {
 public:
  // `python`: a path; empty: that of tools/parity_env.sh in the repository. NotFound: it is not there.
  static absl::StatusOr<std::unique_ptr<Rival>> Start(std::string python, const std::vector<std::string>& arguments);

  // Internal: the answer is an error of the rival. Unavailable: its process ended. DeadlineExceeded: no answer within
  // 20 minutes, which covers packages that are compiled when they are first used.
  absl::StatusOr<std::string> Ask(absl::string_view question);
  // The same, of an answer in seconds. Internal: it is not a number.
  absl::StatusOr<double> AskSeconds(absl::string_view question);

 private:
  Rival() = default;
  std::unique_ptr<Process> process_;
};

}  // namespace shardmesh::bench
