#include "worker/move/shard_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "checkpoint/folder.h"
#include "checkpoint/stored_files.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/file_error.h"
#include "core/base/give_way.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "core/format/stream_digest.h"
#include "core/job/stored_values.h"
#include "local/descriptor/fd.h"
#include "worker/memory/memory.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/thread_team.h"

namespace shardmesh {
namespace {

constexpr int64_t kReportBytes = 32 << 20, kPieceBytes = 256 << 10;
constexpr int kNice = 19;                           // of a thread that ends with its call
constexpr absl::Duration kIdle = absl::Seconds(2);  // a job that has done nothing for so long does not step
constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kRetry = absl::Milliseconds(2);
constexpr absl::Duration kLongestRound = absl::Seconds(20);

// A folder that is not there is the caller's to make.
absl::Status FileFailed(absl::string_view verb, const std::string& path, int error) {
  const absl::Status failed = FailedTo(verb, path, error);
  return absl::IsNotFound(failed) || error == ELOOP ? absl::FailedPreconditionError(failed.message()) : failed;
}

// A stretch of a part that is contiguous both in its file and in memory. Short enough to stay in a core's cache.
struct FilePiece {
  const FilePart* part = nullptr;
  int64_t first_element = 0;
  int64_t num_elements = 0;
  char* data = nullptr;

  int64_t bytes() const { return part->layout.BytesOf(num_elements); }
  int64_t offset() const { return part->OffsetOf(first_element); }
};

uint64_t DigestOf(const FilePiece& piece, const char* data) {
  const FilePart& part = *piece.part;
  return DigestPart(DigestKey(static_cast<uint32_t>(part.tensor), part.stream, part.extra ? 1 : 0), part.layout,
                    static_cast<uint64_t>(piece.first_element), data, piece.num_elements);
}

StoredRun RunAt(const ShardStorage& storage, int range, int parity, int stream, int64_t offset) {
  return stream == 0 ? storage.weights(range, parity, offset) : storage.state(stream - 1, range, parity, offset);
}

// Calls visit(part, run, data) for every part of every run of a shard, stream after stream of each range.
template <class Visit>
void ForEachPart(const StoredFiles& files, const ShardStorage& storage, int parity, const Visit& visit) {
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    for (int stream = 0; stream <= kStates; ++stream) {
      for (const bool extra : {false, true}) {
        if (storage.ranges()[range].parts[StreamOf(stream, extra)].bytes == 0) continue;
        for (const ChunkRun& run : storage.runs(range)) {
          const StoredRun at = RunAt(storage, range, parity, stream, run.offset);
          const FilePart* const part = files.Find(run.tensor, stream, extra);
          if (part != nullptr) visit(*part, run, static_cast<char*>(extra ? at.extra : at.codes));
        }
      }
    }
  }
}

std::vector<FilePiece> PiecesIn(const StoredFiles& files, const ShardStorage& storage, int parity) {
  std::vector<FilePiece> pieces;
  ForEachPart(files, storage, parity, [&](const FilePart& part, const ChunkRun& run, char* data) {
    if (!pieces.empty()) {
      FilePiece& last = pieces.back();
      const bool follows = last.part == &part && last.first_element + last.num_elements == run.first_element &&
                           last.data + last.bytes() == data;
      if (follows && last.bytes() + part.layout.BytesOf(run.num_elements) <= kPieceBytes) {
        last.num_elements += run.num_elements;
        return;
      }
    }
    pieces.push_back({&part, run.first_element, run.num_elements, data});
  });
  return pieces;
}

// The files of a folder that some pieces lie in, by their number; the others stay closed.
class OpenFiles {
 public:
  // Each is a regular file of the right length that begins with its head.
  // `path`: of the folder, for messages.
  static absl::StatusOr<OpenFiles> Open(const UniqueFd& folder, const std::string& path, const StoredFiles& files,
                                        bool write) {
    OpenFiles open;
    for (const StoredFile& file : files.files()) {
      open.paths_.push_back(absl::StrCat(path, "/", file.name));
      ASSIGN_OR_RETURN(UniqueFd fd, OpenOne(folder, open.paths_.back(), file, write));
      open.fds_.push_back(std::move(fd));
    }
    return open;
  }

  absl::Status Write(const FilePiece& piece) const {
    return Move<ssize_t (*)(int, const void*, size_t, off_t)>(piece, piece.data, pwrite, "write",
                                                              FaultPoint::kFileChange);
  }
  absl::Status Read(const FilePiece& piece, char* to) const {
    return Move<ssize_t (*)(int, void*, size_t, off_t)>(piece, to, pread, "read", FaultPoint::kFileRead);
  }

  // Has the disk begin with what was written so far. A wish.
  void BeginSync() const {
    for (const UniqueFd& fd : fds_) sync_file_range(fd.get(), 0, 0, SYNC_FILE_RANGE_WRITE);
  }
  absl::Status Sync() const {
    for (size_t i = 0; i < fds_.size(); ++i) {
      RETURN_IF_ERROR(ErrorAt(FaultPoint::kFileChange));
      if (fdatasync(fds_[i].get()) != 0) return FileFailed("sync", paths_[i], errno);
    }
    return absl::OkStatus();
  }

 private:
  static absl::StatusOr<UniqueFd> OpenOne(const UniqueFd& folder, const std::string& path, const StoredFile& file,
                                          bool write) {
    if (!write) RETURN_IF_ERROR(ErrorAt(FaultPoint::kFileRead));
    const int flags = (write ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
    UniqueFd fd(openat(folder.get(), file.name.c_str(), flags));
    if (!fd.valid()) return FileFailed("open", path, errno);
    struct stat stat;
    if (fstat(fd.get(), &stat) != 0) return FileFailed("look at", path, errno);
    if (!S_ISREG(stat.st_mode) || stat.st_size != file.bytes) {
      return absl::FailedPreconditionError(absl::StrCat(path, " is no regular file of ", file.bytes,
                                                        " bytes, which this job's is; it has ", stat.st_size));
    }
    if (write && stat.st_nlink != 1) {
      return absl::FailedPreconditionError(absl::StrCat(path, " has ", stat.st_nlink,
                                                        " names; it may be a file of "
                                                        "another checkpoint: make a new one"));
    }
    std::string head(file.head.size(), '\0');
    const ssize_t got = pread(fd.get(), head.data(), head.size(), 0);
    if (got < 0) return FileFailed("read", path, errno);
    if (got == static_cast<ssize_t>(head.size()) && head == file.head) return fd;
    return absl::FailedPreconditionError(
        absl::StrCat(path, " does not begin as this job's file: it is of other parameters, formats or optimizers"));
  }

  template <class Call>
  absl::Status Move(const FilePiece& piece, char* data, Call call, const char* verb, FaultPoint point) const {
    const int file = piece.part->file;
    for (int64_t done = 0, bytes = piece.bytes(); done < bytes;) {
      RETURN_IF_ERROR(ErrorAt(point));
      const ssize_t moved =
          call(fds_[file].get(), data + done, static_cast<size_t>(bytes - done), piece.offset() + done);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) return FileFailed(verb, paths_[file], errno);
      if (moved == 0) return absl::DataLossError(absl::StrCat(paths_[file], " became shorter while it was read"));
      done += moved;
    }
    return absl::OkStatus();
  }

  std::vector<std::string> paths_;
  std::vector<UniqueFd> fds_;
};

// Moves all pieces, and tells now and then. The caller tells the end.
template <class Move>
absl::Status MoveAll(const std::vector<FilePiece>& pieces, const std::atomic<bool>& cancelled,
                     const ReportProgress& report, v1::FileProgress& progress, const Move& move) {
  int64_t told = 0, done = 0;
  for (const FilePiece& piece : pieces) {
    if (cancelled.load()) return absl::CancelledError("the caller is gone");
    RETURN_IF_ERROR(move(piece));
    done += piece.bytes();
    if (done - told < kReportBytes || done == progress.bytes_total()) continue;
    progress.set_bytes_done(told = done);
    RETURN_IF_ERROR(report(progress));
  }
  progress.set_bytes_done(done);
  return absl::OkStatus();
}

int64_t BytesOf(const std::vector<FilePiece>& pieces) {
  int64_t bytes = 0;
  for (const FilePiece& piece : pieces) bytes += piece.bytes();
  return bytes;
}

absl::Status CheckFiles(JobShard& shard, int64_t epoch, Feature feature) {
  RETURN_IF_ERROR(shard.protocol().members().CheckEpoch(epoch));
  RETURN_IF_ERROR(shard.Health());
  return CheckSupported(shard.spec(), shard.plan(), TopologyOf(shard), feature);
}

// A round of copies (copies=2) that has the place is over soon.
absl::Status AskFor(JobShard& shard, const std::shared_ptr<Snapshot>& snapshot, const std::atomic<bool>& cancelled) {
  const absl::Time until = MonotonicNow() + (shard.spec().copies > 1 ? kLongestRound : absl::ZeroDuration());
  while (true) {
    const absl::Status asked = shard.run().snapshots.Ask(snapshot);
    if (!absl::IsAborted(asked) || MonotonicNow() >= until || cancelled.load()) return asked;
    absl::SleepFor(kRetry);
  }
}

// Says again and again that it waits, so that a caller that has given up can say so.
absl::StatusOr<SnapshotPort::Copied> AwaitCopy(JobShard& shard, const std::atomic<bool>& cancelled,
                                               const ReportProgress& report, const v1::FileProgress& progress) {
  while (true) {
    RETURN_IF_ERROR(report(progress));
    if (const auto copied = shard.run().snapshots.Await(kSlice); copied.has_value()) return *copied;
    if (cancelled.load()) return absl::CancelledError("the caller is gone");
    RETURN_IF_ERROR(shard.Health());
  }
}

// Reads a shard straight into its place, with several threads: nobody looks there before the job begins with it. Each
// piece is digested while it is in the cache of the processor that read it.
class ShardReader {
 public:
  ShardReader(JobShard& shard, const OpenFiles& open, const std::vector<FilePiece>& pieces,
              const std::atomic<bool>& cancelled)
      : shard_(shard), open_(open), pieces_(pieces), cancelled_(cancelled), caller_(std::this_thread::get_id()) {}

  // After ReadAll: a value that no job may begin with; empty: there was none.
  std::string refused() {
    MutexLock lock(mu_);
    return refused_;
  }

  // The digest of what was read. One thread tells how far all are.
  absl::StatusOr<uint64_t> ReadAll(const ReportProgress& report, v1::FileProgress& progress) {
    ThreadTeam team(shard_.run().threads);
    team.ForEach(static_cast<int>(pieces_.size()), [&](int piece) {
      if (failed_.load()) return;
      absl::Status status = ReadPiece(pieces_[piece]);
      if (status.ok() && std::this_thread::get_id() == caller_) status = Tell(report, progress);
      if (!status.ok()) Fail(status);
    });
    MutexLock lock(mu_);
    RETURN_IF_ERROR(first_error_);
    progress.set_bytes_done(done_.load());
    return digest_.load();
  }

 private:
  absl::Status ReadPiece(const FilePiece& piece) {
    if (cancelled_.load()) return absl::CancelledError("the caller is gone");
    if (shard_.protocol().decided() > 0) return absl::AbortedError("the job got its weights meanwhile");
    RETURN_IF_ERROR(open_.Read(piece, piece.data));
    digest_.fetch_add(DigestOf(piece, piece.data));
    const StoredRule rule = RuleOf(shard_.spec(), piece.part->tensor, piece.part->stream, piece.part->extra);
    if (const std::optional<BadEntry> bad = FindBadEntry(rule, piece.data, piece.bytes()); bad.has_value()) {
      const int64_t first = piece.first_element / piece.part->layout.elements;
      MutexLock lock(mu_);
      if (refused_.empty()) refused_ = BadEntryText(piece.part->name, rule, *bad, first);
    }
    done_.fetch_add(piece.bytes());
    return absl::OkStatus();
  }
  absl::Status Tell(const ReportProgress& report, v1::FileProgress& progress) const {
    const int64_t done = done_.load();
    if (done - progress.bytes_done() < kReportBytes || done == progress.bytes_total()) return absl::OkStatus();
    progress.set_bytes_done(done);
    RETURN_IF_ERROR(shard_.Health());
    return report(progress);
  }
  void Fail(const absl::Status& status) {
    MutexLock lock(mu_);
    first_error_.Update(status);
    failed_.store(true);
  }

  JobShard& shard_;
  const OpenFiles& open_;
  const std::vector<FilePiece>& pieces_;
  const std::atomic<bool>& cancelled_;
  const std::thread::id caller_;
  std::atomic<uint64_t> digest_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
  Mutex mu_;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);
  std::string refused_ ABSL_GUARDED_BY(mu_);
};

// Where a shard that is not memory of the host is read to first; unset: it is read straight into its place.
absl::StatusOr<std::optional<ShardStorage>> StagedOf(const JobShard& shard, const std::atomic<bool>& cancelled) {
  if (!shard.run().pass.staged()) return std::nullopt;
  RETURN_IF_ERROR(shard.memory().CheckCopyFits());
  ASSIGN_OR_RETURN(ShardStorage staged, ShardStorage::Open(*NewPrivateMemory(), "shardmesh-staged", shard.plan(),
                                                           shard.place().shard, &cancelled, shard.run().pass.cut()));
  return staged;
}

// Of the job, and of the buffers that a SaveRequest or a LoadRequest names. InvalidArgument: one that cannot be.
template <class Request>
absl::StatusOr<StoredFiles> FilesOf(const JobSpec& spec, const Request& request) {
  std::vector<SafetensorsEntry> buffers;
  for (const v1::StoredBuffer& buffer : request.buffers()) {
    ASSIGN_OR_RETURN(SafetensorsEntry entry, MakeSafetensorsEntry(buffer.name(), buffer.dtype(),
                                                                  {buffer.shape().begin(), buffer.shape().end()}));
    buffers.push_back(std::move(entry));
  }
  return StoredFiles::Create(spec, buffers);
}

}  // namespace

absl::Status SaveShard(JobShard& shard, const FolderAccess& folders, const v1::SaveRequest& request,
                       const std::atomic<bool>& cancelled, const ReportProgress& report) {
  RETURN_IF_ERROR(CheckFiles(shard, request.epoch(), Feature::kCheckpointSave));
  if (shard.protocol().committed_step().value() == kNoStep) {
    return absl::FailedPreconditionError(absl::StrCat("job ", shard.spec().name, " has no initial weights yet"));
  }
  ASSIGN_OR_RETURN(const UniqueFd folder, folders.OpenToSave(request.folder(), request.secret()));
  RETURN_IF_ERROR(shard.memory().CheckCopyFits());
  if (shard.run().idle < kIdle) GiveWay(kNice);
  ASSIGN_OR_RETURN(const StoredFiles files, FilesOf(shard.spec(), request));
  ASSIGN_OR_RETURN(const OpenFiles open, OpenFiles::Open(folder, request.folder(), files, /*write=*/true));
  ASSIGN_OR_RETURN(const std::shared_ptr<Snapshot> snapshot,
                   Snapshot::Create(shard.plan(), shard.place().shard, shard.run().pass.cut()));
  v1::FileProgress progress;
  progress.set_step(kNoStep);
  progress.set_bytes_total(BytesOf(PiecesIn(files, snapshot->storage(), 0)));
  RETURN_IF_ERROR(AskFor(shard, snapshot, cancelled));
  const absl::Cleanup take_away = [&] { shard.run().snapshots.TakeAway(); };
  ASSIGN_OR_RETURN(const SnapshotPort::Copied copied, AwaitCopy(shard, cancelled, report, progress));
  progress.set_step(copied.step);
  RETURN_IF_ERROR(report(progress));
  uint64_t digest = 0;
  const uint64_t decided = shard.protocol().decided();
  bool gave_way = false;
  const ReportProgress begin_and_report = [&](const v1::FileProgress& so_far) {
    open.BeginSync();
    return report(so_far);
  };
  RETURN_IF_ERROR(MoveAll(PiecesIn(files, snapshot->storage(), copied.parity), cancelled, begin_and_report, progress,
                          [&](const FilePiece& piece) -> absl::Status {
                            if (!gave_way && shard.protocol().decided() != decided) {
                              GiveWay(kNice);
                              gave_way = true;
                            }
                            digest += DigestOf(piece, piece.data);
                            RETURN_IF_ERROR(open.Write(piece));
                            Snapshot::GiveBack(piece.data, piece.bytes());  // to the control block cache
                            return absl::OkStatus();
                          }));
  RETURN_IF_ERROR(open.Sync());
  progress.set_digest(digest);
  return report(progress);
}

absl::Status LoadShard(JobShard& shard, const FolderAccess& folders, const v1::LoadRequest& request,
                       const std::atomic<bool>& cancelled, const ReportProgress& report) {
  RETURN_IF_ERROR(CheckFiles(shard, request.epoch(), Feature::kRestore));
  RETURN_IF_ERROR(CheckHasNoWeights(shard));
  ASSIGN_OR_RETURN(const UniqueFd folder, folders.OpenToLoad(request.folder(), request.step(), request.digest()));
  ASSIGN_OR_RETURN(const StoredFiles files, FilesOf(shard.spec(), request));
  ASSIGN_OR_RETURN(const OpenFiles open, OpenFiles::Open(folder, request.folder(), files, /*write=*/false));
  ASSIGN_OR_RETURN(const std::optional<ShardStorage> staged, StagedOf(shard, cancelled));
  const std::vector<FilePiece> pieces =
      PiecesIn(files, staged.has_value() ? *staged : shard.memory().storage(), /*parity=*/0);
  v1::FileProgress progress;
  progress.set_step(request.step());
  progress.set_bytes_total(BytesOf(pieces));
  RETURN_IF_ERROR(report(progress));
  const absl::Status loaded = shard.run().engine.Load(request.load_id(), Step(request.step()), [&]() -> absl::Status {
    ShardReader reader(shard, open, pieces, cancelled);
    ASSIGN_OR_RETURN(const uint64_t digest, reader.ReadAll(report, progress));
    progress.set_digest(digest);
    progress.set_refused(reader.refused());
    if (!progress.refused().empty()) return absl::DataLossError(progress.refused());
    return staged.has_value() ? shard.run().pass.Fill(*staged) : absl::OkStatus();
  });
  // The caller first compares the digests of all shards: a value that was changed in a file is a changed file.
  if (!loaded.ok() && progress.refused().empty()) return loaded;
  return report(progress);
}

absl::StatusOr<uint64_t> LoadStored(JobShard& shard, const FolderAccess& folders,
                                    const v1::StoredCheckpoint& checkpoint, uint64_t load_id,
                                    const std::atomic<bool>& cancelled) {
  // Before its manifest is read: whether it is the checkpoint, and may be opened.
  const absl::Status there = folders.OpenToLoad(checkpoint.folder(), checkpoint.step(), checkpoint.digest()).status();
  if (absl::IsPermissionDenied(there)) {
    return absl::NotFoundError(absl::StrCat(
        checkpoint.folder(), " is not the checkpoint of step ", checkpoint.step(),
        " as this worker sees it: it was removed or changed, or it lies elsewhere for this worker, or below no "
        "--checkpoint-root of it"));
  }
  RETURN_IF_ERROR(there);
  ASSIGN_OR_RETURN(const OpenedCheckpoint opened, OpenCheckpoint(checkpoint.folder()));
  v1::LoadRequest request;
  request.set_job(shard.spec().name);
  request.set_epoch(shard.epoch().value());
  request.set_folder(checkpoint.folder());
  request.set_step(checkpoint.step());
  request.set_digest(checkpoint.digest());
  request.set_load_id(load_id);
  for (const SafetensorsEntry& entry : opened.manifest.buffer_entries()) {
    v1::StoredBuffer* const buffer = request.add_buffers();
    buffer->set_name(entry.name);
    buffer->set_dtype(entry.dtype);
    buffer->mutable_shape()->Add(entry.shape.begin(), entry.shape.end());
  }
  v1::FileProgress last;
  const ReportProgress keep = [&](const v1::FileProgress& progress) {
    last = progress;
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(LoadShard(shard, folders, request, cancelled, keep));
  if (!last.refused().empty()) return absl::DataLossError(absl::StrCat(checkpoint.folder(), ": ", last.refused()));
  return last.digest();
}

}  // namespace shardmesh
