#include "rpc/tls_files.h"

#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/civil_time.h"
#include "core/status.h"

namespace shardmesh {
namespace {

// Tags of ASN.1 values in a certificate (X.690, 8.1.2).
constexpr uint8_t kSequence = 0x30, kVersion = 0xa0, kUtcTime = 0x17, kGeneralizedTime = 0x18;
constexpr int kFieldsBeforeTimes = 3;  // serial number, algorithm, issuer; the version is optional

absl::Status Damaged() { return absl::InvalidArgumentError("not a certificate in PEM"); }

struct Value {
  uint8_t tag = 0;
  absl::string_view bytes;
};

// Takes the next DER value off the front of `der`.
absl::StatusOr<Value> Next(absl::string_view& der) {
  if (der.size() < 2) return Damaged();
  Value value;
  value.tag = static_cast<uint8_t>(der[0]);
  size_t length = static_cast<uint8_t>(der[1]), head = 2;
  if (length >= 0x80) {
    const size_t count = length & 0x7f;
    if (count > 4 || der.size() < 2 + count) return Damaged();
    length = 0;
    for (size_t i = 0; i < count; ++i) length = length << 8 | static_cast<uint8_t>(der[2 + i]);
    head += count;
  }
  if (der.size() - head < length) return Damaged();
  value.bytes = der.substr(head, length);
  der.remove_prefix(head + length);
  return value;
}

// "YYMMDDHHMMSSZ", where YY from 50 on is of the last century, or "YYYYMMDDHHMMSSZ".
absl::StatusOr<absl::Time> ParseTime(const Value& value) {
  const size_t year_digits = value.tag == kUtcTime ? 2 : 4;
  if (value.tag != kUtcTime && value.tag != kGeneralizedTime) return Damaged();
  if (value.bytes.size() != year_digits + 11 || value.bytes.back() != 'Z') return Damaged();
  for (const char c : value.bytes.substr(0, value.bytes.size() - 1)) {
    if (!absl::ascii_isdigit(c)) return Damaged();
  }
  const auto number = [&](size_t at, size_t digits) {
    int result = 0;
    for (size_t i = at; i < at + digits; ++i) result = 10 * result + (value.bytes[i] - '0');
    return result;
  };
  int year = number(0, year_digits);
  if (value.tag == kUtcTime) year += year >= 50 ? 1900 : 2000;
  const size_t at = year_digits;
  const absl::CivilSecond time(year, number(at, 2), number(at + 2, 2), number(at + 4, 2), number(at + 6, 2),
                               number(at + 8, 2));
  return absl::FromUnixSeconds(time - absl::CivilSecond(1970));
}

}  // namespace

absl::StatusOr<CertificateTimes> ReadCertificateTimes(absl::string_view pem) {
  constexpr absl::string_view kBegin = "-----BEGIN CERTIFICATE-----", kEnd = "-----END CERTIFICATE-----";
  const size_t begin = pem.find(kBegin);
  if (begin == absl::string_view::npos) return Damaged();
  const size_t end = pem.find(kEnd, begin);
  std::string der;
  if (end == absl::string_view::npos) return Damaged();
  if (!absl::Base64Unescape(pem.substr(begin + kBegin.size(), end - begin - kBegin.size()), &der)) return Damaged();
  absl::string_view rest = der;
  ASSIGN_OR_RETURN(const Value certificate, Next(rest));
  rest = certificate.bytes;
  ASSIGN_OR_RETURN(const Value signed_part, Next(rest));
  if (certificate.tag != kSequence || signed_part.tag != kSequence) return Damaged();
  rest = signed_part.bytes;
  ASSIGN_OR_RETURN(Value field, Next(rest));
  for (int i = field.tag == kVersion ? 0 : 1; i < kFieldsBeforeTimes; ++i) {
    ASSIGN_OR_RETURN(field, Next(rest));
  }
  ASSIGN_OR_RETURN(const Value times, Next(rest));
  if (times.tag != kSequence) return Damaged();
  rest = times.bytes;
  CertificateTimes result;
  ASSIGN_OR_RETURN(const Value not_before, Next(rest));
  ASSIGN_OR_RETURN(result.not_before, ParseTime(not_before));
  ASSIGN_OR_RETURN(const Value not_after, Next(rest));
  ASSIGN_OR_RETURN(result.not_after, ParseTime(not_after));
  return result;
}

std::vector<std::string> TlsFileWarnings(const std::string& cert_file, const std::string& key_file, absl::Time now) {
  std::vector<std::string> warnings;
  std::ifstream file(cert_file, std::ios::binary);
  const std::string pem{std::istreambuf_iterator<char>(file), {}};
  const absl::StatusOr<CertificateTimes> times = ReadCertificateTimes(pem);
  if (times.ok() && now > times->not_after) {
    warnings.push_back(absl::StrCat("--tls-cert ", cert_file, " expired on ", absl::FormatTime(times->not_after),
                                    ", so peers refuse it; give a new certificate and start again"));
  }
  if (times.ok() && now < times->not_before) {
    warnings.push_back(absl::StrCat("--tls-cert ", cert_file, " is valid from ", absl::FormatTime(times->not_before),
                                    " only, so peers refuse it; look at this machine's clock"));
  }
  struct stat key;
  if (stat(key_file.c_str(), &key) == 0 && (key.st_mode & 077) != 0) {
    warnings.push_back(absl::StrCat("--tls-key ", key_file, " has mode ", absl::StrFormat("%04o", key.st_mode & 07777),
                                    ", so other users of this machine may read the private key; run chmod 600"));
  }
  return warnings;
}

}  // namespace shardmesh
