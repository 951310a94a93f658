// What the tests of shardctl share: `shardctl up` as a child process, a tiny job, and waiting. For one thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "core/job/job.h"
#include "local/descriptor/fd.h"
#include "local/process/child_process.h"

namespace shardmesh {

constexpr absl::Duration kLong = absl::Seconds(30);

// The whole file; empty when there is none.
std::string Contents(const std::string& path);

// True as soon as `condition` is, looked at every 20 ms; false after `kLong`.
bool Eventually(const std::function<bool()>& condition);

// A process that is no child of this one.
class Watched {
 public:
  explicit Watched(pid_t pid);
  pid_t pid() const { return pid_; }
  bool EndsSoon() const;

 private:
  pid_t pid_;
  UniqueFd fd_;
};

// `shardctl up` as a child process; its output is a file, NAME.out.
class Cluster {
 public:
  // Returns when it is ready. DeadlineExceeded: it is not, with its output.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const std::string& name, std::vector<std::string> args);

  std::string output() const { return Contents(output_); }
  bool Prints(const std::string& text) const;  // soon
  const std::string& address() const { return address_; }
  ChildProcess& up() { return *up_; }
  const std::vector<Watched>& processes() const { return processes_; }  // the coordinator first
  bool AllEndSoon() const;
  // Of the newest incarnation that it printed; 0: there is none.
  pid_t PidOf(const std::string& name) const;

 private:
  std::string output_, address_;
  std::unique_ptr<ChildProcess> up_;
  std::vector<Watched> processes_;
};

// Every format, and a tie.
JobSpec TinyJob(const std::string& name);

// Creates the job, gives it weights, and takes two steps.
absl::StatusOr<std::shared_ptr<Job>> Train(const std::string& coordinator, const JobSpec& spec);

}  // namespace shardmesh
