#include "core/base/matchers.h"
#include "core/mesh/mesh.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

Mesh Cube() { return Mesh::Create({2, 2, 2}, {"ddp", "fsdp", "abcd"}).value(); }
Mesh Part(const Mesh& mesh, const std::vector<std::string>& names) { return mesh.Slice(names).value(); }
Mesh Again(const Mesh& mesh) { return Mesh::FromState(mesh.ToState()).value(); }

void ExpectSame(const Mesh& a, const Mesh& b) {
  EXPECT_EQ(a.DebugString(), b.DebugString());
  EXPECT_EQ(a.Instances(), b.Instances());
}

TEST(MeshStateTest, MeshOfState_AnswersAsTheMesh) {
  const Mesh cube = Cube();
  for (const Mesh& mesh : {cube, Part(cube, {"fsdp"}), cube.Transpose({"abcd", "ddp", "fsdp"}).value(),
                           Part(cube.Flatten({"ddp", "abcd"}, "da").value(), {"da"}),
                           Mesh::Create({1, 2, 1}, {"a", "b", "c"}, {Rank(9), Rank(4)}).value()}) {
    ExpectSame(Again(mesh), mesh);
  }
}

// The instances of a slice of a slice are ordered by all coordinates left out, whichever was left out first.
TEST(MeshStateTest, SliceOfState_OrdersInstancesAsTheMesh) {
  const Mesh two = Part(Cube(), {"ddp", "fsdp"});
  ExpectSame(Part(Again(two), {"fsdp"}), Part(two, {"fsdp"}));
}

TEST(MeshStateTest, SlicesOfState_AreStillPartsOfOneRoot) {
  const Mesh cube = Cube();
  const Mesh fsdp = Part(cube, {"fsdp"}), da = cube.Flatten({"ddp", "abcd"}, "da", /*keep_rest=*/false).value();
  const Mesh expected = Mesh::Concatenate({fsdp, da}).value();
  for (const auto& parts : {std::vector<Mesh>{Again(fsdp), Again(da)}, {Again(fsdp), da}, {fsdp, Again(da)}}) {
    ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Concatenate(parts));
    ExpectSame(mesh, expected);
  }
}

TEST(MeshStateTest, StateOfNoMesh_IsRefused) {
  const Mesh::State good = Part(Cube(), {"ddp", "abcd"}).ToState();
  ASSERT_OK(Mesh::FromState(good));
  const auto refused = [&](auto change, const char* why) {
    Mesh::State state = good;
    change(state);
    EXPECT_THAT(Mesh::FromState(std::move(state)), StatusIs(kInvalid, HasSubstr(why)));
  };
  refused([](auto& s) { s.axes.clear(); }, "dimension");
  refused([](auto& s) { s.axes[0].layout.name = "no name"; }, "no name");
  refused([](auto& s) { s.axes[0].layout.name = "abcd"; }, "abcd");
  refused([](auto& s) { s.axes[1].layout.size = 0; }, "once");
  refused([](auto& s) { s.axes[1].layout.stride = -2; }, "once");
  refused([](auto& s) { s.axes[1].layout.stride = 4; }, "once");
  refused([](auto& s) { s.axes[1].layout.size = int64_t{1} << 62; }, "once");
  refused([](auto& s) { s.axes.pop_back(); }, "once");
  refused([](auto& s) { s.axes.erase(s.axes.begin()); }, "once");
  refused([](auto& s) { s.ranks.clear(); }, "once");
  refused([](auto& s) { s.ranks[0] = Rank(7); }, "rank 7 is given twice");
  refused([](auto& s) { s.ranks[0] = Rank(-1); }, "negative");
  refused([](auto& s) { s.root[0] = Rank(8); }, "root");
  refused([](auto& s) { s.root.clear(); }, "root");
}

}  // namespace
}  // namespace shardmesh
