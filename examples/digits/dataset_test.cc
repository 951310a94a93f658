#include "examples/digits/dataset.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>
#include <set>

#include "core/base/matchers.h"
#include "gtest/gtest.h"

namespace shardmesh::digits {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

constexpr char kPath[] = "examples/digits/digits.bin";

std::string FileBytes() {
  std::ifstream file(kPath, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void Put(std::string& bytes, size_t offset, size_t num_bytes, uint64_t value) {
  for (size_t i = 0; i < num_bytes; ++i) bytes[offset + i] = static_cast<char>(value >> (8 * i));
}

// Makes the checksum right again, so that what lies behind it is tested.
std::string Sealed(std::string bytes) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (size_t i = 0; i + 8 < bytes.size(); ++i) hash = (hash ^ static_cast<uint8_t>(bytes[i])) * 0x100000001B3ull;
  Put(bytes, bytes.size() - 8, 8, hash);
  return bytes;
}

TEST(Dataset, Load_ShippedFile_HasTheKnownContent) {
  ASSERT_OK_AND_ASSIGN(const Dataset set, Dataset::Load(kPath));
  ASSERT_EQ(set.size(), 1797);
  EXPECT_EQ(set.train().size(), 1438u);
  EXPECT_EQ(set.held_out().size(), 359u);
  EXPECT_EQ(set.held_out()[1], 9);
  // The first row of the first image is 0 0 5 13 9 1 0 0; its label is 0; the last label is 8.
  EXPECT_EQ(set.image(0)[2], 5.0f / 16);
  EXPECT_EQ(set.image(0)[3], 13.0f / 16);
  EXPECT_EQ(set.label(0), 0);
  EXPECT_EQ(set.label(1796), 8);
  std::vector<int> per_class(kClasses, 0);
  for (int i = 0; i < set.size(); ++i) ++per_class[set.label(i)];
  EXPECT_EQ(per_class,
            (std::vector<int>{178, 182, 177, 183, 181, 182, 181, 179, 174, 180}));  // the data set's own table
}

TEST(Dataset, Load_NoSuchFile_SaysWhichAndWhatToGive) {
  EXPECT_THAT(Dataset::Load("absent/digits.bin"), StatusIs(StatusCode::kNotFound, HasSubstr("absent/digits.bin")));
}

TEST(Dataset, Load_NotADigitsFile_NamesTheFile) {
  const std::string path = ::testing::TempDir() + "/other.bin";
  std::ofstream(path) << std::string(100, 'x');
  EXPECT_THAT(Dataset::Load(path), StatusIs(StatusCode::kInvalidArgument, HasSubstr("other.bin: not a digits file")));
}

TEST(Dataset, Load_EndlessFile_IsRefused) {
  EXPECT_THAT(Dataset::Load("/dev/zero"), StatusIs(StatusCode::kInvalidArgument, HasSubstr("longer than")));
}

TEST(Dataset, Parse_EveryTruncationAndTrailingBytes_AreErrors) {
  const std::string bytes = FileBytes();
  for (size_t length = 0; length < bytes.size(); length += length < 200 ? 1 : 997) {
    EXPECT_THAT(Dataset::Parse(bytes.substr(0, length)), StatusIs(StatusCode::kDataLoss, HasSubstr("truncated")))
        << length;
  }
  EXPECT_THAT(Dataset::Parse(bytes + "x"), StatusIs(StatusCode::kDataLoss, HasSubstr("trailing")));
}

TEST(Dataset, Parse_WrongHeaderField_NamesItWithBothValues) {
  const auto with = [](size_t offset, uint64_t value) {
    std::string bytes = FileBytes();
    Put(bytes, offset, 4, value);
    return Dataset::Parse(Sealed(bytes));
  };
  EXPECT_THAT(with(0, 0x12345678), StatusIs(StatusCode::kInvalidArgument, HasSubstr("SMDIGITS")));
  EXPECT_THAT(with(8, 2), StatusIs(StatusCode::kInvalidArgument, HasSubstr("version is 2, expected 1")));
  EXPECT_THAT(with(12, 0), StatusIs(StatusCode::kInvalidArgument, HasSubstr("images is 0")));
  EXPECT_THAT(with(12, 0xFFFFFFFF), StatusIs(StatusCode::kInvalidArgument, HasSubstr("images is 4294967295")));
  EXPECT_THAT(with(12, 1798), StatusIs(StatusCode::kDataLoss, HasSubstr("truncated")));
  EXPECT_THAT(with(16, 63), StatusIs(StatusCode::kInvalidArgument, HasSubstr("pixels is 63, expected 64")));
  EXPECT_THAT(with(20, 11), StatusIs(StatusCode::kInvalidArgument, HasSubstr("classes is 11, expected 10")));
}

TEST(Dataset, Parse_ContentOutOfRange_NamesThePlace) {
  std::string pixel = FileBytes();
  pixel[24 + 65 * 7 + 3] = 17;
  EXPECT_THAT(Dataset::Parse(Sealed(pixel)), StatusIs(StatusCode::kDataLoss, HasSubstr("image 7, pixel 3 is 17")));
  std::string label = FileBytes();
  label[24 + 65 * 7 + 64] = 10;
  EXPECT_THAT(Dataset::Parse(Sealed(label)), StatusIs(StatusCode::kDataLoss, HasSubstr("image 7: label is 10")));
}

TEST(Dataset, Parse_AnyFlippedBit_IsAnError) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string bytes = FileBytes();
  for (int round = 0; round < 200; ++round) {
    std::string flipped = bytes;
    const size_t at = random() % bytes.size();
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << random() % 8));
    EXPECT_FALSE(Dataset::Parse(flipped).ok()) << "byte " << at;
  }
}

TEST(BatchIndices, OneEpoch_TakesEveryImageOnceWhateverTheSlots) {
  std::vector<int> indices;
  for (int i = 0; i < 240; ++i) indices.push_back(3 * i);
  for (int slots : {1, 3, 4}) {
    std::multiset<int> seen;
    std::vector<int> order;
    for (int step = 1; step <= 240 / (slots * 20); ++step) {
      for (int slot = 0; slot < slots; ++slot) {
        ASSERT_OK_AND_ASSIGN(const std::vector<int> batch, BatchIndices(indices, {/*seed=*/7, step, slot, slots, 20}));
        seen.insert(batch.begin(), batch.end());
        order.insert(order.end(), batch.begin(), batch.end());
      }
    }
    EXPECT_TRUE(std::equal(seen.begin(), seen.end(), indices.begin(), indices.end())) << slots;
    EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  }
}

TEST(BatchIndices, IsAFunctionOfItsArgumentsAndGoesOnAcrossEpochs) {
  const std::vector<int> indices = {0, 1, 2, 3, 4, 5, 6};
  ASSERT_OK_AND_ASSIGN(const auto first,
                       BatchIndices(indices, {1, /*step=*/2, /*slot=*/1, /*num_slots=*/2, /*batch_size=*/3}));
  ASSERT_OK_AND_ASSIGN(const auto again, BatchIndices(indices, {1, 2, 1, 2, 3}));
  EXPECT_EQ(first, again);
  EXPECT_EQ(first, (std::vector<int>{0, 1, 5}));
  // The shuffle of seed 1 is part of the contract: runs of different releases can be compared.
  ASSERT_OK_AND_ASSIGN(const auto epochs, BatchIndices(indices, {1, 1, 0, 1, 14}));
  EXPECT_TRUE(std::is_permutation(epochs.begin(), epochs.begin() + 7, indices.begin()));
  EXPECT_TRUE(std::is_permutation(epochs.begin() + 7, epochs.end(), indices.begin()));
  EXPECT_FALSE(std::equal(epochs.begin(), epochs.begin() + 7, epochs.begin() + 7));
  ASSERT_OK_AND_ASSIGN(const auto other, BatchIndices(indices, {2, 1, 0, 1, 14}));
  EXPECT_NE(epochs, other);
}

TEST(BatchIndices, BadChoice_NamesTheField) {
  const std::vector<int> indices = {0, 1};
  const auto expect = [&](const BatchChoice& choice, const char* message) {
    EXPECT_THAT(BatchIndices(indices, choice), StatusIs(StatusCode::kInvalidArgument, HasSubstr(message)));
  };
  expect({0, 0, 0, 1, 1}, "step is 0");
  expect({0, 1, 1, 1, 1}, "slot is 1, expected 0 to 0");
  expect({0, 1, -1, 1, 1}, "slot is -1");
  expect({0, 1, 0, 0, 1}, "num_slots is 0");
  expect({0, 1, 0, 1, 0}, "batch_size is 0");
  EXPECT_THAT(BatchIndices({}, {}), StatusIs(StatusCode::kInvalidArgument, HasSubstr("no indices")));
}

}  // namespace
}  // namespace shardmesh::digits
