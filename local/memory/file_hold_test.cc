#include "local/memory/file_hold.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "core/base/matchers.h"
#include "local/memory/segment.h"

namespace shardmesh {
namespace {

Segment NewSegment() { return *Segment::Create("held", 1 << 16, 0); }

// Another mapping of it, as a reader has it.
Segment MapAgain(const Segment& segment) {
  return *Segment::Map(*segment.ReadOnlyFd(), segment.num_bytes(), 0, Segment::Access::kReadOnly);
}

TEST(FileHold, EndsWhenItIsLetGo) {
  const Segment segment = NewSegment();
  const Segment one = MapAgain(segment), other = MapAgain(segment);
  EXPECT_FALSE(IsFileHeld(segment.fd()));
  ASSERT_TRUE(HoldFile(one.fd(), 3).ok());
  ASSERT_TRUE(HoldFile(one.fd(), 3).ok());
  ASSERT_TRUE(HoldFile(other.fd(), 200'000).ok());
  EXPECT_TRUE(IsFileHeld(segment.fd()));
  EXPECT_TRUE(IsFileHeldAt(segment.fd(), 3));
  EXPECT_FALSE(IsFileHeldAt(segment.fd(), 4));
  LetFileGo(one.fd(), 3);
  LetFileGo(one.fd(), 3);
  EXPECT_FALSE(IsFileHeldAt(segment.fd(), 3));
  EXPECT_TRUE(IsFileHeld(segment.fd()));
  LetFileGo(other.fd(), 200'000);
  EXPECT_FALSE(IsFileHeld(segment.fd()));
}

TEST(FileHold, EndsWithTheLastMapping) {
  const Segment segment = NewSegment();
  UniqueFd fd = *segment.ReadOnlyFd();
  ASSERT_TRUE(HoldFile(fd.get(), 0).ok());
  void* const mapping = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(mapping, MAP_FAILED);
  fd = UniqueFd();
  EXPECT_TRUE(IsFileHeld(segment.fd()));
  munmap(mapping, 4096);
  EXPECT_FALSE(IsFileHeld(segment.fd()));
}

TEST(FileHold, EndsWithTheProcessHoweverItDies) {
  const Segment segment = NewSegment();
  std::optional<Segment> mine(MapAgain(segment));
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t child = fork();
  if (child == 0) {
    const bool held = HoldFile(mine->fd(), 1).ok();
    if (write(told[1], "x", 1) != 1 || !held) _exit(1);
    while (true) pause();
  }
  char byte;
  ASSERT_EQ(read(told[0], &byte, 1), 1);
  mine.reset();  // the child has the same description
  EXPECT_TRUE(IsFileHeldAt(segment.fd(), 1));
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(IsFileHeld(segment.fd()));
  close(told[0]);
  close(told[1]);
}

TEST(FileHold, WhatCannotBeAskedCountsAsHeld) {
  EXPECT_TRUE(IsFileHeld(-1));
  EXPECT_THAT(HoldFile(-1, 0), StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("descriptor -1")));
}

}  // namespace
}  // namespace shardmesh
