#include "worker/collectives/gloo_connections.h"

#include <signal.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/clock.h"
#include "core/status.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/tcp/device.h"

namespace shardmesh {
namespace {

constexpr uint64_t kEndSlot = 0, kLateSlot = 1, kProbeSlot = 2;

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
    const auto theirs = rendezvous.Get(absl::StrCat(key, "/", peer), until - MonotonicNow());
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

std::chrono::milliseconds Milliseconds(absl::Duration duration) {
  return std::chrono::milliseconds(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, kForever.count()));
}

absl::StatusOr<std::unique_ptr<GlooConnections>> GlooConnections::Connect(const std::shared_ptr<Rendezvous>& rendezvous,
                                                                          const GlooOptions& options) {
  auto made = std::unique_ptr<GlooConnections>(new GlooConnections(options.rank, options.size));
  if (options.size == 1) return made;
  IgnoreSigpipe();
  const absl::Time until = MonotonicNow() + options.timeout;
  try {
    gloo::transport::tcp::attr address;
    address.iface = options.interface;
    address.hostname = options.host;
    const auto device = gloo::transport::tcp::CreateDevice(address);
    made->calls_ = device->createContext(options.rank, options.size);
    made->news_ = device->createContext(options.rank, options.size);
    RETURN_IF_ERROR(ConnectAll(*made->news_, *rendezvous, options, options.key + "/news", until));
    made->Listen(made->ends_, kEndSlot);
    made->Listen(made->lates_, kLateSlot);
    made->probe_buffer_ = made->news_->createUnboundBuffer(nullptr, 0);
    RETURN_IF_ERROR(ConnectAll(*made->calls_, *rendezvous, options, options.key + "/calls", until));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("rank ", options.names(options.rank), " of group '", options.key,
                                               "' could not connect its peers: ", error.what()));
  }
  return made;
}

template <class News>
void GlooConnections::Listen(Board<News>& board, uint64_t slot) {
  board.told.resize(static_cast<size_t>(size_));
  board.buffer = news_->createUnboundBuffer(board.told.data(), board.told.size() * sizeof(News));
  board.telling_buffer = news_->createUnboundBuffer(&board.telling, sizeof(News));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) board.buffer->recv(peer, slot, static_cast<size_t>(peer) * sizeof(News), sizeof(News));
  }
}

template <class News>
void GlooConnections::Tell(Board<News>& board, uint64_t slot) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      board.telling_buffer->send(peer, slot);
    } catch (const std::exception&) {  // it is gone
    }
  }
}

void GlooConnections::TellEnd(uint32_t kind, uint64_t last_call, absl::string_view reason) {
  EndNews& news = ends_.telling;
  news.last_call = last_call;
  std::memcpy(news.reason, reason.data(), std::min(reason.size(), sizeof(news.reason) - 1));
  news.kind = kind;
  Tell(ends_, kEndSlot);
}

void GlooConnections::TellLate(const std::vector<int>& waits_for) {
  LateNews& late = lates_.telling;
  for (const int peer : waits_for) late.waits_for[peer / 64] |= uint64_t{1} << peer % 64;
  late.told = 1;
  Tell(lates_, kLateSlot);
}

std::vector<int> GlooConnections::WaitsFor(int peer) const {
  const LateNews& late = lates_.told[static_cast<size_t>(peer)];
  std::vector<int> ranks;
  if (__atomic_load_n(&late.told, __ATOMIC_ACQUIRE) == 0) return ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (late.waits_for[rank / 64] >> rank % 64 & 1) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> GlooConnections::Gone() {
  std::vector<int> gone;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || KindOf(peer) == kLeft) continue;
    try {
      probe_buffer_->recv(peer, kProbeSlot);
    } catch (const std::exception&) {
      gone.push_back(peer);
    }
  }
  return gone;
}

GlooBuffer GlooConnections::BufferOf(char* memory, int64_t bytes) const {
  return calls_->createUnboundBuffer(memory, static_cast<size_t>(bytes));
}

void GlooConnections::CloseCalls() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) calls_->getPair(peer)->close();
  }
}

}  // namespace shardmesh
