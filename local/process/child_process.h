// ChildProcess: a program started beside this one, that never outlives it: the kernel kills it when the thread that
// started it ends, and so does the destructor (unless the options say otherwise). It gets its own
// process group (Ctrl-C in a terminal is the parent's), no standard input, an empty signal mask, and SIGINT, SIGTERM
// and SIGPIPE as they are by default. Not thread-safe; Start is safe in a process with threads.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

struct ChildOptions {
  std::string name;                // for messages
  std::string program;             // its path
  std::vector<std::string> args;   // without the program
  std::string log_file;            // standard output and error, appended; unset: both go to standard error
  bool outlives_parent = false;    // it goes on when this process ends, and when the object does
  int when_parent_ends = SIGKILL;  // what it gets then; SIGTERM: it has children of its own to end
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
  // Readable, as poll says it, once the process has ended. Close-on-exec; the object's.
  int pidfd() const { return pidfd_.get(); }

  // Never waits. The status as of waitpid once the process has ended, the same at every later call; nullopt before.
  std::optional<int> Ended();

  // Nothing when it has ended.
  void Signal(int signal);

 private:
  ChildProcess(const ChildOptions& options, pid_t pid);

  const std::string name_;
  const bool outlives_parent_;
  const pid_t pid_;
  const UniqueFd pidfd_;
  std::optional<int> status_;
};

// "signal KILL" or "status 3", from a status as of waitpid.
std::string EndText(int wait_status);

}  // namespace shardmesh
