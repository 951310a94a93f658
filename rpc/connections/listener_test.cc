#include "rpc/connections/listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "local/testing/temp_folder.h"
#include "rpc/connections/acceptor.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

bool CanConnect(const std::string& path) {
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, path.data(), path.size());
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0;
}

struct ListenerTest : ::testing::Test {
  testing::TempFolder folder;
  const std::string path = folder.File("socket");
  const Address address{path, "", 0};
};

TEST_F(ListenerTest, ASocketFileThatIsRemoved_IsMadeAgain_AndGoesAtTheEnd) {
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Listener> listener, Listener::Open(address));
  EXPECT_TRUE(listener->IsReachable());
  unlink(path.c_str());
  EXPECT_FALSE(listener->IsReachable());
  ASSERT_OK(listener->ListenAgain());
  EXPECT_TRUE(listener->IsReachable());
  EXPECT_TRUE(CanConnect(path));
  listener.reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(ListenerTest, SomethingElseInItsPlace_Stays) {
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Listener> listener, Listener::Open(address));
  unlink(path.c_str());
  std::ofstream(path) << "of another program";
  EXPECT_FALSE(listener->IsReachable());
  EXPECT_THAT(listener->ListenAgain(), StatusIs(Code::kInvalidArgument, HasSubstr("is no socket")));
  listener.reset();
  EXPECT_EQ(std::filesystem::file_size(path), 18u);
}

TEST_F(ListenerTest, AnAcceptor_LooksAtItsSocketFile) {
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Listener> listener, Listener::Open(address));
  Mutex mu;
  CondVar changed;
  int accepted = 0;
  Acceptor acceptor(std::move(listener), {8, 8, 0}, [&](int fd) {
    close(fd);
    MutexLock lock(mu);
    ++accepted;
    changed.SignalAll();
  });
  unlink(path.c_str());
  const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
  MutexLock lock(mu);
  while (!CanConnect(path) && MonotonicNow() < deadline) changed.WaitFor(mu, absl::Milliseconds(20));
  while (accepted == 0 && MonotonicNow() < deadline) changed.WaitFor(mu, absl::Seconds(1));
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace shardmesh
