#include "core/format/stream_digest.h"

#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace shardmesh {
namespace {

constexpr StoredLayout kFp32 = {{4}, {}};

std::vector<uint8_t> Bytes(int64_t n) {
  std::vector<uint8_t> bytes(n);
  std::mt19937 rng(7);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  return bytes;
}

std::vector<StoredLayout> AllLayouts() {
  std::vector<StoredLayout> layouts;
  for (const WeightFormat format :
       {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr}) {
    layouts.push_back(LayoutOf(format));
  }
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kDyn4,
                                   StateFormat::kFp8, StateFormat::kFp8x32}) {
    layouts.push_back(LayoutOf(format));
  }
  for (const int64_t row : {1, 3, 128, 256, 768}) layouts.push_back(LayoutOf(WeightFormat::kInt8Row, row));
  return layouts;
}

// Of a program of its own, in another language, after the definition.
TEST(StreamDigest, Value_IsGolden) {
  std::vector<uint8_t> data(259);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(7 * i + 1);
  EXPECT_EQ(DigestPart(DigestKey(3, 1, 0), {1}, 512, data.data(), 259), 14182520607518978312u);
  EXPECT_EQ(DigestPart(DigestKey(3, 2, 1), {4, 256}, 512, data.data(), 300), 13083887687048288876u);
}

// The digest of any way to cut a tensor is the same: so it does not depend on the mesh.
TEST(StreamDigest, CutsAddUp_InEveryFormat) {
  const std::vector<uint8_t> codes = Bytes(2400 * 4), extra = Bytes(2400 * 4 + 4);
  for (const StoredLayout& layout : AllLayouts()) {
    const uint64_t whole = DigestStream(5, 1, layout, 0, codes.data(), extra.data(), 2400);
    for (int64_t cut = 0; cut <= 2400; cut += 256) {
      if (layout.extra.bytes > 0 && cut % layout.extra.elements != 0) continue;
      const auto at = [&](const std::vector<uint8_t>& bytes, const PartLayout& part) {
        return bytes.data() + part.BytesOf(cut);
      };
      const uint64_t rest = DigestStream(5, 1, layout, static_cast<uint64_t>(cut), at(codes, layout.codes),
                                         at(extra, layout.extra), 2400 - cut);
      EXPECT_EQ(DigestStream(5, 1, layout, 0, codes.data(), extra.data(), cut) + rest, whole)
          << layout.codes.bytes << " " << layout.extra.bytes << " " << layout.extra.elements << " cut at " << cut;
    }
    EXPECT_EQ(DigestStream(5, 1, layout, 0, nullptr, nullptr, 0), 0u);
  }
}

TEST(StreamDigest, LanesAddUp) {
  const std::vector<uint8_t> data = Bytes(203);
  for (const int64_t word_bytes : {2, 4, 8}) {
    uint64_t digest = 0;
    for (int64_t lane = 0; lane < 7; ++lane) digest += DigestWords(9, 3, word_bytes, data.data(), 203, lane, 7);
    EXPECT_EQ(digest, DigestWords(9, 3, word_bytes, data.data(), 203)) << word_bytes;
  }
}

TEST(StreamDigest, EveryBitAndEveryPlaceCounts) {
  std::vector<uint8_t> data = Bytes(64 * 4);
  const auto digest = [&](uint32_t tensor, int stream, uint64_t first) {
    return DigestStream(tensor, stream, kFp32, first, data.data(), nullptr, 64);
  };
  std::set<uint64_t> digests = {digest(0, 0, 0)};
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= 1 << bit % 8;
    EXPECT_TRUE(digests.insert(digest(0, 0, 0)).second) << "bit " << bit;
    data[bit / 8] ^= 1 << bit % 8;
  }
  EXPECT_TRUE(digests.insert(digest(1, 0, 0)).second);
  EXPECT_TRUE(digests.insert(digest(0, 1, 0)).second);
  EXPECT_TRUE(digests.insert(digest(0, 0, 256)).second);
  EXPECT_TRUE(digests.insert(digest(0, 0, uint64_t{1} << 40)).second);
  EXPECT_TRUE(digests.insert(DigestPart(DigestKey(0, 0, 1), kFp32.codes, 0, data.data(), 64)).second);
}

// Two words that change places change the digest, although what becomes of them is added.
TEST(StreamDigest, SwappedWords_Differ) {
  std::vector<uint8_t> data = Bytes(16), swapped(data.begin() + 8, data.end());
  swapped.insert(swapped.end(), data.begin(), data.begin() + 8);
  EXPECT_NE(DigestStream(0, 0, kFp32, 0, data.data(), nullptr, 4),
            DigestStream(0, 0, kFp32, 0, swapped.data(), nullptr, 4));
}

}  // namespace
}  // namespace shardmesh
