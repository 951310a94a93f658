// StoredFiles: which bytes of a job lie where in the files of a checkpoint. A function of the job's specification but
// for its mesh, and of the buffers of its model: jobs that hold the same weights and states at the same step have the
// same files, byte for byte, whatever mesh they were trained on; and each shard, of any mesh, finds its own bytes by
// arithmetic.
//
//   model.safetensors                the weights: fp32 as F32; bf16, bf16_sr, and the upper part of bf16+16 and
//   bf16+8sr
//                                    as BF16; int8_row as I8, with NAME.scales (F32, one for each row) behind it;
//                                    nf4 as U8, with NAME.scales (F32, one for 64 elements) behind it.
//                                    Behind them the buffers, which the trainer that saves has.
//                                    What the ecosystem's loaders read. More than kMaxFileBytes:
//                                    model-00001-of-00003... and model.safetensors.index.json, which says what lies
//                                    where
//   states.safetensors (...)         what only a job needs: NAME.remainder of weights in two parts; optimizer states
//                                    NAME.exp_avg, ... as torch.optim calls them, as they are stored, and
//                                    NAME.exp_avg.scales
//
// Tied parameters have their owner's entry alone. Codes of less than a byte lie packed, as U8 of one dimension.
// Headers hold nothing that varies, so whoever knows the job knows the bytes of each header: files are compared with
// it, and never parsed. Format: github.com/huggingface/safetensors.
//
// A pure function of its arguments; immutable and thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/safetensors.h"
#include "core/format/numeric_formats.h"
#include "core/job/job.h"

namespace shardmesh {

inline constexpr int64_t kMaxFileBytes = 5'000'000'000;  // about, as the ecosystem cuts files

inline constexpr int kBufferTensor = -1;

// A part of a tensor that is stored by itself.
struct FilePart {
  int tensor = 0;      // index in JobSpec::parameters; kBufferTensor: a buffer
  int stream = 0;      // 0 the weights, 1 to 3 the states in their order
  bool extra = false;  // the remainder, or the scales
  PartLayout layout;
  std::string name;  // in the file
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  int file = 0;
  int64_t offset = 0;  // from the file's first byte

  // Where elements [first, ...) of the tensor begin in the file. REQUIRES: an entry of the layout begins there.
  int64_t OffsetOf(int64_t first) const { return offset + first / layout.elements * layout.bytes; }
};

struct StoredFile {
  std::string name;
  std::string head;   // length and header, with which it begins
  int64_t bytes = 0;  // of all
};

class StoredFiles {
 public:
  // InvalidArgument: as JobSpec::Validate; a tensor named like safetensors' metadata; two of one name.
  static absl::StatusOr<StoredFiles> Create(const JobSpec& spec, const std::vector<SafetensorsEntry>& buffers = {},
                                            int64_t max_file_bytes = kMaxFileBytes);

  absl::Span<const StoredFile> files() const { return files_; }
  absl::Span<const FilePart> parts() const { return parts_; }
  // Null: a tensor without that part. REQUIRES: no buffer.
  const FilePart* Find(int tensor, int stream, bool extra) const;
  int64_t num_bytes() const;  // of all files
  // Of several files of weights, the text of model.safetensors.index.json; empty: there is one.
  const std::string& index() const { return index_; }

 private:
  using Key = std::pair<int, int>;  // tensor, 2 * stream + extra
  void AddParts(const JobSpec& spec, int tensor);
  absl::Status MakeFiles(const std::string& stem, bool weights, int64_t max_file_bytes);
  void MakeIndex();

  std::vector<FilePart> parts_;
  std::vector<StoredFile> files_;
  std::map<Key, int> index_of_;
  std::string index_;
};

inline constexpr char kModelStem[] = "model";
inline constexpr char kIndexFile[] = "model.safetensors.index.json";

}  // namespace shardmesh
