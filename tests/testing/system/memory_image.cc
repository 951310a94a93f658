#include "tests/testing/system/memory_image.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::testing {
namespace {
constexpr int64_t kLine = 64;        // what a change is kept in
constexpr int64_t kLookAtAll = 256;  // one look of so many
}  // namespace

absl::StatusOr<Segment> RetainedSegments::Open(const std::string& name, int64_t num_bytes, int64_t data_offset) {
  if (segments_.count(name) == 0) {
    ASSIGN_OR_RETURN(segments_[name], Segment::Create(name, num_bytes, data_offset));
  }
  return Segment::Map(UniqueFd(dup(segments_[name].fd())), num_bytes, data_offset, Segment::Access::kReadWrite);
}

std::vector<char> RetainedSegments::Save() const {
  std::vector<char> image;
  for (const auto& [name, segment] : segments_) {
    image.insert(image.end(), segment.data(), segment.data() + segment.data_bytes());
  }
  return image;
}

void RetainedSegments::Load(const std::vector<char>& image) {
  const char* from = image.data();
  int64_t size = 0;
  for (const auto& [name, segment] : segments_) size += segment.data_bytes();
  if (static_cast<int64_t>(image.size()) != size) std::abort();
  for (const auto& [name, segment] : segments_) {
    std::memcpy(segment.data(), from, segment.data_bytes());
    from += segment.data_bytes();
  }
}

std::string RetainedSegments::Differs(const std::vector<char>& image) const {
  const char* from = image.data();
  std::string what;
  for (const auto& [name, segment] : segments_) {
    const char* const end = from + segment.data_bytes();
    const auto at = std::mismatch(from, end, segment.data());
    int64_t bytes = 0;
    for (int64_t i = 0; i < segment.data_bytes(); ++i) bytes += from[i] != segment.data()[i];
    if (bytes > 0) {
      absl::StrAppend(&what, name, " in ", bytes, " bytes from ", at.first - from, " on: ", int{*at.second},
                      ", should be ", int{*at.first}, "; ");
    }
    from = end;
  }
  return what;
}

int64_t RetainedSegments::Begin(const std::string& name) const {
  if (segments_.count(name) == 0) std::abort();
  int64_t begin = 0;
  for (auto it = segments_.begin(); it->first != name; ++it) begin += it->second.data_bytes();
  return begin;
}

std::vector<RetainedSegments::Piece> RetainedSegments::Pieces() const {
  std::vector<Piece> pieces;
  int64_t begin = 0;  // of the segment in an image
  for (const auto& [name, segment] : segments_) {
    const int64_t size = segment.data_bytes();
    for (int64_t at = 0; at < size; at += kPieceBytes) {
      pieces.push_back({begin + at, segment.data() + at, std::min(kPieceBytes, size - at)});
    }
    begin += size;
  }
  return pieces;
}

MemoryStates::MemoryStates(const RetainedSegments& memory, const std::vector<char>& other,
                           const std::vector<int64_t>& too)
    : first_(memory.Save()), newest_(first_) {
  const std::vector<RetainedSegments::Piece> pieces = memory.Pieces();
  std::vector<bool> differs;
  for (const RetainedSegments::Piece& piece : pieces) differs.push_back(Differs(piece, other));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool beside = (i > 0 && differs[i - 1]) || (i + 1 < pieces.size() && differs[i + 1]);
    const bool named = std::any_of(too.begin(), too.end(), [&](int64_t at) {
      return pieces[i].at <= at && at < pieces[i].at + pieces[i].num_bytes;
    });
    (differs[i] || beside || named ? likely_ : unlikely_).push_back(pieces[i]);
  }
}

MemoryStates::MemoryStates(const RetainedSegments& memory, const MemoryStates& other)
    : first_(memory.Save()), newest_(first_), likely_(other.likely_), unlikely_(other.unlikely_) {}

bool MemoryStates::Differs(const RetainedSegments::Piece& piece, const std::vector<char>& image) const {
  return std::memcmp(piece.bytes, image.data() + piece.at, piece.num_bytes) != 0;
}

void MemoryStates::AddTo(const RetainedSegments::Piece& piece, Change& change) {
  for (int64_t at = 0; at < piece.num_bytes; at += kLine) {
    const int64_t bytes = std::min(kLine, piece.num_bytes - at);
    char* const newest = newest_.data() + piece.at + at;
    if (std::memcmp(newest, piece.bytes + at, bytes) == 0) continue;
    change.emplace_back(piece.at + at, std::string(piece.bytes + at, bytes));
    std::memcpy(newest, piece.bytes + at, bytes);
  }
}

void MemoryStates::Add() {
  Change change;
  for (const RetainedSegments::Piece& piece : likely_) {
    if (Differs(piece, newest_)) AddTo(piece, change);
  }
  if (++looks_ % kLookAtAll == 0) {
    for (const RetainedSegments::Piece& piece : unlikely_) {
      if (!Differs(piece, newest_)) continue;
      AddTo(piece, change);
      ++late_;
    }
  }
  if (!change.empty()) changes_.push_back(std::move(change));
}

}  // namespace shardmesh::testing
