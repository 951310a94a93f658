// What the coordinator remembers: workers, jobs and their members. Plain values; what a Store keeps.
//
//   job:   WAITING --assigned--> PREPARING --all members ready--> READY
//             ^                      |  |                           |
//             +-- plan hash differs, +  +-- a member fails --+      +-- a member dies, leaves or fails
//                 a member dies or leaves                    |      |
//                                                            +------+--> FAILED (sticky: until the job is deleted)
//   A job that would fail for a loss goes back to its newest checkpoint instead, if its specification says so and it has
//   one: it is WAITING, and PREPARING again when there are workers.
//   A READY job whose other members have a copy of every shard re-forms when a member dies or leaves: it is PREPARING
//   again, without that one, with from_epoch set, and so again if it loses another; else it fails. It never waits, but
//   for the next incarnation of a worker that a node restarts, while nobody else has its shard.
//   A READY job that is brought to another mesh (Coordinator::Reshard) re-forms, too, once its members to be have
//   prepared: until then nothing of it changes.
//   worker: alive --silent longer than the timeout--> dead --a heartbeat of the same incarnation--> alive
//           alive or dead --Leave--> left --Join with a larger incarnation--> alive
//           alive --Join of the next incarnation, which takes it over--> alive, as that incarnation; its READY jobs
//           stay READY
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/store/shared_list.h"

namespace shardmesh {

// The numbers stand in state files: never change one.
enum class WorkerState { kAlive = 1, kDead = 2, kLeft = 3 };
enum class JobState { kWaiting = 1, kPreparing = 2, kReady = 3, kFailed = 4 };

// "alive", "dead", "left"; "waiting", "preparing", "ready", "failed".
absl::string_view WorkerStateName(WorkerState state);
absl::string_view JobStateName(JobState state);

// How a worker process introduced itself. Meanings: JoinRequest in coordinator.proto.
struct WorkerIdentity {
  std::string name;
  int64_t incarnation = 0;
  std::string address;
  std::string host_id;
  std::string local_socket;
  int64_t pid = 0;

  friend bool operator==(const WorkerIdentity& a, const WorkerIdentity& b) {
    return a.name == b.name && a.incarnation == b.incarnation && a.address == b.address && a.host_id == b.host_id &&
           a.local_socket == b.local_socket && a.pid == b.pid;
  }
};

// Whether both are the same incarnation of a worker.
bool SameIncarnation(const WorkerIdentity& a, const WorkerIdentity& b);

// What a worker is, beside where. Not stored: it says so with each Join and Heartbeat.
struct WorkerTraits {
  bool spans_hosts = false;  // workers of other hosts reach it
  bool has_device = false;   // its steps run on a CUDA device
  bool retained = false;     // a node has its memory; decides no assignment

  // Whether both may be members of the same jobs.
  friend bool SameForJobs(const WorkerTraits& a, const WorkerTraits& b) {
    return a.spans_hosts == b.spans_hosts && a.has_device == b.has_device;
  }
  friend bool operator==(const WorkerTraits& a, const WorkerTraits& b) {
    return SameForJobs(a, b) && a.retained == b.retained;
  }
};

struct WorkerRecord {
  WorkerIdentity identity;
  WorkerState state = WorkerState::kAlive;
  std::string secret;  // JoinRequest.secret of this incarnation; here alone, since identities are copied and told

  friend bool operator==(const WorkerRecord& a, const WorkerRecord& b) {
    return a.identity == b.identity && a.state == b.state && a.secret == b.secret;
  }
};

// A worker in its place: as it was when the job was assigned, or taken over by its next incarnation. The rank is its
// index in
// JobRecord::members.
struct MemberRecord {
  WorkerIdentity worker;
  bool ready = false;  // it reported READY with the plan hash of the job; while that is PREPARING: see Job::ready
  int32_t was = -1;    // its rank at JobRecord::from_epoch; -1: none

  friend bool operator==(const MemberRecord& a, const MemberRecord& b) {
    return a.worker == b.worker && a.ready == b.ready && a.was == b.was;
  }
};

// A checkpoint that is there whole. Meanings: StoredCheckpoint in job.proto.
struct CheckpointRecord {
  std::string folder;
  int64_t step = 0;
  uint64_t digest = 0;
  int64_t copied_at = 0;  // the epoch at which members copied it to each other; then it has no folder

  bool is_set() const { return !folder.empty() || copied_at != 0; }
  friend bool operator==(const CheckpointRecord& a, const CheckpointRecord& b) {
    return a.folder == b.folder && a.step == b.step && a.digest == b.digest && a.copied_at == b.copied_at;
  }
};
inline constexpr size_t kMaxCheckpoints = 3;  // of a job

// Meanings: GoneBack in job.proto.
struct GoneBackRecord {
  int64_t epoch = 0;
  CheckpointRecord checkpoint;
  int64_t lost_step = -1;
  std::string cause;

  friend bool operator==(const GoneBackRecord& a, const GoneBackRecord& b) {
    return a.epoch == b.epoch && a.checkpoint == b.checkpoint && a.lost_step == b.lost_step && a.cause == b.cause;
  }
};

// A job without its specification as it was given, which never changes and is kept apart.
struct JobRecord {
  std::string name;
  int64_t uid = 0;     // JobDescription.uid
  std::string secret;  // Assignment.secret; empty: it was assigned by a version that had none
  JobState state = JobState::kWaiting;
  int64_t epoch = 0;                  // of the last assignment; 0 before the first
  SharedList<MemberRecord> members;   // by rank; empty while WAITING
  // Incarnations of workers whose plan hash differed, or that failed while it re-formed: never members of this job
  // again.
  std::vector<std::string> excluded;
  std::string error;  // of FAILED: the first cause
  int64_t committed_step = -1;
  std::vector<int64_t> published_steps;  // ascending
  std::string mesh;                      // of its members, MeshSpec::ToString; empty: that of its specification
  std::string wanted_mesh;               // that it was brought to last; empty: that of its specification
  // While it re-forms: the epoch at which it was READY last, and its mesh then. Else 0 and empty.
  int64_t from_epoch = 0;
  std::string from_mesh;
  // Then, too: workers that were members at that epoch and are not now, each with its rank there (MemberRecord::was).
  // They keep what they held: for the members, of a job that is resharded, or should another member be lost.
  SharedList<MemberRecord> others;
  std::vector<CheckpointRecord> checkpoints;  // the newest first, at most kMaxCheckpoints
  bool goes_back = false;                     // WAITING or PREPARING: to that of `gone_back`
  // The last time that it did; no checkpoint is set: never. Its epoch is the first one after that; while it goes back, 0.
  GoneBackRecord gone_back;

  friend bool operator==(const JobRecord& a, const JobRecord& b) {
    return a.name == b.name && a.uid == b.uid && a.secret == b.secret && a.state == b.state && a.epoch == b.epoch &&
           a.members == b.members && a.excluded == b.excluded && a.error == b.error &&
           a.committed_step == b.committed_step && a.published_steps == b.published_steps && a.mesh == b.mesh &&
           a.wanted_mesh == b.wanted_mesh && a.checkpoints == b.checkpoints && a.goes_back == b.goes_back &&
           a.gone_back == b.gone_back && a.from_epoch == b.from_epoch && a.from_mesh == b.from_mesh &&
           a.others == b.others;
  }
};

}  // namespace shardmesh
