#include "local/memory/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/descriptor/descriptor_error.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shardmesh {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

absl::Status ErrnoError(absl::StatusCode code, absl::string_view what, int error) {
  return absl::Status(code, absl::StrCat(what, ": ", DescriptorError(error)));
}

}  // namespace

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)),
      data_offset_(std::exchange(other.data_offset_, 0)),
      access_(other.access_.load()),
      not_in_children_(std::move(other.not_in_children_)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  Segment moved(std::move(other));
  std::swap(fd_, moved.fd_);
  std::swap(mapping_, moved.mapping_);
  std::swap(num_bytes_, moved.num_bytes_);
  std::swap(data_offset_, moved.data_offset_);
  access_.store(moved.access_.exchange(access_.load()));
  std::swap(not_in_children_, moved.not_in_children_);
  return *this;
}

Segment::~Segment() {
  not_in_children_ = NotInChildren();
  if (mapping_ != nullptr) munmap(mapping_, num_bytes_);
}

absl::StatusOr<Segment> Segment::Create(const std::string& name, int64_t num_bytes, int64_t data_offset) {
  Segment segment;
  segment.num_bytes_ = num_bytes;
  segment.data_offset_ = data_offset;
  segment.fd_ = UniqueFd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment.fd_.valid()) return ErrnoError(absl::StatusCode::kResourceExhausted, "memfd_create", errno);
  if (ftruncate(segment.fd(), num_bytes) != 0) {
    return ErrnoError(absl::StatusCode::kResourceExhausted, absl::StrCat("a segment of ", num_bytes, " bytes"), errno);
  }
  if (fcntl(segment.fd(), F_ADD_SEALS, kSizeSeals) != 0) {
    return ErrnoError(absl::StatusCode::kInternal, "sealing a segment's size", errno);
  }
  RETURN_IF_ERROR(segment.MapFd(Access::kReadWrite));
  return segment;
}

absl::StatusOr<Segment> Segment::CreatePrivate(int64_t num_bytes, int64_t data_offset) {
  Segment segment;
  segment.num_bytes_ = num_bytes;
  segment.data_offset_ = data_offset;
  RETURN_IF_ERROR(segment.MapFd(Access::kReadWrite));
  return segment;
}

absl::StatusOr<Segment> Segment::Map(UniqueFd fd, int64_t num_bytes, int64_t data_offset, Access access) {
  struct stat info;
  if (fstat(fd.get(), &info) != 0)
    return ErrnoError(absl::StatusCode::kInvalidArgument, "a segment's descriptor", errno);
  if (num_bytes <= 0 || data_offset < 0 || data_offset > num_bytes || info.st_size < num_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a segment said to have ", num_bytes, " bytes with data from ",
                                                   data_offset, " has ", info.st_size, " bytes"));
  }
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return absl::InvalidArgumentError("a segment whose size is not sealed could be cut under its readers: refused");
  }
  Segment segment;
  segment.fd_ = std::move(fd);
  segment.num_bytes_ = num_bytes;
  segment.data_offset_ = data_offset;
  RETURN_IF_ERROR(segment.MapFd(access));
  return segment;
}

// Maps at a multiple of the huge page size, so that the kernel can use huge pages and data_offset is a true stagger.
absl::Status Segment::MapFd(Access access) {
  access_ = access;
  const int64_t span = num_bytes_ + kHugePageBytes;
  void* reserved = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return ErrnoError(absl::StatusCode::kResourceExhausted, absl::StrCat("address space for ", num_bytes_, " bytes"),
                      errno);
  }
  char* base = static_cast<char*>(reserved);
  const int64_t skip = -reinterpret_cast<int64_t>(base) & (kHugePageBytes - 1);
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  const int kind = !fd_.valid()                     ? MAP_PRIVATE | MAP_ANONYMOUS
                   : access == Access::kCopyOnWrite ? MAP_PRIVATE | MAP_NORESERVE
                                                    : MAP_SHARED;
  void* mapped = mmap(base + skip, num_bytes_, protection, kind | MAP_FIXED, fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    munmap(base, span);
    const auto code =
        error == EPERM || error == EACCES ? absl::StatusCode::kPermissionDenied : absl::StatusCode::kResourceExhausted;
    return ErrnoError(code, absl::StrCat("mapping a segment of ", num_bytes_, " bytes"), error);
  }
  mapping_ = static_cast<char*>(mapped);
  // Give back the reserve on both sides of the mapping, which ends at a page boundary.
  const int64_t mapped_bytes = (num_bytes_ + 4095) & ~int64_t{4095};
  if (skip > 0) munmap(base, skip);
  if (const int64_t tail = span - skip - mapped_bytes; tail > 0) munmap(mapping_ + mapped_bytes, tail);
  // A wish: ordinary pages are fine. Not of private ones, which live for seconds: see CreatePrivate.
  if (fd_.valid() && num_bytes_ >= kHugePageBytes) madvise(mapping_, num_bytes_, MADV_HUGEPAGE);
  return absl::OkStatus();
}

absl::Status Segment::SealFutureWrites() {
  if (fcntl(fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0) return absl::OkStatus();
  return ErrnoError(absl::StatusCode::kInternal, "sealing a segment against new writers", errno);
}

absl::Status Segment::RefuseNewWriters(bool punched) {
  struct stat info;
  const bool done = fstat(fd(), &info) == 0 && (info.st_mode & 0777) == S_IRUSR;  // of immutable memory it stays
  if (!done && fchmod(fd(), S_IRUSR) != 0) {
    return ErrnoError(absl::StatusCode::kInternal, "making a segment read-only", errno);
  }
  int flags = 0;
  if (!punched && ioctl(fd(), FS_IOC_GETFLAGS, &flags) == 0) {
    flags |= FS_IMMUTABLE_FL;
    ioctl(fd(), FS_IOC_SETFLAGS, &flags);  // descriptors that are open for writing stay so
  }
  return absl::OkStatus();
}

absl::Status Segment::Punch(int64_t begin, int64_t bytes) const {
  if (bytes == 0 || fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, data_offset_ + begin, bytes) == 0) {
    return absl::OkStatus();
  }
  return ErrnoError(absl::StatusCode::kInternal, absl::StrCat("giving back ", bytes, " bytes of a segment"), errno);
}

void Segment::Populate(int64_t begin, int64_t bytes) const {
  const auto first = reinterpret_cast<uintptr_t>(data() + begin) & -uintptr_t{kSegmentPage};
  const auto end = (reinterpret_cast<uintptr_t>(data() + begin + bytes) + kSegmentPage - 1) & -uintptr_t{kSegmentPage};
  if (bytes > 0) madvise(reinterpret_cast<void*>(first), end - first, MADV_POPULATE_WRITE);
}

void Segment::Write(int64_t begin, const void* from, int64_t bytes) const {
  const char* source = static_cast<const char*>(from);
  char* target = data() + begin;
  while (fd_.valid() && access_ == Access::kReadWrite && bytes > 0) {
    const ssize_t written = pwrite(fd(), source, bytes, target - mapping_);
    if (written <= 0) break;  // sealed, or out of memory, which the copy meets again
    source += written;
    target += written;
    bytes -= written;
  }
  std::memcpy(target, source, bytes);
}

absl::Status Segment::Guard(int64_t begin, int64_t bytes, bool accessible) {
  const int open = access_ == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  if (bytes == 0 || mprotect(data() + begin, bytes, accessible ? open : PROT_NONE) == 0) return absl::OkStatus();
  return ErrnoError(absl::StatusCode::kResourceExhausted, absl::StrCat("guarding ", bytes, " bytes of a segment"),
                    errno);
}

absl::Status Segment::MakePrivate() {
  const int protection = access_ == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  if (mmap(mapping_, num_bytes_, protection, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd_.get(), 0) != MAP_FAILED) {
    if (access_ == Access::kReadWrite) access_ = Access::kCopyOnWrite;
    return absl::OkStatus();
  }
  return ErrnoError(absl::StatusCode::kInternal, absl::StrCat("mapping ", num_bytes_, " bytes privately"), errno);
}

absl::Status Segment::ForgetWrites() const {
  if (access_ != Access::kCopyOnWrite) {
    return absl::FailedPreconditionError(
        "what is written to this segment is no copy of its own: it cannot be forgotten");
  }
  if (madvise(mapping_, num_bytes_, MADV_DONTNEED) == 0) return absl::OkStatus();
  return ErrnoError(absl::StatusCode::kInternal, absl::StrCat("forgetting writes to ", num_bytes_, " bytes"), errno);
}

void Segment::KeepFromChildren() { not_in_children_ = NotInChildren(fd_.get(), mapping_, num_bytes_); }

int64_t Segment::ResidentBytes() const {
  struct stat info;
  return fstat(fd(), &info) == 0 ? int64_t{info.st_blocks} * 512 : -1;
}

absl::StatusOr<UniqueFd> Segment::ReadOnlyFd() const {
  UniqueFd fd(open(absl::StrCat("/proc/self/fd/", fd_.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoError(absl::StatusCode::kResourceExhausted, "opening a segment read-only", errno);
  return fd;
}

}  // namespace shardmesh
