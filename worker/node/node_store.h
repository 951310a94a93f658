// NodeStore: what a node knows: who is which worker, which memory each gave, and what a worker's next incarnation
// finds.
//
// Incarnations: a worker's incarnation is a process and an incarnation. It begins with Hello and is over when its
// process has ended (Ended, told by the owner of the store, who watches processes), or when the same process says hello
// with a newer incarnation. After an incarnation that was killed, the next one is told where its last incarnation
// served and which jobs are whole; memory of other jobs goes. After an incarnation that ended in order nothing is left.
//
// Holds descriptors, maps nothing. No threads, no sockets, no time. Thread-compatible.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/descriptor/fd.h"
#include "proto/shardmesh/v1/node.pb.h"

namespace shardmesh {

inline constexpr int kMaxRetainedWorkers = 1024;
inline constexpr int kMaxRetainedSegments = 4096;  // of a worker
inline constexpr int kMaxRetainedJobs = 64;        // of a worker that are whole: all are in one reply
inline constexpr int kMaxRetainedNameBytes = 192;  // of a segment's name, which has a job's in it, and a plan's hash
inline constexpr int kMaxRetainedAddressBytes = 1024;

class NodeStore {
 public:
  // A segment as Find gives it; the descriptor is the store's.
  struct Found {
    int fd = -1;
    int64_t num_bytes = 0, data_offset = 0;
  };

  // Begins the incarnation, or goes on with it when it is the current one; either way the same reply. The incarnation's
  // incarnation is larger than the last one's, whatever it asks for: the wall clock may have been set back.
  //   InvalidArgument: the worker's name is no id, or the incarnation not of 1 to kMaxIncarnation.
  //   AlreadyExists: another process is this worker, and has not ended. Aborted: this process said hello with a newer
  //   incarnation. ResourceExhausted: kMaxRetainedWorkers.
  absl::StatusOr<v1::NodeReply> Hello(const v1::NodeHello& hello, pid_t pid);

  // The process has ended; `orderly`: with status 0. Nothing when another process, or none, is this worker.
  void Ended(const std::string& worker, pid_t pid, bool orderly, int64_t now_nanos);
  // Whether the worker's incarnation that is this process has said where it serves.
  bool Served(const std::string& worker, pid_t pid) const;
  // The coordinator's, as the worker said in the newest incarnation that had joined. Zero: none said so.
  absl::Duration HeartbeatTimeout(const std::string& worker) const;
  // The process that is the worker; 0: none.
  pid_t Pid(const std::string& worker) const;

  // Of a worker that said hello. FailedPrecondition: it did not. InvalidArgument: a value is over its limit.
  absl::Status Serving(const std::string& worker, const v1::NodeServing& serving);
  // InvalidArgument also: the descriptor is no memory of num_bytes whose size is sealed. ResourceExhausted:
  // kMaxRetainedSegments.
  absl::Status Keep(const std::string& worker, const v1::RetainSegment& keep, UniqueFd fd);
  // Of any worker; when several gave one of that name, the asking worker's own. NotFound: nobody did.
  absl::StatusOr<Found> Find(const std::string& asking, const v1::FindSegment& find) const;
  // ResourceExhausted: kMaxRetainedJobs.
  absl::Status Whole(const std::string& worker, const v1::RetainedJob& job);
  absl::Status Drop(const std::string& worker, const v1::DropJob& drop);

 private:
  using JobKey = std::pair<std::string, int64_t>;                    // job, epoch
  using SegmentKey = std::tuple<std::string, int64_t, std::string>;  // job, epoch, name
  struct Segment {
    UniqueFd fd;
    int64_t num_bytes = 0, data_offset = 0;
  };
  struct Worker {
    pid_t pid = 0;  // 0: it has ended
    int64_t incarnation = 0;
    int64_t asked = 0, granted = 0;  // by and to this incarnation's hello
    bool served = false;             // in this incarnation
    int64_t away_since = 0;          // when the newest incarnation that served ended; 0: it has not
    v1::NodeServing serving;         // of the newest incarnation that served
    std::map<SegmentKey, Segment> segments;
    std::map<JobKey, v1::RetainedJob> whole;
    v1::NodeReply welcome;  // of this incarnation
  };

  absl::StatusOr<Worker*> Alive(const std::string& worker);
  static void DropUnfinished(Worker& worker);

  std::map<std::string, Worker> workers_;
};

}  // namespace shardmesh
