// The bulk messages of shard.proto as raw gRPC buffers: field 1 a header message (or absent), field 2 bytes. Encoding
// takes the data as slices that are never copied; decoding hands the data on as it lies in the received buffer. The
// bytes on the wire are those of the ordinary PushChunk and PullChunk, so any gRPC client can speak them. Thread-safe
// functions.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// `header` is a serialized header message; empty: none. `data` may be empty.
grpc::ByteBuffer EncodeChunk(absl::string_view header, const grpc::Slice& data);

// `header` gets the serialized header message, and `has_header` whether there was one; `data` is called with each
// contiguous part of the bytes, in order, and may stop with an error. Unknown fields are skipped, as protobuf does.
// InvalidArgument: not such a message.
absl::Status DecodeChunk(grpc::ByteBuffer& buffer, std::string& header, bool& has_header,
                         const std::function<absl::Status(absl::string_view)>& data);

// A message of one slice, and back. InvalidArgument from Parse: not a `Message`.
template <typename Message>
grpc::ByteBuffer EncodeMessage(const Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}
absl::Status ReadAll(const grpc::ByteBuffer& buffer, std::string& bytes);
template <typename Message>
absl::Status DecodeMessage(const grpc::ByteBuffer& buffer, Message& message) {
  std::string bytes;
  if (absl::Status status = ReadAll(buffer, bytes); !status.ok()) return status;
  if (message.ParseFromString(bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError("the message cannot be parsed as " + message.GetTypeName());
}

}  // namespace shardmesh
