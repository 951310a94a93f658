// Process: a program started for a benchmark, on one core or all, with its stdin and stdout as pipes; killed with the
// object, and with the thread that started it. For one thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "local/descriptor/fd.h"

namespace shardmesh::bench {

class Process {
 public:
  static constexpr int kEveryCore = -1;

  // NotFound: no such program. ResourceExhausted: no process or descriptor left.
  static absl::StatusOr<std::unique_ptr<Process>> Start(const std::vector<std::string>& arguments, int core);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }

  // Unavailable: the program ended.
  absl::Status WriteLine(absl::string_view line);
  // Unavailable: the program ended. DeadlineExceeded: no line within `timeout`.
  absl::StatusOr<std::string> ReadLine(absl::Duration timeout);

  // Processor time used so far, by all of its threads.
  double ProcessorSeconds() const;
  // The most memory that it had resident at a time so far.
  double PeakBytes() const;

  // The first line of a file, once the program has written it. Errors as ReadLine.
  absl::StatusOr<std::string> AwaitFile(const std::string& path, absl::Duration timeout);

 private:
  Process() = default;
  std::string name_;
  pid_t pid_ = -1;
  UniqueFd to_, from_;
  std::string buffered_;
};

// A program of this repository, built beside this one: "worker/shardmesh-worker".
std::string ProgramPath(absl::string_view target);

}  // namespace shardmesh::bench
