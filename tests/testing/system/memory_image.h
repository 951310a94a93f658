// A worker's memory that a test looks at and sets back: RetainedSegments, as a node holds them, and the states that
// they go through. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "worker/memory/memory.h"

namespace shardmesh::testing {

class RetainedSegments final : public Memory {
 public:
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override;

  // The bytes of all segments, one behind the other.
  std::vector<char> Save() const;
  // REQUIRES: no segment was opened since the image was saved.
  void Load(const std::vector<char>& image);
  // Where bytes differ, for messages: "" if none does.
  std::string Differs(const std::vector<char>& image) const;

  // A piece of memory: where it lies in an image, and in the segment.
  struct Piece {
    int64_t at;
    const char* bytes;
    int64_t num_bytes;
  };
  // Where the segment's bytes begin in an image. REQUIRES: it is open.
  int64_t Begin(const std::string& name) const;
  // All of it, cut into pieces of at most kPieceBytes.
  static constexpr int64_t kPieceBytes = 4096;
  std::vector<Piece> Pieces() const;

 private:
  std::map<std::string, Segment> segments_;
};

// The states of memory, one after the other, of which each is kept as what changed.
//
// Looking at all of it takes longer than an instruction: so most looks are at the pieces that are `likely` to change,
// and some at the others. late() says how many of those changed all the same: then states may be missing.
class MemoryStates {
 public:
  // The first one is as it is now. The likely pieces are those of which `other` has other bytes, those beside them, and
  // those that hold the byte of an image at one of `too`: there lie words that change and end as they began.
  MemoryStates(const RetainedSegments& memory, const std::vector<char>& other, const std::vector<int64_t>& too);
  // The likely pieces are those of other states of the same memory.
  MemoryStates(const RetainedSegments& memory, const MemoryStates& other);

  // Memory as it is now, if that is another state than the newest.
  void Add();
  int64_t size() const { return 1 + static_cast<int64_t>(changes_.size()); }
  int late() const { return late_; }
  // Calls visit(number, image) for each; the image is the visitor's to read until it returns.
  template <class Visit>
  void ForEach(const Visit& visit) const {
    std::vector<char> image = first_;
    visit(int64_t{0}, image);
    for (size_t i = 0; i < changes_.size(); ++i) {
      for (const auto& [at, bytes] : changes_[i]) std::copy(bytes.begin(), bytes.end(), image.begin() + at);
      visit(static_cast<int64_t>(i) + 1, image);
    }
  }

 private:
  using Change = std::vector<std::pair<int64_t, std::string>>;  // offset and bytes
  bool Differs(const RetainedSegments::Piece& piece, const std::vector<char>& image) const;
  void AddTo(const RetainedSegments::Piece& piece, Change& change);

  const std::vector<char> first_;
  std::vector<char> newest_;
  std::vector<Change> changes_;
  std::vector<RetainedSegments::Piece> likely_, unlikely_;
  int64_t looks_ = 0;
  int late_ = 0;
};

}  // namespace shardmesh::testing
