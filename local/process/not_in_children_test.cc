#include "local/process/not_in_children.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "core/base/matchers.h"
#include "local/descriptor/fd.h"
#include "local/memory/segment.h"
#include "local/socket/socket.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using Code = absl::StatusCode;

// What `check` says in a forked child.
template <typename Check>
bool InChild(Check check) {
  const pid_t child = fork();
  if (child == 0) _exit(check() ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
}

bool IsThere(int fd) { return fcntl(fd, F_GETFD) >= 0; }

// A child that lives until the object goes.
struct WaitingChild {
  WaitingChild() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    UniqueFd reader(ends[0]);
    hold = UniqueFd(ends[1]);
    pid = fork();
    if (pid != 0) return;
    hold.reset();
    char byte;
    _exit(read(reader.get(), &byte, 1) == 0 ? 0 : 1);
  }
  ~WaitingChild() {
    hold.reset();
    waitpid(pid, nullptr, 0);
  }
  UniqueFd hold;
  pid_t pid = -1;
};

TEST(NotInChildren, Memory_IsZerosOfTheChildsOwn) {
  ASSERT_OK_AND_ASSIGN(Segment shared, Segment::Create("s", 10000, 16));
  std::memcpy(shared.data(), "parent", 7);
  shared.KeepFromChildren();
  Segment moved(std::move(shared));  // it goes with the mapping
  EXPECT_TRUE(InChild([&] {
    const bool zero = moved.data()[0] == 0 && moved.data()[9000] == 0;
    std::memcpy(moved.data(), "child", 6);
    return zero && std::strcmp(moved.data(), "child") == 0 && moved.ResidentBytes() <= 0;
  }));
  EXPECT_STREQ(moved.data(), "parent");
  EXPECT_GT(moved.ResidentBytes(), 0);
}

TEST(NotInChildren, Memory_ThatIsGone_IsNotTouched) {
  ASSERT_OK_AND_ASSIGN(Segment other, Segment::Create("s", 10000, 0));
  std::memcpy(other.data(), "other", 6);
  {
    const NotInChildren gone(-1, other.data(), 10000);
  }
  EXPECT_TRUE(InChild([&] { return std::strcmp(other.data(), "other") == 0; }));
}

TEST(NotInChildren, Connection_EndsWithTheProcessThatMadeIt_WhateverItsChildrenDo) {
  const testing::TempFolder folder;
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("a")));
  absl::StatusOr<LocalSocket> client = LocalSocket::Connect(listener.path());
  ASSERT_OK(client);
  ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
  const WaitingChild child;
  ASSERT_GT(child.pid, 0);
  ASSERT_OK(client->Send("x", {}, absl::Seconds(5)));  // the parent's goes on
  EXPECT_OK(server.Receive(absl::Seconds(5)));
  client = absl::UnknownError("closed");
  EXPECT_THAT(server.Receive(absl::Seconds(5)), StatusIs(Code::kUnavailable, ::testing::_));
}

TEST(NotInChildren, Connection_IsHungUpInTheChild_AndItsNumberStaysTaken) {
  const testing::TempFolder folder;
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(folder.File("a")));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(listener.path()));
  ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
  EXPECT_TRUE(InChild([&] {
    const bool closed = absl::IsUnavailable(client.Receive(absl::Seconds(5)).status());
    client.Shutdown();
    return closed && IsThere(client.fd());
  }));
  ASSERT_OK(server.Send("still there", {}, absl::Seconds(5)));
  EXPECT_OK(client.Receive(absl::Seconds(5)));
}

}  // namespace
}  // namespace shardmesh
