// Checkpoints of a job: written by its workers while it trains on, and given to a new job, on any mesh. Files:
// checkpoint/stored_files.h; folders: checkpoint/folder.h. The workers and this process see the same file system, under
// the same paths. Thread-safe functions; they block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/buffers.h"
#include "checkpoint/folder.h"
#include "client/cpp/client.h"

namespace shardmesh {

// How far it is, in bytes of all shards. Called by several threads, one at a time.
using OnFileProgress = std::function<void(int64_t done, int64_t total)>;

struct SaveOptions {
  // What the model has beside its parameters, in the caller's process: the files hold it behind the weights.
  std::vector<BufferValue> buffers;
  absl::Duration timeout = absl::Minutes(10);
  OnFileProgress progress;  // may be empty
  // Whether the coordinator is told of it (Job::RecordCheckpoint). Not of one that is removed again soon.
  bool record = true;
};

struct SavedCheckpoint {
  std::string path;
  int64_t step = 0;
  uint64_t digest = 0;
  int64_t bytes = 0;           // of its files
  bool already_there = false;  // the step was saved before, with the same bits
  // Of a job that goes back to a checkpoint on a loss: whether the coordinator knows of this one. If not, the job would
  // go back to an older one, or fail: older ones are to stay then. Errors of Job::RecordCheckpoint. OK: it was not to be told.
  absl::Status recorded;
};

// Writes the newest committed step to root/step-... The job waits only while each worker copies its shard in memory.
// It is there whole, and synced, or not at all. Not more than one at a time of a job. The coordinator is told of it.
//   AlreadyExists: that step is there with other weights, states or buffers. InvalidArgument: buffers that cannot be,
//   or that have the name of a parameter. FailedPrecondition: the job has no weights yet, or the workers do not see the
//   folder. Aborted: steps followed each other so fast that no common one was found, or another checkpoint is under
//   way. ResourceExhausted: the disk is full, or a worker has no memory for the copy. DataLoss: replicas
//   differ, or that step is there, and its files were changed since.
//   Unavailable: a worker is gone, named. DeadlineExceeded.
absl::StatusOr<SavedCheckpoint> SaveCheckpoint(Job& job, const std::string& root, const SaveOptions& options = {});

struct RestoreOptions {
  std::string name;  // of the new job; empty: as it was saved
  std::string mesh;  // "ddp=2,fsdp=2"; empty: as it was saved
  // Of each wait for others. Reading the files may take as much longer as they have bytes: a second for 50 MB.
  absl::Duration timeout = absl::Minutes(10);
  OnFileProgress progress;  // may be empty
  // The format in which the new job gathers its weights ("stored", "fp8_tensor", ...), but those stored in nf4, which
  // are gathered so; empty: as it was saved. Its weights and states are the same.
  std::string gather;
  // If no mesh is given: that of the checkpoint where it fits the live workers, else one that does
  // (CreateJobRequest.fit_mesh). False: as it was saved, which may wait for workers.
  bool fit_mesh = false;
  // The uid of the job of this name whose place the restored one takes; 0: there is none. Both happen at once: when the
  // coordinator has made the new job, the old one's weights are gone.
  int64_t replaces_uid = 0;
  // "full" or "bucket"; empty: as it was saved. The job has the same bits with either.
  std::string residency;
  // Elements gathered together, and buckets beyond the one that a trainer works on (JobSpec); 0: as it was saved.
  int64_t bucket_elements = 0;
  int64_t prefetch_buckets = 0;
  // "fail" or "checkpoint"; empty: as it was saved.
  std::string on_loss;
  int64_t copies = 0;  // JobSpec::copies; 0: as it was saved
  // As SaveOptions::record, of the checkpoint that is restored.
  bool record = true;
};

// Creates the job of a checkpoint, or of the newest one in a folder of them, and gives it its weights and states: it
// continues after that step with the bits that it had. Buffers are checked, and are for the caller to read
// (ReadBuffers). Nothing is loaded by halves: if this fails, the job that it made is deleted again. One that took the
// place of another stays, without weights: a later RestoreCheckpoint gives it some.
//   NotFound: no checkpoint there. DataLoss: a file is not what was saved. InvalidArgument: a mesh, a gather format or a
//   residency that is none, sizes of buckets that cannot be, or a manifest of another build. FailedPrecondition: a job
//   of that name has weights already, or got them meanwhile from somebody else. Aborted: somebody else loads it all the
//   time. AlreadyExists: it is another job. Errors of Client::OpenJob.
absl::StatusOr<std::shared_ptr<Job>> RestoreCheckpoint(Client& client, const std::string& path,
                                                       const RestoreOptions& options = {});

}  // namespace shardmesh
