#include "worker/transport/symmetric_memory.h"

#include <new>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr int64_t kPageBytes = 4096, kHugePageBytes = 2 << 20;

constexpr int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

SymmetricMemory::SymmetricMemory(Segment segment, int ranks, const Sizes& sizes)
    : segment_(std::move(segment)), ranks_(ranks), sizes_(sizes) {
  staging_begin_ = RoundUp(sizeof(SymmetricPage), kPageBytes);
  heaps_begin_ = RoundUp(staging_begin_ + ranks * sizes.staging, kHugePageBytes);
  sizes_.own = RoundUp(sizes.own, kHugePageBytes);
  shared_begin_ = heaps_begin_ + ranks * sizes_.own;
}

int64_t SymmetricMemory::TotalBytes(int ranks, const Sizes& sizes) {
  const int64_t staging = RoundUp(sizeof(SymmetricPage), kPageBytes) + ranks * sizes.staging;
  return RoundUp(staging, kHugePageBytes) + ranks * RoundUp(sizes.own, kHugePageBytes) + sizes.shared;
}

absl::StatusOr<SymmetricMemory> SymmetricMemory::Create(int ranks, const Sizes& sizes) {
  constexpr int64_t kMost = int64_t{1} << 42;
  if (ranks < 1 || ranks > kMaxSymmetricRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("symmetric memory of ", ranks, " ranks; a host has 1 to ", kMaxSymmetricRanks));
  }
  if (sizes.own < 0 || sizes.shared < 0 || sizes.own > kMost || sizes.shared > kMost || sizes.staging < kPageBytes ||
      sizes.staging > kMost) {
    return absl::InvalidArgumentError(absl::StrCat("symmetric memory with heaps of ", sizes.own, " and ", sizes.shared,
                                                   " bytes and staging of ", sizes.staging,
                                                   "; heaps have 0 to 2^42 bytes, staging 4096 to 2^42"));
  }
  ASSIGN_OR_RETURN(Segment segment, Segment::Create("shardmesh-group", TotalBytes(ranks, sizes), 0));
  return SymmetricMemory(std::move(segment), ranks, sizes);
}

absl::StatusOr<SymmetricMemory> SymmetricMemory::Map(UniqueFd fd, int ranks, const Sizes& sizes) {
  if (ranks < 1 || ranks > kMaxSymmetricRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("symmetric memory of ", ranks, " ranks; a host has 1 to ", kMaxSymmetricRanks));
  }
  ASSIGN_OR_RETURN(Segment segment,
                   Segment::Map(std::move(fd), TotalBytes(ranks, sizes), 0, Segment::Access::kReadWrite));
  return SymmetricMemory(std::move(segment), ranks, sizes);
}

absl::StatusOr<char*> SymmetricMemory::Take(int64_t& used, int64_t begin, int64_t size, int64_t bytes,
                                            const char* heap) {
  // The next place that is this stream's own modulo 2 MiB.
  const int64_t wanted = StreamOffset(streams_);
  int64_t offset = RoundUp(begin + used, kPageBytes);
  offset += (wanted - offset % kHugePageBytes + kHugePageBytes) % kHugePageBytes;
  if (bytes < 0 || offset - begin > size || bytes > size - (offset - begin)) {
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes do not fit into the ", heap, " heap: ", size,
                                                     " bytes, of which ", used,
                                                     " are used; every buffer takes up to 2 MiB more than it has"));
  }
  used = offset - begin + bytes;
  ++streams_;
  return At(offset);
}

absl::StatusOr<char*> SymmetricMemory::Allocate(int rank, int64_t bytes) {
  return Take(own_used_, heaps_begin_ + rank * sizes_.own, sizes_.own, bytes, "rank's");
}

absl::StatusOr<char*> SymmetricMemory::AllocateShared(int64_t bytes) {
  return Take(shared_used_, shared_begin_, sizes_.shared, bytes, "shared");
}

int64_t SymmetricMemory::PlaceOf(const void* memory, int64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(memory), begin = reinterpret_cast<uintptr_t>(At(heaps_begin_));
  const uintptr_t end = reinterpret_cast<uintptr_t>(At(0)) + static_cast<uintptr_t>(segment_.data_bytes());
  if (address < begin || address > end || static_cast<uintptr_t>(bytes) > end - address) return -1;
  return static_cast<int64_t>(address - reinterpret_cast<uintptr_t>(At(0)));
}

char* SymmetricMemory::AtPlace(int64_t place, int64_t bytes) const {
  const int64_t end = segment_.data_bytes();
  return place < heaps_begin_ || place > end || bytes < 0 || bytes > end - place ? nullptr : At(place);
}

}  // namespace shardmesh
