// NodeWorkers: the workers of a shardmesh-node as its starter sees them: what the node tells of them (its --events
// file), and their processes, which go on when the node is killed. Not thread-safe. Never waits.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

class NodeWorkers {
 public:
  struct Events {
    std::function<void(const std::string& name, pid_t pid)> started;
    std::function<void(const std::string& name, pid_t pid, const std::string& how)> ended;  // "signal KILL", "status 1"
  };
  struct End {
    std::string name, how;
    pid_t pid = 0;
  };

  NodeWorkers(std::string events_file, Events events);

  // Passes on what the node has told since the last call.
  void Read();
  // Passes on which processes have ended, of which no node tells any more: "status unknown".
  void ReportUntold();

  bool HasStarted(const std::string& name) const { return processes_.count(name) > 0; }
  const std::optional<End>& first_end() const { return first_end_; }
  bool AnyRuns() const;
  void SignalAll(int signal) const;

 private:
  struct Process {
    pid_t pid = 0;
    UniqueFd pidfd;
    bool told = false;  // that it ended
    bool Runs() const;
  };
  void ReadLine(absl::string_view line);
  void Ended(const std::string& name, pid_t pid, const std::string& how);

  const std::string events_file_;
  const Events events_;
  size_t read_ = 0;                           // bytes
  std::map<std::string, Process> processes_;  // by worker; of its newest incarnation
  std::optional<End> first_end_;
};

}  // namespace shardmesh
