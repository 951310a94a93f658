// Process: a child process of a test, with its output in a file. It is killed when the object goes, and by the kernel
// when the test dies. Starting and signalling are for one thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardmesh::testing {

struct ProcessSpec {
  std::vector<std::string> command;  // program and arguments; a program is found by its path, or in PATH
  std::string log_file;              // gets stdout and stderr, appended
  int descriptor_limit = 0;          // RLIMIT_NOFILE, soft and hard; 0: the test's own
  std::vector<std::string> environment;  // NAME=VALUE each, beside the test's own
  int64_t address_space_limit = 0;       // RLIMIT_AS in bytes; 0: the test's own
};

class Process {
 public:
  // Internal: fork failed. A program that cannot be run ends with status 127.
  static absl::StatusOr<std::unique_ptr<Process>> Start(ProcessSpec spec);
  ~Process();  // SIGKILL

  pid_t pid() const { return pid_; }
  bool alive();
  void Signal(int signal);
  void Kill9();  // SIGKILL, and waits for the end
  void Stop();   // SIGSTOP
  // Waits until it has stopped, by itself or by Stop(): a Continue() that comes before is lost. False: it runs on.
  bool AwaitStopped(absl::Duration timeout) const;
  void Continue();  // SIGCONT
  // The exit status, 128 + signal when a signal ended it. DeadlineExceeded: it still runs.
  absl::StatusOr<int> Wait(absl::Duration timeout);

  // Resident memory now and its highest value, in bytes; 0 when it is gone.
  int64_t rss_bytes() const { return StatusBytes("VmRSS:"); }
  int64_t peak_rss_bytes() const { return StatusBytes("VmHWM:"); }
  int open_descriptors() const;  // 0 when it is gone
  int threads() const;           // likewise
  std::string Log() const;

 private:
  Process(pid_t pid, ProcessSpec spec) : pid_(pid), spec_(std::move(spec)) {}
  std::string StatusValue(const std::string& key) const;  // "": it is gone
  int64_t StatusBytes(const std::string& key) const;

  const pid_t pid_;
  const ProcessSpec spec_;
  bool ended_ = false;
  int status_ = 0;
};

// The whole file, empty when there is none; what could be read, should reading fail.
std::string ReadFile(const std::string& path);
// Waits until the file exists and has a line; returns that line. DeadlineExceeded: it has none.
// Unavailable: `writer` ended before.
absl::StatusOr<std::string> AwaitLine(const std::string& path, Process& writer, absl::Duration timeout);
// Runs a command to its end; its output. Internal: it failed (the output is in the message).
absl::StatusOr<std::string> RunCommand(std::vector<std::string> command, absl::Duration timeout = absl::Seconds(60));
// Gives the processor away for a while, inside a loop that looks at a condition with a deadline.
void Pause(absl::Duration duration);

}  // namespace shardmesh::testing
