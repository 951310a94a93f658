// ModelFiles: a model as the ecosystem keeps it: FOLDER/model.safetensors, or FOLDER/model.safetensors.index.json with
// the files that it names (github.com/huggingface/transformers, "sharded checkpoints").
//
// What is read may come from anybody: everything is checked before a byte of a tensor is read, nothing outside the
// folder is named, and a file that changes meanwhile is an error. Links are followed: caches of downloads are made of
// them. Immutable and thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/safetensors.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

struct ModelTensor : SafetensorsEntry {
  int file = 0;
  int64_t offset = 0;  // from the file's first byte
};

class ModelFiles {
 public:
  // `path`: such a folder, its index, or one file. Errors name the file.
  //   NotFound: nothing of that there. DataLoss: a file that is damaged, a tensor that the index names and the file has
  //   not, or the other way round, or in two files. InvalidArgument: a dtype that this build does not know, an index
  //   that names something else than a file beside it. Errors of the system as checkpoint/folder.h has them.
  static absl::StatusOr<ModelFiles> Open(const std::string& path);

  const std::vector<ModelTensor>& tensors() const { return tensors_; }  // as they lie, file by file
  const std::string& folder() const { return folder_; }
  int64_t num_bytes() const;  // of all tensors
  // Null: there is none of that name.
  const ModelTensor* Find(absl::string_view name) const;

  // A tensor's bytes. DataLoss: the file became shorter.
  absl::StatusOr<std::string> Read(const ModelTensor& tensor) const;
  // The same as floats, exactly. InvalidArgument: not F32, BF16 or F16.
  absl::StatusOr<std::vector<float>> ReadFloats(const ModelTensor& tensor) const;

 private:
  absl::StatusOr<std::vector<std::string>> AddFile(const std::string& name);
  absl::Status AddIndexed(const std::string& index);
  absl::Status IndexNames();

  std::string folder_;
  std::vector<std::string> paths_;
  std::vector<std::shared_ptr<const UniqueFd>> files_;
  std::vector<ModelTensor> tensors_;
  std::map<std::string, int, std::less<>> by_name_;
};

// What weights may be read from and written to.
bool IsFloatDtype(absl::string_view dtype);
// `dtype` of those. Rounds to nearest, ties to even.
std::string FloatsAs(absl::string_view dtype, const std::vector<float>& values);

}  // namespace shardmesh
