#include "worker/transport/secure/frame.h"

#include "absl/strings/str_cat.h"
#include "worker/transport/secure/wire.h"

namespace shardmesh {
namespace {

constexpr uint32_t kMagic = 0x46'47'4d'53;  // "SMGF"

// -1: there is no such type.
int64_t MostBehind(FrameType type) {
  switch (type) {
    case FrameType::kCall:
    case FrameType::kLeft:
      return 0;
    case FrameType::kData:
      return kMostChunk;
    case FrameType::kLate:
      return kMaxGroupRanks / 8;
    case FrameType::kEnd:
      return kMostNews;
  }
  return -1;
}

}  // namespace

void AppendFrame(const Frame& frame, std::string& to) {
  AppendNumber(kMagic, to);
  AppendNumber(static_cast<uint16_t>(frame.type), to);
  AppendNumber(uint16_t{0}, to);
  AppendNumber(frame.length, to);
  AppendNumber(uint32_t{0}, to);
  AppendNumber(frame.call.epoch, to);
  AppendNumber(frame.call.number, to);
  AppendNumber(static_cast<uint32_t>(frame.call.kind), to);
  AppendNumber(frame.call.detail, to);
  AppendNumber(frame.call.bytes, to);
}

absl::StatusOr<Frame> ParseFrame(absl::string_view bytes) {
  if (TakeNumber<uint32_t>(bytes) != kMagic) return absl::DataLossError("sent bytes where a frame was due");
  Frame frame;
  frame.type = static_cast<FrameType>(TakeNumber<uint16_t>(bytes));
  const auto none = TakeNumber<uint16_t>(bytes);
  frame.length = TakeNumber<uint32_t>(bytes);
  const auto nothing = TakeNumber<uint32_t>(bytes);
  const int64_t most = MostBehind(frame.type);
  if (most < 0 || none != 0 || nothing != 0) {
    return absl::DataLossError(absl::StrCat("sent a frame of the unknown type ", static_cast<int>(frame.type)));
  }
  if (frame.length > most) {
    return absl::DataLossError(absl::StrCat("sent a frame of type ", static_cast<int>(frame.type), " with ",
                                            frame.length, " bytes behind it; there are at most ", most));
  }
  frame.call.epoch = TakeNumber<uint64_t>(bytes);
  frame.call.number = TakeNumber<uint64_t>(bytes);
  frame.call.kind = static_cast<CallKind>(TakeNumber<uint32_t>(bytes));
  frame.call.detail = TakeNumber<uint32_t>(bytes);
  frame.call.bytes = TakeNumber<int64_t>(bytes);
  return frame;
}

}  // namespace shardmesh
