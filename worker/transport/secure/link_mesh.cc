#include "worker/transport/secure/link_mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "worker/transport/secure/handshake.h"
#include "worker/transport/secure/socket_address.h"

namespace shardmesh {
namespace {

constexpr size_t kMaxUnknown = 64;                         // connections that have not proved who they are
constexpr absl::Duration kUnknownTime = absl::Seconds(5);  // for them to prove it
constexpr absl::Duration kRetry = absl::Milliseconds(50);  // of a connection that was cut before the answer
constexpr absl::Duration kHearTime = absl::Seconds(1);     // after one rank's refusal: for the others to say theirs
constexpr absl::Duration kLook = absl::Milliseconds(500);  // between looks at the rendezvous
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kFairTime = absl::Milliseconds(200);  // that each has at least, however many come
constexpr int kMostAtOnce = 16;                                // that are accepted in one turn
constexpr int kMaxToldStrangers = 10;                          // lines of the log

// Sizes of buffers are left to the kernel, which makes them larger as a connection needs it; asking for one ends that.
void SetUp(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool IsOver(int fd) {
  pollfd looked = {fd, POLLRDHUP, 0};
  return poll(&looked, 1, 0) == 1 && looked.revents != 0;
}

class Meeting {
 public:
  Meeting(Rendezvous& rendezvous, const SecureOptions& options, const TlsContext* tls)
      : rendezvous_(rendezvous),
        options_(options),
        tls_(tls),
        until_(MonotonicNow() + options.timeout),
        links_(static_cast<size_t>(options.size)),
        refused_(static_cast<size_t>(options.size)) {}

  absl::StatusOr<std::vector<std::unique_ptr<Stream>>> Run() {
    RETURN_IF_ERROR(Listen());
    for (int peer = 0; peer < options_.rank; ++peer) RETURN_IF_ERROR(LookUp(peer));
    absl::Time look = MonotonicNow() + kLook;
    while (const std::optional<int> missing = FirstMissing()) {
      if (!failed_.ok() && (dialed_.empty() || MonotonicNow() >= until_)) return failed_;
      if (MonotonicNow() >= until_) return Missing(*missing);
      if (MonotonicNow() >= look) {
        RETURN_IF_ERROR(CheckStillWanted());
        look = MonotonicNow() + kLook;
      }
      RETURN_IF_ERROR(Turn());
    }
    return std::move(links_);
  }

 private:
  // A connection that this rank opens.
  struct Dialed {
    int peer = 0;
    SocketAddress address;
    UniqueFd connecting;                         // until it is connected; then:
    std::unique_ptr<DialerHandshake> handshake;  // null with no descriptor either: to be opened at `again_at`
    absl::Time again_at;
    absl::Status last;  // why the last try failed
    bool failed = false;
    int fd() const { return handshake != nullptr ? handshake->stream().fd() : connecting.get(); }
  };
  // One that was accepted, and has not proved who it is.
  struct Unknown {
    std::unique_ptr<ListenerHandshake> handshake;  // null: dropped
    std::string from;
    absl::Time since;
  };

  std::string KeyOf(int rank) const { return absl::StrCat(options_.key, "/", rank); }
  std::unique_ptr<Stream>& LinkOf(int peer) { return links_[static_cast<size_t>(peer)]; }

  // `why`: the rest of a sentence that begins with the peer.
  absl::Status Failed(int peer, const absl::Status& why) const {
    return absl::Status(why.code(), absl::StrCat("rank ", options_.names(options_.rank), " of group '", options_.key,
                                                 "' could not connect rank ", options_.names(peer), ": rank ",
                                                 options_.names(peer), " ", why.message()));
  }

  // At the end of the time: what is known of the rank, in the code of that.
  absl::Status Missing(int peer) {
    const std::string late = absl::StrCat("did not come within ", absl::FormatDuration(options_.timeout));
    const absl::Status* last = &refused_[static_cast<size_t>(peer)];
    for (const Dialed& dialed : dialed_) {
      if (dialed.peer == peer) last = &dialed.last;
    }
    if (last->ok()) {
      const std::string told = stranger_.empty() ? "" : absl::StrCat("; another connection was refused: ", stranger_);
      return Failed(peer, absl::UnavailableError(late + told));
    }
    const auto code = absl::IsAlreadyExists(*last) ? absl::StatusCode::kFailedPrecondition : last->code();
    return Failed(peer, absl::Status(code, absl::StrCat(late, "; it ", last->message())));
  }

  std::unique_ptr<Stream> NewStream(UniqueFd fd, bool dials) const {
    SetUp(fd.get());
    return tls_ != nullptr ? tls_->NewStream(std::move(fd), dials) : NewClearStream(std::move(fd));
  }

  absl::Status Listen() {
    ASSIGN_OR_RETURN(const std::vector<SocketAddress> found, AddressesOf(options_.host));
    int error = 0;
    for (SocketAddress here : found) {
      listener_ = UniqueFd(socket(here.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (listener_.valid() && bind(listener_.get(), here.get(), here.length) == 0 &&
          listen(listener_.get(), SOMAXCONN) == 0 && getsockname(listener_.get(), here.get(), &here.length) == 0) {
        return rendezvous_.Set(KeyOf(options_.rank), AddressText(here));
      }
      error = errno;
    }
    return absl::InvalidArgumentError(absl::StrCat("rank ", options_.names(options_.rank), " of group '", options_.key,
                                                   "' cannot listen at \"", options_.host, "\": ", std::strerror(error),
                                                   "; give an address of this host"));
  }

  absl::Status LookUp(int peer) {
    const absl::StatusOr<std::string> theirs = rendezvous_.Get(KeyOf(peer), until_ - MonotonicNow());
    if (absl::IsCancelled(theirs.status()) || absl::IsFailedPrecondition(theirs.status())) return theirs.status();
    if (!theirs.ok()) {
      return Failed(peer, absl::UnavailableError(absl::StrCat("gave no address: ", theirs.status().message())));
    }
    const absl::StatusOr<SocketAddress> address = ParseAddress(*theirs);
    if (!address.ok()) {
      return Failed(peer, absl::UnavailableError(absl::StrCat("gave ", address.status().message())));
    }
    Dialed& dialed = dialed_.emplace_back();
    dialed.peer = peer;
    dialed.address = *address;
    dialed.again_at = MonotonicNow();
    return absl::OkStatus();
  }

  std::optional<int> FirstMissing() const {
    for (int peer = 0; peer < options_.size; ++peer) {
      if (peer != options_.rank && links_[static_cast<size_t>(peer)] == nullptr) return peer;
    }
    return std::nullopt;
  }

  // Whether another rank has said that the group cannot be, or it is not wanted any more.
  absl::Status CheckStillWanted() {
    const absl::Status there = rendezvous_.Get(KeyOf(options_.rank), absl::ZeroDuration()).status();
    return absl::IsCancelled(there) || absl::IsFailedPrecondition(there) ? there : absl::OkStatus();
  }

  // Waits for something to happen, for a slice of time at most, and sees to it.
  absl::Status Turn() {
    bool retries = false;
    for (Dialed& dialed : dialed_) {
      if (dialed.fd() < 0 && MonotonicNow() >= dialed.again_at) Open(dialed);
      retries = retries || dialed.fd() < 0;
    }
    std::vector<pollfd> waited = {{HasRoom() ? listener_.get() : -1, POLLIN, 0}};
    const auto events = [](const Handshake* handshake) {
      return static_cast<int16_t>(handshake == nullptr || handshake->stream().WantsToWrite() ? POLLOUT : POLLIN);
    };
    for (const Dialed& dialed : dialed_) waited.push_back({dialed.fd(), events(dialed.handshake.get()), 0});
    for (const Unknown& unknown : unknown_) {
      waited.push_back({unknown.handshake->stream().fd(), events(unknown.handshake.get()), 0});
    }
    const absl::Duration wait = std::clamp(until_ - MonotonicNow(), absl::ZeroDuration(), retries ? kRetry : kSlice);
    if (poll(waited.data(), waited.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1) < 0 &&
        errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("group '", options_.key, "' cannot poll: ", std::strerror(errno)));
    }
    auto next = waited.begin() + 1;
    for (Dialed& dialed : dialed_) {
      if ((next++)->revents != 0) Serve(dialed);
    }
    for (Unknown& unknown : unknown_) {
      if ((next++)->revents != 0) Hear(unknown);
    }
    Accept();
    dialed_.remove_if([this](const Dialed& dialed) { return dialed.failed || LinkOf(dialed.peer) != nullptr; });
    DropSilent();
    return absl::OkStatus();
  }

  // ---- Connections that this rank opens. ----

  void Open(Dialed& dialed) {
    dialed.connecting =
        UniqueFd(socket(dialed.address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (dialed.connecting.valid() &&
        (connect(dialed.connecting.get(), dialed.address.get(), dialed.address.length) == 0 || errno == EINPROGRESS)) {
      return;
    }
    Fail(dialed, absl::UnavailableError(absl::StrCat("cannot be dialed: ", std::strerror(errno))));
  }

  // The group cannot be. The other ranks that this one dials still learn of it, so that their errors say why, too.
  void Fail(Dialed& dialed, const absl::Status& why) {
    dialed.connecting.reset();
    dialed.handshake.reset();
    dialed.failed = true;
    if (!failed_.ok()) return;
    failed_ = Failed(dialed.peer, why);
    until_ = std::min(until_, MonotonicNow() + kHearTime);
  }

  // Cut before it was answered: its listener has too many strangers, or is gone; then the next try says so.
  static void Again(Dialed& dialed, absl::Status why) {
    dialed.connecting.reset();
    dialed.handshake.reset();
    dialed.again_at = MonotonicNow() + kRetry;
    dialed.last = std::move(why);
  }

  void Serve(Dialed& dialed) {
    if (dialed.handshake == nullptr && !BeginHandshake(dialed)) return;
    const absl::StatusOr<bool> done = dialed.handshake->Advance();
    if (absl::IsUnavailable(done.status()) || absl::IsAlreadyExists(done.status())) {
      Again(dialed, done.status());
    } else if (!done.ok()) {
      Fail(dialed, done.status());
    } else if (*done) {
      LinkOf(dialed.peer) = dialed.handshake->TakeStream();
    }
  }

  bool BeginHandshake(Dialed& dialed) {
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(dialed.connecting.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      const absl::Status why = absl::UnavailableError(absl::StrCat("cannot be dialed: ", std::strerror(error)));
      error == ECONNRESET ? Again(dialed, why) : Fail(dialed, why);
      return false;
    }
    std::unique_ptr<Stream> stream = NewStream(std::move(dialed.connecting), /*dials=*/true);
    if (stream == nullptr) {
      Fail(dialed, absl::ResourceExhaustedError("cannot be dialed: no memory is left for TLS"));
      return false;
    }
    dialed.handshake = std::make_unique<DialerHandshake>(options_, dialed.peer, std::move(stream));
    return true;
  }

  // ---- Connections of others. ----

  // Where too many are held that have not proved who they are, the oldest makes room once it had time to.
  bool HasRoom() {
    if (unknown_.size() < kMaxUnknown) return true;
    if (unknown_.front().since > MonotonicNow() - kFairTime) return false;
    if (unknown_.front().handshake != nullptr) Drop(unknown_.front(), "made room: others came");
    unknown_.pop_front();
    return true;
  }

  // A few at a time: however fast others come, this rank does the rest of its work, and looks at the time.
  void Accept() {
    for (int i = 0; i < kMostAtOnce && HasRoom(); ++i) {
      SocketAddress from;
      from.length = sizeof(from.storage);
      UniqueFd fd(accept4(listener_.get(), from.get(), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd.valid()) {
        if (errno == ECONNABORTED || errno == EINTR) continue;
        // Too many open files: what is not known makes room. If none is left, a slice of time later.
        if (errno != EAGAIN && errno != EWOULDBLOCK) DropOldest(std::strerror(errno));
        return;
      }
      std::unique_ptr<Stream> stream = NewStream(std::move(fd), /*dials=*/false);
      if (stream == nullptr) return;
      unknown_.push_back(
          {std::make_unique<ListenerHandshake>(options_, std::move(stream)), AddressText(from), MonotonicNow()});
      Hear(unknown_.back());
    }
  }

  void Hear(Unknown& unknown) {
    if (unknown.handshake == nullptr) return;
    const absl::StatusOr<bool> done = unknown.handshake->Advance();
    if (done.ok() && !*done) return;
    const int peer = unknown.handshake->peer();
    if (!done.ok()) {
      if (peer > options_.rank && peer < options_.size) refused_[static_cast<size_t>(peer)] = done.status();
      return Drop(unknown, done.status().message());
    }
    std::unique_ptr<Stream>& link = LinkOf(peer);
    if (link != nullptr && !IsOver(link->fd())) {
      unknown.handshake->RefuseSecond();
      return Drop(unknown, "is there already");
    }
    unknown.handshake->Welcome();
    link = unknown.handshake->TakeStream();
    unknown.handshake.reset();
  }

  void Drop(Unknown& unknown, absl::string_view why) {
    const int peer = unknown.handshake->peer();
    stranger_ = absl::StrCat("who came from ", unknown.from, " ", why);
    if (told_++ < kMaxToldStrangers) {
      spdlog::warn("event=stranger_refused group={} rank={} from=\"{}\" because=\"{} {}\"", options_.key,
                   options_.names(options_.rank), unknown.from,
                   peer < 0 ? std::string("it") : absl::StrCat("rank ", options_.names(peer)), std::string(why));
    }
    unknown.handshake.reset();
  }
  void DropOldest(absl::string_view why) {
    const auto oldest =
        std::find_if(unknown_.begin(), unknown_.end(), [](const Unknown& u) { return u.handshake != nullptr; });
    if (oldest != unknown_.end()) Drop(*oldest, absl::StrCat("made room: ", why));
  }
  void DropSilent() {
    const absl::Time since = MonotonicNow() - kUnknownTime;
    for (Unknown& unknown : unknown_) {
      if (unknown.handshake != nullptr && unknown.since < since) Drop(unknown, "proved nothing for long");
    }
    unknown_.remove_if([](const Unknown& unknown) { return unknown.handshake == nullptr; });
  }

  Rendezvous& rendezvous_;
  const SecureOptions& options_;
  const TlsContext* const tls_;
  absl::Time until_;
  absl::Status failed_;  // the first rank that cannot be connected, and why
  UniqueFd listener_;
  std::vector<std::unique_ptr<Stream>> links_;
  std::vector<absl::Status> refused_;  // by rank: why one that proved itself was refused
  std::string stranger_;               // the last one
  std::list<Dialed> dialed_;
  std::list<Unknown> unknown_;
  int told_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Stream>>> ConnectMesh(Rendezvous& rendezvous, const SecureOptions& options,
                                                                 const TlsContext* tls) {
  return Meeting(rendezvous, options, tls).Run();
}

}  // namespace shardmesh
