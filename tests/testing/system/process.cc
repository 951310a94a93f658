#include "tests/testing/system/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "local/testing/temp_folder.h"

namespace shardmesh::testing {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);

// Only calls that are safe between fork and exec.
void SetLimit(__rlimit_resource resource, int64_t most) {
  if (most <= 0) return;
  const rlimit limit = {static_cast<rlim_t>(most), static_cast<rlim_t>(most)};
  setrlimit(resource, &limit);
}

[[noreturn]] void RunChild(char* const argv[], char* const environment[], const ProcessSpec& spec) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int log = open(spec.log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log >= 0) {
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
  }
  SetLimit(RLIMIT_NOFILE, spec.descriptor_limit);
  SetLimit(RLIMIT_AS, spec.address_space_limit);
  execvpe(argv[0], argv, environment);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Process>> Process::Start(ProcessSpec spec) {
  std::vector<char*> argv;
  for (std::string& argument : spec.command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<char*> variables;  // the first one of a name counts
  for (std::string& variable : spec.environment) variables.push_back(variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) variables.push_back(*variable);
  variables.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) RunChild(argv.data(), variables.data(), spec);
  if (pid < 0) return absl::InternalError(absl::StrCat("fork: ", std::strerror(errno)));
  return std::unique_ptr<Process>(new Process(pid, std::move(spec)));
}

Process::~Process() { Kill9(); }

bool Process::alive() { return !Wait(absl::ZeroDuration()).ok(); }

void Process::Signal(int signal) {
  if (!ended_) kill(pid_, signal);
}

void Process::Kill9() {
  Signal(SIGKILL);
  (void)Wait(absl::Seconds(20));
}

void Process::Stop() { Signal(SIGSTOP); }

void Process::Continue() { Signal(SIGCONT); }

absl::StatusOr<int> Process::Wait(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!ended_) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      ended_ = true;
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      break;
    }
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(absl::StrJoin(spec_.command, " "), " still runs"));
    }
    Pause(kPoll);
  }
  return status_;
}

bool Process::AwaitStopped(absl::Duration timeout) const {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!absl::StartsWith(StatusValue("State:"), "T")) {
    if (MonotonicNow() >= deadline) return false;
    Pause(kPoll);
  }
  return true;
}

std::string Process::StatusValue(const std::string& key) const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/status"));
  std::string line;
  while (std::getline(file, line)) {
    if (absl::StartsWith(line, key)) return std::string(absl::StripLeadingAsciiWhitespace(line.substr(key.size())));
  }
  return "";
}

int64_t Process::StatusBytes(const std::string& key) const {
  int64_t kib = 0;
  std::istringstream(StatusValue(key)) >> kib;
  return kib << 10;
}

int Process::threads() const { return std::atoi(StatusValue("Threads:").c_str()); }

int Process::open_descriptors() const {
  std::error_code ignored;
  const std::filesystem::directory_iterator entries(absl::StrCat("/proc/", pid_, "/fd"), ignored);
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

std::string Process::Log() const { return ReadFile(spec_.log_file); }

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();  // of a process that ends meanwhile: what was read before, and no exception
  return text.str();
}

absl::StatusOr<std::string> AwaitLine(const std::string& path, Process& writer, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    const std::string text = ReadFile(path);
    if (const size_t end = text.find('\n'); end != std::string::npos) return text.substr(0, end);
    if (!writer.alive()) return absl::UnavailableError(absl::StrCat("the process ended; its log:\n", writer.Log()));
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(path, " did not appear; the log:\n", writer.Log()));
    }
    Pause(kPoll);
  }
}

absl::StatusOr<std::string> RunCommand(std::vector<std::string> command, absl::Duration timeout) {
  TempFolder folder;
  const std::string name = absl::StrJoin(command, " ");
  ASSIGN_OR_RETURN(const auto process, Process::Start({std::move(command), folder.File("log")}));
  ASSIGN_OR_RETURN(const int status, process->Wait(timeout));
  if (status == 0) return process->Log();
  return absl::InternalError(absl::StrCat(name, " ended with status ", status, ":\n", process->Log()));
}

void Pause(absl::Duration duration) {
  Mutex mu;
  CondVar never;
  MutexLock lock(mu);
  never.WaitFor(mu, duration);
}

}  // namespace shardmesh::testing
