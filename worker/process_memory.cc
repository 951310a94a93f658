#include "worker/memory.h"

namespace shardmesh {
namespace {

class ProcessMemory final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    return Segment::Create(name, num_bytes, data_offset);
  }
};

}  // namespace

std::unique_ptr<Memory> NewProcessMemory() { return std::make_unique<ProcessMemory>(); }

}  // namespace shardmesh
