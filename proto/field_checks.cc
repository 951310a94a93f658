#include "proto/field_checks.h"

#include <bitset>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/job/job.h"

namespace shardmesh {

std::string QuotedField(absl::string_view text) {
  if (text.size() <= 100) return absl::StrCat("\"", absl::CHexEscape(text), "\"");
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 100)), "...\"");
}

absl::Status CheckRange(absl::string_view what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  if (high == INT64_MAX)
    return absl::InvalidArgumentError(absl::StrCat(what, " is ", value, "; it is ", low, " or more"));
  return absl::InvalidArgumentError(absl::StrCat(what, " is ", value, "; it is ", low, " to ", high));
}

absl::Status CheckText(absl::string_view what, absl::string_view text, int max_bytes) {
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(what, " is unset; it is required"));
  if (text.size() > static_cast<size_t>(max_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", QuotedField(text), " has ", text.size(), " bytes; at most ", max_bytes));
  }
  for (char c : text) {
    if (absl::ascii_iscntrl(c)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " ", QuotedField(text), " holds a control character; printable characters only"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCount(absl::string_view what, int64_t count, int64_t limit) {
  if (count <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(count, " ", what, "; at most ", limit, " in one call"));
}

absl::Status CheckSecret(absl::string_view secret) {
  if (secret.size() <= kMaxSecretBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("secret has ", secret.size(), " bytes; at most ", kMaxSecretBytes));
}

absl::Status CheckHash(absl::string_view what, absl::string_view hash) {
  bool good = hash.size() == 32;
  for (char c : hash) good = good && ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'));
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", QuotedField(hash), "; it is 32 lower-case hexadecimal digits"));
}

absl::Status CheckSlots(const google::protobuf::RepeatedField<int32_t>& slots) {
  if (slots.empty()) return absl::InvalidArgumentError("slots is empty; name at least one");
  std::bitset<kMaxSlots> seen;
  for (int32_t slot : slots) {
    RETURN_IF_ERROR(CheckRange("slot", slot, 0, kMaxSlots - 1));
    if (seen[slot]) return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " is named twice; name each once"));
    seen[slot] = true;
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
