// Granule: the piece of a tensor that one worker must hold whole, because its format or optimizer computes something
// over it (a scale, a normalisation, an orthogonalisation). A shard boundary never cuts one.
//
//   text        granule                                       for
//   flat:N      N elements of the flat index                  formats with 1-D blocks (dyn8: 256, nf4: 64 x 256)
//   rows:N      N rows (of the last dimension)                one scale a row: int8_row, fp8_row
//   block:N     N x N elements of the last two dimensions     one scale a block: fp8_block (128 x 128)
//   whole       the matrix (the last two dimensions)          Muon
//
// Every granule is a multiple of kGroupElements, the unit of random draws, so groups of rows grow until they are one.
// A matrix that goes to one owner is filled up to kOwnedAlignment instead, the longest block of a format: nothing lies
// behind it in its granule.
//
// How a tensor lies in its bucket: row-major, with one exception. A tensor of `block` granules lies block by block (the
// blocks row-major, the elements of a block row-major, blocks at the edge filled up with zeros): a block is then
// contiguous and every tensor has the granule N * N. Row-major, a granule would be N whole rows, of another size for
// each width of tensor, and equal shards would be up to twice as large as their contents (bench/plan has the figures).
// Values and pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/view/box.h"  // kMaxTensorDims

namespace shardmesh {

inline constexpr int64_t kMaxTensorElements = int64_t{1} << 40;
inline constexpr int64_t kMaxGranuleSize = int64_t{1} << 32;
inline constexpr int64_t kMaxBlockSide = 1 << 16;
inline constexpr int64_t kOwnedAlignment = 256;

enum class GranuleKind { kFlat, kRows, kBlock, kWhole };

// "flat", "rows", "block" or "whole".
absl::string_view GranuleKindName(GranuleKind kind);

struct Granule {
  GranuleKind kind = GranuleKind::kFlat;
  int64_t size = 256;  // elements, rows, or the side of a block; 0 with kWhole

  std::string ToString() const;
  friend bool operator==(const Granule& a, const Granule& b) { return a.kind == b.kind && a.size == b.size; }
};

// The inverse of ToString. InvalidArgument: another form, or a size that no granule has: flat sizes are multiples of
// kGroupElements, sides of blocks multiples of 8 up to kMaxBlockSide, all others at most kMaxGranuleSize.
absl::StatusOr<Granule> ParseGranule(absl::string_view text);

// What a granule comes to for one shape.
struct GranuleCut {
  int64_t granule_elements = 0;  // a multiple of kGroupElements
  int64_t num_granules = 0;      // 0: the tensor has no elements
  int64_t num_elements = 0;      // of the tensor itself
  bool owned = false;            // one matrix in whole: it goes to one owner, not into equal shards

  int64_t padded_elements() const { return granule_elements * num_granules; }
};

// The product of `shape`. InvalidArgument: a negative size, or more than kMaxTensorDims dimensions. ResourceExhausted:
// more than 2^40 elements.
absl::StatusOr<int64_t> CheckedElements(absl::Span<const int64_t> shape);

// Errors as CheckedElements. InvalidArgument: rows, blocks or a matrix of a tensor with fewer than two dimensions.
absl::StatusOr<GranuleCut> CutIntoGranules(absl::Span<const int64_t> shape, const Granule& granule);

}  // namespace shardmesh
