// Memory of a device that is shared, over the stand-in: two runtimes stand for two processes, and one test has two.
#include "local/device/device_segment.h"

#include <sys/wait.h>
#include <unistd.h>

#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {
namespace {

using testing::HasSubstr;

class DeviceSegmentTest : public testing::Test {
 protected:
  DeviceSegmentTest() : one_(*DeviceRuntime::Open(3, kStandInPath)), two_(*DeviceRuntime::Open(3, kStandInPath)) {}
  ~DeviceSegmentTest() override {
    one_.reset();
    two_.reset();
    EXPECT_EQ(TheStandIn().Allocations(), 0);
    EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
    TheStandIn().Reset();
  }
  static std::string Read(DeviceRuntime& device, const uint8_t* from, int64_t bytes) {
    DeviceRuntime::Scope scope(device);
    std::string text(bytes, '?');
    EXPECT_OK(device.Copy(text.data(), from, bytes));
    EXPECT_OK(device.AwaitIdle(absl::Seconds(5)));
    return text;
  }
  static void Write(DeviceRuntime& device, uint8_t* to, const std::string& text) {
    DeviceRuntime::Scope scope(device);
    EXPECT_OK(device.Copy(to, text.data(), static_cast<int64_t>(text.size())));
    EXPECT_OK(device.AwaitIdle(absl::Seconds(5)));
  }

  std::shared_ptr<DeviceRuntime> one_, two_;
};

TEST_F(DeviceSegmentTest, TwoRuntimes_ShareTheBytes) {
  auto mine = DeviceSegment::Create(one_, 100'000);
  ASSERT_OK(mine.status());
  EXPECT_EQ(mine->num_bytes(), 100'000);
  EXPECT_EQ(mine->allocated_bytes(), 128 << 10) << "whole granules";
  EXPECT_EQ(Read(*one_, mine->data(), 4), std::string(4, '\0'));
  auto theirs = DeviceSegment::Map(two_, UniqueFd(dup(mine->fd())), 100'000, DeviceSegment::Access::kReadOnly);
  ASSERT_OK(theirs.status());
  EXPECT_NE(theirs->data(), mine->data());
  Write(*one_, mine->data() + 99'995, "hello");
  EXPECT_EQ(Read(*two_, theirs->data() + 99'995, 5), "hello");
  mine = DeviceSegment();  // the owner goes: the memory stays while somebody maps it
  EXPECT_EQ(Read(*two_, theirs->data() + 99'995, 5), "hello");
}

TEST_F(DeviceSegmentTest, ReadOnlyMapping_RefusesAWrite) {
  auto mine = DeviceSegment::Create(one_, 10);
  ASSERT_OK(mine.status());
  auto theirs = DeviceSegment::Map(two_, UniqueFd(dup(mine->fd())), 10, DeviceSegment::Access::kReadOnly);
  ASSERT_OK(theirs.status());
  EXPECT_DEATH(Write(*two_, theirs->data(), "x"), "");
}

TEST_F(DeviceSegmentTest, OtherProcess_SharesTheBytes) {
  auto mine = DeviceSegment::Create(one_, 10);
  ASSERT_OK(mine.status());
  const pid_t child = fork();
  if (child == 0) {
    auto theirs = DeviceSegment::Map(two_, UniqueFd(dup(mine->fd())), 10, DeviceSegment::Access::kReadWrite);
    if (theirs.ok()) Write(*two_, theirs->data(), "from afar");
    _exit(theirs.ok() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Read(*one_, mine->data(), 9), "from afar");
}

TEST_F(DeviceSegmentTest, OtherSize_IsInvalidArgument) {
  auto mine = DeviceSegment::Create(one_, 100'000);
  ASSERT_OK(mine.status());
  for (const auto& [bytes, allocated] : {std::pair(200'000, 262144), std::pair(50'000, 65536)}) {
    auto theirs = DeviceSegment::Map(two_, UniqueFd(dup(mine->fd())), bytes, DeviceSegment::Access::kReadOnly);
    EXPECT_THAT(theirs.status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("has not the " + std::to_string(allocated) + " bytes")));
  }
}

TEST_F(DeviceSegmentTest, OtherDescriptor_IsInvalidArgument) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd retained(ends[1]);
  auto theirs = DeviceSegment::Map(two_, UniqueFd(ends[0]), 10, DeviceSegment::Access::kReadOnly);
  EXPECT_THAT(theirs.status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no descriptor of CUDA memory, says device 3")));
}

TEST_F(DeviceSegmentTest, NoRoom_IsResourceExhausted) {
  TheStandIn().SetVirtualMemory(64 << 10);
  EXPECT_OK(DeviceSegment::Create(one_, 10).status());
  EXPECT_THAT(DeviceSegment::Create(one_, 10).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("CUDA device 3 cannot give 65536 bytes: out of memory")));
}

TEST_F(DeviceSegmentTest, DriverWithoutVirtualMemory_IsUnimplemented) {
  TheStandIn().SetVirtualMemory(-1);
  EXPECT_THAT(DeviceSegment::Create(one_, 10).status(),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("has no virtual memory management")));
}

TEST_F(DeviceSegmentTest, LostDevice_IsUnavailable) {
  auto mine = DeviceSegment::Create(one_, 10);
  ASSERT_OK(mine.status());
  TheStandIn().LoseDevice(3);
  const absl::Status status = DeviceSegment::Create(one_, 10).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("CUDA device 3")));
  EXPECT_THAT(std::string(status.message()), HasSubstr("unspecified launch failure"));
}

TEST_F(DeviceSegmentTest, Uuid_FindsTheDevice) {
  const auto same = DeviceRuntime::OpenUuid(one_->uuid(), kStandInPath);
  ASSERT_OK(same.status());
  EXPECT_EQ((*same)->device(), 3);
  EXPECT_EQ((*same)->name(), "stand-in");
  EXPECT_THAT(DeviceRuntime::OpenUuid(std::string(16, 'x'), kStandInPath).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none of the 16 CUDA devices")));
}

}  // namespace
}  // namespace shardmesh
