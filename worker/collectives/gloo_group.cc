#include "worker/collectives/gloo_group.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/status.h"
#include "gloo/transport/context.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/unbound_buffer.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kNewsTime = absl::Milliseconds(500);  // for what peers tell, after a connection failed
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 3650);  // for waits that are broken off
constexpr uint64_t kStays = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kNewsSlot = 0, kProbeSlot = 1;

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
using Context = std::shared_ptr<gloo::transport::Context>;

// At least a millisecond: none would mean no limit. At most what a clock can count.
std::chrono::milliseconds Milliseconds(absl::Duration duration) {
  return std::chrono::milliseconds(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, kForever.count()));
}

// What a rank tells each peer once: that it ended the group, or that it leaves after a call.
enum : uint32_t { kNothing = 0, kEnded, kLeft };
struct News {
  uint64_t last_call;
  char reason[244];
  uint32_t kind;  // behind the rest: where it is there, all is
};

void IgnoreSigpipe() {
  struct sigaction now = {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

// Connects a pair with each peer, in the order of their ranks. Each listens at an address of its own; a rank's value at
// the rendezvous has all of its addresses.
absl::Status ConnectAll(gloo::transport::Context& context, Rendezvous& rendezvous, const GlooOptions& options,
                        const std::string& key, absl::Time until) {
  context.setTimeout(Milliseconds(options.timeout / 10));  // a pair waits five times as long
  std::string addresses;
  size_t length = 0;
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    const std::vector<char> address = context.createPair(peer)->address().bytes();
    length = address.size();
    addresses.append(address.begin(), address.end());
  }
  RETURN_IF_ERROR(rendezvous.Set(absl::StrCat(key, "/", options.rank), addresses));
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    const auto failed = [&](absl::string_view why) {
      return absl::UnavailableError(absl::StrCat("rank ", options.names(options.rank), " of group '", options.key,
                                                 "' could not connect rank ", options.names(peer), ": ", why));
    };
    const auto theirs = rendezvous.Get(absl::StrCat(key, "/", peer), until - absl::Now());
    if (!theirs.ok()) return failed(theirs.status().message());
    if (theirs->size() != addresses.size()) {
      return failed(absl::StrCat("it gives addresses of ", theirs->size(), " bytes instead of ", addresses.size()));
    }
    const char* mine = theirs->data() + length * static_cast<size_t>(options.rank - (options.rank > peer));
    try {
      context.getPair(peer)->connect(std::vector<char>(mine, mine + length));
    } catch (const std::exception& error) {
      return failed(error.what());
    }
  }
  return absl::OkStatus();
}

}  // namespace

struct GlooGroup::Connections {
  Context calls, news;
  std::vector<News> told;  // by each rank
  News telling = {};
  Buffer told_buffer, telling_buffer, probe_buffer;

  void WaitForNews(const GlooOptions& options) {
    told.resize(static_cast<size_t>(options.size));
    told_buffer = news->createUnboundBuffer(told.data(), told.size() * sizeof(News));
    telling_buffer = news->createUnboundBuffer(&telling, sizeof(telling));
    probe_buffer = news->createUnboundBuffer(nullptr, 0);
    for (int peer = 0; peer < options.size; ++peer) {
      if (peer == options.rank) continue;
      told_buffer->recv(peer, kNewsSlot, static_cast<size_t>(peer) * sizeof(News), sizeof(News));
    }
  }
};

struct GlooGroup::Transfer {
  int peer = 0;
  bool receive = false;
  Buffer buffer;
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
  auto connections = std::make_unique<Connections>();
  if (options.size > 1) {
    IgnoreSigpipe();
    const absl::Time until = absl::Now() + options.timeout;
    try {
      gloo::transport::tcp::attr address;
      address.iface = options.interface;
      address.hostname = options.host;
      const auto device = gloo::transport::tcp::CreateDevice(address);
      connections->calls = device->createContext(options.rank, options.size);
      connections->news = device->createContext(options.rank, options.size);
      RETURN_IF_ERROR(ConnectAll(*connections->news, *rendezvous, options, options.key + "/news", until));
      connections->WaitForNews(options);
      RETURN_IF_ERROR(ConnectAll(*connections->calls, *rendezvous, options, options.key + "/calls", until));
    } catch (const std::exception& error) {
      return absl::UnavailableError(absl::StrCat("rank ", options.names(options.rank), " of group '", options.key,
                                                 "' could not connect its peers: ", error.what()));
    }
  }
  return std::unique_ptr<GlooGroup>(new GlooGroup(options, std::move(connections)));
}

GlooGroup::GlooGroup(const GlooOptions& options, std::unique_ptr<Connections> connections)
    : ExchangeGroup(options.rank, options.size, options.epoch, options.names),
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
  if (leaves) Tell(kLeft, call, "");
  connections_->told_buffer->abortWaitRecv();
  watcher_.join();
}

// ---- The end, and what peers tell about it. ----

absl::Status GlooGroup::EndLocked() const { return absl::IsAborted(end_) ? GroupEnded(end_.message()) : end_; }

void GlooGroup::Tell(uint32_t kind, uint64_t calls, absl::string_view reason) {
  News& news = connections_->telling;
  news.last_call = calls;
  std::memcpy(news.reason, reason.data(), std::min(reason.size(), sizeof(news.reason) - 1));
  news.kind = kind;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    try {
      connections_->telling_buffer->send(peer, kNewsSlot);
    } catch (const std::exception&) {  // it is gone
    }
  }
}

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
    Tell(kEnded, 0, status.message());
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) connections_->calls->getPair(peer)->close();
    }
  }
  MutexLock lock(mu_);
  return EndLocked();
}

void GlooGroup::Abort(absl::string_view reason) { (void)End(absl::AbortedError(reason)); }

absl::Status GlooGroup::AfterNews(const absl::Status& seen) {
  const absl::Time until = absl::Now() + kNewsTime;
  {
    MutexLock lock(mu_);
    while (end_.ok() && absl::Now() < until) changed_.WaitFor(mu_, until - absl::Now());
  }
  return End(seen);
}

void GlooGroup::Watch() {
  try {
    while (connections_->told_buffer->waitRecv(nullptr, kForever)) {
      if (!ReadNews()) return;
    }
  } catch (const std::exception&) {  // a connection was closed; what was told before counts
    if (ReadNews()) (void)End(WhoIsGone());
  }
}

bool GlooGroup::ReadNews() {
  absl::Status here;
  for (int peer = 0; peer < size(); ++peer) {
    const News& news = connections_->told[static_cast<size_t>(peer)];
    const uint32_t kind = __atomic_load_n(&news.kind, __ATOMIC_ACQUIRE);
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
  std::vector<int> gone;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || connections_->told[static_cast<size_t>(peer)].kind == kLeft) continue;
    try {
      connections_->probe_buffer->recv(peer, kProbeSlot);
    } catch (const std::exception&) {
      gone.push_back(NameOf(peer));
    }
  }
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
      auto buffer = connections_->calls->createUnboundBuffer(t.memory, static_cast<size_t>(t.bytes));
      transfers.push_back({receive ? t.from : t.to, receive, std::move(buffer)});
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
      if (transfer.Wait(call.until - absl::Now())) continue;
      MutexLock lock(mu_);
      return EndLocked();
    }
  } catch (const std::exception& error) {
    if (absl::Now() >= call.until) return Late(call, transfers);
    return AfterNews(absl::UnavailableError(absl::StrCat("rank ", NameOf(peer), " is gone; it did not come to ",
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
    const int name = NameOf(transfer.peer);
    if (std::find(missing.begin(), missing.end(), name) == missing.end()) missing.push_back(name);
  }
  const absl::Status late = MissingRanks(missing, call.header, call.timeout);
  // One of several may just wait for another one of them, and say so in a moment.
  return missing.size() > 1 ? AfterNews(late) : End(late);
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

absl::Status GlooGroup::SendPieces(const CallHeader& header, const char* mine, int64_t stride, char* theirs,
                                   absl::Duration timeout) {
  std::vector<PeerTransfer> transfers;
  for (int i = 0; i < size() - 1; ++i) {
    const int peer = PeerAt(i);
    transfers.push_back({rank(), peer, const_cast<char*>(mine) + peer * stride, header.bytes});
    transfers.push_back({peer, rank(), theirs + peer * header.bytes, header.bytes});
  }
  if (header.bytes > 0) {
    std::memmove(theirs + rank() * header.bytes, mine + rank() * stride, static_cast<size_t>(header.bytes));
  }
  return DoExchange(header, transfers, timeout);
}

absl::Status GlooGroup::DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) {
  return SendPieces(header, mine, 0, all, timeout);
}

absl::Status GlooGroup::DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) {
  return SendPieces(header, mine, header.bytes, theirs, timeout);
}

absl::Status GlooGroup::DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) {
  std::vector<PeerTransfer> transfers;
  for (int i = 0; i < size(); ++i) {
    if (i != root) transfers.push_back({root, i, memory, header.bytes});
  }
  return DoExchange(header, transfers, timeout);
}

absl::Status GlooGroup::DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                                   absl::Duration timeout) {
  const Call call = {header, timeout, absl::Now() + timeout};
  RETURN_IF_ERROR(Agree(call));
  return MoveAll(call, transfers);
}

}  // namespace shardmesh
