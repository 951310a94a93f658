#include "rpc/tls/pem.h"

#include <cstdint>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kBegin = "-----BEGIN ", kEnd = "-----END ", kDashes = "-----";
constexpr unsigned char kSequence = 0x30, kInteger = 0x02, kVersion = 0xa0, kUtcTime = 0x17, kGeneralizedTime = 0x18;

struct Element {
  unsigned char tag = 0;
  absl::string_view content;
};

// The DER element that `der` begins with, which is taken from it.
std::optional<Element> Take(absl::string_view& der) {
  if (der.size() < 2) return std::nullopt;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(der[i]); };
  size_t length = byte(1), head = 2;
  if (length >= 0x80) {
    const size_t digits = length & 0x7f;
    if (digits == 0 || digits > 4 || der.size() < head + digits) return std::nullopt;
    length = 0;
    for (size_t i = 0; i < digits; ++i) length = length << 8 | byte(head + i);
    head += digits;
  }
  if (der.size() - head < length) return std::nullopt;
  const Element element{byte(0), der.substr(head, length)};
  der.remove_prefix(head + length);
  return element;
}

bool TakeTag(absl::string_view& der, unsigned char tag, absl::string_view& content) {
  const std::optional<Element> element = Take(der);
  if (!element.has_value() || element->tag != tag) return false;
  content = element->content;
  return true;
}

absl::StatusOr<std::string> Decode(absl::string_view label, absl::string_view body) {
  if (absl::StrContains(label, "ENCRYPTED") || absl::StrContains(body, "ENCRYPTED")) {
    return absl::InvalidArgumentError(
        "has a key that is encrypted with a passphrase, for which nobody can be asked here; give one without: openssl "
        "pkey -in FILE -out NEW_FILE");
  }
  std::string der;
  if (!absl::Base64Unescape(absl::StrReplaceAll(body, {{"\r", ""}, {"\n", ""}}), &der)) {
    return absl::InvalidArgumentError(absl::StrCat("is damaged: its ", label, " block is not base64"));
  }
  absl::string_view rest = der;
  const std::optional<Element> whole = Take(rest);
  if (!whole.has_value() || whole->tag != kSequence || !rest.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("is damaged: its ", label, " block is not a whole one"));
  }
  return der;
}

std::optional<absl::Time> TimeOf(const std::optional<Element>& element) {
  if (!element.has_value() || (element->tag != kUtcTime && element->tag != kGeneralizedTime)) return std::nullopt;
  std::string text(element->content);
  // Two digits of a year are 1950 to 2049.
  if (element->tag == kUtcTime && !text.empty()) text.insert(0, text[0] >= '5' ? "19" : "20");
  absl::Time time;
  std::string error;
  if (!absl::ParseTime("%E4Y%m%d%H%M%SZ", text, &time, &error)) return std::nullopt;
  return time;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> PemBlocks(absl::string_view text, absl::string_view kind) {
  std::vector<std::string> blocks;
  for (size_t begin = text.find(kBegin); begin != absl::string_view::npos; begin = text.find(kBegin)) {
    text.remove_prefix(begin + kBegin.size());
    const size_t label_end = text.find(kDashes);
    if (label_end == absl::string_view::npos) break;
    const absl::string_view label = text.substr(0, label_end);
    text.remove_prefix(label_end + kDashes.size());
    if (!absl::EndsWith(label, kind)) continue;
    const size_t end = text.find(kEnd);
    if (end == absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat("is cut off: its ", label, " block has no end"));
    }
    ASSIGN_OR_RETURN(std::string der, Decode(label, text.substr(0, end)));
    blocks.push_back(std::move(der));
  }
  if (!blocks.empty()) return blocks;
  return absl::InvalidArgumentError(absl::StrCat("has no \"-----BEGIN ", kind, "-----\" line; it must be PEM"));
}

// Certificate is a sequence that begins with tbsCertificate: version, serial, algorithm, issuer, validity.
CertificateTimes TimesOfCertificate(absl::string_view der) {
  CertificateTimes times;
  absl::string_view certificate, fields, skipped, validity, begin = der;
  if (!TakeTag(begin, kSequence, certificate) || !TakeTag(certificate, kSequence, fields)) return times;
  absl::string_view after_version = fields;
  if (TakeTag(after_version, kVersion, skipped)) fields = after_version;
  if (!TakeTag(fields, kInteger, skipped) || !TakeTag(fields, kSequence, skipped) ||
      !TakeTag(fields, kSequence, skipped) || !TakeTag(fields, kSequence, validity)) {
    return times;
  }
  times.not_before = TimeOf(Take(validity)).value_or(times.not_before);
  times.not_after = TimeOf(Take(validity)).value_or(times.not_after);
  return times;
}

// Looked for by the bytes of the object identifiers: a certificate has them nowhere else.
bool MayServe(absl::string_view der) {
  constexpr absl::string_view kPurposes("\x06\x03\x55\x1d\x25", 5);                             // id-ce-extKeyUsage
  constexpr absl::string_view kServer("\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x01", 10);  // id-kp-serverAuth
  constexpr absl::string_view kAny("\x06\x04\x55\x1d\x25\x00", 6);                            // anyExtendedKeyUsage
  const size_t at = der.find(kPurposes);
  if (at == absl::string_view::npos) return true;
  const absl::string_view purposes = der.substr(at + kPurposes.size());
  return purposes.find(kServer) != absl::string_view::npos || purposes.find(kAny) != absl::string_view::npos;
}

}  // namespace shardmesh
