// GlooConnections: what a GlooGroup has of Gloo: a pair of connections with every peer, one for calls and one for news,
// and what peers have told on the latter. gloo_group.cc and gloo_connections.cc alone include this.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "gloo/transport/context.h"
#include "gloo/transport/unbound_buffer.h"
#include "worker/transport/gloo_group.h"

namespace shardmesh {

using GlooBuffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 3650);  // for waits that are broken off

// At least a millisecond: none would mean no limit. At most what a clock can count.
std::chrono::milliseconds Milliseconds(absl::Duration duration);

// What a rank tells each peer at its end: that it ended the group, or that it leaves after a call.
enum : uint32_t { kNothing = 0, kEnded, kLeft };
struct EndNews {
  uint64_t last_call;
  char reason[244];
  uint32_t kind;  // behind the rest: where it is there, all is
};
// And before it ends the group because a call's time is up: whom it waits for.
struct LateNews {
  uint64_t waits_for[kMaxGroupRanks / 64];  // a bit each
  uint32_t told;                            // likewise behind the rest
};

class GlooConnections {
 public:
  // Connects all peers. Errors: GlooGroup::Connect's.
  static absl::StatusOr<std::unique_ptr<GlooConnections>> Connect(const std::shared_ptr<Rendezvous>& rendezvous,
                                                                  const GlooOptions& options);

  // To all peers that are still there; each once.
  void TellEnd(uint32_t kind, uint64_t last_call, absl::string_view reason);
  void TellLate(const std::vector<int>& waits_for);

  // Until a peer has told its end; false: Break was called. Throws when a connection was closed before.
  bool AwaitEndNews() { return ends_.buffer->waitRecv(nullptr, kForever); }
  void Break() { ends_.buffer->abortWaitRecv(); }

  // What a peer has told at its end; kNothing: nothing yet.
  const EndNews& EndOf(int peer) const { return ends_.told[static_cast<size_t>(peer)]; }
  uint32_t KindOf(int peer) const { return __atomic_load_n(&EndOf(peer).kind, __ATOMIC_ACQUIRE); }
  // Whom a peer has said it waits for; none: it has said nothing.
  std::vector<int> WaitsFor(int peer) const;
  // Peers that have not said that they leave, and whose connection is closed.
  std::vector<int> Gone();

  GlooBuffer BufferOf(char* memory, int64_t bytes) const;
  void CloseCalls();

 private:
  GlooConnections(int rank, int size) : rank_(rank), size_(size) {}

  // One kind of news: what each rank has told, and what this one tells. A buffer of its own for each kind: the closed
  // connection of a rank that left breaks the waits of a buffer that still expects something of it.
  template <class News>
  struct Board {
    std::vector<News> told;
    News telling = {};
    GlooBuffer buffer, telling_buffer;
  };
  // Expects a message from every peer, from the beginning.
  template <class News>
  void Listen(Board<News>& board, uint64_t slot);
  template <class News>
  void Tell(Board<News>& board, uint64_t slot);

  const int rank_, size_;
  std::shared_ptr<gloo::transport::Context> calls_, news_;
  Board<EndNews> ends_;
  Board<LateNews> lates_;
  GlooBuffer probe_buffer_;
};

}  // namespace shardmesh
