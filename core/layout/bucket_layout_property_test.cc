// Random models against a brute-force account of every element.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/layout/bucket_layout.h"

namespace shardmesh {
namespace {

uint64_t Seed() {
  uint64_t seed = 0;
  const char* given = std::getenv("SHARDMESH_TEST_SEED");
  seed = given != nullptr && absl::SimpleAtoi(given, &seed) ? seed : std::random_device()();
  std::printf("seed %llu (repeat with SHARDMESH_TEST_SEED)\n", static_cast<unsigned long long>(seed));
  return seed;
}

// What core/layout/granule.h says, by counting.
struct Granules {
  int64_t size = 1;    // elements of one
  int64_t stored = 0;  // elements of all
  bool owned = false;
};

Granules Count(const LayoutTensor& tensor) {
  Granules all;
  int64_t elements = 1;
  for (const int64_t size : tensor.shape) elements *= size;
  const int64_t columns = tensor.shape.empty() ? 1 : tensor.shape.back();
  const int64_t rows = tensor.shape.size() < 2 ? 1 : tensor.shape[tensor.shape.size() - 2];
  const int64_t given = tensor.granule.size;
  if (elements == 0) return all;
  if (tensor.granule.kind == GranuleKind::kFlat) all.size = given;
  if (tensor.granule.kind == GranuleKind::kBlock) all.size = given * given;
  if (tensor.granule.kind == GranuleKind::kRows || tensor.granule.kind == GranuleKind::kWhole) {
    const int64_t piece = columns * (tensor.granule.kind == GranuleKind::kRows ? given : rows);
    all.owned = tensor.granule.kind == GranuleKind::kWhole && elements == rows * columns;
    all.size = piece;
    while (all.size % (all.owned ? 256 : 64) != 0) all.size += all.owned ? 1 : piece;
  }
  if (tensor.granule.kind == GranuleKind::kBlock) {
    int64_t blocks = 0;
    for (int64_t r = 0; r < rows; r += given) {
      for (int64_t c = 0; c < columns; c += given) ++blocks;
    }
    all.stored = elements / (rows * columns) * blocks * all.size;
  } else {
    while (all.stored < elements) all.stored += all.size;
  }
  return all;
}

struct Model {
  std::vector<LayoutTensor> tensors;
  LayoutOptions options;
};

Model RandomModel(std::mt19937_64& random) {
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  const char* const granules[] = {"flat:64", "flat:256", "flat:512", "rows:1",
                                  "rows:3",  "block:8",  "block:16", "whole"};
  Model model;
  model.options.num_shards = 1 + below(9);
  model.options.bucket_elements = 1 + below(20'000);
  for (int64_t i = below(25); i-- > 0;) {
    LayoutTensor tensor;
    tensor.name = absl::StrCat("t", i);
    tensor.space = below(3) == 0 ? "bf16" : "fp32";
    for (int64_t d = below(4); d-- > 0;) tensor.shape.push_back(below(8) == 0 ? below(3) : 1 + below(60));
    tensor.granule = tensor.shape.size() < 2 ? Granule() : *ParseGranule(granules[below(8)]);
    if (below(6) == 0 && !model.tensors.empty() && model.tensors.back().tied_to.empty()) {
      const std::string name = tensor.name;
      tensor = model.tensors.back();
      tensor.tied_to = tensor.name;
      tensor.name = name;
    }
    model.tensors.push_back(std::move(tensor));
  }
  return model;
}

class EveryElement {
 public:
  explicit EveryElement(const Model& model)
      : model_(model), layout_(*BucketLayout::Create(model.tensors, model.options)) {}

  void Check() {
    for (int b = 0; b < static_cast<int>(layout_.buckets().size()); ++b) {
      for (int64_t shard = 0; shard < layout_.num_shards(); ++shard) Visit(b, shard);
    }
    for (int t = 0; t < static_cast<int>(model_.tensors.size()); ++t) CheckTensor(t);
    for (int b = 0; b < static_cast<int>(layout_.buckets().size()); ++b) CheckBucket(b);
  }

 private:
  // Notes who holds each element; nothing overlaps and nothing is outside of the shard.
  void Visit(int b, int64_t shard) {
    int64_t end = 0;
    for (const Stretch& s : layout_.StretchesOf(b, shard)) {
      ASSERT_GE(s.shard_offset, end);
      end = s.shard_offset + s.num_elements;
      ASSERT_LE(end, layout_.buckets()[b].shard_elements);
      ASSERT_GT(s.num_elements, 0);
      const auto [first, last] = layout_.ShardsOf(s.tensor);
      ASSERT_TRUE(first <= shard && shard <= last);
      for (int64_t e = s.first_element; e < s.first_element + s.num_elements; ++e) {
        ASSERT_TRUE(holder_[s.tensor].emplace(e, shard).second) << "held twice";
      }
      held_in_[b] += s.num_elements;
      spaces_[b].insert(model_.tensors[s.tensor].space);
    }
  }

  void CheckTensor(int t) {
    const LayoutTensor& tensor = model_.tensors[t];
    const TensorPlace& place = layout_.places()[t];
    if (!tensor.tied_to.empty()) {
      const TensorPlace& owner = layout_.places()[*layout_.IndexOf(tensor.tied_to)];
      EXPECT_EQ(place.bucket, owner.bucket);
      EXPECT_EQ(place.offset, owner.offset);
      EXPECT_TRUE(holder_[t].empty());
      return;
    }
    const Granules cut = Count(tensor);
    ASSERT_EQ(static_cast<int64_t>(holder_[t].size()), cut.stored);
    for (const auto& [e, shard] : holder_[t]) {
      // One holder for a granule; of all elements it has the first to the last without a gap, since there are as many.
      ASSERT_EQ(shard, holder_[t][e - e % cut.size]);
      ASSERT_TRUE(!cut.owned || shard == place.owner);
    }
  }

  void CheckBucket(int b) {
    const LayoutBucket& bucket = layout_.buckets()[b];
    EXPECT_EQ(spaces_[b], std::set<std::string>{bucket.space});
    int64_t elements = 0;
    for (const int32_t t : bucket.tensors) elements += layout_.places()[t].num_elements;
    EXPECT_EQ(bucket.padding, bucket.num_elements - elements);
    if (bucket.owned) {
      EXPECT_EQ(held_in_[b], bucket.num_elements);
    } else {
      EXPECT_EQ(bucket.num_elements, bucket.shard_elements * layout_.num_shards());
      EXPECT_LT(bucket.num_elements - held_in_[b], bucket.granule_elements * layout_.num_shards());
    }
  }

  const Model& model_;
  const BucketLayout layout_;
  std::map<int, std::map<int64_t, int64_t>> holder_;  // tensor -> element -> shard
  std::map<int, int64_t> held_in_;
  std::map<int, std::set<std::string>> spaces_;
};

TEST(BucketLayoutProperty, EveryElementHasOneHolder_NoGranuleIsCut) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(absl::StrCat("SHARDMESH_TEST_SEED=", seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200 && !HasFatalFailure() && !HasNonfatalFailure(); ++round) {
    SCOPED_TRACE(round);
    const Model model = RandomModel(random);
    EveryElement(model).Check();
  }
}

// The same model has the same hash; one in which anything that moves an element is changed has another.
TEST(BucketLayoutProperty, HashIsOfTheLayoutAlone) {
  std::mt19937_64 random(Seed());
  const std::vector<std::function<void(Model&, LayoutTensor&)>> changes = {
      [](Model&, LayoutTensor& tensor) { tensor.name += "x"; },
      [](Model&, LayoutTensor& tensor) { tensor.space += "x"; },
      [](Model&, LayoutTensor& tensor) { tensor.shape.push_back(1); },
      [](Model&, LayoutTensor& tensor) { tensor.shape.empty() ? tensor.shape.push_back(2) : void(++tensor.shape[0]); },
      [](Model&, LayoutTensor& tensor) { tensor.granule = *ParseGranule("flat:1024"); },
      [](Model& model, LayoutTensor&) { ++model.options.num_shards; },
      [](Model& model, LayoutTensor& tensor) {
        model.tensors.push_back({"new", {1}, "fp32", tensor.granule, ""});
      },
      [](Model& model, LayoutTensor&) { model.tensors.pop_back(); },
  };
  for (int round = 0; round < 100; ++round) {
    Model model = RandomModel(random);
    for (LayoutTensor& tensor : model.tensors) {
      tensor.tied_to.clear();
      tensor.granule = {};
    }
    if (model.tensors.empty()) continue;
    const std::string hash = BucketLayout::Create(model.tensors, model.options)->hash();
    EXPECT_EQ(BucketLayout::Create(model.tensors, model.options)->hash(), hash);
    for (size_t c = 0; c < changes.size(); ++c) {
      Model changed = model;
      changes[c](changed, changed.tensors[random() % changed.tensors.size()]);
      const auto layout = BucketLayout::Create(changed.tensors, changed.options);
      ASSERT_OK(layout);
      EXPECT_NE(layout->hash(), hash) << "round " << round << " change " << c;
    }
  }
}

TEST(BucketLayoutProperty, BucketsButTheLastOfASpaceKeepThePaddingBound) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(absl::StrCat("SHARDMESH_TEST_SEED=", seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 40; ++round) {
    Model model;
    model.options.num_shards = 1 + static_cast<int64_t>(random() % 64);
    model.options.bucket_elements = 1 << 16;
    for (int i = 0; i < 300; ++i) {
      model.tensors.push_back(
          {absl::StrCat("t", i), {256 * (1 + static_cast<int64_t>(random() % 64))}, "fp32", {}, ""});
    }
    const BucketLayout layout = *BucketLayout::Create(model.tensors, model.options);
    for (size_t b = 0; b + 1 < layout.buckets().size(); ++b) {
      EXPECT_LE(static_cast<double>(layout.buckets()[b].padding),
                0.001 * static_cast<double>(layout.buckets()[b].num_elements));
    }
  }
}

}  // namespace
}  // namespace shardmesh
