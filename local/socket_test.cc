#include "local/socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <thread>

#include "core/matchers.h"
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
  EXPECT_THAT(RemoveDeadSockets(folder.path(), "w-"), ::testing::ElementsAre("w-2"));
  EXPECT_EQ(access(folder.File("w-1").c_str(), F_OK), 0);
  EXPECT_NE(access(folder.File("w-2").c_str(), F_OK), 0);
  EXPECT_EQ(access(folder.File("v-2").c_str(), F_OK), 0);
  EXPECT_THAT(RemoveDeadSockets("/nonexistent", "w-"), ::testing::IsEmpty());
}

}  // namespace
}  // namespace shardmesh
