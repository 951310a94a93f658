// The checks that Validate() is made of: one field each, with a message that says what would be right.
// Pure functions, thread-safe. InvalidArgument, or ResourceExhausted where a size is over a limit.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/repeated_field.h"

namespace shardmesh {

// `text` quoted, escaped and cut after 100 bytes.
std::string QuotedField(absl::string_view text);

// `what` is `value`, which must be in [low, high].
absl::Status CheckRange(absl::string_view what, int64_t value, int64_t low, int64_t high);

// Not empty, no control characters, at most max_bytes.
absl::Status CheckText(absl::string_view what, absl::string_view text, int max_bytes);

// At most `limit` entries.
absl::Status CheckCount(absl::string_view what, int64_t count, int64_t limit);

// At most kMaxSecretBytes; it is not in the message.
absl::Status CheckSecret(absl::string_view secret);

// 32 lower-case hexadecimal digits.
absl::Status CheckHash(absl::string_view what, absl::string_view hash);

// At least one slot, each in [0, kMaxSlots), none twice.
absl::Status CheckSlots(const google::protobuf::RepeatedField<int32_t>& slots);

}  // namespace shardmesh
