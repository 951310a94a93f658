#include "worker/pass/device/device_digest.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "core/base/status.h"
#include "worker/pass/device/shard_stretches.h"

namespace shardmesh {
namespace {

// What of a tensor lies in a row in several chunks is one stretch.
std::vector<DigestStretch> StretchesOf(const ShardStorage& cut, const uint8_t* storage) {
  std::vector<DigestStretch> stretches;
  for (int range = 0; range < static_cast<int>(cut.ranges().size()); ++range) {
    const std::vector<ChunkRun>& runs = cut.runs(range);
    for (size_t i = 0; i < runs.size();) {
      ChunkRun whole = runs[i];
      for (++i; i < runs.size() && runs[i].tensor == whole.tensor; ++i) {
        whole.num_elements = runs[i].offset - whole.offset + runs[i].num_elements;
      }
      AddStretches(cut.ranges()[range], whole, AddressesOf(cut, range, storage), 0, &stretches);
    }
  }
  return stretches;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceDigest>> DeviceDigest::Create(const ShardStorage& cut, const uint8_t* storage,
                                                                   const std::shared_ptr<DeviceRuntime>& device) {
  auto digest = std::make_unique<DeviceDigest>();
  const std::vector<DigestStretch> stretches = StretchesOf(cut, storage);
  if (stretches.empty()) return digest;
  digest->num_stretches_ = static_cast<int32_t>(stretches.size());
  const auto digests = static_cast<int64_t>(stretches.size() * sizeof(uint64_t));
  const auto bytes = static_cast<int64_t>(stretches.size() * sizeof(DigestStretch));
  ASSIGN_OR_RETURN(digest->table_, DeviceSegment::Create(device, bytes));
  ASSIGN_OR_RETURN(digest->block_, PinnedBlock::Create(device, digests + bytes));
  char* const table = digest->block_.data() + digests;
  std::memcpy(table, stretches.data(), static_cast<size_t>(bytes));
  DeviceRuntime::Scope scope(*device);
  RETURN_IF_ERROR(device->Copy(digest->table_.data(), table, bytes));
  return digest;
}

const char* DeviceDigest::Launch(const PassKernels& kernels, int parity, void* stream) const {
  if (num_stretches_ == 0) return nullptr;
  StretchDigests args;
  args.stretches = reinterpret_cast<const DigestStretch*>(table_.data());
  args.num_stretches = num_stretches_;
  args.parity = parity;
  args.digests = block_.OnDevice(reinterpret_cast<uint64_t*>(block_.data()));
  return kernels.Digests(args, stream);
}

uint64_t DeviceDigest::Sum() const {
  const auto* const digests = reinterpret_cast<const uint64_t*>(block_.data());
  return std::accumulate(digests, digests + num_stretches_, uint64_t{0});
}

}  // namespace shardmesh
