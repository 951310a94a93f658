// Buffers: tensors of a model that are no parameters of its job, such as BatchNorm's statistics. A trainer has their
// values and the service does not, so whoever saves a checkpoint hands them over. They lie in the files of the weights,
// behind those (stored_files.h), and the manifest has a digest of each. Thread-safe for different checkpoints.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/stored_files.h"

namespace shardmesh {

struct BufferValue {
  SafetensorsEntry entry;
  std::string bytes;
};

// As a manifest lists them. InvalidArgument: one whose bytes are not as many as its dtype and shape take; more than
// kMaxBuffers.
absl::StatusOr<std::vector<Manifest::Buffer>> DescribeBuffers(const std::vector<BufferValue>& values);

// Into files that are there, with their heads. REQUIRES: `files` was created with the entries of `values`.
absl::Status WriteBuffers(const StoredFiles& files, const std::vector<BufferValue>& values, NewCheckpoint& checkpoint);

// Those of a checkpoint, in its manifest's order. DataLoss: one changed since it was saved; names it.
absl::StatusOr<std::vector<BufferValue>> ReadBuffers(const OpenedCheckpoint& opened);

}  // namespace shardmesh
