// ByteSink: where the bytes of one push go (shard.proto): a slot's, or initial weights (push_sink.h), or a seat's
// (seat_sink.h). For one thread, but CheckWanted. What was not finished leaves nothing behind that counts.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {

class ByteSink {
 public:
  virtual ~ByteSink() = default;
  // NotFound: the job was deleted meanwhile. For any thread.
  virtual absl::Status CheckWanted() const = 0;
  // InvalidArgument: more bytes than announced, or a gradient that is not finite under policy fail. Aborted: the slot
  // was finished or taken back meanwhile.
  virtual absl::Status Append(absl::string_view bytes) = 0;
  // InvalidArgument: fewer bytes than announced. The reply says whether the step had been committed before.
  virtual absl::StatusOr<v1::PushReply> Finish() = 0;
};

}  // namespace shardmesh
