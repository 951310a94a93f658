// ShardStorage: one worker's shard of a job: the weights and every state of the optimizer as stored (codes, and beside
// them remainders or scales: core/format/numeric_formats.h), each part a stream of its own in one segment, in rotating
// storage.
//
// A step never overwrites its source. The shard is cut into fixed ranges of about kRangeElements, each range into
// chunks of about kChunkElements: as many whole granules of the bucket as fit, so of int8_row weights whole rows, and
// at least one. A matrix that Muon steps is a range. Each range has room for one chunk, the longest it has, more than
// it holds:
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
// The update of a matrix that Muon steps needs all of its source. So it is made, before the first chunk, in a scratch
// that lies in the segment too and is large enough for each matrix of the shard; a word says for which command and
// which matrix it is complete. The chunks take it from there.
//
// Beside the progress words each chunk has a guard for each of its two places: the digest of what lies there, where
// somebody told it, for whoever wants to know whether it still does (pass_check.cc).
//
// A shard on a CUDA device is cut the same way, into shorter ranges (Cut), and lies in memory of the device.
//
// Not thread-safe; different ranges may be worked on by different threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job/plan.h"
#include "kernels/muon/muon.h"
#include "kernels/optimizer_step.h"
#include "worker/memory/memory.h"

namespace shardmesh {

inline constexpr int64_t kChunkElements = 4096;
inline constexpr int64_t kRangeElements = int64_t{1} << 20;
static_assert(kChunkElements % kBlockElements == 0 && kRangeElements % kChunkElements == 0);

// How long chunks and ranges are about, and whether chunks have guards.
struct StorageCut {
  int64_t chunk_elements = kChunkElements;
  int64_t range_elements = kRangeElements;
  bool guards = true;
};
// Of a device, whose blocks take a range each: 2^24 elements are 1024 of them, which fill a large one, and each warp of
// a block has a tile of a chunk. Spares are a sixteenth.
inline constexpr StorageCut kDeviceCut = {1024, 16 * 1024, false};

// Streams of a shard: codes of the weights (0) and of states 1 to 3, and behind them the other part of each.
inline constexpr int kStates = 3, kStreams = 2 * (1 + kStates);
constexpr int StreamOf(int state_plus_one, bool extra) { return state_plus_one + (extra ? 1 + kStates : 0); }

// Elements of a bucket's chunks, and of its ranges but for the last and those of matrices.
int64_t ChunkElementsOf(const Bucket& bucket, const StorageCut& cut = {});
int64_t RangeElementsOf(const Bucket& bucket, const StorageCut& cut = {});

// A fixed part of one bucket's shard.
struct StorageRange {
  int bucket = 0;
  int64_t bucket_begin = 0;                  // first element, from the bucket's start
  int64_t num_elements = 0;                  // a multiple of kBlockElements
  std::array<PartLayout, kStreams> parts;    // 0 bytes: there is no such stream
  std::array<int64_t, kStreams> begin = {};  // bytes before it in each stream, spares counted
  bool frozen = false;                       // as its bucket
  int64_t chunk_elements = kChunkElements;
  int matrix = -1;          // its number among the shard's matrices, if it is one
  int64_t first_chunk = 0;  // chunks of the shard before its own
  int64_t num_chunks() const { return (num_elements + chunk_elements - 1) / chunk_elements; }
  int64_t spare() const { return frozen ? 0 : std::min(chunk_elements, num_elements); }
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
                                           const std::atomic<bool>* cancelled = nullptr, const StorageCut& cut = {});

  // The same shard without memory, cut as `cut` says: what StreamAt and ProgressAt say are bytes from
  // where segment_bytes() of memory begin. Only what says where things lie may be called.
  static absl::StatusOr<ShardStorage> Cut(const Plan& plan, int shard, const StorageCut& cut,
                                          const std::atomic<bool>* cancelled = nullptr);
  int64_t segment_bytes() const { return segment_bytes_; }
  int64_t StreamAt(int range, int stream) const { return streams_at_[stream] + ranges_[range].begin[stream]; }
  int64_t ProgressAt(int range) const;

  // Bytes of the segment that Open asks for. INT64_MAX stands for more.
  static int64_t NumBytes(const Plan& plan, int shard);

  const std::vector<StorageRange>& ranges() const { return ranges_; }
  const Segment& segment() const { return segment_; }
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
  // Takes a range's memory, its spare included, from the system now (Segment::Populate).
  void Populate(int range) const;

  // Chunks of `range` that command `seq` has finished; 0 when the word is of another command.
  int64_t Progress(int range, uint64_t seq) const;
  void SetProgress(int range, uint64_t seq, int64_t chunks);

  // What a chunk's bytes, as placed by `parity`, were when they were written: a digest, or 0: nobody told.
  // REQUIRES: storage that was cut with guards.
  uint64_t Guard(int range, int parity, int64_t chunk) const { return *guard(range, parity, chunk); }
  void SetGuard(int range, int parity, int64_t chunk, uint64_t digest) { *guard(range, parity, chunk) = digest; }

  // Where the matrices' updates are made, one after the other, and which one it has: whether that of a range is
  // complete for command `seq`.
  const MuonSpace& scratch_space() const { return scratch_space_; }
  float* scratch() const { return reinterpret_cast<float*>(segment_.data() + scratch_at_); }
  bool UpdateIsReady(int range, uint64_t seq) const;
  void SetUpdateReady(int range, uint64_t seq);

  // Bytes of weights and states, of the spare chunks among them, and of the matrices' scratch.
  int64_t num_bytes() const { return segment_.num_bytes(); }
  int64_t spare_bytes() const { return spare_bytes_; }

 private:
  absl::Status CutRanges(const Plan& plan, int shard, const StorageCut& cut, const std::atomic<bool>* cancelled);
  void CutChunks(const Plan& plan, const StorageRange& range);
  std::atomic<uint64_t>* progress(int range) const;  // and behind those of all ranges, the scratch's
  uint64_t* guard(int range, int parity, int64_t chunk) const {
    return reinterpret_cast<uint64_t*>(segment_.data() + guards_at_) + 2 * (ranges_[range].first_chunk + chunk) +
           parity;
  }
  StoredRun At(int state_plus_one, int range, int parity, int64_t offset) const;
  char* At(int range, int stream) const { return segment_.data() + StreamAt(range, stream); }

  Segment segment_;
  std::vector<StorageRange> ranges_;
  std::vector<std::vector<ChunkRun>> runs_;
  std::vector<std::vector<int>> first_run_;
  int64_t spare_bytes_ = 0, segment_bytes_ = 0;
  std::array<int64_t, kStreams> streams_at_ = {};  // bytes from the segment's data
  MuonSpace scratch_space_;
  int64_t scratch_at_ = 0, guards_at_ = 0;
};

// The sum of ShardStorage::NumBytes over all ranks. INT64_MAX stands for more.
int64_t StorageBytesOfAll(const Plan& plan);

}  // namespace shardmesh
