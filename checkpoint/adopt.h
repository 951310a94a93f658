// AdoptFiles: a checkpoint of what another program stored: it says what the job would be and writes each tensor as a
// job stores it, in any order and files; this lays them out as checkpoint/stored_files.h has it, adds up the digest
// (core/format/stream_digest.h) and writes the manifest.
//
//   FOLDER/job.json              {"step": 1200, "job": JobSpec as protobuf's JSON (proto/shardmesh/v1/job.proto)}
//   FOLDER/model.safetensors     or several, with an index: the weights, and the scales of int8_row
//   FOLDER/states/               the same of what else a job needs; may be absent where it needs nothing
//
// Names, dtypes and shapes are those of the files of a checkpoint. What is read may come from anybody: all of it is
// checked before anything is written, and nothing is there by halves. Thread-safe for different folders.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/stored_files.h"

namespace shardmesh {

struct AdoptedCheckpoint {
  std::string job;
  std::string path;
  int64_t step = 0;
  uint64_t digest = 0;
  int64_t bytes = 0;  // of its files
};

// Writes root/step-...
//   NotFound: no job.json, or no model. InvalidArgument: a job that is none, tensors that are missing, of another dtype
//   or shape, or of no parameter; all say which. DataLoss: a value that no job may have (core/job/stored_values.h),
//   with its tensor and index. AlreadyExists: that step is there with other bits; with the same ones nothing is
//   written. Errors of ModelFiles::Open and NewCheckpoint.
absl::StatusOr<AdoptedCheckpoint> AdoptFiles(const std::string& folder, const std::string& root,
                                             int64_t max_file_bytes = kMaxFileBytes);

}  // namespace shardmesh
