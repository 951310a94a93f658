// ShardStorage: one worker's shard of a job: the weights and every state of the optimizer as stored (codes, and beside
// them remainders or scales: core/numeric_formats.h), each part a stream of its own in one segment, in rotating
// storage.
//
// A step never overwrites its source. The shard is cut into fixed ranges of at most kRangeElements, each range into
// chunks of kChunkElements, and each range has room for one chunk more than it holds:
//
//   parity 0:   [spare][chunk 0][chunk 1] ... [chunk n-1]      a step walks up:   chunk i goes where chunk i-1 lay
//   parity 1:   [chunk 0][chunk 1] ... [chunk n-1][spare]      a step walks down: chunk i goes where chunk i+1 lay
//
// Frozen parameters are never stepped: their ranges have weights alone, no spare, and one place for both parities.
//
// The place just left is still in cache, so rotation costs nothing over writing in place, and whoever takes over after
// a crash finds the source of the open chunk untouched. After each chunk a progress word (command seq and chunks
// finished) is release-stored, in the same segment. Ranges are fixed by the plan, never by threads.
//
// Not thread-safe; different ranges may be worked on by different threads.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layout.h"
#include "kernels/optimizer_step.h"
#include "worker/memory.h"

namespace shardmesh {

inline constexpr int64_t kChunkElements = 4096;
inline constexpr int64_t kRangeElements = int64_t{1} << 20;
static_assert(kChunkElements % kBlockElements == 0 && kRangeElements % kChunkElements == 0);

// Streams of a shard: codes of the weights (0) and of states 1 to 3, and behind them the other part of each.
inline constexpr int kStates = 3, kStreams = 2 * (1 + kStates);
constexpr int StreamOf(int state_plus_one, bool extra) { return state_plus_one + (extra ? 1 + kStates : 0); }

// Elements of a range's spare.
constexpr int64_t SpareOf(bool frozen) { return frozen ? 0 : kChunkElements; }

// A fixed part of one bucket's shard.
struct StorageRange {
  int bucket = 0;
  int64_t bucket_begin = 0;                  // first element, from the bucket's start
  int64_t num_elements = 0;                  // a multiple of kBlockElements
  std::array<PartLayout, kStreams> parts;    // 0 bytes: there is no such stream
  std::array<int64_t, kStreams> begin = {};  // bytes before it in each stream, spares counted
  bool frozen = false;                       // as its bucket
  int64_t num_chunks() const { return (num_elements + kChunkElements - 1) / kChunkElements; }
  int64_t spare() const { return SpareOf(frozen); }
  // Elements from the range's first place in the stream to where chunk 0 lies.
  int64_t Base(int parity) const { return parity == 0 ? spare() : 0; }
};

// A run of one tensor inside one chunk.
struct ChunkRun {
  int tensor = 0;
  int64_t first_element = 0;  // in the tensor, a multiple of kBlockElements
  int64_t offset = 0;         // elements from the range's begin, a multiple of kBlockElements
  int64_t num_elements = 0;   // the tensor's last may be no multiple
};

class ShardStorage {
 public:
  // Streams of `shard` of the plan. Fresh memory: zeros, parity 0.
  //   ResourceExhausted: not enough memory.
  //   Cancelled: `cancelled`, looked at before each range, was set.
  static absl::StatusOr<ShardStorage> Open(Memory& memory, const std::string& name, const Plan& plan, int shard,
                                           const std::atomic<bool>* cancelled = nullptr);

  // Bytes of the segment that Open asks for: the same for every shard of a plan.
  static int64_t NumBytes(const Plan& plan);

  const std::vector<StorageRange>& ranges() const { return ranges_; }
  // The runs of every chunk of a range: [first_run(range, chunk), first_run(range, chunk + 1)) of runs().
  const std::vector<ChunkRun>& runs(int range) const { return runs_[range]; }
  int first_run(int range, int64_t chunk) const { return first_run_[range][chunk]; }

  // The element `offset` of a range, a multiple of kBlockElements, as placed by `parity`: of the weights, and of state
  // 0 to 2. Parts that do not exist are null.
  StoredRun weights(int range, int parity, int64_t offset) const { return At(0, range, parity, offset); }
  StoredRun state(int state, int range, int parity, int64_t offset) const {
    return At(state + 1, range, parity, offset);
  }
  // The bytes of a range in a stream, and where they begin, its spare included.
  int64_t StreamBytes(int range, int stream) const;
  char* StreamBegin(int range, int stream) const { return At(range, stream); }

  // Chunks of `range` that command `seq` has finished; 0 when the word is of another command.
  int64_t Progress(int range, uint64_t seq) const;
  void SetProgress(int range, uint64_t seq, int64_t chunks);

  // Bytes of weights and states, and of the spare chunks among them.
  int64_t num_bytes() const { return segment_.num_bytes(); }
  int64_t spare_bytes() const { return spare_bytes_; }

 private:
  absl::Status CutRanges(const Plan& plan, int shard, const std::atomic<bool>* cancelled);
  std::atomic<uint64_t>* progress(int range) const;
  StoredRun At(int state_plus_one, int range, int parity, int64_t offset) const;
  char* At(int range, int stream) const { return segment_.data() + streams_at_[stream] + ranges_[range].begin[stream]; }

  Segment segment_;
  std::vector<StorageRange> ranges_;
  std::vector<std::vector<ChunkRun>> runs_;
  std::vector<std::vector<int>> first_run_;
  int64_t spare_bytes_ = 0;
  std::array<int64_t, kStreams> streams_at_ = {};  // bytes from the segment's data
};

}  // namespace shardmesh
