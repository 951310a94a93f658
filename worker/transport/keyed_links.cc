#include "worker/transport/keyed_links.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/secret.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr size_t kHalf = 16, kKey = 2 * kHalf;                 // bytes of half a key, and of all
constexpr size_t kMaxUnknown = 64;                             // connections that have not said who they are
constexpr absl::Duration kUnknownTime = absl::Seconds(5);      // for them to say it
constexpr absl::Duration kRetry = absl::Milliseconds(50);      // of a connection that was cut before the answer
constexpr absl::Duration kLook = absl::Milliseconds(500);      // between looks at the rendezvous
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kFairTime = absl::Milliseconds(200);  // that each has at least, however many come
constexpr int kMostAtOnce = 16;                                // that are accepted in one turn
constexpr int kMaxToldStrangers = 10;  // lines of the log

// All ranks are of one build on machines of one byte order, as what crosses later is.
struct Hello {
  char key[kHalf];
  uint32_t from, to, link, size;
};

absl::StatusOr<std::string> AddressText(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    return absl::StrCat(text, " ", ntohs(v4.sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    return absl::StrCat(text, " ", ntohs(v6.sin6_port));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("an address of family ", address.ss_family, "; give one of IPv4 or IPv6"));
}

bool ParseAddress(const std::string& text, sockaddr_storage* address) {
  const size_t space = text.find(' ');
  int port = 0;
  if (space == std::string::npos || !absl::SimpleAtoi(text.substr(space + 1), &port) || port < 1 || port > 65535) {
    return false;
  }
  const std::string host = text.substr(0, space);
  *address = {};
  auto* const v4 = reinterpret_cast<sockaddr_in*>(address);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    return true;
  }
  *address = {};
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(address);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(static_cast<uint16_t>(port));
  return inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1;
}

socklen_t LengthOf(const sockaddr_storage& address) {
  return address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

bool IsLater(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Reads on until `length` bytes are there. False: the connection has ended.
bool ReadSome(int fd, char* to, size_t length, size_t& got) {
  while (got < length) {
    const ssize_t bytes = recv(fd, to + got, length - got, 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return IsLater(errno);
    if (bytes == 0) return false;
    got += static_cast<size_t>(bytes);
  }
  return true;
}

// So little that a new connection has room for it.
bool SendWhole(int fd, const void* from, size_t length) {
  return send(fd, from, length, MSG_NOSIGNAL) == static_cast<ssize_t>(length);
}

class Linking {
 public:
  Linking(Rendezvous& rendezvous, const LinkOptions& options)
      : rendezvous_(rendezvous),
        options_(options),
        until_(MonotonicNow() + options.timeout),
        links_(static_cast<size_t>(options.size) * static_cast<size_t>(options.links)) {}

  absl::StatusOr<std::vector<UniqueFd>> Run() {
    RETURN_IF_ERROR(Listen());
    RETURN_IF_ERROR(AgreeOnKey());
    for (int peer = 0; peer < options_.rank; ++peer) RETURN_IF_ERROR(DialPeer(peer));
    absl::Time look = MonotonicNow() + kLook;
    while (const std::optional<int> missing = FirstMissing()) {
      if (MonotonicNow() >= until_) {
        return Failed(*missing, absl::StrCat("it did not come within ", absl::FormatDuration(options_.timeout)));
      }
      if (MonotonicNow() >= look) {
        RETURN_IF_ERROR(CheckStillWanted());
        look = MonotonicNow() + kLook;
      }
      RETURN_IF_ERROR(PollOnce());
    }
    return std::move(links_);
  }

 private:
  // One that this rank opens.
  struct Dialed {
    int peer = 0, link = 0;
    sockaddr_storage address = {};
    UniqueFd fd;
    absl::Time again_at;  // while there is no fd
    bool sent = false;
    size_t got = 0;
    char answer[kHalf];
  };
  // One that was accepted, and has not said who it is.
  struct Unknown {
    UniqueFd fd;
    std::string from;
    absl::Time since;
    size_t got = 0;
    Hello hello;
  };

  std::string KeyOf(int rank) const { return absl::StrCat(options_.key, "/", rank); }
  UniqueFd& LinkOf(int peer, int link) { return links_[static_cast<size_t>(peer * options_.links + link)]; }

  absl::Status Failed(int peer, absl::string_view why) const {
    return absl::UnavailableError(absl::StrCat("rank ", options_.names(options_.rank), " of group '", options_.key,
                                               "' could not connect rank ", options_.names(peer), ": ", why));
  }

  absl::Status Listen() {
    sockaddr_storage here = options_.address;
    RETURN_IF_ERROR(AddressText(here).status());
    if (here.ss_family == AF_INET) reinterpret_cast<sockaddr_in&>(here).sin_port = 0;
    if (here.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6&>(here).sin6_port = 0;
    listener_ = UniqueFd(socket(here.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    socklen_t length = LengthOf(here);
    auto* const address = reinterpret_cast<sockaddr*>(&here);
    if (!listener_.valid() || bind(listener_.get(), address, length) != 0 || listen(listener_.get(), SOMAXCONN) != 0 ||
        getsockname(listener_.get(), address, &length) != 0) {
      return absl::UnavailableError(absl::StrCat("rank ", options_.names(options_.rank), " of group '", options_.key,
                                                 "' cannot listen: ", std::strerror(errno)));
    }
    ASSIGN_OR_RETURN(const std::string text, AddressText(here));
    return rendezvous_.Set(KeyOf(options_.rank), text);
  }

  absl::Status AgreeOnKey() {
    const std::string at = absl::StrCat(options_.key, "/key");
    if (options_.rank == 0) {
      key_ = RandomBytes(kKey);
      return rendezvous_.Set(at, key_);
    }
    absl::StatusOr<std::string> key = rendezvous_.Get(at, until_ - MonotonicNow());
    if (!key.ok()) return Annotated(0, key.status());
    if (key->size() != kKey) {
      return Failed(0, absl::StrCat("it gives a key of ", key->size(), " bytes instead of ", kKey));
    }
    key_ = *std::move(key);
    return absl::OkStatus();
  }

  // What the rendezvous says of a peer's value. That nobody came is the peer's fault.
  absl::Status Annotated(int peer, const absl::Status& status) const {
    if (absl::IsCancelled(status) || absl::IsFailedPrecondition(status)) return status;
    return Failed(peer, status.message());
  }

  absl::Status DialPeer(int peer) {
    const absl::StatusOr<std::string> theirs = rendezvous_.Get(KeyOf(peer), until_ - MonotonicNow());
    if (!theirs.ok()) return Annotated(peer, theirs.status());
    sockaddr_storage address;
    if (!ParseAddress(*theirs, &address)) {
      return Failed(peer, absl::StrCat("it gives an address of ", theirs->size(), " bytes that is none"));
    }
    for (int link = 0; link < options_.links; ++link) {
      Dialed& dialed = dialed_.emplace_back();
      dialed.peer = peer;
      dialed.link = link;
      dialed.address = address;
      dialed.again_at = MonotonicNow();
    }
    return absl::OkStatus();
  }

  std::optional<int> FirstMissing() const {
    for (int peer = 0; peer < options_.size; ++peer) {
      for (int link = 0; link < options_.links && peer != options_.rank; ++link) {
        if (!links_[static_cast<size_t>(peer * options_.links + link)].valid()) return peer;
      }
    }
    return std::nullopt;
  }

  // Whether another rank has said that the group cannot be, or it is not wanted any more.
  absl::Status CheckStillWanted() {
    const absl::Status there = rendezvous_.Get(KeyOf(options_.rank), absl::ZeroDuration()).status();
    return absl::IsCancelled(there) || absl::IsFailedPrecondition(there) ? there : absl::OkStatus();
  }

  // Waits for something to happen, for a slice of time at most, and sees to it.
  absl::Status PollOnce() {
    for (Dialed& dialed : dialed_) {
      if (!dialed.fd.valid() && MonotonicNow() >= dialed.again_at) RETURN_IF_ERROR(Open(dialed));
    }
    std::vector<pollfd> waited = {{HasRoom() ? listener_.get() : -1, POLLIN, 0}};
    for (const Dialed& dialed : dialed_) {
      waited.push_back({dialed.fd.get(), static_cast<int16_t>(dialed.sent ? POLLIN : POLLOUT), 0});  // -1: is skipped
    }
    for (const Unknown& unknown : unknown_) waited.push_back({unknown.fd.get(), POLLIN, 0});
    const absl::Duration wait = std::clamp(until_ - MonotonicNow(), absl::ZeroDuration(), AnyClosed() ? kRetry : kSlice);
    if (poll(waited.data(), waited.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1) < 0 &&
        errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("group '", options_.key, "' cannot poll: ", std::strerror(errno)));
    }
    auto next = waited.begin() + 1;
    for (Dialed& dialed : dialed_) {
      if ((next++)->revents != 0) RETURN_IF_ERROR(Serve(dialed));
    }
    for (Unknown& unknown : unknown_) {
      if ((next++)->revents != 0) Hear(unknown);
    }
    Accept();
    dialed_.remove_if([this](const Dialed& dialed) { return LinkOf(dialed.peer, dialed.link).valid(); });
    const absl::Time since = MonotonicNow() - kUnknownTime;
    for (Unknown& unknown : unknown_) {
      if (unknown.fd.valid() && unknown.since < since) Drop(unknown, "it said nothing for long");
    }
    unknown_.remove_if([](const Unknown& unknown) { return !unknown.fd.valid(); });
    return absl::OkStatus();
  }

  bool AnyClosed() const {
    return std::any_of(dialed_.begin(), dialed_.end(), [](const Dialed& dialed) { return !dialed.fd.valid(); });
  }

  // ---- Connections that this rank opens. ----

  absl::Status Open(Dialed& dialed) {
    dialed.fd = UniqueFd(socket(dialed.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    dialed.sent = false;
    dialed.got = 0;
    if (dialed.fd.valid() && (connect(dialed.fd.get(), reinterpret_cast<sockaddr*>(&dialed.address),
                                      LengthOf(dialed.address)) == 0 ||
                              errno == EINPROGRESS)) {
      return absl::OkStatus();
    }
    return Failed(dialed.peer, std::strerror(errno));
  }

  // Cut before it was answered: its listener has too many strangers, or is gone; then the next try says so.
  static void Again(Dialed& dialed) {
    dialed.fd.reset();
    dialed.again_at = MonotonicNow() + kRetry;
  }

  absl::Status Serve(Dialed& dialed) {
    if (!dialed.sent) {
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(dialed.fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error == ECONNRESET) {
        Again(dialed);
        return absl::OkStatus();
      }
      if (error != 0) return Failed(dialed.peer, std::strerror(error));
      Hello hello = {};
      std::memcpy(hello.key, key_.data(), kHalf);
      hello.from = static_cast<uint32_t>(options_.rank);
      hello.to = static_cast<uint32_t>(dialed.peer);
      hello.link = static_cast<uint32_t>(dialed.link);
      hello.size = static_cast<uint32_t>(options_.size);
      dialed.sent = SendWhole(dialed.fd.get(), &hello, sizeof(hello));
      if (!dialed.sent) Again(dialed);
      return absl::OkStatus();
    }
    if (!ReadSome(dialed.fd.get(), dialed.answer, kHalf, dialed.got)) {
      Again(dialed);
    } else if (dialed.got == kHalf) {
      if (!SameSecret({dialed.answer, kHalf}, absl::string_view(key_).substr(kHalf))) {
        return Failed(dialed.peer, "who listens at its address does not know the group's key");
      }
      LinkOf(dialed.peer, dialed.link) = std::move(dialed.fd);
    }
    return absl::OkStatus();
  }

  // ---- Connections of others. ----

  // Where too many are held that have not said who they are, the oldest makes room once it had time to.
  bool HasRoom() {
    unknown_.remove_if([](const Unknown& unknown) { return !unknown.fd.valid(); });
    if (unknown_.size() < kMaxUnknown) return true;
    if (unknown_.front().since > MonotonicNow() - kFairTime) return false;
    Drop(unknown_.front(), "others came");
    unknown_.pop_front();
    return true;
  }

  // A few at a time: however fast others come, this rank does the rest of its work, and looks at the time.
  void Accept() {
    for (int i = 0; i < kMostAtOnce && HasRoom(); ++i) {
      sockaddr_storage from = {};
      socklen_t length = sizeof(from);
      UniqueFd fd(accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd.valid()) {
        if (errno == ECONNABORTED || errno == EINTR) continue;
        // Too many open files: what is not known makes room. If none is left, a slice of time later.
        if (!IsLater(errno) && !unknown_.empty()) Drop(unknown_.front(), std::strerror(errno));
        return;
      }
      unknown_.emplace_back();
      unknown_.back().fd = std::move(fd);
      unknown_.back().from = AddressText(from).value_or("");
      unknown_.back().since = MonotonicNow();
      Hear(unknown_.back());
    }
  }

  void Hear(Unknown& unknown) {
    if (!unknown.fd.valid()) return;
    auto* const bytes = reinterpret_cast<char*>(&unknown.hello);
    if (!ReadSome(unknown.fd.get(), bytes, sizeof(Hello), unknown.got)) return Drop(unknown, "it ended");
    if (unknown.got < sizeof(Hello)) return;
    const Hello& hello = unknown.hello;
    if (!SameSecret({hello.key, kHalf}, absl::string_view(key_).substr(0, kHalf))) return Drop(unknown, "it does not know the group's key");
    const bool expected = hello.from > static_cast<uint32_t>(options_.rank) &&
                          hello.from < static_cast<uint32_t>(options_.size) &&
                          hello.to == static_cast<uint32_t>(options_.rank) &&
                          hello.link < static_cast<uint32_t>(options_.links) &&
                          hello.size == static_cast<uint32_t>(options_.size);
    if (!expected) return Drop(unknown, absl::StrCat("rank ", hello.from, " has no such connection"));
    if (!SendWhole(unknown.fd.get(), key_.data() + kHalf, kHalf)) return Drop(unknown, "it ended");
    // One that came before was cut at the other end.
    LinkOf(static_cast<int>(hello.from), static_cast<int>(hello.link)) = std::move(unknown.fd);
  }

  void Drop(Unknown& unknown, const std::string& why) {
    unknown.fd.reset();
    if (told_++ < kMaxToldStrangers) {
      spdlog::warn("event=stranger_dropped group={} from=\"{}\" because=\"{}\"", options_.key, unknown.from, why);
    }
  }

  Rendezvous& rendezvous_;
  const LinkOptions& options_;
  const absl::Time until_;
  std::string key_;
  UniqueFd listener_;
  std::vector<UniqueFd> links_;
  std::list<Dialed> dialed_;
  std::list<Unknown> unknown_;
  int told_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> ConnectRanks(Rendezvous& rendezvous, const LinkOptions& options) {
  return Linking(rendezvous, options).Run();
}

}  // namespace shardmesh
