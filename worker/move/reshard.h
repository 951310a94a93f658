// Weights and states of a job on their way from the shards of one mesh to those of another one, as they are stored:
// every granule (block, row, matrix) is whole in both, so nothing is decoded and no bit changes.
//
//   shard 0 of 2:  [ a a a a | b b ]         pieces of shard 1 of 3:  a 3-4 from shard 0, b 0-1 from shard 0,
//   shard 1 of 2:  [ b b b | c c c ]                                   b 2 from shard 1
//
// Pure but for the memory that they read and write; for one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/job/plan.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {

// A stretch of one tensor that no chunk of either shard cuts.
struct ReshardPiece {
  int tensor = 0;
  int64_t first_element = 0;  // in the tensor
  int64_t num_elements = 0;
  int from_range = 0, to_range = 0;        // of the storages
  int64_t from_offset = 0, to_offset = 0;  // elements from the range's begin
};

// What `to` takes from `from`, in the order of `to`. Both are cut from plans of one job, with other meshes.
std::vector<ReshardPiece> PiecesOf(const ShardStorage& from, const ShardStorage& to);

// Who held what of an epoch that ended: `was`, by rank of now, which rank it was there, -1: none; `departing`:
// ranks there that are none now.
struct Holders {
  absl::Span<const int32_t> was, departing;
};
// From whom `rank` takes what `shard` of `before` held: itself, where it held that shard; else, in turn, the ranks of
// now that did; else was.size() + i: departing[i]. -1: nobody held it.
int SourceOf(const Plan& before, const Holders& holders, int shard, int rank);
// The ranks of `before` that give something: members of now, and departing ones where no member has their shard.
std::vector<Rank> GiversOf(const Plan& before, const Holders& holders);
// A rank of `before` is not there any more: neither a member of now nor departing.
bool IsAnyLost(const Plan& before, const Holders& holders);

// The bytes of pieces in one of the two storages, as they travel: piece after piece, of each its streams in their order
// (StreamOf). Pieces and storage outlive the object.
class ReshardBytes {
 public:
  enum class Side { kFrom, kTo };
  ReshardBytes(const ShardStorage& storage, int parity, Side side, absl::Span<const ReshardPiece> pieces);

  int64_t num_bytes() const { return num_bytes_; }  // of all
  // The next stretch, of at most `most` bytes; empty: there are no more.
  absl::Span<char> Next(int64_t most);
  // Of the streams that are complete (core/format/stream_digest.h): the same in both storages, if the bytes are.
  uint64_t digest();

 private:
  struct Part {
    char* data = nullptr;
    PartLayout layout;
    int64_t bytes = 0;
  };
  Part PartOf(const ReshardPiece& piece, int stream) const;
  void Complete();

  const ShardStorage& storage_;
  const int parity_;
  const Side side_;
  const absl::Span<const ReshardPiece> pieces_;
  int64_t num_bytes_ = 0;
  size_t piece_ = 0;
  int stream_ = 0;
  int64_t in_part_ = 0;
  uint64_t digest_ = 0;
};

// Pieces from a shard that this process holds.
void CopyPieces(const ShardStorage& from, int from_parity, const ShardStorage& to, int to_parity,
                absl::Span<const ReshardPiece> pieces);

}  // namespace shardmesh
