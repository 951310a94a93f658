#include "core/layout_picture.h"

#include "absl/strings/str_cat.h"
#include "core/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

BucketLayout Layout(std::vector<LayoutTensor> tensors, int64_t num_shards, int64_t bucket_elements = 1 << 20) {
  LayoutOptions options;
  options.num_shards = num_shards;
  options.bucket_elements = bucket_elements;
  return *BucketLayout::Create(std::move(tensors), options);
}

TEST(LayoutPicture, ABarForEachShard_PaddingAsDots) {
  const std::string picture =
      Picture(Layout({{"embed.w", {1024}, "bf16", {}, ""}, {"head.w", {512}, "bf16", {}, ""}}, 2));
  EXPECT_THAT(picture, HasSubstr("2 tensors in 1 buckets on 2 shards"));
  EXPECT_THAT(picture,
              HasSubstr("bucket 0  bf16  flat granules of 256  2 x 768 elements, padding 0.00%\n"
                        "  shard 0   |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|   a embed.w\n"
                        "  shard 1   |aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb|   a embed.w b head.w\n"));
}

TEST(LayoutPicture, PaddingInsideAndBehind) {
  const std::string picture = Picture(Layout({{"a", {128}, "", {}, ""}}, 3));
  EXPECT_THAT(picture, HasSubstr("  shard 0   |aaaaaaaaaaaaaaaaaaaaaaaa........................|   a a\n"
                                 "  shard 1   |................................................|"));
}

TEST(LayoutPicture, LargeOnes_SayWhatIsLeftOut_NamesAreEscaped) {
  std::vector<LayoutTensor> tensors;
  for (int i = 0; i < 20; ++i) tensors.push_back({absl::StrCat("t", i, "\x1b[2J"), {64 * 256}, "", {}, ""});
  const std::string picture = Picture(Layout(tensors, 64, 1));
  EXPECT_THAT(picture, HasSubstr("and 48 shards more"));
  EXPECT_THAT(picture, HasSubstr("and 4 buckets more"));
  EXPECT_EQ(picture.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace shardmesh
