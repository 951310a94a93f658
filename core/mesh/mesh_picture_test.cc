#include "core/mesh/mesh_picture.h"

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

Mesh Cube() { return Mesh::Create({2, 2, 2}, {"ddp", "fsdp", "abcd"}).value(); }

TEST(MeshPictureTest, OneDimension_HasARowForEachInstance) {
  EXPECT_EQ(Picture(Cube().Slice({"ddp", "fsdp"}).value().Slice({"fsdp"}).value()),
            "mesh fsdp=2: 4 instances of 2 ranks\n"
            "\n"
            "instance  fsdp=0  fsdp=1\n"
            "       0       0       2\n"
            "       1       1       3\n"
            "       2       4       6\n"
            "       3       5       7\n");
  EXPECT_EQ(Picture(Mesh::Create({3}, {"w"}, {Rank(7), Rank(100), Rank(0)}).value()),
            "mesh w=3: 1 instance of 3 ranks\n"
            "\n"
            "      w=0  w=1  w=2\n"
            "rank    7  100    0\n");
}

TEST(MeshPictureTest, TwoDimensions_HaveATableForEachInstance) {
  EXPECT_EQ(Picture(Cube().Slice({"ddp", "fsdp"}).value()),
            "mesh ddp=2 x fsdp=2: 2 instances of 4 ranks\n"
            "\n"
            "instance 0  fsdp=0  fsdp=1\n"
            "ddp=0            0       2\n"
            "ddp=1            4       6\n"
            "\n"
            "instance 1  fsdp=0  fsdp=1\n"
            "ddp=0            1       3\n"
            "ddp=1            5       7\n");
}

TEST(MeshPictureTest, MoreDimensions_HaveATableForEachChoiceOfTheOthers) {
  EXPECT_EQ(Picture(Cube()),
            "mesh ddp=2 x fsdp=2 x abcd=2: 1 instance of 8 ranks\n"
            "\n"
            "ddp=0   abcd=0  abcd=1\n"
            "fsdp=0       0       1\n"
            "fsdp=1       2       3\n"
            "\n"
            "ddp=1   abcd=0  abcd=1\n"
            "fsdp=0       4       5\n"
            "fsdp=1       6       7\n");
  const Mesh mesh = Mesh::Create({2, 2, 2, 1, 2}, {"a", "b", "c", "d", "e"}).value();
  EXPECT_THAT(Picture(mesh.Slice({"b", "c", "d", "e"}).value()),
              HasSubstr("\ninstance 1, b=0, c=1  e=0  e=1\nd=0                    10   11\n\ninstance 1, b=1, c=0 "));
}

TEST(MeshPictureTest, WhatIsLeftOut_IsSaid) {
  const std::string wide = Picture(Mesh::Create({33, 17}, {"a", "b"}).value());
  EXPECT_THAT(wide, HasSubstr("  b=15  ...\n"));
  EXPECT_THAT(wide, HasSubstr("\na=31  527  528"));
  EXPECT_THAT(wide, Not(HasSubstr("a=32")));
  EXPECT_THAT(wide, EndsWith("  542  ...\n... 1 more column\n... 1 more row\n"));
  EXPECT_THAT(Picture(Mesh::Create({20, 2, 2}, {"a", "b", "c"}).value()),
              EndsWith("b=1    62   63\n\n... 4 more tables\n"));
  EXPECT_THAT(Picture(Mesh::Create({40, 2}, {"a", "b"}).value().Slice({"b"}).value()),
              EndsWith("      31   62   63\n... 8 more instances\n"));
  EXPECT_THAT(Picture(Mesh::Create({16}, {"a"}).value()), Not(HasSubstr("...")));
}

TEST(MeshPictureTest, LargestMeshWithLongNames_IsBounded) {
  const std::string a(kMaxDimNameBytes, 'a'), b(kMaxDimNameBytes, 'b'), c(kMaxDimNameBytes, 'c');
  const std::string picture = Picture(Mesh::Create({64, 128, 128}, {a, b, c}).value());
  const std::vector<std::string> lines = absl::StrSplit(picture, '\n');
  EXPECT_LT(lines.size(), 700u);
  EXPECT_LT(picture.size(), size_t{1} << 20);
  for (const std::string& line : lines) EXPECT_FALSE(absl::EndsWith(line, " ")) << line;
}

}  // namespace
}  // namespace shardmesh
