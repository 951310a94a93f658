#include "rpc/calls/caller_share.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "rpc/calls/caller.h"

namespace shardmesh {
namespace {

std::string Written(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  return inet_ntop(family, address, text, sizeof(text)) == nullptr ? "" : text;
}

// The address that `text` is, as inet_ntop writes it, of IPv4 where it is mapped; empty: none.
std::string Canonical(const std::string& text) {
  in_addr v4;
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return Written(AF_INET, &v4);
  in6_addr v6;
  if (inet_pton(AF_INET6, text.c_str(), &v6) != 1) return "";
  return IN6_IS_ADDR_V4MAPPED(&v6) ? Written(AF_INET, v6.s6_addr + 12) : Written(AF_INET6, &v6);
}

// Whether an interface of this host has it now.
bool IsOwnAddress(const std::string& address) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(list, &freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr) continue;
    std::string own;
    if (at->ifa_addr->sa_family == AF_INET) {
      own = Written(AF_INET, &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr);
    } else if (at->ifa_addr->sa_family == AF_INET6) {
      own = Written(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(at->ifa_addr)->sin6_addr);
    }
    if (!own.empty() && own == address) return true;
  }
  return false;
}

}  // namespace

std::string KeyOfPeer(absl::string_view peer, const std::function<bool(const std::string&)>& is_own) {
  if (absl::StartsWith(peer, "unix:") || absl::StartsWith(peer, "unix-abstract:")) return "";
  std::string rest = absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}, {"%5b", "["}, {"%5d", "]"}, {"%25", "%"}});
  std::string host;
  if (absl::StartsWith(rest, "ipv4:")) {
    host = rest.substr(5, rest.rfind(':') - 5);
  } else if (absl::StartsWith(rest, "ipv6:")) {
    const size_t from = rest.find('['), to = rest.find(']');
    if (from != std::string::npos && to != std::string::npos && to > from) host = rest.substr(from + 1, to - from - 1);
    host = host.substr(0, host.find('%'));
  }
  const std::string address = Canonical(host);
  if (address.empty()) return absl::StrCat("peer ", peer);
  if (absl::StartsWith(address, "127.") || address == "::1" || is_own(address)) return "";
  return absl::StrCat("address ", address);
}

std::string CallerKey(const grpc::ServerContextBase& context) {
  const std::string name = CertificateNameOf(context);
  return name.empty() ? KeyOfPeer(context.peer(), &IsOwnAddress) : name;
}

}  // namespace shardmesh
