#include "worker/transport/secure/frame.h"

#include <random>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using Code = absl::StatusCode;

std::string Bytes(const Frame& frame) {
  std::string bytes;
  AppendFrame(frame, bytes);
  return bytes;
}

TEST(Frame, IsReadAsItWasWritten) {
  const CallHeader call = {0x0123456789abcdef, 77, CallKind::kBroadcast, 0xfedcba98, int64_t{1} << 46};
  for (const auto& [type, length] : {std::pair(FrameType::kCall, 0u),
                                     {FrameType::kData, 512u << 10},
                                     {FrameType::kLate, 128u},
                                     {FrameType::kLeft, 0u},
                                     {FrameType::kEnd, 1024u}}) {
    const std::string bytes = Bytes({type, length, call});
    ASSERT_EQ(bytes.size(), kFrameBytes);
    ASSERT_OK_AND_ASSIGN(const Frame frame, ParseFrame(bytes));
    EXPECT_EQ(frame.type, type);
    EXPECT_EQ(frame.length, length);
    EXPECT_OK(CheckHeader(call, frame.call, 0, 1));
  }
}

// The same bytes on every machine.
TEST(Frame, IsLittleEndian) {
  const std::string bytes = Bytes({FrameType::kData, 0x11223, {1, 2, CallKind::kBarrier, 3, 4}});
  EXPECT_EQ(bytes.substr(0, 12), std::string("SMGF\x02\0\0\0\x23\x12\x01\0", 12));
  EXPECT_EQ(bytes[16], 1);
  EXPECT_EQ(bytes[24], 2);
}

TEST(Frame, WhatIsNoFrame_IsDataLoss) {
  const std::string good = Bytes({FrameType::kData, 9, {}});
  for (const auto& [at, value] : {std::pair(0, 'X'), {4, '\0'}, {4, '\6'}, {5, '\1'}, {6, '\1'}, {12, '\1'}}) {
    std::string bad = good;
    bad[static_cast<size_t>(at)] = value;
    EXPECT_THAT(ParseFrame(bad), StatusIs(Code::kDataLoss, testing::HasSubstr("sent ")));
  }
}

TEST(Frame, MoreThanItsTypeHasBehindIt_IsDataLoss) {
  for (const auto& [type, length] : {std::pair(FrameType::kCall, 1u),
                                     {FrameType::kData, (512u << 10) + 1},
                                     {FrameType::kLate, 129u},
                                     {FrameType::kLeft, 1u},
                                     {FrameType::kEnd, 1025u}}) {
    EXPECT_THAT(ParseFrame(Bytes({type, length, {}})), StatusIs(Code::kDataLoss, testing::HasSubstr("at most")));
  }
  EXPECT_EQ(ParseFrame(Bytes({FrameType::kData, 0xffffffff, {}})).status().code(), Code::kDataLoss);
}

// Whatever comes is a frame within its bounds or an error.
TEST(Frame, RandomBytes_AreAnErrorOrWithinBounds) {
  constexpr uint64_t kSeed = 20250101;
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 100'000; ++i) {
    std::string bytes = Bytes({FrameType::kData, 9, {}});
    for (int changes = 0; changes < 3; ++changes) bytes[random() % 16] = static_cast<char>(random());
    const absl::StatusOr<Frame> frame = ParseFrame(bytes);
    if (frame.ok()) {
      ASSERT_LE(frame->length, static_cast<uint32_t>(kMostChunk)) << "seed " << kSeed << ", " << i;
    }
  }
}

}  // namespace
}  // namespace shardmesh
