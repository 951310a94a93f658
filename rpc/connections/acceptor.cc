#include "rpc/connections/acceptor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "core/base/clock.h"
#include "local/descriptor/descriptor_error.h"
#include "rpc/connections/peer_user.h"

namespace shardmesh {
namespace {

constexpr int kPausedPollMs = 25;
constexpr int kIdlePollMs = 1000;
constexpr absl::Duration kWatchPeriod = absl::Seconds(1);  // of looks at the file of a UNIX socket
constexpr absl::Duration kGuardPeriod = absl::Milliseconds(50);  // of looks at the bytes of connections without calls
constexpr char kForeignKey[] = "foreign";
constexpr int kSlowLooks = 20;  // a second
// Of a user who is not served: more than the first window of a stream. To read so much padding takes 70 ms of a core;
// after each flood none of them is served for a time, so that they never have more than a fifth of one.
constexpr int64_t kMostForeignBytes = 96 << 10;
constexpr absl::Duration kForeignPause = absl::Seconds(2);
constexpr int kAcceptsPerTurn = 64;

// True when the next descriptor's number leaves `reserved` free below the soft limit. Asked of the kernel each time:
// it gives the lowest free number, and other parts of the process open and close descriptors too.
bool DescriptorsLeft(int probe_fd, int reserved) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return true;
  const UniqueFd probe(fcntl(probe_fd, F_DUPFD_CLOEXEC, 0));
  if (!probe.valid()) return false;
  if (limit.rlim_cur == RLIM_INFINITY) return true;
  const rlim_t reserve = std::min<rlim_t>(static_cast<rlim_t>(reserved), limit.rlim_cur / 2);
  return static_cast<rlim_t>(probe.get()) < limit.rlim_cur - reserve;
}

// Errors of accept4 that concern one connection or this moment only: the next call may succeed.
bool IsTransient(int error) {
  switch (error) {
    case EINTR:
    case ECONNABORTED:
    case EPROTO:
    case ENETDOWN:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

}  // namespace

Acceptor::Acceptor(std::unique_ptr<Listener> listener, AcceptorLimits limits, Sink sink, AcceptorGuards guards)
    : limits_(limits),
      sink_(std::move(sink)),
      guards_(std::move(guards)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      listener_(std::move(listener)),
      table_(limits.max_connections, limits.max_connections_per_peer) {
  MutexLock lock(stop_mu_);
  if (guards_.most_bytes_without_call > 0) guard_thread_ = std::thread([this] { Guard(); });
  thread_ = std::thread([this] { Run(); });
}

Acceptor::~Acceptor() { Stop(); }

void Acceptor::Stop() {
  MutexLock lock(stop_mu_);
  if (!thread_.joinable()) return;
  stopping_.store(true);
  const uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof(one)) < 0)
    spdlog::error("event=acceptor_wake_failed error={}", std::strerror(errno));
  thread_.join();
  {
    MutexLock table_lock(table_mu_);
    guard_ended_ = true;
    ended_.SignalAll();
  }
  if (guard_thread_.joinable()) guard_thread_.join();
  listener_.reset();
}

void Acceptor::Guard() {
  FloodLimits limits;
  limits.most_bytes = guards_.most_bytes_without_call;
  limits.slow_bytes = guards_.slow_bytes_without_call;
  limits.slow_looks = kSlowLooks;
  limits.strict_key = kForeignKey;
  limits.strict_bytes = kMostForeignBytes;
  MutexLock lock(table_mu_);
  while (!guard_ended_) {
    ended_.WaitFor(table_mu_, kGuardPeriod);
    const std::vector<Flood> floods = table_.AbortFloods(limits, guards_.calls());
    for (const Flood& flood : floods) {
      spdlog::warn("event=connection_ended reason=bytes_without_call peer={} bytes={}", flood.peer_name, flood.bytes);
      if (flood.strict) foreign_until_ = MonotonicNow() + kForeignPause;
    }
  }
}

void Acceptor::Run() {
  bool failed = false;  // the last accept4 failed for want of something: pause once
  while (!stopping_.load()) {
    WatchListener();
    const bool accepting = !failed && MayAccept();
    failed = false;
    pollfd fds[2] = {{wake_.get(), POLLIN, 0}, {listener_->fd(), POLLIN, 0}};
    const int ready = poll(fds, accepting ? 2 : 1, accepting ? kIdlePollMs : kPausedPollMs);
    if (ready > 0 && fds[1].revents != 0) failed = !AcceptSome();
    MutexLock lock(table_mu_);
    if (ready == 0) table_.Reconcile();
    connections_.store(table_.size());
  }
}

// Who waits in the queue of a socket that nobody can reach any more is served first.
void Acceptor::WatchListener() {
  if (MonotonicNow() < next_watch_) return;
  next_watch_ = MonotonicNow() + kWatchPeriod;
  if (listener_->IsReachable()) return;
  AcceptSome();
  const std::string address = listener_->address().ToString();
  const absl::Status again = listener_->ListenAgain();
  if (again.ok()) {
    spdlog::warn("event=socket_restored address={} hint=\"its file was removed; exclude the folder from cleaning, or "
                 "choose another path with --listen\"", address);
  } else if (again.ToString() != lost_) {
    spdlog::error("event=socket_lost address={} error=\"{}\"", address, absl::CHexEscape(again.ToString()));
  }
  lost_ = again.ok() ? "" : again.ToString();
}

bool Acceptor::MayAccept() {
  {
    MutexLock lock(table_mu_);
    if (table_.full()) table_.Reconcile();
    if (table_.full()) return false;
  }
  const bool left = DescriptorsLeft(wake_.get(), limits_.reserved_descriptors);
  if (!left && !out_of_descriptors_) {
    spdlog::warn("event=accepting_paused address={} reason=descriptors remedy=\"{}\"", listener_->address().ToString(),
                 DescriptorLimit());
  }
  out_of_descriptors_ = !left;
  return left;
}

// False when accept4 failed for want of descriptors or memory, or for a reason unknown.
bool Acceptor::AcceptSome() {
  for (int i = 0; i < kAcceptsPerTurn && !stopping_.load() && MayAccept(); ++i) {
    sockaddr_storage peer = {};
    socklen_t length = sizeof(peer);
    const int fd = accept4(listener_->fd(), reinterpret_cast<sockaddr*>(&peer), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      Admit(fd, peer);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    } else if (!IsTransient(errno)) {
      spdlog::warn("event=accept_failed address={} error=\"{}\"", listener_->address().ToString(),
                   std::strerror(errno));
      return false;
    }
  }
  return true;
}

void Acceptor::Admit(int fd, const sockaddr_storage& peer) {
  const bool foreign = IsForeign(fd, peer);
  if (!Track(fd, peer, foreign)) {
    close(fd);
    if (foreign) return;
    if (refused_.fetch_add(1) % 1024 == 0) {
      spdlog::warn("event=connection_refused reason=peer_cap peer={} cap={}", PeerName(peer),
                   limits_.max_connections_per_peer);
    }
    return;
  }
  if (peer.ss_family != AF_UNIX) {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }
  foreign ? guards_.foreign(fd) : sink_(fd);
}

// False when the peer is over its cap.
bool Acceptor::Track(int fd, const sockaddr_storage& peer, bool foreign) {
  const std::string key = foreign ? kForeignKey : PeerKey(peer);
  MutexLock lock(table_mu_);
  if (foreign && MonotonicNow() < foreign_until_) return false;
  const auto full = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(table_mu_) {
    return foreign ? table_.CountOf(key) >= kMaxForeignConnections : table_.PeerFull(key);
  };
  if (full()) table_.Reconcile();
  if (full()) return false;
  table_.Track(fd, peer, key);
  return true;
}

bool Acceptor::IsForeign(int fd, const sockaddr_storage& peer) {
  if (guards_.users.empty()) return false;
  const absl::StatusOr<uid_t> user = PeerUser(fd);
  const bool served = user.ok() && std::find(guards_.users.begin(), guards_.users.end(), *user) != guards_.users.end();
  if (served) return false;
  if (absl::IsNotFound(user.status())) return true;  // it has hung up: nothing to tell
  if (foreign_++ % 1024 == 0) {
    spdlog::warn("event=foreign_user_refused address={} peer={} user={} total={}", listener_->address().ToString(),
                 PeerName(peer), user.ok() ? std::to_string(*user) : std::string(user.status().message()), foreign_);
  }
  return true;
}

void Acceptor::EndReading() {
  MutexLock lock(table_mu_);
  table_.EndReading();
}

bool Acceptor::Abort(const std::string& peer_name) {
  MutexLock lock(table_mu_);
  return table_.Abort(peer_name);
}

}  // namespace shardmesh
