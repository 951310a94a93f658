#include "rpc/base/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

absl::Status Malformed(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("address \"", absl::CHexEscape(text.substr(0, 200)), "\": ", why,
                                                 "; write host:port, e.g. 127.0.0.1:7000, or unix:/path"));
}

absl::StatusOr<Address> ParseUnix(absl::string_view text, absl::string_view path) {
  if (path.empty() || path[0] != '/') return Malformed(text, "a UNIX socket needs an absolute path");
  if (absl::StrContains(path, '\0')) return Malformed(text, "the path has a NUL byte");
  constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
  if (path.size() > kMaxPath) {
    return Malformed(text, absl::StrCat("the path has ", path.size(), " bytes, at most ", kMaxPath, " are possible"));
  }
  Address address;
  address.unix_path = std::string(path);
  return address;
}

bool IsHostCharacter(char c, bool bracketed) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_' ||
         (bracketed && (c == ':' || c == '%'));
}

}  // namespace

bool Address::is_local() const {
  if (is_unix() || host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::string Address::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", unix_path);
  if (absl::StrContains(host, ':')) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  if (absl::StartsWith(text, "unix:")) return ParseUnix(text, text.substr(5));
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return Malformed(text, "no port");
  absl::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (host.empty()) return Malformed(text, "no host (0.0.0.0 is every IPv4 address of the machine)");
  if (host.size() > 253) return Malformed(text, "the host has more than 253 characters");
  for (char c : host) {
    if (!IsHostCharacter(c, bracketed)) return Malformed(text, "the host has a character that is in no name or IP");
  }
  int port = -1;
  const absl::string_view digits = text.substr(colon + 1);
  const bool is_number = digits.find_first_not_of("0123456789") == absl::string_view::npos && digits.size() <= 5;
  if (!is_number || !absl::SimpleAtoi(digits, &port) || port > 65535) {
    return Malformed(text, "the port is not a number of 0..65535");
  }
  Address address;
  address.host = std::string(host);
  address.port = port;
  return address;
}

absl::Status CheckDialable(const Address& address) {
  in_addr v4;
  in6_addr v6;
  const bool any = (inet_pton(AF_INET, address.host.c_str(), &v4) == 1 && v4.s_addr == INADDR_ANY) ||
                   (inet_pton(AF_INET6, address.host.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6));
  if (address.is_unix() || !any) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--listen ", address.ToString(),
                   " is every address of this machine, which nobody can dial; say with "
                   "--advertise HOST by which name or IP address others reach it, as its certificate has it"));
}

absl::Status CheckHost(absl::string_view option, absl::string_view host) {
  const std::string bracketed = absl::StrContains(host, ':') ? absl::StrCat("[", host, "]") : std::string(host);
  const absl::StatusOr<Address> address = ParseAddress(absl::StrCat(bracketed, ":0"));
  in6_addr v6;
  const bool is_host = !absl::StrContains(host, ':') || inet_pton(AF_INET6, std::string(host).c_str(), &v6) == 1;
  if (is_host && address.ok() && CheckDialable(*address).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(option, " is \"", absl::CHexEscape(host.substr(0, 200)),
                                                 "\"; give a name or IP address of this machine, without a port"));
}

absl::StatusOr<std::string> AdvertisedAddress(absl::string_view listening, const std::string& advertise) {
  ASSIGN_OR_RETURN(Address address, ParseAddress(listening));
  if (!advertise.empty() && !address.is_unix()) {
    RETURN_IF_ERROR(CheckHost("--advertise", advertise));
    address.host = advertise;
  }
  RETURN_IF_ERROR(CheckDialable(address));
  return address.ToString();
}

}  // namespace shardmesh
