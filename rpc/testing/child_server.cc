#include "rpc/testing/child_server.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "local/descriptor/fd.h"
#include "rpc/base/address.h"

extern char** environ;

namespace shardmesh::testing {
namespace {

// One line from `fd`, within 10 s; what came until then otherwise.
std::string ReadLine(int fd) {
  std::string line;
  char c;
  pollfd poll_fd = {fd, POLLIN, 0};
  while (poll(&poll_fd, 1, 10000) > 0 && read(fd, &c, 1) == 1) {
    if (c == '\n') return line;
    line += c;
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildServer>> ChildServer::Start(const std::string& listen, int descriptor_limit) {
  int pipe_fds[2];
  if (pipe2(pipe_fds, O_CLOEXEC) != 0) return absl::InternalError(std::strerror(errno));
  const UniqueFd from_child(pipe_fds[0]);
  UniqueFd to_parent(pipe_fds[1]);
  std::string program =
      absl::StrCat(std::getenv("TEST_SRCDIR"), "/", std::getenv("TEST_WORKSPACE"), "/rpc/echo_server");
  std::string arguments[] = {program, listen, absl::StrCat(descriptor_limit)};
  char* argv[] = {&arguments[0][0], &arguments[1][0], &arguments[2][0], nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to_parent.get(), 1);
  pid_t pid;
  const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return absl::InternalError(absl::StrCat(program, ": ", std::strerror(error)));
  to_parent.reset();
  const std::string address = ReadLine(from_child.get());
  std::unique_ptr<ChildServer> child(new ChildServer(pid, address));
  if (address.empty()) return absl::InternalError("echo_server printed no address");
  return child;
}

ChildServer::~ChildServer() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

int ChildServer::port() const { return ParseAddress(address_)->port; }

bool ChildServer::alive() const {
  siginfo_t info = {};
  return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

int ChildServer::Terminate() {
  kill(pid_, SIGTERM);
  const UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  pollfd poll_fd = {process.get(), POLLIN, 0};
  if (poll(&poll_fd, 1, 10000) != 1) return -1;
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = 0;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int ChildServer::open_descriptors() const {
  const std::filesystem::directory_iterator entries(absl::StrCat("/proc/", pid_, "/fd"));
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

int64_t ChildServer::StatusBytes(const std::string& key) const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/status"));
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size(), key) != 0) continue;
    int64_t kib = 0;
    std::istringstream(line.substr(key.size())) >> kib;
    return kib << 10;
  }
  return 0;
}

}  // namespace shardmesh::testing
