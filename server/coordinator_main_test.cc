// The coordinator's process: starting, refusing to start, ending. Reads what it prints; nothing here waits by the
// clock.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kBinary[] = "server/shardmesh-coordinator";

std::string NewPath(const std::string& name) {
  static int count = 0;
  return absl::StrCat(::testing::TempDir(), "/", name, "_", getpid(), "_", ++count);
}

// A child whose stdout and stderr come through one pipe.
class Child {
 public:
  explicit Child(std::vector<std::string> args) {
    int fds[2];
    if (pipe(fds) != 0) abort();
    args.insert(args.begin(), kBinary);
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(fds[1], STDOUT_FILENO);
      dup2(fds[1], STDERR_FILENO);
      close(fds[0]);
      close(fds[1]);
      execv(kBinary, argv.data());
      _exit(127);
    }
    close(fds[1]);
    out_ = fds[0];
  }
  ~Child() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    Wait();
    close(out_);
  }
  // Reads until `text` was printed, the output ended, or 20 s passed without any.
  bool ReadUntil(const std::string& text) {
    while (!absl::StrContains(output_, text)) {
      pollfd fd = {out_, POLLIN, 0};
      if (poll(&fd, 1, 20'000) <= 0) return false;
      char buffer[4096];
      const ssize_t n = read(out_, buffer, sizeof(buffer));
      if (n <= 0) return false;
      output_.append(buffer, n);
    }
    return true;
  }
  void Signal(int signal) { kill(pid_, signal); }
  // The exit status; -1: it died of a signal. Reads all output first.
  int Wait() {
    if (pid_ <= 0) return status_;
    (void)ReadUntil("\xff never printed");
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  const std::string& output() const { return output_; }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
  int status_ = -1;
  std::string output_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

TEST(CoordinatorMain, ServesAndEndsOnSigterm) {
  const std::string address_file = NewPath("address");
  Child child({"--listen", "127.0.0.1:0", "--state", NewPath("state"), "--address-file", address_file});
  ASSERT_TRUE(child.ReadUntil("event=listening")) << child.output();
  const std::string address = ReadFile(address_file);
  EXPECT_TRUE(absl::StartsWith(address, "127.0.0.1:") && absl::EndsWith(address, "\n")) << address;
  EXPECT_NE(address, "127.0.0.1:0\n");
  child.Signal(SIGTERM);
  EXPECT_EQ(child.Wait(), 0) << child.output();
}

TEST(CoordinatorMain, StateSurvivesSigkill_AndIsLockedWhileInUse) {
  const std::string state = NewPath("state");
  {
    Child first({"--listen", "127.0.0.1:0", "--state", state});
    ASSERT_TRUE(first.ReadUntil("event=listening")) << first.output();
    Child second({"--listen", "127.0.0.1:0", "--state", state});
    EXPECT_EQ(second.Wait(), 1);
    EXPECT_THAT(second.output(), AllOf(HasSubstr("in use by another process"), HasSubstr(state)));
    first.Signal(SIGKILL);
    EXPECT_EQ(first.Wait(), -1);
  }
  Child again({"--listen", "127.0.0.1:0", "--state", state});
  EXPECT_TRUE(again.ReadUntil("event=listening")) << again.output();
}

TEST(CoordinatorMain, PortInUse_OneLineAndStatus1) {
  const std::string address_file = NewPath("address");
  Child first({"--listen", "127.0.0.1:0", "--state", ":memory:", "--address-file", address_file});
  ASSERT_TRUE(first.ReadUntil("event=listening")) << first.output();
  std::string address = ReadFile(address_file);
  address.pop_back();
  const std::string port = address.substr(address.rfind(':') + 1);
  Child second({"--listen", address, "--state", ":memory:", "--log-level", "error"});
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.output(), AllOf(HasSubstr("shardmesh-coordinator: "), HasSubstr(port), HasSubstr("in use")));
  EXPECT_EQ(std::count(second.output().begin(), second.output().end(), '\n'), 1) << second.output();
}

TEST(CoordinatorMain, NewerStateFile_OneLineAndStatus1) {
  const std::string state = NewPath("state");
  {
    Child first({"--listen", "127.0.0.1:0", "--state", state});
    ASSERT_TRUE(first.ReadUntil("event=listening"));
  }
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(state.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "PRAGMA user_version=9", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  Child child({"--listen", "127.0.0.1:0", "--state", state, "--log-level", "error"});
  EXPECT_EQ(child.Wait(), 1);
  EXPECT_THAT(child.output(),
              AllOf(HasSubstr("schema version 9"), HasSubstr("reads version 7"), HasSubstr("--state another file")));
  EXPECT_EQ(std::count(child.output().begin(), child.output().end(), '\n'), 1) << child.output();
}

TEST(CoordinatorMain, Flags_HelpVersionAndNonsense) {
  Child help({"--help"});
  EXPECT_EQ(help.Wait(), 0);
  EXPECT_THAT(help.output(), AllOf(HasSubstr("--heartbeat-timeout-ms"), HasSubstr("Examples:")));
  Child version({"--version"});
  EXPECT_EQ(version.Wait(), 0);
  EXPECT_THAT(version.output(), HasSubstr("shardmesh-coordinator 0."));
  Child unknown({"--nonsense"});
  EXPECT_EQ(unknown.Wait(), 2);
  EXPECT_THAT(unknown.output(), HasSubstr("--nonsense"));
  Child mesh({"--state", ":memory:", "--default-mesh", "fsdp=0"});
  EXPECT_EQ(mesh.Wait(), 1);
  EXPECT_THAT(mesh.output(), AllOf(HasSubstr("--default-mesh"), HasSubstr("fsdp")));
  Child timeout({"--state", ":memory:", "--heartbeat-timeout-ms", "600", "--heartbeat-interval-ms", "500"});
  EXPECT_EQ(timeout.Wait(), 1);
  EXPECT_THAT(timeout.output(), HasSubstr("less than twice"));
  Child open({"--state", ":memory:", "--listen", "0.0.0.0:0"});
  EXPECT_EQ(open.Wait(), 1);
  EXPECT_THAT(open.output(), HasSubstr("--tls-cert"));
}

}  // namespace
}  // namespace shardmesh
