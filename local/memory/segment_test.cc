#include "local/memory/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

UniqueFd Duplicate(const Segment& segment) { return UniqueFd(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)); }

TEST(SegmentTest, TwoMappings_SameBytes_AtTheirOffset) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", StreamOffset(3) + 5000, StreamOffset(3)));
  ASSERT_OK_AND_ASSIGN(Segment b,
                       Segment::Map(Duplicate(a), a.num_bytes(), a.data_offset(), Segment::Access::kReadOnly));
  EXPECT_EQ(a.data_bytes(), 5000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % (2 << 20), StreamOffset(3));
  std::memcpy(a.data() + 4990, "0123456789", 10);
  EXPECT_EQ(std::memcmp(b.data() + 4990, "0123456789", 10), 0);
}

TEST(SegmentTest, Unsealed_IsRefused) {
  UniqueFd bare(memfd_create("bare", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(bare.get(), 4096), 0);
  EXPECT_THAT(Segment::Map(std::move(bare), 4096, 0, Segment::Access::kReadOnly),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not sealed")));
}

TEST(SegmentTest, ShorterThanSaid_IsRefused) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 4096, 0));
  EXPECT_THAT(Segment::Map(Duplicate(a), 8192, 0, Segment::Access::kReadOnly),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("8192")));
  EXPECT_NE(ftruncate(a.fd(), 100), 0) << "the size is sealed";
}

TEST(SegmentTest, ReadOnlyDescriptor_CannotBeMappedForWriting_EvenWhenReopened) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 4096, 0));
  ASSERT_OK(a.SealFutureWrites());
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, a.ReadOnlyFd());
  UniqueFd reopened(open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR));
  EXPECT_THAT(Segment::Map(std::move(fd), 4096, 0, Segment::Access::kReadWrite),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("4096")));
  if (reopened.valid()) {
    EXPECT_THAT(Segment::Map(std::move(reopened), 4096, 0, Segment::Access::kReadWrite),
                StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("4096")));
  }
  a.data()[0] = 1;  // the creator's mapping goes on
}

TEST(SegmentTest, PopulatedPages_AreTaken_AndNoOthers) {
  ASSERT_OK_AND_ASSIGN(const Segment a, Segment::Create("test", 9 * 4096, 4096));
  a.Populate(4096 + 100, 4096);  // of two pages
  a.Populate(6 * 4096, 0);
  EXPECT_EQ(a.ResidentBytes(), 2 * 4096);
  a.Populate(0, 8 * 4096);
  EXPECT_EQ(a.ResidentBytes(), 8 * 4096);
  for (int i = 0; i < 8 * 4096; ++i) ASSERT_EQ(a.data()[i], 0);
}

TEST(SegmentTest, PunchedPages_TakeNoMemoryAndReadAsZeros_AtTheSameAddress) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 6 * 4096, 4096));
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, a.ReadOnlyFd());
  ASSERT_OK_AND_ASSIGN(Segment reader, Segment::Map(std::move(fd), 6 * 4096, 4096, Segment::Access::kReadOnly));
  std::memset(a.data(), 7, 5 * 4096);
  EXPECT_EQ(a.ResidentBytes(), 5 * 4096);
  ASSERT_OK(a.Punch(4096, 2 * 4096));
  ASSERT_OK(a.Punch(0, 0));
  EXPECT_EQ(reader.ResidentBytes(), 3 * 4096);
  EXPECT_EQ(reader.data()[4095], 7);
  EXPECT_EQ(reader.data()[4096], 0);
  EXPECT_EQ(reader.data()[3 * 4096], 7);
  a.data()[4096] = 5;
  EXPECT_EQ(reader.data()[4096], 5);
  EXPECT_THAT(reader.Punch(0, 4096), StatusIs(absl::StatusCode::kInternal, HasSubstr("giving back 4096")));
  ASSERT_OK(a.SealFutureWrites());
  EXPECT_THAT(a.Punch(0, 4096), StatusIs(absl::StatusCode::kInternal, HasSubstr("giving back 4096")));
}

TEST(SegmentTest, GuardedPages_CannotBeTouchedUntilTheyAreOpen) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 3 * 4096, 4096));
  ASSERT_OK(a.Guard(4096, 4096, /*accessible=*/false));
  a.data()[0] = 1;
  EXPECT_DEATH(a.data()[4096] = 1, "");
  ASSERT_OK(a.Guard(4096, 4096, /*accessible=*/true));
  a.data()[4096] = 1;
  ASSERT_OK_AND_ASSIGN(Segment reader, Segment::Map(*a.ReadOnlyFd(), 3 * 4096, 4096, Segment::Access::kReadOnly));
  ASSERT_OK(reader.Guard(0, 4096, /*accessible=*/true));
  EXPECT_DEATH(reader.data()[0] = 1, "");  // no more than it had
}

TEST(SegmentTest, Private_WhatIsWrittenIsTheProcesssOwn_AtTheSameAddress) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 3 * 4096, 4096));
  ASSERT_OK_AND_ASSIGN(Segment b, Segment::Map(UniqueFd(dup(a.fd())), 3 * 4096, 4096, Segment::Access::kReadWrite));
  b.data()[0] = 1;
  char* const at = b.data();
  ASSERT_OK(b.MakePrivate());
  EXPECT_EQ(b.data(), at);
  EXPECT_EQ(b.data()[0], 1);
  b.data()[0] = 2;
  b.data()[5000] = 3;
  EXPECT_EQ(a.data()[0], 1);
  EXPECT_EQ(a.data()[5000], 0);
}

TEST(SegmentTest, CopyOnWrite_WhatIsWrittenIsTheProcesssOwn_UntilItIsForgotten) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 3 * 4096, 0));
  ASSERT_OK(a.SealFutureWrites());
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, a.ReadOnlyFd());
  ASSERT_OK_AND_ASSIGN(Segment b, Segment::Map(std::move(fd), 3 * 4096, 0, Segment::Access::kCopyOnWrite));
  a.data()[0] = 1;
  EXPECT_EQ(b.data()[0], 1);
  b.data()[0] = 2;
  EXPECT_EQ(a.data()[0], 1);
  a.data()[0] = 3;
  a.data()[5000] = 4;
  EXPECT_EQ(b.data()[0], 2);
  EXPECT_EQ(b.data()[5000], 4);  // another page
  ASSERT_OK(b.ForgetWrites());
  EXPECT_EQ(b.data()[0], 3);
  EXPECT_THAT(a.ForgetWrites(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("forgotten")));
}

// The privileged open what they want, where pages are given back: of them only the mode can be said.
TEST(SegmentTest, RefusingNewWriters_ReadOnlyDescriptorsStaySo) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 4096, 0));
  ASSERT_OK(a.RefuseNewWriters(/*punched=*/true));
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, a.ReadOnlyFd());
  struct stat info;
  ASSERT_EQ(fstat(fd.get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0400u);
  if (geteuid() != 0) {
    EXPECT_LT(open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR), 0);
  }
  EXPECT_THAT(Segment::Map(std::move(fd), 4096, 0, Segment::Access::kReadWrite),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("4096")));
  ASSERT_OK(a.Punch(0, 4096));
  a.data()[0] = 1;  // the creator goes on
}

// Of root, which has the capability. In a sandbox it lacks that: tagged no-sandbox.
TEST(SegmentTest, RefusingNewWriters_NeitherRootNorANewModeHelp_AndARestartedWriterMapsItAgain) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 4096, 0));
  ASSERT_OK(a.RefuseNewWriters(/*punched=*/false));
  ASSERT_OK(a.RefuseNewWriters(/*punched=*/false));
  ASSERT_OK_AND_ASSIGN(UniqueFd given, a.ReadOnlyFd());
  int flags = 0;
  const bool can = ioctl(a.fd(), FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_IMMUTABLE_FL) != 0;
  if (!can) GTEST_SKIP() << "this kernel, or user, cannot make memory immutable";
  EXPECT_EQ(fchmod(given.get(), 0600), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(open(("/proc/self/fd/" + std::to_string(given.get())).c_str(), O_RDWR), -1);
  EXPECT_EQ(errno, EPERM);
  UniqueFd retained(fcntl(a.fd(), F_DUPFD_CLOEXEC, 0));
  ASSERT_OK_AND_ASSIGN(Segment again, Segment::Map(std::move(retained), 4096, 0, Segment::Access::kReadWrite));
  again.data()[0] = 7;
  EXPECT_EQ(a.data()[0], 7);
}

TEST(SegmentTest, Written_IsThere_WhateverPagesThereAre_AndWhoeverMayWrite) {
  constexpr int64_t kOffset = 1000;  // pages begin elsewhere
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", kOffset + 3 * kSegmentPage, kOffset));
  const std::string text(kSegmentPage + 100, 'x');
  const auto at = [](const Segment& segment, int64_t begin) { return std::string(segment.data() + begin, 4); };
  a.Write(500, text.data(), static_cast<int64_t>(text.size()));
  EXPECT_EQ(at(a, 498), std::string("\0\0xx", 4));
  EXPECT_EQ(at(a, 500 + kSegmentPage + 98), std::string("xx\0\0", 4));
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, a.ReadOnlyFd());
  ASSERT_OK_AND_ASSIGN(Segment b, Segment::Map(std::move(fd), a.num_bytes(), kOffset, Segment::Access::kReadOnly));
  EXPECT_EQ(at(b, 498), std::string("\0\0xx", 4));

  ASSERT_OK_AND_ASSIGN(Segment sealed, Segment::Create("test", kSegmentPage, 0));
  ASSERT_OK(sealed.SealFutureWrites());  // the descriptor cannot be written to; the mapping can
  sealed.Write(0, "abcd", 4);
  EXPECT_EQ(at(sealed, 0), "abcd");

  ASSERT_OK(a.MakePrivate());
  a.Write(500, "efgh", 4);
  EXPECT_EQ(at(a, 500), "efgh");
  EXPECT_EQ(at(b, 500), "xxxx");

  ASSERT_OK_AND_ASSIGN(Segment alone, Segment::CreatePrivate(kSegmentPage, 0));
  Segment moved(std::move(alone));
  moved.Write(8, "ijkl", 4);
  EXPECT_EQ(at(moved, 8), "ijkl");
}

TEST(SegmentTest, MoveAndMoveAssign_KeepTheMapping) {
  ASSERT_OK_AND_ASSIGN(Segment a, Segment::Create("test", 4096, 0));
  a.data()[7] = 42;
  Segment b(std::move(a));
  Segment c;
  c = std::move(b);
  EXPECT_EQ(c.data()[7], 42);
  EXPECT_FALSE(a.mapped());
  EXPECT_FALSE(b.mapped());
}

}  // namespace
}  // namespace shardmesh
