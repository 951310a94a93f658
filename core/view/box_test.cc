#include "core/view/box.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/view/box_index.h"
#include "core/view/box_parts.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

// Row-major numbers of a box's elements, one by one.
std::set<int64_t> ElementsOf(const Box& box, const Dims& shape) {
  std::set<int64_t> elements;
  const Dims inner = RowMajorStrides(box.sizes), outer = RowMajorStrides(shape);
  for (int64_t i = 0; i < box.NumElements(); ++i) {
    int64_t id = 0;
    for (size_t d = 0; d < shape.size(); ++d) id += (box.offsets[d] + i / inner[d] % box.sizes[d]) * outer[d];
    elements.insert(id);
  }
  return elements;
}

class RandomBoxes {
 public:
  RandomBoxes() {
    const char* fixed = std::getenv("SHARDMESH_TEST_SEED");
    seed = fixed != nullptr ? std::stoul(fixed) : std::random_device()();
    std::printf("seed %u (repeat with SHARDMESH_TEST_SEED)\n", seed);
    rng_.seed(seed);
  }
  int Below(int limit) { return static_cast<int>(rng_() % limit); }
  Dims Shape(int max_dims, int max_size) {
    Dims shape;
    for (int d = Below(max_dims + 1); d-- > 0;) shape.push_back(Below(max_size + 1));
    return shape;
  }
  Box Inside(const Dims& shape) {
    Box box = Box::Whole(shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      box.offsets[d] = Below(static_cast<int>(shape[d]) + 1);
      box.sizes[d] = Below(static_cast<int>(shape[d] - box.offsets[d]) + 1);
    }
    return box;
  }

  unsigned seed;

 private:
  std::mt19937 rng_;
};

TEST(BoxTest, ScalarAndEmpty_CountOneAndNone) {
  const Box scalar = Box::Whole({});
  EXPECT_EQ(scalar.NumElements(), 1);
  EXPECT_TRUE(scalar.Overlaps(scalar));
  EXPECT_EQ(scalar.ToString(), "[]");
  const Box empty{{4, 0}, {0, 3}};
  EXPECT_TRUE(empty.IsEmpty());
  EXPECT_EQ(empty.NumElements(), 0);
  EXPECT_FALSE(empty.Overlaps(Box::Whole({9, 9})));
  EXPECT_EQ(empty.ToString(), "[4:4, 0:3]");
}

TEST(BoxTest, RandomBoxes_IntersectionAndOverlapEqualTheElements) {
  RandomBoxes random;
  for (int round = 0; round < 5000; ++round) {
    const Dims shape = random.Shape(3, 6);
    const Box a = random.Inside(shape), b = random.Inside(shape), both = Intersection(a, b);
    const std::set<int64_t> in_a = ElementsOf(a, shape), in_b = ElementsOf(b, shape);
    std::set<int64_t> in_both;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::inserter(in_both, in_both.end()));
    ASSERT_EQ(ElementsOf(both, shape), in_both) << "seed " << random.seed << a.ToString() << b.ToString();
    ASSERT_EQ(a.Overlaps(b), !in_both.empty()) << "seed " << random.seed << a.ToString() << b.ToString();
  }
}

TEST(BoxTest, RandomFlatRanges_AreFewAscendingBoxesOfJustThoseElements) {
  RandomBoxes random;
  for (int round = 0; round < 5000; ++round) {
    const Dims shape = random.Shape(4, 4);
    const int64_t n = Box::Whole(shape).NumElements();
    const int64_t begin = random.Below(static_cast<int>(n) + 1),
                  end = begin + random.Below(static_cast<int>(n - begin) + 1);
    const std::vector<Box> boxes = BoxesOfFlatRange(shape, begin, end);
    ASSERT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
    int64_t next = begin;
    for (const Box& box : boxes) {
      for (const int64_t element : ElementsOf(box, shape)) ASSERT_EQ(element, next++) << "seed " << random.seed;
    }
    ASSERT_EQ(next, std::max(begin, end)) << "seed " << random.seed;
  }
}

TEST(BoxTest, RandomBoxes_NextInBoxIsTheNextElement) {
  RandomBoxes random;
  for (int round = 0; round < 5000; ++round) {
    const Dims shape = random.Shape(4, 4);
    const Box box = random.Inside(shape);
    if (box.IsEmpty()) continue;
    const std::set<int64_t> elements = ElementsOf(box, shape);
    for (int64_t i = 0; i <= Box::Whole(shape).NumElements(); ++i) {
      const auto next = elements.lower_bound(i);
      const auto expected = next == elements.end() ? std::nullopt : std::optional<int64_t>(*next);
      ASSERT_EQ(NextInBox(shape, box, i), expected) << "seed " << random.seed << box.ToString() << " at " << i;
    }
  }
}

TEST(BoxTest, Shapes_LimitsAreTyped) {
  const int64_t big = int64_t{1} << 31;
  EXPECT_OK(ValidateShape({}));
  EXPECT_OK(ValidateShape({big, big}));
  EXPECT_OK(ValidateShape({1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_THAT(ValidateShape({1, 1, 1, 1, 1, 1, 1, 1, 1}), StatusIs(kExhausted, HasSubstr("9 dimensions; at most 8")));
  EXPECT_THAT(ValidateShape({big, big, 2}), StatusIs(kExhausted, HasSubstr("more than 2^62")));
  EXPECT_THAT(ValidateShape({0, INT64_MAX, INT64_MAX}), StatusIs(kExhausted, HasSubstr("more than 2^62")));
  EXPECT_THAT(ValidateShape({3, -1}), StatusIs(kInvalid, HasSubstr("-1 in the shape [3, -1]; give 0 or more")));
}

TEST(BoxTest, BoxesOutsideTheShape_AreInvalidArgument) {
  EXPECT_OK(ValidateBox({{4}, {0}}, {4}));
  EXPECT_THAT(ValidateBox({{2, 0}, {3, 1}}, {4, 1}),
              StatusIs(kInvalid, HasSubstr("[2:5, 0:1] is not inside the shape [4, 1]: see dimension 0")));
  EXPECT_THAT(ValidateBox({{-1}, {1}}, {4}),
              StatusIs(kInvalid, HasSubstr("[-1:0] has the negative offset -1 along dimension 0")));
  EXPECT_THAT(ValidateBox({{1}, {-1}}, {4}),
              StatusIs(kInvalid, HasSubstr("[1:0] has the negative size -1 along dimension 0")));
  EXPECT_THAT(ValidateBox({{INT64_MAX}, {INT64_MAX}}, {4}), StatusIs(kInvalid, HasSubstr("not inside")));
  EXPECT_THAT(ValidateBox({{0}, {1, 1}}, {4, 4}), StatusIs(kInvalid, HasSubstr("1 offsets and 2 sizes")));
}

TEST(BoxTest, LocalBoxes_BadMemoryIsTyped) {
  const Dims shape = {4, 4};
  const Box whole = Box::Whole(shape);
  EXPECT_OK(ValidateLocalBox({whole, 7, {1, 4}}, shape));
  EXPECT_OK(ValidateLocalBox({{{1, 1}, {1, 1}}, 0, {0, 0}}, shape));
  EXPECT_OK(ValidateLocalBox({{{1, 1}, {0, 3}}, 0, {0, 0}}, shape));
  EXPECT_THAT(ValidateLocalBox({whole, 0, {4}}, shape), StatusIs(kInvalid, HasSubstr("one stride for each")));
  EXPECT_THAT(ValidateLocalBox({whole, -1, {4, 1}}, shape), StatusIs(kInvalid, HasSubstr("offset -1")));
  EXPECT_THAT(ValidateLocalBox({whole, 0, {4, -1}}, shape), StatusIs(kInvalid, HasSubstr("strides must be 0 or more")));
  EXPECT_THAT(ValidateLocalBox({whole, 0, {3, 1}}, shape), StatusIs(kInvalid, HasSubstr("two elements share a place")));
  EXPECT_THAT(ValidateLocalBox({whole, 0, {0, 1}}, shape), StatusIs(kInvalid, HasSubstr("two elements share a place")));
  EXPECT_THAT(ValidateLocalBox({whole, 0, {INT64_MAX / 2, 1}}, shape), StatusIs(kExhausted, HasSubstr("2^62")));
  EXPECT_THAT(ValidateLocalBox({whole, INT64_MAX, {4, 1}}, shape), StatusIs(kExhausted, HasSubstr("2^62")));
}

TEST(BoxIndexTest, RandomBoxes_OverlapsEqualTheBruteForce) {
  RandomBoxes random;
  for (int round = 0; round < 300; ++round) {
    const Dims shape = random.Shape(3, 30);
    std::vector<Box> boxes;
    for (int i = random.Below(60); i-- > 0;) boxes.push_back(random.Inside(shape));
    const BoxIndex index(boxes);
    const Box want = random.Inside(shape);
    std::vector<size_t> expected, found;
    bool any_pair = false;
    for (size_t i = 0; i < boxes.size(); ++i) {
      if (boxes[i].Overlaps(want)) expected.push_back(i);
      for (size_t j = 0; j < i; ++j) any_pair |= boxes[i].Overlaps(boxes[j]);
    }
    EXPECT_TRUE(index.ForEachOverlap(want, [&](size_t i) { return found.push_back(i), true; }));
    ASSERT_THAT(found, UnorderedElementsAreArray(expected)) << "seed " << random.seed << " round " << round;
    const auto pair = index.FirstOverlap();
    ASSERT_EQ(pair.has_value(), any_pair) << "seed " << random.seed << " round " << round;
    ASSERT_TRUE(!any_pair || boxes[pair->first].Overlaps(boxes[pair->second]));
  }
}

TEST(BoxIndexTest, DisjointGrid_FindsNoPairAndStopsWhenTold) {
  std::vector<Box> grid;
  for (int64_t i = 0; i < 128; ++i) {
    for (int64_t j = 0; j < 128; ++j) grid.push_back({{3 * i, 5 * j}, {3, 5}});
  }
  const BoxIndex index(grid);
  EXPECT_EQ(index.FirstOverlap(), std::nullopt);
  int calls = 0;
  EXPECT_FALSE(index.ForEachOverlap({{0, 0}, {384, 640}}, [&](size_t) { return ++calls < 3; }));
  EXPECT_EQ(calls, 3);
}

TEST(PackedPartsTest, Qkv_PartsAreFoundByName) {
  ASSERT_OK_AND_ASSIGN(
      const PackedParts qkv,
      PackedParts::Create({12, 4}, {{"q", {{0, 0}, {8, 4}}}, {"k", {{8, 0}, {2, 4}}}, {"v", {{10, 0}, {2, 4}}}},
                          Gaps::kRefuse));
  EXPECT_EQ(qkv.Find("k").value(), (Box{{8, 0}, {2, 4}}));
  EXPECT_THAT(qkv.Find("o"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"o\"; there are q, k, v")));
}

TEST(PackedPartsTest, BadParts_ErrorsNameThem) {
  const auto create = [](std::vector<NamedBox> parts, Gaps gaps = Gaps::kRefuse) {
    return PackedParts::Create({8, 4}, std::move(parts), gaps);
  };
  EXPECT_THAT(create({{"gate", {{0, 0}, {5, 4}}}, {"up", {{4, 0}, {4, 4}}}}),
              StatusIs(kInvalid, AllOf(HasSubstr("\"gate\" [0:5, 0:4]"), HasSubstr("\"up\" [4:8, 0:4] overlap"))));
  EXPECT_THAT(create({{"gate", {{0, 0}, {4, 4}}}, {"gate", {{4, 0}, {4, 4}}}}),
              StatusIs(kInvalid, HasSubstr("\"gate\" [0:4, 0:4] and \"gate\" [4:8, 0:4] have one name")));
  EXPECT_THAT(create({{"gate", {{0, 0}, {9, 4}}}}), StatusIs(kInvalid, HasSubstr("parts: \"gate\" [0:9, 0:4]: box: ")));
  EXPECT_THAT(create({}), StatusIs(kInvalid, HasSubstr("there is none")));
  const std::vector<NamedBox> gap = {{"gate", {{0, 0}, {4, 4}}}, {"up", {{5, 0}, {3, 4}}}};
  EXPECT_THAT(create(gap), StatusIs(kInvalid, HasSubstr("cover 28 of the 32 elements of the shape [8, 4]")));
  EXPECT_OK(create(gap, Gaps::kAllow));
  const int64_t big = int64_t{1} << 40;
  EXPECT_THAT(PackedParts::Create({big, big}, {}, Gaps::kAllow), StatusIs(kExhausted, HasSubstr("2^62")));
}

}  // namespace
}  // namespace shardmesh
