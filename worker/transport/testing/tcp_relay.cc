#include "worker/transport/testing/tcp_relay.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"

namespace shardmesh::testing {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(2);
constexpr int64_t kMostWaiting = 1 << 20;  // bytes on the line

absl::Status SocketError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

TcpRelay::TcpRelay() : thread_([this] { Run(); }) {}

TcpRelay::~TcpRelay() {
  {
    MutexLock lock(mu_);
    closing_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

absl::StatusOr<sockaddr_in> TcpRelay::Route(const sockaddr_in& to, int side) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in here = to;
  here.sin_port = 0;
  socklen_t length = sizeof(here);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&here), length) != 0 || listen(fd.get(), 16) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&here), &length) != 0) {
    return SocketError("cannot listen for a relay");
  }
  MutexLock lock(mu_);
  listeners_.push_back({std::move(fd), to, side});
  return here;
}

void TcpRelay::SetLine(absl::Duration delay, double bytes_per_second) {
  MutexLock lock(mu_);
  delay_ = delay;
  bytes_per_second_ = bytes_per_second;
}

void TcpRelay::Stop() {
  MutexLock lock(mu_);
  stopped_ = true;
}

void TcpRelay::Drop() {
  MutexLock lock(mu_);
  const linger reset = {1, 0};
  for (const auto& connection : connections_) {
    for (const UniqueFd& end : connection->ends) {
      setsockopt(end.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    }
  }
  connections_.clear();
}

int64_t TcpRelay::forwarded_bytes() const {
  MutexLock lock(mu_);
  return forwarded_;
}

void TcpRelay::Run() {
  MutexLock lock(mu_);
  while (!closing_) {
    for (const Listener& listener : listeners_) AcceptLocked(listener);
    for (const auto& connection : connections_) {
      for (int from = 0; from < 2 && !stopped_; ++from) {
        ReadLocked(*connection, from);
        WriteLocked(*connection, from);
      }
    }
    changed_.WaitFor(mu_, kLook);
  }
}

void TcpRelay::AcceptLocked(const Listener& listener) {
  UniqueFd near(accept4(listener.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!near.valid()) return;
  // On this machine a listening socket connects at once.
  UniqueFd far(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(far.get(), reinterpret_cast<const sockaddr*>(&listener.to), sizeof(listener.to)) != 0) return;
  const int no_delay = 1;
  for (const UniqueFd* end : {&near, &far}) {
    setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &no_delay, sizeof(no_delay));
  }
  connections_.push_back(std::make_unique<Connection>());
  connections_.back()->side = listener.side;
  connections_.back()->ends[0] = std::move(near);
  connections_.back()->ends[1] = std::move(far);
}

void TcpRelay::ReadLocked(Connection& connection, int from) {
  Way& way = connection.ways[from];
  while (!way.ended && way.waiting < kMostWaiting) {
    std::string bytes(64 << 10, 0);
    const ssize_t length = recv(connection.ends[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) return;
    way.ended = length <= 0;
    if (way.ended) return;
    bytes.resize(static_cast<size_t>(length));
    absl::Time& free = free_[from == 0 ? connection.side : 1 - connection.side];
    free = std::max(free, MonotonicNow()) + absl::Seconds(static_cast<double>(length) / bytes_per_second_);
    way.waiting += length;
    way.chunks.push_back({free + delay_, std::move(bytes)});
  }
}

void TcpRelay::WriteLocked(Connection& connection, int from) {
  Way& way = connection.ways[from];
  const int to = connection.ends[1 - from].get();
  while (!way.chunks.empty() && way.chunks.front().due <= MonotonicNow()) {
    std::string& bytes = way.chunks.front().bytes;
    const ssize_t length = send(to, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (length < 0) return;  // full, or closed: then the other way ends
    forwarded_ += length;
    way.waiting -= length;
    bytes.erase(0, static_cast<size_t>(length));
    if (!bytes.empty()) return;
    way.chunks.pop_front();
  }
  if (way.ended && way.chunks.empty()) shutdown(to, SHUT_WR);
}

}  // namespace shardmesh::testing
