// Checkpoints in a folder of them, each there whole or not at all:
//
//   ROOT/step-0000000001200/         a checkpoint: its files, and manifest.json, which was written last
//   ROOT/.step-XXXXXX.part/          one that is being written, or that somebody died writing: its writer holds a lock
//   ROOT/.removed-step-.../          one that is being removed
//
// A checkpoint appears by one rename, after all its bytes are on the disk. Leftovers of writers that died are removed
// by the next one. Whoever may write in ROOT is trusted not to change checkpoints while they are read; what was changed
// before is found, by size here and by digest where it is loaded. Links are not followed.
// Functions are thread-safe for different folders. Errors by what the system says: NotFound, PermissionDenied,
// ResourceExhausted (the disk is full), Unavailable; the message has the path.
//
// The newest checkpoint is the one that was saved last (Manifest.saved), whatever its step: a job that went back from
// step 8 to 3 and saves at 5 has left the checkpoint of step 8 behind.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/manifest.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr absl::string_view kHiddenStep = ".step-";  // how the name of a folder begins that is being written

// A checkpoint that is being written. For one thread; its files may be written by anybody meanwhile.
class NewCheckpoint {
 public:
  // Makes ROOT too, with its parents, and removes what dead writers left.
  static absl::StatusOr<std::unique_ptr<NewCheckpoint>> Begin(const std::string& root);
  // Removes what was not finished.
  ~NewCheckpoint();
  NewCheckpoint(const NewCheckpoint&) = delete;
  NewCheckpoint& operator=(const NewCheckpoint&) = delete;

  const std::string& path() const { return path_; }

  // A file kSecretFile in the folder, by whose content callers of workers prove that they save here (folder_access.h).
  // Finish removes it. The content. Once.
  absl::StatusOr<std::string> MakeSecret();

  // Makes a file of `bytes`, for which the disk sets room apart, that begins with `head`. REQUIRES: IsPlainFileName.
  absl::Status AddFile(const std::string& name, absl::string_view head, int64_t bytes);

  // Into a file that AddFile made. REQUIRES: the bytes lie within its length.
  absl::Status Write(const std::string& name, int64_t offset, absl::string_view bytes);

  struct Finished {
    std::string path;
    bool already_there = false;  // a checkpoint of the same bits, which stays
  };
  // Brings all bytes to the disk, and the checkpoint into being, as the newest one; `manifest.saved` is set here. One
  // of the same bits that is there becomes the newest. DataLoss: that one has files that were changed. AlreadyExists: a
  // checkpoint of that step is there, and it has other weights, states or buffers; says which.
  absl::StatusOr<Finished> Finish(Manifest manifest);

 private:
  NewCheckpoint(std::string root, std::string path, UniqueFd lock)
      : root_(std::move(root)), path_(std::move(path)), lock_(std::move(lock)) {}

  // OK: the checkpoint at `path` has the bits that `manifest` tells of, and is the newest.
  absl::StatusOr<Finished> AlreadyThere(const std::string& path, const Manifest& manifest);

  const std::string root_, path_;
  const UniqueFd lock_;  // of the folder
  std::vector<std::string> files_;
  std::string secret_;  // path of its file; empty: none was made
  bool finished_ = false;
};

struct FoundCheckpoint {
  int64_t step = 0;
  int64_t saved = 0;  // Manifest.saved; kSavedUnknown: the manifest cannot be read, as opening it will say
  std::string path;
};
inline constexpr int64_t kSavedUnknown = std::numeric_limits<int64_t>::max();
// The newest last; whatever else lies there is passed over, links too. NotFound: there is no such folder.
absl::StatusOr<std::vector<FoundCheckpoint>> ListCheckpoints(const std::string& root);

struct OpenedCheckpoint {
  std::string path;
  Manifest manifest;
};
// `path`: a checkpoint, or a folder of them: its newest. Every file is there, and has its size. NotFound: there is
// none. DataLoss: a file is missing, or of another size. Errors of ParseManifest.
absl::StatusOr<OpenedCheckpoint> OpenCheckpoint(const std::string& path);

// Which checkpoints stay: the newest `last`, and those whose step is a multiple of `every` (0: of none). The newest
// always does.
struct KeepRule {
  int last = 0;  // 0: all
  int64_t every = 0;
};
// Removes the others; returns their steps. One that is not removed whole is no checkpoint any more.
absl::StatusOr<std::vector<int64_t>> Prune(const std::string& root, const KeepRule& rule);

}  // namespace shardmesh
