#include <sys/mman.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/memory/memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shardmesh {
namespace {

class ProcessMemory final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    return Segment::Create(name, num_bytes, data_offset);
  }
};

class PrivateMemory final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    ASSIGN_OR_RETURN(Segment segment, Segment::CreatePrivate(num_bytes, data_offset));
    char* const begin = segment.data() - data_offset;
    if (madvise(begin, num_bytes, MADV_POPULATE_WRITE) == 0) return segment;
    if (errno == ENOMEM || errno == EFAULT) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", num_bytes, " bytes of ", name));
    }
    for (int64_t at = 0; at < num_bytes; at += kSegmentPage) begin[at] = 0;  // a kernel before 5.14
    return segment;
  }
};

}  // namespace

std::unique_ptr<Memory> NewProcessMemory() { return std::make_unique<ProcessMemory>(); }

std::unique_ptr<Memory> NewPrivateMemory() { return std::make_unique<PrivateMemory>(); }

}  // namespace shardmesh
