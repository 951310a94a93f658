#include "worker/transport/nccl/nccl_library.h"

#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "local/device/device_runtime.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {
namespace {

using testing::HasSubstr;

class NcclLibraryTest : public testing::Test {
 protected:
  ~NcclLibraryTest() override { TheStandIn().Reset(); }
};

TEST_F(NcclLibraryTest, Load_FindsEveryFunction) {
  const auto nccl = NcclLibrary::Load(kStandInPath);
  ASSERT_OK(nccl.status());
  EXPECT_EQ(nccl->version(), 22809);
  EXPECT_EQ(nccl->VersionText(), "2.28.9");
  EXPECT_THAT(nccl->path(), HasSubstr("libnccl_stand_in.so"));
#define SHARDMESH_IS_THERE(name) EXPECT_NE(nccl->api().name, nullptr) << #name;
  SHARDMESH_NCCL_FUNCTIONS(SHARDMESH_IS_THERE)
#undef SHARDMESH_IS_THERE
  EXPECT_STREQ(nccl->api().GetErrorString(kNcclRemoteError), "remote process exited or there was a network error");
}

TEST_F(NcclLibraryTest, Load_NoSuchFile_SaysWhereItLooked) {
  const auto nccl = NcclLibrary::Load("nowhere/libnccl.so.2");
  EXPECT_EQ(nccl.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(nccl.status().message()), HasSubstr("nowhere/libnccl.so.2: cannot open"));
  EXPECT_THAT(std::string(nccl.status().message()), HasSubstr("install NCCL 2.28 or newer"));
}

TEST_F(NcclLibraryTest, Load_NameWithoutFolder_SaysWhereTheSystemLooks) {
  const auto library = SharedLibrary::Open({"libno-such-library.so.1", "nowhere/libno-such-library.so"});
  EXPECT_EQ(library.status().code(), absl::StatusCode::kNotFound);
  for (const char* part : {"libno-such-library.so.1: ", "; nowhere/libno-such-library.so: ", "LD_LIBRARY_PATH"}) {
    EXPECT_THAT(std::string(library.status().message()), HasSubstr(part));
  }
}

TEST_F(NcclLibraryTest, Load_TooOld_NamesBothVersions) {
  TheStandIn().SetVersion(21805);
  const auto nccl = NcclLibrary::Load(kStandInPath);
  EXPECT_EQ(nccl.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(nccl.status().message()), HasSubstr("is NCCL 2.18.5; it is too old: install NCCL 2.28"));
  TheStandIn().SetVersion(kOldestNccl);
  EXPECT_OK(NcclLibrary::Load(kStandInPath).status());
}

TEST_F(NcclLibraryTest, Load_AnotherLibrary_NamesTheFunctionThatItLacks) {
  const auto nccl = NcclLibrary::Load("libm.so.6");
  EXPECT_EQ(nccl.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(nccl.status().message()), HasSubstr("has no function ncclGetVersion"));
}

// ---- The device. ----

TEST_F(NcclLibraryTest, Device_NoDriver_SaysWhereItLooked) {
  const auto device = DeviceRuntime::Open(0, "nowhere/libcuda.so.1");
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("no CUDA driver here: nowhere/libcuda.so.1"));
}

TEST_F(NcclLibraryTest, Device_NoSuchDevice_HasTheDriversWords) {
  const auto device = DeviceRuntime::Open(99, kStandInPath);
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("CUDA device 99 cannot be opened: invalid device"));
}

TEST_F(NcclLibraryTest, Device_LacksAFunction_IsNamed) {
  const auto device = DeviceRuntime::Open(0, "libm.so.6");
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("has no function cuInit"));
}

TEST_F(NcclLibraryTest, Device_CopiesInOrder_AndOwnsWhatItAllocates) {
  const auto device = DeviceRuntime::Open(3, kStandInPath);
  ASSERT_OK(device.status());
  DeviceRuntime::Scope scope(**device);
  const auto a = (*device)->Allocate(8), b = (*device)->Allocate(8);
  ASSERT_OK(a.status());
  ASSERT_OK(b.status());
  char text[8] = "abcdefg", back[8] = {};
  EXPECT_TRUE((*device)->Owns(*a));
  EXPECT_FALSE((*device)->Owns(text));
  ASSERT_OK((*device)->Copy(*a, text, 8));
  ASSERT_OK((*device)->Copy(*b, *a, 8));
  ASSERT_OK((*device)->Copy(back, *b, 8));
  EXPECT_STREQ(back, "abcdefg");
  ASSERT_OK((*device)->Copy(*a, *b, 8));
  ASSERT_OK((*device)->Copy(nullptr, nullptr, 0));
  EXPECT_TRUE((*device)->Idle().value());
  (*device)->Free(*a);
  (*device)->Free(*b);
  (*device)->Free(nullptr);
  EXPECT_EQ(TheStandIn().Allocations(), 0);
  EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
}

TEST_F(NcclLibraryTest, Device_NoRoom_IsResourceExhausted) {
  const auto device = DeviceRuntime::Open(0, kStandInPath);
  ASSERT_OK(device.status());
  DeviceRuntime::Scope scope(**device);
  const auto memory = (*device)->Allocate(int64_t{1} << 40);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(memory.status().message()), HasSubstr("allocate 1099511627776 bytes: out of memory"));
}

TEST_F(NcclLibraryTest, Device_OutsideAScope_IsAnError) {
  const auto device = DeviceRuntime::Open(0, kStandInPath);
  ASSERT_OK(device.status());
  EXPECT_EQ((*device)->Allocate(8).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace shardmesh
