#include "local/segment.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>

#include "core/matchers.h"

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
