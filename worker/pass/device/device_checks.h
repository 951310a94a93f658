// DeviceChecks: the search for silent corruption of a shard on a CUDA device, of jobs with check_every. It is that of
// worker/pass/pass_check.cc, but that a device has shorter chunks, and that weights which are placed have no guards.
//
// A step leaves no chunk's source, so the sources of drawn chunks are copied, on the device and before the step, into a
// scratch that has a range for each. The kernels of the step take these ranges, too, and write nothing but the scratch.
// What lies in the shard and what lies in the scratch is digested on the device: two results of one step differ where
// arithmetic erred. The shard's digest is the chunk's guard: the next step digests it first, and finds memory that
// changed meanwhile. The device's work grows by what is drawn, one of check_every chunks; the host draws from all chunks
// of the shard in each step.
//
// All goes into the caller's stream, in this order: Begin, the step, the ranges of Drawn with places for nothing, End;
// when the stream has done it, Found. The shard, the runtime, its memory and the kernels outlive the object. Not
// thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job/job.h"
#include "kernels/cuda/fused_pass_kernels.h"
#include "local/device/device_segment.h"
#include "worker/control/control_block.h"
#include "worker/control/damage.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/device/pinned_block.h"
#include "worker/pass/device/shard_stretches.h"

namespace shardmesh {

class DeviceChecks {
 public:
  // Of the shard that is cut so, at `storage`. `ranges`: as kernels have them, those of a bucket in a row; `cut_ranges`:
  // which of the cut's each is.
  //   ResourceExhausted: there is not enough memory. Unavailable: the device failed.
  static absl::StatusOr<std::unique_ptr<DeviceChecks>> Create(const JobSpec& job, const ShardStorage& cut,
                                                              const uint8_t* storage, std::vector<PassRange> ranges,
                                                              std::vector<int> cut_ranges,
                                                              const std::shared_ptr<DeviceRuntime>& device);

  // Draws the step's chunks, copies their sources, and digests those that have a guard.
  absl::Status Begin(const Command& command, const PassKernels& kernels);
  // The scratch's ranges for what was drawn of ranges [first, first + num): where they lie, and how many.
  std::pair<const PassRange*, int> Drawn(int first, int num) const;
  // Digests both results.
  absl::Status End(const Command& command, const PassKernels& kernels);
  // What was found, if anything. The guards of the result are those of what was drawn.
  std::optional<Damage> Found(const Command& command);
  // The shard has other bytes from now on.
  void Forget();

  // Chunks of a bucket that a step looks at, at most: four times the spread of the draw above what is expected, and one.
  // The room is for so many; what else is drawn is not looked at.
  static int64_t MostDrawn(int64_t num_chunks, int check_every);
  // Of the device: the scratch and its tables.
  int64_t device_bytes() const { return scratch_.allocated_bytes(); }

 private:
  struct Chunk {
    int range = 0;  // of the kernels'
    int32_t chunk = 0;
    int64_t slot_at = 0;  // bytes from where slots begin
  };
  // By bucket.
  struct Room {
    int64_t chunks = 0, most_drawn = 0;
    int64_t slot_bytes = 0;  // a chunk's source and where its result goes
    std::array<int64_t, kStreams> stream_at = {};
    int64_t stretches = 0;  // of a chunk, at most
  };
  struct Guard {
    Chunk at;
    uint64_t digest = 0;
  };

  DeviceChecks(const JobSpec& job, const ShardStorage& cut, const uint8_t* storage, std::vector<PassRange> ranges,
               std::vector<int> cut_ranges, std::shared_ptr<DeviceRuntime> device)
      : job_(job),
        cut_(cut),
        storage_(storage),
        ranges_(std::move(ranges)),
        cut_ranges_(std::move(cut_ranges)),
        device_(std::move(device)) {}
  absl::Status Open();
  void Draw(int64_t step);
  // Uploads the tables: stretches of guards, of what was drawn in the shard, and of the same in the scratch.
  absl::Status FillTables(int parity);
  void AddChunk(const Chunk& at, const StreamAddresses& addresses, int64_t before,
                std::vector<DigestStretch>* stretches);
  absl::Status Launched(const char* error) const;
  absl::Status Digest(int32_t first, int32_t num, int parity, const PassKernels& kernels);
  void AddCopies(const Chunk& at, int parity, std::vector<StretchCopy>* copies) const;
  StreamAddresses SlotAddresses(const Chunk& at) const;
  template <class Value>
  absl::Status Upload(int64_t at, const std::vector<Value>& values);
  // The sum of what stretches [firsts_[i], firsts_[i + 1]) tell.
  uint64_t DigestOf(size_t i) const;
  Damage DamageOf(Damage::What what, const Chunk& at) const;

  const JobSpec& job_;
  const ShardStorage& cut_;
  const uint8_t* const storage_;
  const std::vector<PassRange> ranges_;
  const std::vector<int> cut_ranges_;
  const std::shared_ptr<DeviceRuntime> device_;
  std::vector<Room> rooms_;
  // Bytes from where the tables begin, on the device as in the block: ranges, their progress words (0), stretches,
  // copies. Behind them are on the device the slots, in the block the digests.
  int64_t progress_at_ = 0, stretches_at_ = 0, copies_at_ = 0, tables_bytes_ = 0;
  DeviceSegment scratch_;
  PinnedBlock block_;
  std::vector<Chunk> drawn_;      // in the ranges' order
  std::vector<Guard> guards_[2];  // by parity
  std::vector<int32_t> firsts_;   // of the stretches of each chunk that is digested, and the end
  int32_t num_guard_stretches_ = 0, num_copies_ = 0;
};

}  // namespace shardmesh
