#include "worker/transport/gloo_connections.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "gloo/transport/tcp/context.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/tcp/pair.h"
#include "local/descriptor/fd.h"
#include "worker/transport/keyed_links.h"

namespace shardmesh {
namespace {

constexpr uint64_t kEndSlot = 0, kLateSlot = 1, kProbeSlot = 2;
constexpr int kNewsLink = 0, kCallsLink = 1, kNumLinks = 2;

void IgnoreSigpipe() {
  struct sigaction now = {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

// A pair of Gloo's over a connection that is there. Gloo's own way to make one takes whoever comes first, and a
// stranger's bytes end its thread, and so the process.
class ConnectedPair final : public gloo::transport::tcp::Pair {
 public:
  using Pair::Pair;

  // Pair's constructor listens; nobody is told where. False: somebody came there all the same.
  bool Take(UniqueFd& connection) {
    const std::lock_guard<std::mutex> lock(m_);
    if (state_ != LISTENING) return false;
    device_->unregisterDescriptor(fd_, this);
    ::close(fd_);
    fd_ = connection.release();
    taken_ = true;
    handleConnected();
    return true;
  }
  void handleEvents(int events) override {
    if (taken_) Pair::handleEvents(events);
  }

 private:
  std::atomic<bool> taken_{false};
};

constexpr int kTakeTries = 10;

using GlooContext = std::shared_ptr<gloo::transport::tcp::Context>;

GlooContext ContextOver(gloo::transport::tcp::Device& device, std::vector<UniqueFd>& connections, int link, int links,
                        const GlooOptions& options) {
  auto context = std::dynamic_pointer_cast<gloo::transport::tcp::Context>(
      device.createContext(options.rank, options.size));
  context->setTimeout(Milliseconds(options.timeout / 10));
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    UniqueFd& connection = connections[static_cast<size_t>(peer * links + link)];
    for (int tries = 0; connection.valid(); ++tries) {
      if (tries == kTakeTries) throw std::runtime_error("others connect to every port that this process listens at");
      auto pair = std::make_unique<ConnectedPair>(context.get(), &device, peer, context->getTimeout());
      if (pair->Take(connection)) context->getPair(peer) = std::move(pair);
    }
  }
  return context;
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
  try {
    gloo::transport::tcp::attr address;
    address.iface = options.interface;
    address.hostname = options.host;
    address = gloo::transport::tcp::CreateDeviceAttr(address);
    LinkOptions links;
    links.rank = options.rank;
    links.size = options.size;
    links.names = options.names;
    links.key = options.key;
    links.address = address.ai_addr;
    links.links = kNumLinks;
    links.timeout = options.timeout;
    ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, ConnectRanks(*rendezvous, links));
    const auto device = std::make_shared<gloo::transport::tcp::Device>(address);
    made->news_ = ContextOver(*device, connections, kNewsLink, kNumLinks, options);
    made->Listen(made->ends_, kEndSlot);
    made->Listen(made->lates_, kLateSlot);
    made->probe_buffer_ = made->news_->createUnboundBuffer(nullptr, 0);
    made->calls_ = ContextOver(*device, connections, kCallsLink, kNumLinks, options);
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
