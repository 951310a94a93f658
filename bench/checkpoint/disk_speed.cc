#include "bench/checkpoint/disk_speed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kPieceBytes = 8 << 20, kMemoryBytes = 64 << 20, kCachedBytes = 128 << 20;  // more than caches hold
enum Task { kWrite, kRemove, kFillCache, kReadCached, kTouchMemory };

// One process's part.
class Files {
 public:
  Files(const std::string& folder, int rank, const int64_t* bytes)
      : written_(absl::StrCat(folder, "/raw", rank)), cached_(absl::StrCat(folder, "/cached", rank)), bytes_(bytes) {
    for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<char>((i * 2654435761u) >> 13);
  }

  bool Do(int task) {
    switch (task) {
      case kWrite:
        return Write(written_, *bytes_, /*sync=*/true);
      case kRemove:
        return unlink(written_.c_str()) == 0;
      case kFillCache:
        return Write(cached_, kCachedBytes, /*sync=*/false);
      case kTouchMemory:
        return TouchMemory();
      default:
        return ReadCached();
    }
  }

 private:
  bool Write(const std::string& path, int64_t bytes, bool sync) const {
    const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    for (int64_t done = 0; done < bytes;) {
      const ssize_t wrote = write(fd.get(), memory_.data() + done % kMemoryBytes, std::min(kPieceBytes, bytes - done));
      if (wrote <= 0) return false;
      done += wrote;
    }
    return !sync || fsync(fd.get()) == 0;
  }

  bool ReadCached() {
    const UniqueFd fd(open(cached_.c_str(), O_RDONLY | O_CLOEXEC));
    for (int64_t done = 0; done < *bytes_;) {
      const int64_t bytes = std::min(kPieceBytes, *bytes_ - done);
      if (pread(fd.get(), memory_.data() + done % kMemoryBytes, bytes, done % kCachedBytes) != bytes) return false;
      done += bytes;
    }
    return true;
  }

  bool TouchMemory() const {
    void* memory = mmap(nullptr, *bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    for (int64_t at = 0; at < *bytes_; at += 4096) static_cast<volatile char*>(memory)[at] = 1;
    return munmap(memory, *bytes_) == 0;
  }

  const std::string written_, cached_;
  const int64_t* const bytes_;
  std::vector<char> memory_ = std::vector<char>(kMemoryBytes);
};

}  // namespace

absl::StatusOr<std::unique_ptr<DiskSpeed>> DiskSpeed::Start(int processes, const std::string& folder) {
  std::unique_ptr<DiskSpeed> speed(new DiskSpeed);
  void* shared = mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return absl::ResourceExhaustedError("no memory for a word");
  speed->bytes_ = static_cast<int64_t*>(shared);
  speed->processes_ = processes;
  ASSIGN_OR_RETURN(speed->team_, WorkerTeam::Start(processes, [&](WorkerTeam::Member& member) -> WorkerTeam::Work {
                     auto files = std::make_shared<Files>(folder, member.rank(), speed->bytes_);
                     return [files](int task) { return files->Do(task); };
                   }));
  RETURN_IF_ERROR(speed->Run(kFillCache, 0).status());
  return speed;
}

absl::StatusOr<double> DiskSpeed::Run(int task, int64_t bytes) {
  *bytes_ = bytes / processes_;
  return team_->Run(task);
}

absl::StatusOr<double> DiskSpeed::Write(int64_t bytes) {
  ASSIGN_OR_RETURN(const double seconds, Run(kWrite, bytes));
  RETURN_IF_ERROR(Run(kRemove, 0).status());
  return seconds;
}

absl::StatusOr<double> DiskSpeed::ReadCached(int64_t bytes) { return Run(kReadCached, bytes); }

absl::StatusOr<double> DiskSpeed::TouchMemory(int64_t bytes) { return Run(kTouchMemory, bytes); }

}  // namespace shardmesh::bench
