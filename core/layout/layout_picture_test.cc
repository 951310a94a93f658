#include "core/layout/layout_picture.h"

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

StoredPlan PlanOn(int64_t num_shards, std::vector<LayoutTensor> tensors, int64_t bucket_elements = 1 << 20) {
  LayoutOptions options;
  options.bucket_elements = bucket_elements;
  return *StoredPlan::Create(std::move(tensors), options, *Mesh::Create({num_shards}, {"fsdp"}), {});
}

TEST(LayoutPicture, ABarForEachShard_PaddingAsDots) {
  const std::string picture =
      Picture(PlanOn(2, {{"embed.w", {1024}, "bf16", {}, ""}, {"head.w", {512}, "bf16", {}, ""}}));
  EXPECT_THAT(picture, HasSubstr("2 tensors in 1 buckets on 2 shards"));
  EXPECT_THAT(
      picture,
      HasSubstr("bucket 0  bf16  flat granules of 256  2 x 768 elements, padding 0.00%\n"
                "  shard 0    rank 0  |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|   a embed.w\n"
                "  shard 1    rank 1  |aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb|   a embed.w b head.w\n"));
}

TEST(LayoutPicture, PaddingInsideAndBehind) {
  const std::string picture = Picture(PlanOn(3, {{"a", {128}, "", {}, ""}}));
  EXPECT_THAT(picture, HasSubstr("  shard 0    rank 0  |aaaaaaaaaaaaaaaaaaaaaaaa........................|   a a\n"
                                 "  shard 1    rank 1  |................................................|"));
}

TEST(LayoutPicture, LargeOnes_SayWhatIsLeftOut_NamesAreEscaped) {
  std::vector<LayoutTensor> tensors;
  for (int i = 0; i < 20; ++i) tensors.push_back({absl::StrCat("t", i, "\x1b[2J"), {64 * 256}, "", {}, ""});
  const std::string picture = Picture(PlanOn(64, tensors, 1));
  EXPECT_THAT(picture, HasSubstr("and 48 shards more"));
  EXPECT_THAT(picture, HasSubstr("and 4 buckets more"));
  EXPECT_EQ(picture.find('\x1b'), std::string::npos);
}

TEST(LayoutPicture, ManyTied_AreCut) {
  std::vector<LayoutTensor> tensors = {{"a", {64}, "", {}, ""}};
  for (int i = 0; i < 10; ++i) tensors.push_back({absl::StrCat("t", i), {64}, "", {}, "a"});
  EXPECT_THAT(Picture(PlanOn(1, tensors)), HasSubstr("  tied: t0 to a, t1 to a, t2 to a, t3 to a, t4 to a, t5 to a, "
                                                     "t6 to a, t7 to a and 2 more\n"));
}

TEST(LayoutPicture, OfAPlan_HasTheRanks_AndWhatLiesInNoBucketOfItsOwn) {
  const Mesh mesh = Mesh::Create({2, 2}, {"ddp", "fsdp"}).value();
  const StoredPlan plan = StoredPlan::Create({{"embed.w", {1024}, "bf16", {}, ""},
                                              {"größe", {512}, "bf16", {}, ""},
                                              {"none", {0}, "bf16", {}, ""},
                                              {"tied.w", {1024}, "bf16", {}, "embed.w"}},
                                             {}, mesh, {"ddp"})
                              .value();
  EXPECT_EQ(Picture(plan),
            "plan " + plan.hash() +
                " on mesh ddp=2,fsdp=2\n"
                "4 tensors in 1 buckets on 2 shards\n"
                "  flat  granules: 1536 elements, padding 0 (0.000%)\n"
                "  tied: tied.w to embed.w\n"
                "  without elements: none\n"
                "\n"
                "bucket 0  bf16  flat granules of 256  2 x 768 elements, padding 0.00%\n"
                "  shard 0    ranks 0,2  |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|   a embed.w\n"
                "  shard 1    ranks 1,3  |aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb|   a embed.w b größe\n");
  const StoredPlan wide =
      StoredPlan::Create({{"w", {512}, "", {}, ""}}, {}, Mesh::Create({8, 2}, {"ddp", "fsdp"}).value(), {"ddp"})
          .value();
  EXPECT_THAT(Picture(wide), HasSubstr("\n  shard 1    ranks 1,3,5,7 and 4 more  |"));
}

}  // namespace
}  // namespace shardmesh
