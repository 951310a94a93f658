// PinnedBlock: zeros in memory of the host that a CUDA device reads and writes where they lie. Movable, not copyable.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/device/pinned_memory.h"
#include "local/memory/segment.h"

namespace shardmesh {

class PinnedBlock {
 public:
  // ResourceExhausted: there is not so much memory. Unavailable: the device failed.
  static absl::StatusOr<PinnedBlock> Create(std::shared_ptr<DeviceRuntime> device, int64_t bytes) {
    const int64_t pages = (bytes + kSegmentPage - 1) / kSegmentPage * kSegmentPage;
    void* memory = nullptr;
    if (posix_memalign(&memory, kSegmentPage, static_cast<size_t>(pages)) != 0) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", pages, " bytes that a device reads"));
    }
    PinnedBlock block;
    block.memory_.reset(static_cast<char*>(memory));
    std::memset(memory, 0, static_cast<size_t>(pages));
    ASSIGN_OR_RETURN(block.pinned_, PinnedMemory::Register(std::move(device), memory, pages));
    return block;
  }

  PinnedBlock() = default;
  PinnedBlock(PinnedBlock&&) = default;
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    pinned_ = std::move(other.pinned_);  // before its memory goes
    memory_ = std::move(other.memory_);
    return *this;
  }

  char* data() const { return memory_.get(); }
  // Where the device has what lies at `at`, in the block.
  template <class Value>
  Value* OnDevice(Value* at) const {
    return pinned_.OnDevice(at);
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  PinnedMemory pinned_;  // ends first
};

}  // namespace shardmesh
