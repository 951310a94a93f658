#include "rpc/base/status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

// The longest prefix of `message` that takes at most `limit` bytes in grpc-message's percent encoding.
absl::string_view WirePrefix(absl::string_view message, size_t limit) {
  size_t wire = 0;
  for (size_t i = 0; i < message.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(message[i]);
    wire += (c >= 0x20 && c < 0x7f && c != '%') ? 1 : 3;
    if (wire > limit) return message.substr(0, i);
  }
  return message;
}

bool TransportCanGive(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const absl::string_view message = status.message();
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const absl::string_view kept = WirePrefix(message, kMaxWireMessageBytes - 3);
  if (kept.size() == message.size()) return grpc::Status(code, std::string(message));
  return grpc::Status(code, absl::StrCat(kept, "..."));
}

absl::Status FromGrpc(const grpc::Status& status, absl::string_view peer_and_method) {
  if (status.ok()) return absl::OkStatus();
  const int raw = static_cast<int>(status.error_code());
  const auto code = raw >= 1 && raw <= 16 ? static_cast<absl::StatusCode>(raw) : absl::StatusCode::kUnknown;
  if (!TransportCanGive(code)) return absl::Status(code, status.error_message());
  return absl::Status(code, absl::StrCat(peer_and_method, ": ", status.error_message()));
}

}  // namespace shardmesh
