#include "checkpoint/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "checkpoint/file_changes.h"
#include "checkpoint/folder_access.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kStep = "step-", kRemoved = ".removed-";
constexpr size_t kStepDigits = 13;
constexpr int kAttempts = 10;
constexpr size_t kCompared = size_t{1} << 20;

// Invalid: somebody else holds it, or it is gone.
UniqueFd LockFolder(const std::string& path) {
  UniqueFd folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  return folder.valid() && flock(folder.get(), LOCK_EX | LOCK_NB) == 0 ? std::move(folder) : UniqueFd();
}

// What was being removed, and what is being written by nobody.
void RemoveLeftovers(const std::string& root) {
  std::error_code error;
  for (fs::directory_iterator entry(root, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    struct stat info = {};
    if (lstat(entry->path().c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) continue;
    const UniqueFd folder = absl::StartsWith(name, kHiddenStep) ? LockFolder(entry->path().string()) : UniqueFd();
    if (!folder.valid() && !absl::StartsWith(name, kRemoved)) continue;
    RemoveFolder(entry->path().string()).IgnoreError();  // the next one tries again
  }
}

// The step of a checkpoint's folder; -1: it has another name.
int64_t StepOf(absl::string_view name) {
  int64_t step = -1;
  const bool has = absl::StartsWith(name, kStep) && name.size() == kStep.size() + kStepDigits &&
                   std::all_of(name.begin() + kStep.size(), name.end(), absl::ascii_isdigit) &&
                   absl::SimpleAtoi(name.substr(kStep.size()), &step);
  return has ? step : -1;
}

std::string NameOf(int64_t step) { return absl::StrFormat("step-%013d", step); }

bool HasManifest(const std::string& folder) {
  struct stat info = {};
  return lstat((folder + "/" + kManifestFile).c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

absl::StatusOr<std::string> ReadManifest(const std::string& path) {
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kFileRead));
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (!fd.valid() || fstat(fd.get(), &info) != 0) return FailedTo("open", path, errno);
  if (!S_ISREG(info.st_mode) || info.st_size > kMaxManifestBytes) {
    return absl::DataLossError(absl::StrCat(path, " is no file of at most ", kMaxManifestBytes, " bytes"));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  for (size_t done = 0; done < text.size();) {
    const ssize_t got = read(fd.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FailedTo("read", path, errno);
    if (got == 0) text.resize(done);
    done += static_cast<size_t>(got);
  }
  return text;
}

absl::Status CheckFile(const std::string& folder, const Manifest::File& file) {
  const std::string path = absl::StrCat(folder, "/", file.name);
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kFileRead));
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::DataLossError(path + " is missing") : FailedTo("look at", path, errno);
  }
  if (S_ISREG(info.st_mode) && info.st_size == file.bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(path, S_ISREG(info.st_mode) ? "" : " is no regular file, and", " has ",
                                          info.st_size, " bytes; it was saved with ", file.bytes));
}

// In which the checkpoints that are there differ from what `manifest` tells of; empty: in nothing.
std::string Difference(const Manifest& there, const Manifest& manifest) {
  if (there.digest != manifest.digest) return "weights or states";
  return there.buffers == manifest.buffers ? "" : "buffers";
}

// Whether two files have the same bytes. REQUIRES: they have the same size.
absl::StatusOr<bool> SameBytes(const std::string& one, const std::string& other) {
  const UniqueFd files[] = {UniqueFd(open(one.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC)),
                            UniqueFd(open(other.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC))};
  if (!files[0].valid() || !files[1].valid()) return FailedTo("open", files[0].valid() ? other : one, errno);
  std::string parts[] = {std::string(kCompared, '\0'), std::string(kCompared, '\0')};
  for (int64_t at = 0;; at += kCompared) {
    size_t got[2] = {};
    for (int i = 0; i < 2; ++i) {
      while (got[i] < kCompared) {
        const ssize_t more =
            pread(files[i].get(), &parts[i][got[i]], kCompared - got[i], at + static_cast<int64_t>(got[i]));
        if (more < 0 && errno == EINTR) continue;
        if (more < 0) return FailedTo("read", i == 0 ? one : other, errno);
        if (more == 0) break;
        got[i] += static_cast<size_t>(more);
      }
    }
    if (got[0] != got[1] || std::memcmp(parts[0].data(), parts[1].data(), got[0]) != 0) return false;
    if (got[0] < kCompared) return true;
  }
}

// DataLoss: a file at `path` is not the one of `written`, where both were to be the same checkpoint.
absl::Status CheckBytes(const std::string& path, const std::string& written, const Manifest& there) {
  for (const Manifest::File& file : there.files) {
    const std::string one = absl::StrCat(path, "/", file.name), other = absl::StrCat(written, "/", file.name);
    struct stat info = {};
    if (lstat(other.c_str(), &info) != 0 || info.st_size != file.bytes) return absl::OkStatus();  // cut in other files
    ASSIGN_OR_RETURN(const bool same, SameBytes(one, other));
    if (same) continue;
    return absl::DataLossError(absl::StrCat(one,
                                            " is not what was saved: it was changed since, or the disk has lost it; "
                                            "remove ",
                                            path, " and save again"));
  }
  return absl::OkStatus();
}

// Of the manifest at `path`.
int64_t SavedOf(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  char head[kManifestHead];
  const ssize_t got = fd.valid() ? pread(fd.get(), head, sizeof(head), 0) : 0;
  return SavedAt(absl::string_view(head, static_cast<size_t>(std::max<ssize_t>(got, 0)))).value_or(kSavedUnknown);
}

// Of what is saved next into `root`.
absl::StatusOr<int64_t> NextSaved(const std::string& root) {
  ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, ListCheckpoints(root));
  int64_t last = 0;
  for (const FoundCheckpoint& each : found) last = std::max(last, each.saved == kSavedUnknown ? 0 : each.saved);
  return last + 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NewCheckpoint>> NewCheckpoint::Begin(const std::string& root) {
  RETURN_IF_ERROR(MakeFolders(root));
  RemoveLeftovers(root);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {  // others may take it for a leftover until it is locked
    ASSIGN_OR_RETURN(std::string path, MakeNewFolder(absl::StrCat(root, "/", kHiddenStep, "XXXXXX")));
    if (UniqueFd lock = LockFolder(path); lock.valid()) {
      return std::unique_ptr<NewCheckpoint>(new NewCheckpoint(root, std::move(path), std::move(lock)));
    }
  }
  return absl::UnavailableError(absl::StrCat("folders made in ", root, " are removed at once; who does that?"));
}

NewCheckpoint::~NewCheckpoint() {
  if (!finished_) RemoveFolder(path_).IgnoreError();  // the next writer tries again
}

absl::StatusOr<std::string> NewCheckpoint::MakeSecret() {
  const std::string secret = NewSecret();
  secret_ = absl::StrCat(path_, "/", kSecretFile);
  ASSIGN_OR_RETURN(const UniqueFd fd, MakeFile(secret_));
  RETURN_IF_ERROR(WriteAll(fd.get(), secret, secret_));
  return secret;
}

absl::Status NewCheckpoint::AddFile(const std::string& name, absl::string_view head, int64_t bytes) {
  const std::string path = absl::StrCat(path_, "/", name);
  ASSIGN_OR_RETURN(const UniqueFd fd, MakeFile(path));
  RETURN_IF_ERROR(SetLength(fd.get(), bytes, path));
  RETURN_IF_ERROR(WriteAll(fd.get(), head, path));
  files_.push_back(path);
  return absl::OkStatus();
}

absl::Status NewCheckpoint::Write(const std::string& name, int64_t offset, absl::string_view bytes) {
  const std::string path = absl::StrCat(path_, "/", name);
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid() || lseek(fd.get(), offset, SEEK_SET) < 0) return FailedTo("write", path, errno);
  return WriteAll(fd.get(), bytes, path);
}

absl::StatusOr<NewCheckpoint::Finished> NewCheckpoint::Finish(Manifest manifest) {
  const std::string final_path = absl::StrCat(root_, "/", NameOf(manifest.step));
  if (HasManifest(final_path)) return AlreadyThere(final_path, manifest);
  ASSIGN_OR_RETURN(manifest.saved, NextSaved(root_));
  if (!secret_.empty()) RETURN_IF_ERROR(RemoveFile(secret_));  // from now on no worker writes here
  const std::string text = ManifestText(manifest);
  RETURN_IF_ERROR(AddFile(kManifestFile, text, static_cast<int64_t>(text.size())));
  for (const std::string& path : files_) RETURN_IF_ERROR(SyncFile(path));
  RETURN_IF_ERROR(SyncFolder(path_));
  const absl::Status renamed = Rename(path_, final_path);
  if (!renamed.ok() && (!absl::IsAlreadyExists(renamed) || !HasManifest(final_path))) return renamed;
  if (!renamed.ok()) return AlreadyThere(final_path, manifest);
  finished_ = true;
  RETURN_IF_ERROR(SyncFolder(root_));
  return Finished{final_path};
}

absl::StatusOr<NewCheckpoint::Finished> NewCheckpoint::AlreadyThere(const std::string& path, const Manifest& manifest) {
  ASSIGN_OR_RETURN(OpenedCheckpoint there, OpenCheckpoint(path));
  if (const std::string others = Difference(there.manifest, manifest); !others.empty()) {
    return absl::AlreadyExistsError(absl::StrCat("step ", manifest.step, " is saved already, in ", path,
                                                 ", with other ", others,
                                                 "; save to another folder, or remove that checkpoint first"));
  }
  RETURN_IF_ERROR(CheckBytes(path, path_, there.manifest));
  ASSIGN_OR_RETURN(const int64_t next, NextSaved(root_));
  if (there.manifest.saved + 1 <
      next) {  // others were saved since: a manifest takes the place of the one that is there
    there.manifest.saved = next;
    const std::string text = ManifestText(there.manifest), written = absl::StrCat(path_, "/newest-", kManifestFile);
    RETURN_IF_ERROR(AddFile(absl::StrCat("newest-", kManifestFile), text, static_cast<int64_t>(text.size())));
    RETURN_IF_ERROR(SyncFile(written));
    RETURN_IF_ERROR(Rename(written, absl::StrCat(path, "/", kManifestFile)));
    RETURN_IF_ERROR(SyncFolder(path));
  }
  return Finished{path, /*already_there=*/true};
}

absl::StatusOr<std::vector<FoundCheckpoint>> ListCheckpoints(const std::string& root) {
  std::vector<FoundCheckpoint> found;
  std::error_code error, ignored;
  fs::directory_iterator entry(root, error);
  if (error) return FailedTo("open the folder", root, error.value());
  for (const fs::directory_iterator end; !error && entry != end; entry.increment(error)) {
    const int64_t step = StepOf(entry->path().filename().string());
    if (step >= 0 && !entry->is_symlink(ignored) && HasManifest(entry->path().string()))
      found.push_back(
          {step, SavedOf(absl::StrCat(entry->path().string(), "/", kManifestFile)), entry->path().string()});
  }
  if (error) return FailedTo("read the folder", root, error.value());
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return std::pair(a.saved, a.step) < std::pair(b.saved, b.step); });
  return found;
}

absl::StatusOr<OpenedCheckpoint> OpenCheckpoint(const std::string& path) {
  OpenedCheckpoint opened{path, {}};
  if (!HasManifest(path)) {
    ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, ListCheckpoints(path));
    if (found.empty()) {
      return absl::NotFoundError(absl::StrCat(path, " is no checkpoint: it has no ", kManifestFile,
                                              ", and no folders step-... that have one"));
    }
    opened.path = found.back().path;
  }
  const std::string manifest = absl::StrCat(opened.path, "/", kManifestFile);
  ASSIGN_OR_RETURN(const std::string text, ReadManifest(manifest));
  absl::StatusOr<Manifest> parsed = ParseManifest(text);
  if (!parsed.ok()) return Annotate(parsed.status(), manifest);
  opened.manifest = *std::move(parsed);
  for (const Manifest::File& file : opened.manifest.files) RETURN_IF_ERROR(CheckFile(opened.path, file));
  return opened;
}

absl::StatusOr<std::vector<int64_t>> Prune(const std::string& root, const KeepRule& rule) {
  ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, ListCheckpoints(root));
  std::vector<int64_t> removed;
  const int last = rule.last == 0 ? static_cast<int>(found.size()) : rule.last;
  for (int i = 0; i + last < static_cast<int>(found.size()); ++i) {
    if (rule.every > 0 && found[i].step % rule.every == 0) continue;
    const std::string hidden = absl::StrCat(root, "/", kRemoved, NameOf(found[i].step));
    RETURN_IF_ERROR(Rename(found[i].path, hidden));
    removed.push_back(found[i].step);
  }
  if (!removed.empty()) RETURN_IF_ERROR(SyncFolder(root));  // before anything of them goes
  RemoveLeftovers(root);
  return removed;
}

}  // namespace shardmesh
