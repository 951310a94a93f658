#include "bench/harness/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh::bench {

absl::StatusOr<std::unique_ptr<Process>> Process::Start(const std::vector<std::string>& arguments, int core) {
  std::unique_ptr<Process> process(new Process);
  process->name_ = arguments[0];
  if (access(arguments[0].c_str(), X_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat(arguments[0], " is not there; build it, or start the benchmark with bazel run"));
  }
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no descriptors for a pipe");
  UniqueFd in_read(in[0]);
  process->to_ = UniqueFd(in[1]);
  if (pipe2(out, O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no descriptors for a pipe");
  process->from_ = UniqueFd(out[0]);
  UniqueFd out_write(out[1]);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  process->pid_ = fork();
  if (process->pid_ < 0) return absl::ResourceExhaustedError("fork failed");
  if (process->pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (core != kEveryCore) PinTo(core);
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  return process;
}

Process::~Process() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

double Process::ProcessorSeconds() const {
  clockid_t clock;
  timespec time;
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double Process::PeakBytes() const {
  std::ifstream status(absl::StrCat("/proc/", pid_, "/status"));
  double kibibytes = 0;
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") status >> kibibytes;
  }
  return kibibytes * 1024;
}

absl::Status Process::WriteLine(absl::string_view line) {
  const std::string bytes = absl::StrCat(line, "\n");
  if (write(to_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(name_, " ended"));
}

absl::StatusOr<std::string> Process::ReadLine(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    if (const size_t end = buffered_.find('\n'); end != std::string::npos) {
      std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(name_, " wrote nothing for ", absl::FormatDuration(timeout)));
    }
    pollfd fd{from_.get(), POLLIN, 0};
    if (poll(&fd, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
    char bytes[4096];
    const ssize_t size = read(from_.get(), bytes, sizeof(bytes));
    if (size <= 0) return absl::UnavailableError(absl::StrCat(name_, " ended"));
    buffered_.append(bytes, size);
  }
}

absl::StatusOr<std::string> Process::AwaitFile(const std::string& path, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (MonotonicNow() < deadline) {
    std::ifstream file(path);
    std::string line;
    if (std::getline(file, line)) return line;
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return absl::UnavailableError(absl::StrCat(name_, " ended before it wrote ", path));
    }
    poll(nullptr, 0, 10);  // the file appears by a rename, which nothing announces
  }
  return absl::DeadlineExceededError(
      absl::StrCat(name_, " did not write ", path, " within ", absl::FormatDuration(timeout)));
}

std::string ProgramPath(absl::string_view target) {
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  std::string self(path, size > 0 ? size : 0);
  for (int up = 0; up < 3; ++up) self.resize(self.rfind('/') == std::string::npos ? 0 : self.rfind('/'));
  return absl::StrCat(self, "/", target);
}

}  // namespace shardmesh::bench
