#include "proto/protocol_version.h"

#include "absl/strings/str_cat.h"

namespace shardmesh {

v1::ProtocolVersion OwnProtocol() {
  v1::ProtocolVersion own;
  own.set_major(kProtocolMajor);
  own.set_minor(kProtocolMinor);
  return own;
}

absl::Status CheckProtocol(const v1::ProtocolVersion& theirs, absl::string_view who) {
  // Programs from before there was this field say nothing.
  const int32_t major = theirs.major() == 0 && theirs.minor() == 0 ? 1 : theirs.major();
  if (major == kProtocolMajor) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      who, " speaks protocol version ", major, ".", theirs.minor(), ", this program ", kProtocolMajor, ".",
      kProtocolMinor, "; programs of two major versions do not understand each other: install one build on both"));
}

}  // namespace shardmesh
