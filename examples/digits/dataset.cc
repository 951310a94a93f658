#include "examples/digits/dataset.h"

#include <fstream>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "examples/digits/splitmix64.h"

namespace shardmesh::digits {
namespace {

constexpr absl::string_view kMagic = "SMDIGITS";
constexpr uint64_t kVersion = 1;
constexpr size_t kHeaderBytes = 24;
constexpr size_t kRecordBytes = kPixels + 1;
constexpr size_t kChecksumBytes = 8;
constexpr uint64_t kMaxImages = 1'000'000;
constexpr size_t kMaxFileBytes = kHeaderBytes + kMaxImages * kRecordBytes + kChecksumBytes;

// Little-endian, independent of the machine. REQUIRES: offset + num_bytes <= bytes.size().
uint64_t ReadInteger(absl::string_view bytes, size_t offset, size_t num_bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < num_bytes; ++i) value |= uint64_t{static_cast<uint8_t>(bytes[offset + i])} << (8 * i);
  return value;
}

// FNV-1a, 64 bits (http://www.isthe.com/chongo/tech/comp/fnv/).
uint64_t Fnv1a64(absl::string_view bytes) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return hash;
}

// The number of images, when header, length and checksum are right.
absl::StatusOr<uint64_t> CheckFrame(absl::string_view bytes) {
  if (bytes.size() < kHeaderBytes + kChecksumBytes) {
    return absl::DataLossError(
        absl::StrCat("truncated: ", bytes.size(), " bytes, at least ", kHeaderBytes + kChecksumBytes, " are needed"));
  }
  if (bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(absl::StrCat("not a digits file: it does not start with \"", kMagic, "\""));
  }
  const auto expect = [&](size_t offset, uint64_t want, absl::string_view what) {
    const uint64_t found = ReadInteger(bytes, offset, 4);
    return found == want ? absl::OkStatus()
                         : absl::InvalidArgumentError(absl::StrCat(what, " is ", found, ", expected ", want));
  };
  RETURN_IF_ERROR(expect(8, kVersion, "format version"));
  RETURN_IF_ERROR(expect(16, kPixels, "number of pixels"));
  RETURN_IF_ERROR(expect(20, kClasses, "number of classes"));
  const uint64_t count = ReadInteger(bytes, 12, 4);
  if (count == 0 || count > kMaxImages) {
    return absl::InvalidArgumentError(absl::StrCat("number of images is ", count, ", expected 1 to ", kMaxImages));
  }
  const uint64_t want = kHeaderBytes + count * kRecordBytes + kChecksumBytes;
  if (bytes.size() != want) {
    return absl::DataLossError(absl::StrCat(bytes.size() < want ? "truncated: " : "trailing bytes: ", bytes.size(),
                                            " bytes, ", count, " images take ", want));
  }
  const uint64_t stored = ReadInteger(bytes, want - kChecksumBytes, kChecksumBytes);
  const uint64_t computed = Fnv1a64(bytes.substr(0, want - kChecksumBytes));
  if (stored != computed) {
    return absl::DataLossError(
        absl::StrCat("checksum of the content is ", absl::Hex(computed), ", the file says ", absl::Hex(stored)));
  }
  return count;
}

// Order `epoch` of the places 0 .. count-1: Fisher-Yates with its own stream of numbers.
std::vector<int> Shuffled(uint64_t seed, int64_t epoch, size_t count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  SplitMix64 random(seed, static_cast<uint64_t>(epoch) + 1);
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  return order;
}

absl::Status Validate(absl::Span<const int> indices, const BatchChoice& c) {
  const auto error = [](auto... parts) { return absl::InvalidArgumentError(absl::StrCat(parts...)); };
  if (indices.empty()) return error("no indices to draw from: at least one is needed");
  if (c.step < 1 || c.step > 1'000'000'000) return error("step is ", c.step, ", expected 1 to 1000000000");
  if (c.num_slots < 1 || c.num_slots > 65'536) return error("num_slots is ", c.num_slots, ", expected 1 to 65536");
  if (c.slot < 0 || c.slot >= c.num_slots) return error("slot is ", c.slot, ", expected 0 to ", c.num_slots - 1);
  if (c.batch_size < 1 || c.batch_size > 65'536) return error("batch_size is ", c.batch_size, ", expected 1 to 65536");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Dataset> Dataset::Parse(absl::string_view bytes) {
  ASSIGN_OR_RETURN(const uint64_t count, CheckFrame(bytes));
  Dataset set;
  set.pixels_.reserve(count * kPixels);
  set.labels_.reserve(count);
  for (uint64_t n = 0; n < count; ++n) {
    const absl::string_view record = bytes.substr(kHeaderBytes + n * kRecordBytes, kRecordBytes);
    for (int i = 0; i < kPixels; ++i) {
      const int pixel = static_cast<uint8_t>(record[i]);
      if (pixel > kMaxPixel) {
        return absl::DataLossError(
            absl::StrCat("image ", n, ", pixel ", i, " is ", pixel, ", expected 0 to ", kMaxPixel));
      }
      set.pixels_.push_back(static_cast<float>(pixel) / kMaxPixel);
    }
    const int label = static_cast<uint8_t>(record[kPixels]);
    if (label >= kClasses) {
      return absl::DataLossError(absl::StrCat("image ", n, ": label is ", label, ", expected 0 to ", kClasses - 1));
    }
    set.labels_.push_back(static_cast<uint8_t>(label));
    (n % 5 == 4 ? set.held_out_ : set.train_).push_back(static_cast<int>(n));
  }
  return set;
}

absl::StatusOr<Dataset> Dataset::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return absl::NotFoundError(absl::StrCat("cannot open the data file \"", path, "\": give the path of digits.bin"));
  std::string bytes;
  std::vector<char> chunk(1 << 16);
  while (bytes.size() <= kMaxFileBytes && (file.read(chunk.data(), chunk.size()), file.gcount() > 0)) {
    bytes.append(chunk.data(), file.gcount());
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat("reading \"", path, "\" failed"));
  if (bytes.size() > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", path, "\" is longer than the largest digits file, ", kMaxFileBytes, " bytes"));
  }
  absl::StatusOr<Dataset> set = Parse(bytes);
  if (!set.ok()) return Annotate(set.status(), path);
  return set;
}

absl::StatusOr<std::vector<int>> BatchIndices(absl::Span<const int> indices, const BatchChoice& choice) {
  RETURN_IF_ERROR(Validate(indices, choice));
  const int64_t count = static_cast<int64_t>(indices.size());
  int64_t place = ((choice.step - 1) * choice.num_slots + choice.slot) * choice.batch_size;
  std::vector<int> batch;
  batch.reserve(choice.batch_size);
  std::vector<int> order;
  for (int64_t epoch = -1; static_cast<int>(batch.size()) < choice.batch_size; ++place) {
    if (place / count != epoch) {
      epoch = place / count;
      order = Shuffled(choice.seed, epoch, indices.size());
    }
    batch.push_back(indices[order[place % count]]);
  }
  return batch;
}

}  // namespace shardmesh::digits
