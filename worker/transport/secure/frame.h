// Frame: the header of everything that ranks of a group send each other once they are connected. Pure, thread-safe.
//
// A rank's part of a call is a kCall frame, and behind it the bytes that it has for the peer, as kData frames. News
// goes between two frames, so bytes of a call hold it up by one chunk at most.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/transport/group.h"

namespace shardmesh {

inline constexpr size_t kFrameBytes = 48;
inline constexpr int64_t kMostChunk = int64_t{512} << 10;  // bytes behind a kData frame
inline constexpr size_t kMostNews = 1024;                  // bytes behind a frame of news

enum class FrameType : uint16_t {
  kCall = 1,  // the sender is at `call`
  kData,      // `length` bytes of `call` follow
  kLate,      // the time of `call` is up; a bit for each rank that the sender waits for follows
  kLeft,      // the sender leaves the group after `call`
  kEnd,       // the sender has ended the group; why follows
};

struct Frame {
  FrameType type = FrameType::kCall;
  uint32_t length = 0;  // of what follows it
  CallHeader call;
};

// `to` grows by kFrameBytes.
void AppendFrame(const Frame& frame, std::string& to);

// DataLoss: these bytes are no frame, or one with more behind it than its type allows. The message is the rest of a
// sentence that begins with the sender's name. REQUIRES: kFrameBytes bytes.
absl::StatusOr<Frame> ParseFrame(absl::string_view bytes);

}  // namespace shardmesh
