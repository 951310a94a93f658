#include "worker/transport/rendezvous.h"

#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "core/base/matchers.h"
#include "gtest/gtest.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

// Both kinds keep the same promises.
class RendezvousTest : public ::testing::TestWithParam<bool> {
 protected:
  // Another rank's view of the same place.
  std::shared_ptr<Rendezvous> Look() const {
    if (!GetParam()) return memory_;
    return std::make_shared<FolderRendezvous>(folder_.path());
  }

 private:
  const testing::TempFolder folder_;
  const std::shared_ptr<Rendezvous> memory_ = std::make_shared<MemoryRendezvous>();
};

TEST_P(RendezvousTest, Get_WaitsForTheValue) {
  std::thread writer([this] { EXPECT_OK(Look()->Set("group/calls/1", absl::string_view("a\0b", 3))); });
  const auto value = Look()->Get("group/calls/1", absl::Seconds(60));
  writer.join();
  ASSERT_OK(value.status());
  EXPECT_EQ(*value, std::string("a\0b", 3));
}

TEST_P(RendezvousTest, NobodyWrites_IsDeadlineExceeded_AndNamesTheKey) {
  ASSERT_OK(Look()->Set("group/1", "x"));
  const absl::Status status = Look()->Get("group/2", absl::Milliseconds(30)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("group/2"), std::string::npos) << status;
}

INSTANTIATE_TEST_SUITE_P(All, RendezvousTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Folder" : "Memory"; });

TEST(MemoryRendezvous, MoreKeysThanItHolds_AreRefused) {
  MemoryRendezvous rendezvous(2);
  for (const char* key : {"a", "b", "a"}) ASSERT_OK(rendezvous.Set(key, "value"));
  EXPECT_EQ(rendezvous.Set("c", "value").code(), absl::StatusCode::kResourceExhausted);
}

TEST(FolderRendezvous, NoFolder_IsUnavailable) {
  FolderRendezvous rendezvous("/nonexistent/folder");
  EXPECT_EQ(rendezvous.Set("key", "value").code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace shardmesh
