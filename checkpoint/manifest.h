// Manifest: what a checkpoint is, as the text of its manifest.json: the job that it is of, the step, one digest over
// all weights and states (core/format/stream_digest.h), and its files. Written last, so a folder without it is no
// checkpoint.
//
//   {"format": "shardmesh checkpoint", "version": 1, "step": 1200, "saved": 3, "digest": "0123456789abcdef",
//    "job": JobSpec as protobuf's JSON (proto/shardmesh/v1/job.proto), "files": [{"name": ..., "bytes": ...}, ...],
//    "buffers": [{"name": ..., "dtype": ..., "shape": [...], "digest": "32 hexadecimal digits"}, ...],
//    "checksum": "32 hexadecimal digits"}
//
// "saved" counts the checkpoints that were saved into one folder: the greatest is the newest, of whatever step, as a
// job may have gone back to an older one. Manifests of before it was counted have none.
//
// "buffers" are what the model has beside its parameters, such as BatchNorm's statistics, in the order in which they
// lie in the files (stored_files.h); a manifest of a checkpoint without any has no such list.
//
// The checksum (core/base/digest.h) is of all else, and a text is read only as ManifestText writes it, so an edited or
// cut one is found; it is no defence against an adversary. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/safetensors.h"
#include "core/job/job.h"

namespace shardmesh {

inline constexpr int64_t kMaxManifestBytes = int64_t{256} << 20;
inline constexpr int kMaxManifestFiles = 100'000;
inline constexpr int kMaxBuffers = 100'000;

struct Manifest {
  struct File {
    std::string name;  // of [A-Za-z0-9._-], not beginning with a dot
    int64_t bytes = 0;
  };
  struct Buffer {
    SafetensorsEntry entry;
    std::string digest;  // of its bytes (core/base/digest.h)
    bool operator==(const Buffer& other) const;
  };
  JobSpec spec;
  int64_t step = 0;
  int64_t saved = 0;  // 0: not counted
  uint64_t digest = 0;
  std::vector<File> files;
  std::vector<Buffer> buffers;

  std::vector<SafetensorsEntry> buffer_entries() const;
};

std::string ManifestText(const Manifest& manifest);

// InvalidArgument: another format or version, or a specification that this build refuses. DataLoss: a text that is
// none, was edited or cut, or lists files that it cannot have. The message says what is wrong.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text);

// What the first kManifestHead bytes of a text say. Nothing: they do not begin a manifest of this version.
inline constexpr size_t kManifestHead = 256;
struct ManifestHead {
  int64_t step = 0;
  int64_t saved = 0;
  uint64_t digest = 0;
};
std::optional<ManifestHead> ParseManifestHead(absl::string_view head);
// ManifestHead.saved alone.
std::optional<int64_t> SavedAt(absl::string_view head);

// The job in a manifest's text, by itself. InvalidArgument: no JobSpec, or one that this build refuses.
absl::StatusOr<JobSpec> ParseJobSpec(const std::string& json);

// Whether a file of a checkpoint may have this name: never a way out of its folder.
bool IsPlainFileName(absl::string_view name);

}  // namespace shardmesh
