// ChildProcess: a program started beside this one, that never outlives it: the kernel kills it when the thread that
// started it ends, and so does the destructor. It gets its own process group (Ctrl-C in a terminal is the parent's),
// no standard input, an empty signal mask, and SIGINT, SIGTERM and SIGPIPE as they are by default.
// Not thread-safe; Start is safe in a process with threads.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardmesh {

struct ChildOptions {
  std::string name;               // for messages
  std::string program;            // its path
  std::vector<std::string> args;  // without the program
  std::string log_file;           // standard output and error, appended; unset: both go to standard error
};

class ChildProcess {
 public:
  // NotFound / PermissionDenied / Unavailable: the program or the log file cannot be opened, or there can be no more
  // processes (with errno).
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const ChildOptions& options);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }

  // Never waits. The status as of waitpid once the process has ended, the same at every later call; nullopt before.
  std::optional<int> Ended();

  // Nothing when it has ended.
  void Signal(int signal);

 private:
  ChildProcess(std::string name, pid_t pid) : name_(std::move(name)), pid_(pid) {}

  const std::string name_;
  const pid_t pid_;
  std::optional<int> status_;
};

// "signal KILL" or "status 3", from a status as of waitpid.
std::string EndText(int wait_status);

}  // namespace shardmesh
