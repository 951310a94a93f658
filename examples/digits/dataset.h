// Dataset: the handwritten digits of digits.bin (README.md), all in memory, with a fixed split into train and held-out.
//
// Images keep the order of the file. Immutable after loading, so safe to share between threads.
// Nothing a file contains aborts the process: every length, count, pixel, label and the checksum is checked first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace shardmesh::digits {

inline constexpr int kPixels = 64;    // 8 rows of 8
inline constexpr int kClasses = 10;   // the labels are 0 .. 9
inline constexpr int kMaxPixel = 16;  // darkest value in the file; images are given divided by it, in [0, 1]

class Dataset {
 public:
  // Reads the format that export_digits.py documents.
  //   InvalidArgument: not such a file (magic, version, number of pixels or classes, no image at all).
  //   DataLoss: truncated, trailing bytes, wrong checksum, or a pixel or label out of range; names where.
  static absl::StatusOr<Dataset> Parse(absl::string_view bytes);

  // Parse() of the file at `path`, and its errors with the path before them. NotFound: it cannot be opened.
  // DataLoss: reading failed. InvalidArgument: it is longer than any digits file.
  static absl::StatusOr<Dataset> Load(const std::string& path);

  int size() const { return static_cast<int>(labels_.size()); }
  // REQUIRES: 0 <= index < size().
  absl::Span<const float> image(int index) const {
    return absl::MakeConstSpan(pixels_).subspan(size_t(index) * kPixels, kPixels);
  }
  int label(int index) const { return labels_[index]; }

  // Indices, ascending. Index i is held out exactly when i % 5 == 4: a fifth of the images, never trained on.
  const std::vector<int>& train() const { return train_; }
  const std::vector<int>& held_out() const { return held_out_; }

 private:
  std::vector<float> pixels_;  // size() * kPixels
  std::vector<uint8_t> labels_;
  std::vector<int> train_, held_out_;
};

// Which batch: batch `slot` of `num_slots` of one step, drawn from `indices` without replacement within an epoch.
struct BatchChoice {
  uint64_t seed = 0;
  int64_t step = 1;  // 1 is the first
  int slot = 0;      // 0 .. num_slots - 1
  int num_slots = 1;
  int batch_size = 32;
};

// The `batch_size` members of `indices` that the choice names. The steps walk through one shuffled epoch after another:
// step s takes the next num_slots * batch_size places, slot by slot. A pure function: whoever computes a slot, and
// however often, gets the same batch.  InvalidArgument: a field out of range (named), or `indices` is empty.
absl::StatusOr<std::vector<int>> BatchIndices(absl::Span<const int> indices, const BatchChoice& choice);

}  // namespace shardmesh::digits
