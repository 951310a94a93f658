#include "tests/testing/system/single_step.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::testing {
namespace {

constexpr int kRefused = 100, kBodyReturned = 101;  // exit codes

// The child: stops before the body and behind it.
[[noreturn]] void RunChild(const SingleStepOptions& options) {
  if (options.prepare) options.prepare();
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(kRefused);
  raise(SIGSTOP);
  options.body();
  raise(SIGSTOP);
  _exit(kBodyReturned);
}

class Tracer {
 public:
  Tracer(const SingleStepOptions& options, pid_t child) : options_(options), child_(child) {}
  ~Tracer() {
    kill(child_, SIGKILL);
    int status = 0;
    if (thread_ != 0) waitpid(thread_, &status, __WALL);
    waitpid(child_, &status, __WALL);
  }
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  absl::StatusOr<int64_t> Run() {
    int status = 0;
    if (waitpid(child_, &status, __WALL) < 0 || (WIFEXITED(status) && WEXITSTATUS(status) == kRefused)) {
      return absl::UnimplementedError("PTRACE_TRACEME is not permitted here");
    }
    if (ptrace(PTRACE_SETOPTIONS, child_, nullptr, PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL) != 0) {
      return absl::UnimplementedError(absl::StrCat("PTRACE_SETOPTIONS: ", strerror(errno)));
    }
    ASSIGN_OR_RETURN(bool more, Step(child_, options_.step_body, /*until_stop=*/true));
    if (more && thread_ != 0) {
      // It stands before its first instruction.
      if (waitpid(thread_, &status, __WALL) < 0 || !WIFSTOPPED(status)) return absl::InternalError("a thread is gone");
      ASSIGN_OR_RETURN(more, Step(thread_, true, /*until_stop=*/false));
    }
    return instructions_;
  }

 private:
  // Runs one thread until `after` says no (false), or until it stops itself (true).
  absl::StatusOr<bool> Step(pid_t thread, bool stepped, bool until_stop) {
    while (true) {
      if (ptrace(stepped ? PTRACE_SINGLESTEP : PTRACE_CONT, thread, nullptr, nullptr) != 0) {
        return absl::UnimplementedError(absl::StrCat("PTRACE_SINGLESTEP: ", strerror(errno)));
      }
      int status = 0;
      if (waitpid(thread, &status, __WALL) < 0 || !WIFSTOPPED(status)) {
        return absl::InternalError(
            absl::StrCat("the child ended by itself, status ", status, ", after ", instructions_, " instructions"));
      }
      if (status >> 8 == (SIGTRAP | (PTRACE_EVENT_CLONE << 8))) {
        unsigned long id = 0;
        ptrace(PTRACE_GETEVENTMSG, thread, nullptr, &id);
        thread_ = static_cast<pid_t>(id);
      } else if (WSTOPSIG(status) == SIGSTOP && until_stop) {
        return true;
      } else if (WSTOPSIG(status) != SIGTRAP) {
        return absl::InternalError(absl::StrCat("the child was stopped by signal ", WSTOPSIG(status), " after ",
                                                instructions_, " instructions"));
      }
      if (!stepped) continue;
      ++instructions_;
      if (!options_.after()) return false;
      if (instructions_ >= options_.max_instructions) {
        return absl::DeadlineExceededError(absl::StrCat("more than ", instructions_, " instructions"));
      }
    }
  }

  const SingleStepOptions& options_;
  const pid_t child_;
  pid_t thread_ = 0;  // that the child started
  int64_t instructions_ = 0;
};

}  // namespace

absl::StatusOr<int64_t> SingleStep(const SingleStepOptions& options) {
  const pid_t child = fork();
  if (child < 0) return absl::UnimplementedError(absl::StrCat("fork: ", strerror(errno)));
  if (child == 0) RunChild(options);
  return Tracer(options, child).Run();
}

}  // namespace shardmesh::testing
