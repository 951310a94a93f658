#include "worker/memory/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/base/matchers.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

// What a peer receives: duplicates of the lead's descriptors, and their sizes.
struct Sent {
  explicit Sent(const HostMemory& host) {
    host.DescribeTo(welcome);
    for (int fd : host.PeerDescriptors()) descriptors.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }
  v1::LocalWelcome welcome;
  std::vector<UniqueFd> descriptors;
};

struct HostMemoryTest : ::testing::Test, TestHost {
  HostMemoryTest() : TestHost(SmallJob("fsdp=2", 3)) {}
  absl::StatusOr<HostMemory> Map(Sent sent) {
    return HostMemory::Map(sent.welcome, std::move(sent.descriptors), 3, plan);
  }
};

TEST_F(HostMemoryTest, ThePeerSeesTheLeadsMemory) {
  ASSERT_OK_AND_ASSIGN(HostMemory peer, Map(Sent(host)));
  host.control()->decided.store(42);
  std::memcpy(host.window().data(), "window", 7);
  std::memcpy(peer.publication(1).data(), "publication", 12);
  std::memcpy(peer.slot(2).data(), "slot", 5);
  EXPECT_TRUE(PutMessage(peer.mailbox(2).request, "message"));
  peer.notifier().store(7);
  EXPECT_EQ(peer.control()->decided.load(), 42u);
  EXPECT_STREQ(peer.window().data(), "window");
  EXPECT_STREQ(host.publication(1).data(), "publication");
  EXPECT_STREQ(host.slot(2).data(), "slot");
  std::string message;
  EXPECT_TRUE(TakeMessage(host.mailbox(2).request, message));
  EXPECT_EQ(message, "message");
  EXPECT_FALSE(host.mailbox(1).open());
  EXPECT_EQ(host.notifier().load(), 7u);
  EXPECT_EQ(host.slot(1).data()[0], 0);
}

TEST_F(HostMemoryTest, SizesHoldThePlan_AndStreamsAreStaggered) {
  EXPECT_GE(host.window().data_bytes(), plan.window_bytes());
  int64_t slots = 0;
  for (int s = 0; s < 3; ++s) {
    EXPECT_GE(host.slot(s).data_bytes(), plan.gradient_window_bytes() + static_cast<int64_t>(sizeof(Mailbox)));
    slots += host.slot(s).num_bytes();
    EXPECT_NE(host.slot(s).data_offset(), host.window().data_offset());
    EXPECT_EQ(host.slot(s).data_offset() % kPageBytes, 0);
  }
  EXPECT_EQ(host.Allocated().slots, slots);
  int64_t publications = 0;
  for (int p = 0; p < 3; ++p) publications += host.publication(p).num_bytes();
  EXPECT_EQ(host.Allocated().publications, publications);
  EXPECT_EQ(host.Resident().publications, 0);  // none was written to
}

TEST_F(HostMemoryTest, TooFewDescriptorsOrSizes_AreRefused) {
  Sent fewer(host);
  fewer.descriptors.pop_back();
  EXPECT_THAT(Map(std::move(fewer)),
              StatusIs(Code::kInvalidArgument, HasSubstr("9 descriptors and 10 sizes; 10 expected")));
  Sent unsized(host);
  unsized.welcome.mutable_segments()->RemoveLast();
  EXPECT_THAT(Map(std::move(unsized)), StatusIs(Code::kInvalidArgument, HasSubstr("10 descriptors and 9 sizes")));
  EXPECT_THAT(HostMemory::Map({}, {}, 3, plan), StatusIs(Code::kInvalidArgument, HasSubstr("10 expected")));
}

TEST_F(HostMemoryTest, SizesThatCannotBe_AreRefused) {
  const std::pair<int64_t, int64_t> wrong[] = {
      {4096, 0}, {0, 0}, {-1, 0}, {INT64_MAX, 0}, {INT64_MAX, -4096}, {INT64_MIN, 4096}, {4096, 8192}, {1 << 30, 0}};
  for (int segment : {0, 1, 6, 8, 9}) {
    for (const auto& [num_bytes, data_offset] : wrong) {
      Sent sent(host);
      sent.welcome.mutable_segments(segment)->set_num_bytes(num_bytes);
      sent.welcome.mutable_segments(segment)->set_data_offset(data_offset);
      if (segment >= 8 && num_bytes == 4096 && data_offset == 0) continue;  // that fits
      if (segment == 1 && num_bytes == 4096 && data_offset == 0) continue;
      EXPECT_THAT(Map(std::move(sent)), StatusIs(Code::kInvalidArgument, ::testing::_))
          << segment << ": " << num_bytes << " " << data_offset;
    }
  }
  Sent crooked(host);
  crooked.welcome.mutable_segments(1)->set_data_offset(crooked.welcome.segments(1).data_offset() - 3);
  EXPECT_THAT(Map(std::move(crooked)), StatusIs(Code::kInvalidArgument, HasSubstr("a multiple of 4096")));
}

TEST_F(HostMemoryTest, Sealed_NoNewWriter) {
  ASSERT_OK_AND_ASSIGN(HostMemory peer, Map(Sent(host)));
  ASSERT_OK(host.Seal());
  ASSERT_OK(host.Seal());
  EXPECT_THAT(Map(Sent(host)), StatusIs(Code::kPermissionDenied, HasSubstr("mapping")));
  std::memcpy(peer.window().data(), "goes on", 8);
  EXPECT_STREQ(host.window().data(), "goes on");
}

// Whoever may open it, root as well.
TEST_F(HostMemoryTest, Sealed_WhatReadersWereGiven_CannotBeWrittenByAnotherWay) {
  ASSERT_OK(host.Seal());
  for (const Segment* segment : {&host.board_segment(), &host.publication(0), &host.window()}) {
    ASSERT_OK_AND_ASSIGN(const UniqueFd given, segment->ReadOnlyFd());
    fchmod(given.get(), 0600);
    const UniqueFd again(open(("/proc/self/fd/" + std::to_string(given.get())).c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_TRUE(again.valid());
    EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0), MAP_FAILED);
    EXPECT_EQ(errno, EPERM);
    EXPECT_LT(pwrite(again.get(), "x", 1, 0), 0);
  }
}

TEST(HostMemoryLimitTest, TooManyRanks) {
  JobSpec job = SmallJob("fsdp=65", 1);
  const auto memory = NewProcessMemory();
  EXPECT_THAT(HostMemory::Create(*memory, job.name, 1, *Plan::Create(job)),
              StatusIs(Code::kResourceExhausted, HasSubstr("65 ranks on one host; at most 64")));
}

}  // namespace
}  // namespace shardmesh
