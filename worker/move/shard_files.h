// A worker's shard and the files of a checkpoint (checkpoint/stored_files.h): written from a snapshot while training
// goes on, and read for a job that has no weights yet. The files are made by who asks, with their heads and in their
// full lengths: a file that does not look like that is not touched, nor one in a folder that `folders` does not open.
//
// Both are for a thread of their own, end soon after `cancelled` is set, and do nothing to the job if they fail. Saving
// gives that thread a low priority, so that steps go first.
#pragma once

#include <atomic>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/folder_access.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/job/job_shard.h"

namespace shardmesh {

// Tells how far it is. An error ends what it is told of.
using ReportProgress = std::function<absl::Status(const v1::FileProgress&)>;

// Shard.Save. Errors as there, and those of `report`.
absl::Status SaveShard(JobShard& shard, const FolderAccess& folders, const v1::SaveRequest& request,
                       const std::atomic<bool>& cancelled, const ReportProgress& report);

// Shard.Load: straight into the shard's storage, or by way of memory of the host into that of its device, with as many
// threads as a step has; and the digest of what it read.
// Errors as there, and those of `report`.
absl::Status LoadShard(JobShard& shard, const FolderAccess& folders, const v1::LoadRequest& request,
                       const std::atomic<bool>& cancelled, const ReportProgress& report);

// Loads a shard of a job that goes back to that checkpoint, as LoadShard does; returns its digest.
//   DataLoss: a file is missing or was changed, or a value is one that no job may begin with. Errors of LoadShard.
absl::StatusOr<uint64_t> LoadStored(JobShard& shard, const FolderAccess& folders,
                                    const v1::StoredCheckpoint& checkpoint, uint64_t load_id,
                                    const std::atomic<bool>& cancelled);

}  // namespace shardmesh
