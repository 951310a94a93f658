#include "worker/transport/secure/socket_address.h"

#include <netdb.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

// What getaddrinfo finds; empty, with `error` set: nothing.
std::vector<SocketAddress> Find(const std::string& host, const char* port, int flags, std::string& error) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  std::vector<SocketAddress> addresses;
  if (const int failed = getaddrinfo(host.c_str(), port, &hints, &found); failed != 0) {
    error = gai_strerror(failed);
    return addresses;
  }
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    address.length = at->ai_addrlen;
  }
  freeaddrinfo(found);
  return addresses;
}

}  // namespace

std::string AddressText(const SocketAddress& address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  const int family = address.storage.ss_family;
  if ((family != AF_INET && family != AF_INET6) || getnameinfo(address.get(), address.length, host, sizeof(host), port,
                                                               sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return absl::StrCat(host, " ", port);
}

absl::StatusOr<SocketAddress> ParseAddress(const std::string& text) {
  const size_t space = text.find(' ');
  if (space != std::string::npos) {
    std::string error;
    const std::vector<SocketAddress> found =
        Find(text.substr(0, space), text.c_str() + space + 1, AI_NUMERICHOST | AI_NUMERICSERV, error);
    if (!found.empty() && AddressText(found[0]) == text && text.substr(space) != " 0") return found[0];
  }
  return absl::InvalidArgumentError(
      absl::StrCat(text.size(), " bytes that are not an address and a port, as in \"10.0.0.2 41000\""));
}

absl::StatusOr<std::vector<SocketAddress>> AddressesOf(const std::string& host) {
  char name[256] = {};
  if (host.empty() && gethostname(name, sizeof(name) - 1) != 0) std::strcpy(name, "localhost");
  const std::string wanted = host.empty() ? name : host;
  std::string error;
  std::vector<SocketAddress> found = Find(wanted, nullptr, 0, error);
  if (!found.empty()) return found;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", wanted, "\" is not an address of this host: ", error, "; give a name or number that is"));
}

}  // namespace shardmesh
