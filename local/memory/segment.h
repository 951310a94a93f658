// Segment: a piece of memory that several processes of a host map: a memfd of fixed size and this process's mapping of
// it.
//
// The size is sealed at creation (no shrink, no growth), and Map refuses a descriptor without these seals: so no peer
// can make an access fault by truncating. Large segments ask for huge pages; where the system grants none they are
// ordinary pages. Data starts `data_offset` bytes in: streams of one pass that start congruent modulo 2 MiB slow each
// other down by up to 1.7x, so each stream has an offset of its own (StreamOffset).
// Pages can be given back (Punch) while everybody keeps the address; a segment that is sealed against new writers
// cannot do that.
// Movable, not copyable; the mapping ends with the object. Not thread-safe itself; the bytes are the users' business.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "local/descriptor/fd.h"
#include "local/process/not_in_children.h"

namespace shardmesh {

class Segment {
 public:
  // kCopyOnWrite: others' bytes are seen until this process writes to a page, which from then on is its own.
  enum class Access { kReadOnly, kReadWrite, kCopyOnWrite };

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // A new segment of zeros, mapped read-write. `name` is seen in /proc/PID/maps. num_bytes counts data_offset in.
  // ResourceExhausted: no memory or no descriptor.
  static absl::StatusOr<Segment> Create(const std::string& name, int64_t num_bytes, int64_t data_offset);

  // The same for this process alone: memory without a descriptor, which nobody else can map. In ordinary pages: where a
  // virtual machine gives free memory back to its host, fresh huge pages take six times as long (docs/performance.md).
  static absl::StatusOr<Segment> CreatePrivate(int64_t num_bytes, int64_t data_offset);

  // Maps a descriptor received from a peer. InvalidArgument: not sealed, or shorter than num_bytes.
  // PermissionDenied: the descriptor does not allow `access`.
  static absl::StatusOr<Segment> Map(UniqueFd fd, int64_t num_bytes, int64_t data_offset, Access access);

  char* data() const { return mapping_ + data_offset_; }
  int64_t data_bytes() const { return num_bytes_ - data_offset_; }
  int64_t num_bytes() const { return num_bytes_; }
  int64_t data_offset() const { return data_offset_; }
  int fd() const { return fd_.get(); }
  bool mapped() const { return mapping_ != nullptr; }

  // From now on nobody can make a new writable mapping; those that exist go on. Idempotent.
  absl::Status SealFutureWrites();

  // The weaker form for segments whose descriptors are mapped for writing again, by a restarted worker, or whose pages
  // are given back (`punched`): the kernel refuses both of sealed ones. Who was given a read-only descriptor cannot open
  // it for writing: the memory's mode is read-only; and it is immutable where the kernel can that (Linux 6.0) and this
  // process may ask for it (CAP_LINUX_IMMUTABLE, which root has): then neither root nor fchmod help. Else a process of
  // the same user can, if it changes the mode on purpose. Memory that is `punched` is not made immutable. Idempotent.
  absl::Status RefuseNewWriters(bool punched);

  // Gives the pages of data [begin, begin + bytes) back: they read as zeros, and take memory when they are touched
  // again. REQUIRES: whole pages of kSegmentPage within the data, mapped for writing, not sealed against writers.
  absl::Status Punch(int64_t begin, int64_t bytes) const;
  // Takes the pages of data [begin, begin + bytes), and those that it begins and ends in, from the system, as writing
  // to them would: whoever writes there later waits for none. A wish. REQUIRES: within the data, mapped for writing.
  void Populate(int64_t begin, int64_t bytes) const;
  // Copies into data [begin, begin + bytes), as memcpy does; where pages were given back it takes about half as long,
  // since none is cleared first. One writer of a segment at a time. REQUIRES: within the data, mapped for writing.
  void Write(int64_t begin, const void* from, int64_t bytes) const;
  // Whether this process may touch data [begin, begin + bytes): without it, an access is a fault. REQUIRES: whole
  // pages.
  absl::Status Guard(int64_t begin, int64_t bytes, bool accessible);
  // From now on what this process writes is its own: nobody else sees it. For any thread. Internal: the system refuses.
  absl::Status MakePrivate();
  // Drops what this process wrote of a segment that it mapped kCopyOnWrite: it sees others' bytes again.
  // FailedPrecondition: it is mapped otherwise. Internal: the system refuses.
  absl::Status ForgetWrites() const;
  // From now on processes that this one forks have zeros of their own there, and neither the descriptor nor the memory:
  // what others do not share they cannot write, and do not keep.
  void KeepFromChildren();
  // What the kernel holds of it now. -1: it cannot say.
  int64_t ResidentBytes() const;

  // A second descriptor of the same memory that can only be mapped for reading.
  absl::StatusOr<UniqueFd> ReadOnlyFd() const;

 private:
  absl::Status MapFd(Access access);

  UniqueFd fd_;
  char* mapping_ = nullptr;
  int64_t num_bytes_ = 0;
  int64_t data_offset_ = 0;
  std::atomic<Access> access_{Access::kReadWrite};
  NotInChildren not_in_children_;  // goes before the mapping
};

inline constexpr int64_t kSegmentPage = 4096;

// The offset of the i-th stream of a pass: i * (64 KiB + 4 KiB) modulo 2 MiB.
constexpr int64_t StreamOffset(int i) { return int64_t{i} * (68 << 10) % (2 << 20); }

}  // namespace shardmesh
