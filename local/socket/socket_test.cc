#include "local/socket/socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <thread>

#include "core/base/matchers.h"
#include "local/process/process_end.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

struct LocalSocketTest : ::testing::Test {
  const testing::TempFolder folder;
};

TEST_F(LocalSocketTest, MessagesKeepTheirBoundaries_AndCarryDescriptors) {
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("a")));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  UniqueFd reader(pipe_ends[0]), writer(pipe_ends[1]);
  ASSERT_OK(server.Send("one", {}, absl::Seconds(1)));
  ASSERT_OK(server.Send("two", {writer.get()}, absl::Seconds(1)));
  ASSERT_OK_AND_ASSIGN(LocalMessage one, client.Receive(absl::Seconds(5)));
  ASSERT_OK_AND_ASSIGN(LocalMessage two, client.Receive(absl::Seconds(5)));
  EXPECT_EQ(one.bytes, "one");
  EXPECT_EQ(two.bytes, "two");
  ASSERT_EQ(two.descriptors.size(), 1u);
  ASSERT_EQ(write(two.descriptors[0].get(), "x", 1), 1);
  char byte;
  ASSERT_EQ(read(reader.get(), &byte, 1), 1);
  ASSERT_OK_AND_ASSIGN(auto peer, server.Peer());
  EXPECT_EQ(peer.first, getuid());
  EXPECT_EQ(peer.second, getpid());
}

TEST_F(LocalSocketTest, PeerGone_IsUnavailable_AndSilence_IsDeadlineExceeded) {
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("b")));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  {
    ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
    EXPECT_THAT(client.Receive(absl::Milliseconds(10)),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("10ms")));
  }
  EXPECT_THAT(client.Receive(absl::Seconds(5)), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("closed")));
  EXPECT_THAT(client.Send("x", {}, absl::Seconds(5)), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("gone")));
}

TEST_F(LocalSocketTest, ReaderThatNeverReads_TheSenderEndsAtItsTimeLimit) {
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("c")));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  const std::string big(60000, 'x');
  absl::Status status;
  for (int i = 0; i < 10000 && status.ok(); ++i) status = client.Send(big, {}, absl::Milliseconds(20));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("20ms")));
}

TEST_F(LocalSocketTest, LimitsAndPaths_AreNamedInErrors) {
  EXPECT_THAT(LocalSocket::Connect(std::string(200, 'p')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("200 bytes")));
  EXPECT_THAT(LocalSocket::Connect(folder.File("nobody")),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("nobody")));
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("d")));
  EXPECT_THAT(LocalListener::Listen(listener.path()),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("live process")));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  EXPECT_THAT(client.Send(std::string(kMaxLocalMessageBytes + 1, 'x'), {}, absl::Seconds(1)),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("65537")));
  struct stat info;
  ASSERT_EQ(stat(listener.path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(LocalSocketTest, FolderThatAnyUserMayWrite_IsRefused_UnlessSticky) {
  ASSERT_EQ(chmod(folder.path().c_str(), 0777), 0);
  EXPECT_THAT(LocalListener::Listen(folder.File("w")),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("mode 0777")));
  ASSERT_EQ(chmod(folder.path().c_str(), 01777), 0);
  EXPECT_OK(LocalListener::Listen(folder.File("w")));
}

TEST_F(LocalSocketTest, FolderOfAnotherUser_IsRefused_UnlessRoots) {
  constexpr uid_t kOther = 65534;
  const std::string path = folder.path();
  if (geteuid() != 0 || chown(path.c_str(), kOther, -1) != 0) GTEST_SKIP() << "SKIPPED: only root gives a folder away";
  EXPECT_THAT(LocalListener::Listen(folder.File("w")),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("belongs to user 65534")));
  ASSERT_EQ(chown(path.c_str(), 0, -1), 0);
  ASSERT_EQ(chmod(path.c_str(), 01777), 0);
  ASSERT_EQ(seteuid(kOther), 0);
  EXPECT_OK(LocalListener::Listen(folder.File("w")));
  ASSERT_EQ(seteuid(0), 0);
}

TEST_F(LocalSocketTest, OnlyASocketIsReplaced) {
  const std::string file = folder.File("file"), link = folder.File("link"), target = folder.File("target");
  ASSERT_GE(UniqueFd(open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)).get(), 0);
  ASSERT_EQ(symlink(target.c_str(), link.c_str()), 0);
  EXPECT_THAT(LocalListener::Listen(file), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("is a file")));
  EXPECT_THAT(LocalListener::Listen(link), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("is a symlink")));
  struct stat info;
  EXPECT_EQ(lstat(file.c_str(), &info), 0);
  EXPECT_EQ(lstat(link.c_str(), &info), 0);
}

TEST_F(LocalSocketTest, FolderThatIsASymlinkOfAnotherUser_IsRefused) {
  const std::string link = folder.File("link"), real = folder.File("real");
  ASSERT_EQ(mkdir(real.c_str(), 0700), 0);
  ASSERT_EQ(symlink(real.c_str(), link.c_str()), 0);
  EXPECT_OK(LocalListener::Listen(link + "/w"));
  if (geteuid() != 0 || lchown(link.c_str(), 65534, -1) != 0) GTEST_SKIP() << "only root gives a symlink away";
  EXPECT_THAT(LocalListener::Listen(link + "/w"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("symlink of user 65534")));
}

TEST_F(LocalSocketTest, FileThatWasRemoved_IsSeen_AndMadeAgain) {
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("s/a")));
  EXPECT_TRUE(listener.IsReachable());
  ASSERT_EQ(unlink(listener.path().c_str()), 0);
  ASSERT_EQ(rmdir(folder.File("s").c_str()), 0);
  EXPECT_FALSE(listener.IsReachable());
  ASSERT_OK(listener.ListenAgain());
  EXPECT_TRUE(listener.IsReachable());
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  ASSERT_OK(listener.Accept(absl::Seconds(5)).status());
}

TEST_F(LocalSocketTest, FileOfTheNextListener_Stays) {
  std::optional<LocalListener> first = *LocalListener::Listen(folder.File("a"));
  ASSERT_EQ(unlink(first->path().c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const LocalListener next, LocalListener::Listen(folder.File("a")));
  EXPECT_THAT(first->ListenAgain(), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("live process")));
  first.reset();
  EXPECT_TRUE(next.IsReachable());
}

// As systemd-tmpfiles asks before it cleans.
TEST_F(LocalSocketTest, OwnFolder_IsLockedWhileItListens) {
  const UniqueFd other(open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(chmod(folder.path().c_str(), 0700), 0);
  {
    ASSERT_OK_AND_ASSIGN(const LocalListener listener, LocalListener::Listen(folder.File("a")));
    ASSERT_OK_AND_ASSIGN(const LocalListener second, LocalListener::Listen(folder.File("b")));
    EXPECT_NE(flock(other.get(), LOCK_EX | LOCK_NB), 0);
  }
  EXPECT_EQ(flock(other.get(), LOCK_EX | LOCK_NB), 0);
}

// A process that connects and ends, while one that it started by a bare clone, in which nothing is closed, lives on.
TEST_F(LocalSocketTest, PeerWhoseProcessEnded_IsGone_WhoeverHoldsItsSocket) {
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("a")));
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  UniqueFd reader(ends[0]), hold(ends[1]);
  const pid_t peer = fork();
  if (peer == 0) {
    hold.reset();
    const absl::StatusOr<LocalSocket> socket = LocalSocket::Connect(listener.path());
    char byte;
    if (syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr) == 0) {
      _exit(read(reader.get(), &byte, 1) == 0 ? 0 : 1);  // until the test is over
    }
    while (true) pause();
  }
  ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
  ASSERT_TRUE(server.WatchPeer());
  EXPECT_THAT(server.Receive(absl::Milliseconds(20)), StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("20ms")));
  EXPECT_FALSE(server.PeerHasEnded());
  ASSERT_EQ(kill(peer, SIGKILL), 0);  // and it is not reaped
  EXPECT_THAT(server.Receive(absl::Seconds(20)), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("has ended")));
  EXPECT_THAT(server.Send("x", {}, absl::Seconds(1)), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("has ended")));
  EXPECT_TRUE(server.PeerHasEnded());
  EXPECT_TRUE(HasEnded(peer));
  waitpid(peer, nullptr, 0);
  EXPECT_TRUE(HasEnded(peer));
  EXPECT_FALSE(HasEnded(getpid()));
  EXPECT_FALSE(HasEnded(0));
}

TEST_F(LocalSocketTest, WhatAPeerSaidBeforeItClosed_IsHeard_AlsoIfItDidNotReadEverything) {
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("a")));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  ASSERT_OK(client.Send("unread", {}, absl::Seconds(1)));
  {
    ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
    ASSERT_OK(server.Send("why", {}, absl::Seconds(1)));
  }
  ASSERT_OK_AND_ASSIGN(const LocalMessage said, client.Receive(absl::Seconds(5)));
  EXPECT_EQ(said.bytes, "why");
  EXPECT_THAT(client.Receive(absl::Seconds(5)), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("closed")));
}

TEST_F(LocalSocketTest, RemoveDeadSockets_LeavesLiveOnesAndOtherNames) {
  ASSERT_OK_AND_ASSIGN(LocalListener live, LocalListener::Listen(folder.File("w-1")));
  const auto leave_dead = [](const std::string& path) {  // as a killed process does: bound, and nobody listens
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    return bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  };
  ASSERT_TRUE(leave_dead(folder.File("w-2")));
  ASSERT_TRUE(leave_dead(folder.File("v-2")));
  // Nobody listens there either, but they are somebody's files.
  ASSERT_TRUE(UniqueFd(open(folder.File("w-3").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)).valid());
  ASSERT_EQ(symlink("v-2", folder.File("w-4").c_str()), 0);
  EXPECT_THAT(RemoveDeadSockets(folder.path(), "w-"), ::testing::ElementsAre("w-2"));
  EXPECT_EQ(access(folder.File("w-1").c_str(), F_OK), 0);
  EXPECT_NE(access(folder.File("w-2").c_str(), F_OK), 0);
  EXPECT_EQ(access(folder.File("v-2").c_str(), F_OK), 0);
  EXPECT_EQ(access(folder.File("w-3").c_str(), F_OK), 0);
  EXPECT_EQ(access(folder.File("w-4").c_str(), F_OK), 0);
  EXPECT_THAT(RemoveDeadSockets("/nonexistent", "w-"), ::testing::IsEmpty());
}

}  // namespace
}  // namespace shardmesh
