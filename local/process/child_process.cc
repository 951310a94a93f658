#include "local/process/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/descriptor/descriptor_error.h"

namespace shardmesh {
namespace {

absl::Status ErrnoStatus(int error, absl::string_view what, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", what, " ", path, ": ", DescriptorError(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
  return absl::UnavailableError(message);
}

// What the child does; between fork and exec only async-signal-safe functions are allowed. Returns errno.
// `parent`: with whom it ends, by `signal`; 0: with nobody.
int BecomeProgram(char* const* argv, pid_t parent, int signal, int input, int output) {
  if (parent != 0 && prctl(PR_SET_PDEATHSIG, signal) != 0) return errno;
  if (parent != 0 && getppid() != parent) _exit(1);  // the parent was gone before the line above
  setpgid(0, 0);
  if (dup2(input, STDIN_FILENO) < 0 || dup2(output, STDOUT_FILENO) < 0 || dup2(output, STDERR_FILENO) < 0) return errno;
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  for (const int number : {SIGINT, SIGTERM, SIGPIPE}) sigaction(number, &standard, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execv(argv[0], argv);
  return errno;
}

// Closed by a successful exec; otherwise the child's errno comes through it.
int ErrorFrom(int pipe_end) {
  int error = 0;
  ssize_t size;
  do {
    size = read(pipe_end, &error, sizeof(error));
  } while (size < 0 && errno == EINTR);
  return size == sizeof(error) ? error : 0;
}

void KillAndReap(pid_t pid) {
  kill(pid, SIGKILL);
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const ChildOptions& options) {
  const UniqueFd input(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!input.valid()) return ErrnoStatus(errno, "open", "/dev/null");
  UniqueFd log;
  if (!options.log_file.empty()) {
    log = UniqueFd(open(options.log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!log.valid()) return ErrnoStatus(errno, "open the log file", options.log_file);
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "make a pipe to", options.program);
  const UniqueFd from_child(ends[0]);
  UniqueFd to_parent(ends[1]);
  std::vector<std::string> words = {options.program};
  words.insert(words.end(), options.args.begin(), options.args.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  const pid_t parent = options.outlives_parent ? 0 : getpid();
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus(errno, "start", options.program);
  if (pid == 0) {
    const int error = BecomeProgram(argv.data(), parent, options.when_parent_ends, input.get(),
                                    log.valid() ? log.get() : STDERR_FILENO);
    if (write(to_parent.get(), &error, sizeof(error)) < 0) _exit(126);
    _exit(127);
  }
  to_parent.reset();
  std::unique_ptr<ChildProcess> child(new ChildProcess(options, pid));
  const int error = ErrorFrom(from_child.get());
  if (error == 0 && child->pidfd_.valid()) return child;
  KillAndReap(pid);
  child->status_ = SIGKILL;
  return ErrnoStatus(error != 0 ? error : EMFILE, "run", options.program);
}

ChildProcess::ChildProcess(const ChildOptions& options, pid_t pid)
    : name_(options.name),
      outlives_parent_(options.outlives_parent),
      pid_(pid),
      pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

ChildProcess::~ChildProcess() {
  if (Ended().has_value() || outlives_parent_) return;
  KillAndReap(pid_);
}

std::optional<int> ChildProcess::Ended() {
  int status;
  if (!status_.has_value() && waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  return status_;
}

void ChildProcess::Signal(int signal) {
  if (!Ended().has_value()) kill(pid_, signal);
}

std::string EndText(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return absl::StrCat("status ", WEXITSTATUS(wait_status));
  const char* name = sigabbrev_np(WTERMSIG(wait_status));
  return name == nullptr ? absl::StrCat("signal ", WTERMSIG(wait_status)) : absl::StrCat("signal ", name);
}

}  // namespace shardmesh
