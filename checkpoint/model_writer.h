// WriteModel: a model as the ecosystem reads it (model_files.h), in a new folder that appears whole or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/stored_files.h"

namespace shardmesh {

// The bytes of the i-th entry.
using TensorBytes = std::function<absl::StatusOr<std::string>(size_t i)>;

// Writes the entries, in their order, to model.safetensors, or, where they are more than `max_file_bytes`, to files of
// about that size and an index; and `other_files` (name to content) beside them. All is on the disk when it returns.
//   AlreadyExists: there is something at `folder`. InvalidArgument: as SafetensorsHead; an entry whose bytes are not
//   as many as it says; names of other files that are not plain. Errors of `bytes_of`, and of the system as
//   checkpoint/folder.h has them; then nothing is left. Thread-safe for different folders.
absl::Status WriteModel(const std::string& folder, const std::vector<SafetensorsEntry>& entries,
                        const TensorBytes& bytes_of, const std::map<std::string, std::string>& other_files = {},
                        int64_t max_file_bytes = kMaxFileBytes);

}  // namespace shardmesh
