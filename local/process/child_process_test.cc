#include "local/process/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>

#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr int kLongMs = 60'000;

bool Readable(int fd, int timeout_ms) {
  pollfd entry = {fd, POLLIN, 0};
  return poll(&entry, 1, timeout_ms) == 1;
}

TEST(ChildProcess, PidfdIsReadable_OnceTheProcessHasEnded_AndIsClosedByExec) {
  ASSERT_OK_AND_ASSIGN(auto child, ChildProcess::Start({"child", "/bin/sleep", {"1000"}, ""}));
  EXPECT_EQ(fcntl(child->pidfd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_FALSE(Readable(child->pidfd(), 0));
  EXPECT_FALSE(child->Ended().has_value());
  child->Signal(SIGKILL);
  ASSERT_TRUE(Readable(child->pidfd(), kLongMs));
  ASSERT_TRUE(child->Ended().has_value());
  EXPECT_EQ(EndText(*child->Ended()), "signal KILL");
}

TEST(ChildProcess, DestructorKills_UnlessTheChildOutlivesItsParent) {
  for (const bool outlives : {false, true}) {
    ASSERT_OK_AND_ASSIGN(auto child, ChildProcess::Start({"child", "/bin/sleep", {"1000"}, "", outlives}));
    const UniqueFd pidfd(fcntl(child->pidfd(), F_DUPFD_CLOEXEC, 0));
    const pid_t pid = child->pid();
    child.reset();
    EXPECT_EQ(Readable(pidfd.get(), 0), !outlives);
    if (outlives) {
      kill(pid, SIGKILL);
      EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
    }
  }
}

// The grandchild reads a pipe of the file system until the test writes it, and holds an end of another one meanwhile.
TEST(ChildProcess, ParentEnds_OnlyAChildThatOutlivesItGoesOn) {
  const testing::TempFolder folder;
  const std::string fifo = folder.File("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const UniqueFd release(open(fifo.c_str(), O_RDWR | O_CLOEXEC));
  for (const bool outlives : {false, true}) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);  // not close-on-exec
    UniqueFd reader(ends[0]), writer(ends[1]);
    const pid_t parent = fork();
    if (parent == 0) {
      const auto child = ChildProcess::Start({"child", "/usr/bin/head", {"-c1", fifo}, "", outlives});
      _exit(child.ok() ? 0 : 1);
    }
    writer.reset();
    int status = -1;
    ASSERT_EQ(waitpid(parent, &status, 0), parent);
    ASSERT_EQ(status, 0);
    EXPECT_EQ(Readable(reader.get(), outlives ? 500 : kLongMs), !outlives);
    if (outlives) {
      EXPECT_EQ(write(release.get(), "x", 1), 1);
    }
    EXPECT_TRUE(Readable(reader.get(), kLongMs));
  }
}

TEST(ChildProcess, ProgramThatCannotBeRun_IsNamed) {
  for (const bool outlives : {false, true}) {
    EXPECT_THAT(ChildProcess::Start({"child", "/nonexistent/program", {}, "", outlives}),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nonexistent/program")));
  }
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);  // no process is left behind
}

}  // namespace
}  // namespace shardmesh
