#include "core/digest.h"

#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "core/format.h"
#include "core/matchers.h"

namespace shardmesh {
namespace {

std::string HashOf(std::initializer_list<absl::string_view> texts) {
  Hasher hasher;
  for (absl::string_view text : texts) hasher.Add(text);
  return hasher.Hex();
}

TEST(HasherTest, Value_IsGolden) {
  Hasher hasher;
  hasher.Add("shardmesh");
  hasher.Add(-1);
  EXPECT_EQ(hasher.Hex(), "5d24314bee875da971927ea2f1702a00");
}

TEST(HasherTest, ValuesAreFramed) {
  EXPECT_NE(HashOf({"ab", "c"}), HashOf({"a", "bc"}));
  EXPECT_NE(HashOf({"ab"}), HashOf({"ab", ""}));
  EXPECT_NE(HashOf({"a", "b"}), HashOf({"b", "a"}));
  Hasher one, two;
  one.Add(1);
  two.Add(int64_t{1});
  EXPECT_EQ(one.Hex(), two.Hex());
}

std::vector<uint8_t> Bytes(int64_t n) {
  std::vector<uint8_t> bytes(n);
  std::mt19937 rng(7);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  return bytes;
}

TEST(DigestRunTest, Value_IsGolden) {
  const std::vector<uint8_t> data = Bytes(128 * 4);
  EXPECT_EQ(DigestRun(3, 1, 64, data.data(), 128, 4), 180644436968052192u);
}

// The digest of any way to cut a tensor is the same: so it does not depend on the mesh.
TEST(DigestRunTest, CutsAddUp) {
  const std::vector<uint8_t> data = Bytes(640 * 2);
  const uint64_t whole = DigestRun(5, 0, 0, data.data(), 640, 2);
  for (int64_t cut = 0; cut <= 640; cut += kGroupElements) {
    EXPECT_EQ(DigestRun(5, 0, cut, data.data() + cut * 2, 640 - cut, 2) + DigestRun(5, 0, 0, data.data(), cut, 2),
              whole);
  }
  EXPECT_EQ(DigestRun(5, 0, 0, data.data(), 0, 2), 0u);
}

TEST(DigestRunTest, EveryBitAndEveryPlaceCounts) {
  std::vector<uint8_t> data = Bytes(64 * 4);
  std::set<uint64_t> digests = {DigestRun(0, 0, 0, data.data(), 64, 4)};
  for (size_t bit = 0; bit < data.size() * 8; bit += 13) {
    data[bit / 8] ^= 1 << bit % 8;
    EXPECT_TRUE(digests.insert(DigestRun(0, 0, 0, data.data(), 64, 4)).second) << "bit " << bit;
    data[bit / 8] ^= 1 << bit % 8;
  }
  EXPECT_TRUE(digests.insert(DigestRun(1, 0, 0, data.data(), 64, 4)).second);
  EXPECT_TRUE(digests.insert(DigestRun(0, 1, 0, data.data(), 64, 4)).second);
  EXPECT_TRUE(digests.insert(DigestRun(0, 0, 64, data.data(), 64, 4)).second);
  EXPECT_TRUE(digests.insert(DigestRun(0, 0, int64_t{1} << 40, data.data(), 64, 4)).second);
}

// Two groups that change places change the digest, although the hashes are added.
TEST(DigestRunTest, SwappedGroups_Differ) {
  const std::vector<uint8_t> data = Bytes(128 * 4);
  std::vector<uint8_t> swapped(data.begin() + 256, data.end());
  swapped.insert(swapped.end(), data.begin(), data.begin() + 256);
  EXPECT_NE(DigestRun(0, 0, 0, data.data(), 128, 4), DigestRun(0, 0, 0, swapped.data(), 128, 4));
}

}  // namespace
}  // namespace shardmesh
