#include "local/process/presence.h"

#include <sys/wait.h>
#include <unistd.h>

#include "core/base/matchers.h"
#include "gtest/gtest.h"
#include "local/memory/segment.h"

namespace shardmesh {
namespace {

TEST(Presence, IsSeenByOthers_AndHeldOnce) {
  const Segment segment = Segment::Create("presence", 4096, 0).value();
  const Presence first = Presence::Hold(segment.fd(), 0).value();
  {
    const Presence second = Presence::Hold(segment.fd(), 1).value();
    EXPECT_TRUE(first.Sees(1));
    EXPECT_TRUE(second.Sees(0));
    EXPECT_FALSE(second.Sees(2));
    EXPECT_EQ(Presence::Hold(segment.fd(), 1).status().code(), absl::StatusCode::kAlreadyExists);
  }
  EXPECT_FALSE(first.Sees(1));
  EXPECT_OK(Presence::Hold(segment.fd(), 1).status());
}

// A killed process's mark is gone, although another one has the file open.
TEST(Presence, EndsWithItsProcess) {
  const Segment segment = Segment::Create("presence", 4096, 0).value();
  const Presence mine = Presence::Hold(segment.fd(), 0).value();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto held = Presence::Hold(segment.fd(), 1);
    const char told = held.ok() ? 'y' : 'n';
    if (write(ready[1], &told, 1) != 1) _exit(1);
    pause();
    _exit(0);
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  ASSERT_EQ(told, 'y');
  EXPECT_TRUE(mine.Sees(1));
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_FALSE(mine.Sees(1));
  close(ready[0]);
  close(ready[1]);
}

TEST(Presence, OfNoFile_IsAnError) { EXPECT_EQ(Presence::Hold(-1, 0).status().code(), absl::StatusCode::kUnavailable); }

}  // namespace
}  // namespace shardmesh
