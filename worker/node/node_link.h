// NodeLink: a worker's connection to the node of its host (shardmesh-node), and what it gave the node. While the
// node lives, memory that was given outlives the worker, and its next incarnation finds it.
//
// The node may die and come back: a thread of the link sees that at once (the connection closes), asks again until
// it is there, and gives it everything anew. Meanwhile connected() is false, and what is given or dropped is told when
// it is back.
//
// Thread-safe. Each call ends within kNodeTimeout.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/memory/segment.h"

namespace shardmesh {

inline constexpr absl::Duration kNodeTimeout = absl::Seconds(5);

// A job of which the node has all that one worker gave.
struct RetainedJob {
  std::string job;
  int64_t epoch = 0;
  int rank = 0;
  std::string plan_hash;
};

class NodeLink {
 public:
  // What the last incarnation of this worker left, as the node said when this incarnation came.
  struct Left {
    int64_t incarnation = 0;            // 0: nothing
    std::string address, local_socket;  // where it was reached
    std::vector<RetainedJob> jobs;      // that are whole
    int64_t away_since_nanos = 0;       // MonotonicNanos, when the last incarnation that served ended; 0: not known
  };

  // Unavailable: no node listens at `path`. AlreadyExists: another process that lives is this worker.
  // `changed`: called by the link's thread when connected() has changed; may be empty.
  static absl::StatusOr<std::unique_ptr<NodeLink>> Connect(const std::string& path, const std::string& worker,
                                                           int64_t incarnation, std::function<void()> changed);
  virtual ~NodeLink() = default;

  virtual const Left& left() const = 0;
  // Of this incarnation: what Connect was given, or one more than the last incarnation's if that is larger.
  virtual int64_t incarnation() const = 0;
  virtual bool connected() const = 0;
  // In place of what Connect was given. When it returns, the one before is not running any more.
  virtual void OnChange(std::function<void()> changed) = 0;

  // Where this incarnation is reached.
  virtual absl::Status Serve(const std::string& address, const std::string& local_socket) = 0;
  // After Serve: the coordinator knows this incarnation, as this incarnation, and expects a sign of life of it, or the
  // next incarnation, within `heartbeat_timeout`.
  virtual absl::Status Joined(int64_t incarnation, absl::Duration heartbeat_timeout) = 0;

  // Gives a segment: the node holds a descriptor of it under the name, in place of the one before.
  // ResourceExhausted: the node has no descriptor left. Unavailable: not connected; it will be given later.
  virtual absl::Status Keep(const std::string& job, int64_t epoch, const std::string& name, const Segment& segment) = 0;
  // Maps what any worker of this node gave. NotFound: nobody did. Unavailable: not connected.
  virtual absl::StatusOr<Segment> Find(const std::string& job, int64_t epoch, const std::string& name) = 0;
  // All that the job needs of this worker is given: the next incarnation may take it over.
  virtual absl::Status Whole(const RetainedJob& job) = 0;
  // What this worker gave for the job, in this incarnation or the last, is not needed any more. Others' stays.
  virtual void Drop(const std::string& job, int64_t epoch) = 0;
};

}  // namespace shardmesh
