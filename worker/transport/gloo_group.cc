#include "worker/transport/gloo_group.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "worker/transport/gloo_connections.h"
#include "worker/transport/late_ranks.h"

namespace shardmesh {
namespace {

// After a call's time is up: until all have said whom they wait for.
constexpr absl::Duration kLateTime = absl::Milliseconds(500);
// After a connection for calls was closed: until the peer has said why; one that is late closes it first.
constexpr absl::Duration kGoneTime = absl::Milliseconds(1500);
constexpr uint64_t kStays = std::numeric_limits<uint64_t>::max();

}  // namespace

struct GlooGroup::Transfer {
  int peer = 0;
  bool receive = false;
  GlooBuffer buffer;
  bool done = false;

  void Start(uint64_t slot) { receive ? buffer->recv(peer, slot) : buffer->send(peer, slot); }
  // False: Break was called. Throws when the connection fails, and when the time is up: then all connections are
  // closed.
  bool Wait(absl::Duration timeout) {
    done = done || (receive ? buffer->waitRecv(Milliseconds(timeout)) : buffer->waitSend(Milliseconds(timeout)));
    return done;
  }
  void Break() { receive ? buffer->abortWaitRecv() : buffer->abortWaitSend(); }
};

absl::StatusOr<std::unique_ptr<GlooGroup>> GlooGroup::Connect(const std::shared_ptr<Rendezvous>& rendezvous,
                                                              const GlooOptions& options) {
  if (options.size < 1 || options.size > kMaxGroupRanks || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of ", options.size, " ranks; a group has 1 to ", kMaxGroupRanks));
  }
  ASSIGN_OR_RETURN(auto connections, GlooConnections::Connect(rendezvous, options));
  return std::unique_ptr<GlooGroup>(new GlooGroup(options, std::move(connections)));
}

GlooGroup::GlooGroup(const GlooOptions& options, std::unique_ptr<GlooConnections> connections)
    : TransferGroup(options.rank, options.size, options.epoch, options.names),
      connections_(std::move(connections)),
      last_(static_cast<size_t>(options.size), kStays) {
  if (size() > 1) watcher_ = std::thread([this] { Watch(); });
}

GlooGroup::~GlooGroup() {
  if (size() == 1) return;
  bool leaves = false;
  uint64_t call = 0;
  {
    MutexLock lock(mu_);
    leaves = end_.ok();
    end_ = absl::AbortedError("this rank left");
    call = call_;
  }
  if (leaves) connections_->TellEnd(kLeft, call, "");
  connections_->Break();
  watcher_.join();
}

// ---- The end, and what peers tell about it. ----

absl::Status GlooGroup::EndLocked() const { return absl::IsAborted(end_) ? GroupEnded(end_.message()) : end_; }

absl::Status GlooGroup::End(const absl::Status& status) {
  {
    MutexLock lock(mu_);
    if (!end_.ok()) return EndLocked();
    end_ = status;
    changed_.SignalAll();
    if (waited_ != nullptr) {
      for (Transfer& transfer : *waited_) transfer.Break();
    }
  }
  if (size() > 1) {
    connections_->TellEnd(kEnded, 0, status.message());
    connections_->CloseCalls();
  }
  MutexLock lock(mu_);
  return EndLocked();
}

void GlooGroup::Abort(absl::string_view reason) { (void)End(absl::AbortedError(reason)); }

void GlooGroup::AwaitEnd(absl::Duration time) {
  const absl::Time until = MonotonicNow() + time;
  MutexLock lock(mu_);
  while (end_.ok() && MonotonicNow() < until) changed_.WaitFor(mu_, until - MonotonicNow());
}

void GlooGroup::Watch() {
  try {
    while (connections_->AwaitEndNews()) {
      if (!ReadNews()) return;
    }
  } catch (const std::exception&) {  // a connection was closed; what was told before counts
    if (ReadNews()) (void)End(WhoIsGone());
  }
}

bool GlooGroup::ReadNews() {
  absl::Status here;
  for (int peer = 0; peer < size(); ++peer) {
    const EndNews& news = connections_->EndOf(peer);
    const uint32_t kind = connections_->KindOf(peer);
    if (kind == kEnded) {
      (void)End(absl::AbortedError(std::string(news.reason, strnlen(news.reason, sizeof(news.reason)))));
      return false;
    }
    MutexLock lock(mu_);
    if (kind == kLeft) last_[static_cast<size_t>(peer)] = news.last_call;
    here = CheckAllHereLocked();
  }
  if (!here.ok()) (void)End(here);
  return here.ok();
}

absl::Status GlooGroup::CheckAllHereLocked() const {
  for (int peer = 0; peer < size(); ++peer) {
    const uint64_t last = last_[static_cast<size_t>(peer)];
    if (last < call_) {
      return absl::UnavailableError(absl::StrCat("rank ", NameOf(peer), " left the group after call ", last,
                                                 "; it does not come to call ", call_));
    }
  }
  return absl::OkStatus();
}

absl::Status GlooGroup::WhoIsGone() {
  std::vector<int> gone = connections_->Gone();
  for (int& peer : gone) peer = NameOf(peer);
  return absl::UnavailableError(absl::StrCat(gone.size() == 1 ? "rank " : "ranks ", absl::StrJoin(gone, ", "),
                                             gone.size() == 1 ? " is" : " are", " gone: the connection was closed"));
}

// ---- Moving. ----

absl::Status GlooGroup::Enter(std::vector<Transfer>& transfers) {
  MutexLock lock(mu_);
  if (!end_.ok()) return GroupEnded(end_.message());
  waited_ = &transfers;
  return absl::OkStatus();
}

void GlooGroup::Exit() {
  MutexLock lock(mu_);
  waited_ = nullptr;
}

absl::Status GlooGroup::MoveAll(const Call& call, absl::Span<const PeerTransfer> all) {
  std::vector<Transfer> transfers;
  for (const bool receive : {true, false}) {
    for (const PeerTransfer& t : all) {
      if ((receive ? t.to : t.from) != rank() || t.bytes == 0) continue;
      transfers.push_back({receive ? t.from : t.to, receive, connections_->BufferOf(t.memory, t.bytes)});
    }
  }
  RETURN_IF_ERROR(Enter(transfers));
  const absl::Status moved = Move(call, transfers);
  Exit();
  return moved;
}

absl::Status GlooGroup::Move(const Call& call, std::vector<Transfer>& transfers) {
  const uint64_t slot = ++exchanges_;
  int peer = 0;
  try {
    for (Transfer& transfer : transfers) {
      peer = transfer.peer;
      transfer.Start(slot);
    }
    for (Transfer& transfer : transfers) {
      peer = transfer.peer;
      if (transfer.Wait(call.until - MonotonicNow())) continue;
      MutexLock lock(mu_);
      return EndLocked();
    }
  } catch (const std::exception& error) {
    if (MonotonicNow() >= call.until) return Late(call, transfers);
    AwaitEnd(kGoneTime);
    return End(absl::UnavailableError(absl::StrCat("rank ", NameOf(peer), " is gone; it did not come to ",
                                                   DescribeCall(call.header), " (", error.what(), ")")));
  }
  return absl::OkStatus();
}

absl::Status GlooGroup::Late(const Call& call, std::vector<Transfer>& transfers) {
  std::vector<int> missing;
  for (Transfer& transfer : transfers) {
    try {
      if (transfer.Wait(absl::ZeroDuration())) continue;
    } catch (const std::exception&) {
    }
    if (std::find(missing.begin(), missing.end(), transfer.peer) == missing.end()) missing.push_back(transfer.peer);
  }
  connections_->TellLate(missing);
  AwaitEnd(kLateTime);
  std::vector<std::vector<int>> waits_for;
  for (int peer = 0; peer < size(); ++peer) {
    waits_for.push_back(peer == rank() ? missing : connections_->WaitsFor(peer));
  }
  std::vector<int> names;
  for (const int peer : WhoHoldsUp(rank(), waits_for)) names.push_back(NameOf(peer));
  return End(MissingRanks(names, call.header, call.timeout));
}

absl::Status GlooGroup::Agree(const Call& call) {
  absl::Status here;
  {
    MutexLock lock(mu_);
    if (!end_.ok()) return GroupEnded(end_.message());
    call_ = call.header.number;
    here = CheckAllHereLocked();
  }
  if (!here.ok()) return End(here);
  CallHeader mine = call.header;  // sent as it is: all ranks are of one build
  std::vector<CallHeader> theirs(size());
  std::vector<PeerTransfer> headers;
  for (int i = 0; i < size() - 1; ++i) {
    const int peer = PeerAt(i);
    headers.push_back({rank(), peer, reinterpret_cast<char*>(&mine), sizeof(mine)});
    headers.push_back({peer, rank(), reinterpret_cast<char*>(&theirs[peer]), sizeof(mine)});
  }
  RETURN_IF_ERROR(MoveAll(call, headers));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const absl::Status same = CheckHeader(call.header, theirs[peer], NameOf(rank()), NameOf(peer));
    if (!same.ok()) return End(same);
  }
  return absl::OkStatus();
}

absl::Status GlooGroup::DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                                   absl::Duration timeout) {
  const Call call = {header, timeout, MonotonicNow() + timeout};
  RETURN_IF_ERROR(Agree(call));
  return MoveAll(call, transfers);
}

}  // namespace shardmesh
