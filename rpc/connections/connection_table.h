// ConnectionTable: which of the connections given to gRPC are still open, and the caps on them.
// gRPC owns and closes the descriptors and tells nobody. A connection is remembered as {descriptor, inode of its
// socket}: it is gone when the descriptor is closed or belongs to another inode. Not thread-safe.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace shardmesh {

// The key under which a connection counts to its peer's cap: the IPv4 address, or the /64 network of an IPv6 address
// (one host commonly has a whole one). Empty for loopback, UNIX sockets and unknown families: those count to the total
// only.
std::string PeerKey(const sockaddr_storage& peer);

// "ipv4:10.0.0.1:4711", "ipv6:[::1]:4711", an IPv4 address mapped into IPv6 as the former; "" for UNIX sockets.
std::string PeerName(const sockaddr_storage& peer);

// What a connection may send without a call.
struct FloodLimits {
  int64_t most_bytes = 0;  // a request is shorter
  // Beyond so many bytes it is over, too, if at each of so many looks in a row bytes were waiting to be read: what takes
  // its owner long to read is no message, but padding of numbers, or a header without end.
  int64_t slow_bytes = 0;
  int slow_looks = 1;
  std::string strict_key;   // connections that count to this peer key
  int64_t strict_bytes = 0;  // are over beyond so many
};

struct Flood {
  std::string peer_name;
  bool strict = false;  // of FloodLimits::strict_key
  int64_t bytes = 0;    // that it sent without a call
};

class ConnectionTable {
 public:
  ConnectionTable(int max_connections, int max_per_peer) : max_(max_connections), max_per_peer_(max_per_peer) {}

  // Counts the open socket `fd`, for the peer of `peer_key`. Call before it is given away. A tracked connection with
  // that number is gone, evidently.
  void Track(int fd, const sockaddr_storage& peer, const std::string& peer_key);
  // Forgets the connections that are closed; returns how many. One system call per connection.
  int Reconcile();

  // Resets the connections of that PeerName: what they sent and was not read yet is thrown away, and their owner sees
  // an error at the next read. False when there is none, or it was done before; they count until they are closed. Safe
  // against the owner closing the descriptor at the same time.
  bool Abort(const std::string& peer_name);

  // Nothing more is read of any connection: its owner sees its end, once it has read what is there. What was written to
  // it is still sent. As safe as Abort.
  void EndReading();

  // Resets the TCP connections that flood their owner since they last had a call: `has_call` is true of a peer's name
  // while a call of it is open, and once after each that began since it was asked. Returns them. Three system calls per
  // connection, but for one that has kept a call open for twenty looks: none.
  std::vector<Flood> AbortFloods(const FloodLimits& limits, const std::function<bool(const std::string&)>& has_call);

  bool full() const { return size() >= max_; }
  bool PeerFull(const std::string& peer_key) const { return CountOf(peer_key) >= max_per_peer_ && !peer_key.empty(); }
  int CountOf(const std::string& peer_key) const;  // 0 of the empty key
  int size() const { return static_cast<int>(open_.size()); }

 private:
  struct Connection {
    ino_t inode;
    std::string peer_key;
    std::string peer_name;
    bool aborted;
    int looks_with_call;       // in a row, until it is a long one
    int64_t bytes_with_calls;  // that it had received when it last had a call; after a long one, at the look after that
    int slow_looks;            // in a row at which bytes were waiting
  };
  void ForgetPeer(const std::string& peer_key);

  const int max_;
  const int max_per_peer_;
  std::unordered_map<int, Connection> open_;            // by descriptor
  std::unordered_map<std::string, int> count_by_peer_;  // no zero entries, no empty key
};

}  // namespace shardmesh
