#include "client/cli/plan/plan_file.h"

#include <fstream>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

std::string FileWith(const std::string& text, const std::string& name = "spec.json") {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

PlanFileOptions Json(int rank = -1, const std::string& reshard_from = "") {
  PlanFileOptions options;
  if (rank >= 0) options.rank = Rank(rank);
  options.reshard_from = reshard_from;
  options.json = true;
  return options;
}

PlanFileOptions Text(int rank, const std::string& reshard_from = "") {
  PlanFileOptions options = Json(rank, reshard_from);
  options.json = false;
  return options;
}

TEST(PlanFile, ForPeopleAndForPrograms) {
  const std::string path = FileWith(R"({"mesh": "ddp=2,fsdp=2", "tensors": [
      {"name": "a", "shape": [4, 128], "granule": "rows:1"}, {"name": "b", "shape": [4, 128], "tied_to": "a", "granule": "rows:1"}]})");
  EXPECT_THAT(*PlanFile(path, {}), HasSubstr("on mesh ddp=2,fsdp=2\n2 tensors in 1 buckets on 2 shards"));
  const auto json = nlohmann::json::parse(*PlanFile(path, Json()));
  EXPECT_EQ(json["ranks"].dump(), "[[0,2],[1,3]]");
  EXPECT_EQ(json["mesh"].dump(), R"({"names":["ddp","fsdp"],"sizes":[2,2]})");
  EXPECT_EQ(json["shards"], 2);
  EXPECT_EQ(json["padding"]["rows"]["padding"], 0);
  EXPECT_EQ(json["buckets"][0]["shard_elements"], 256);
  EXPECT_EQ(json["placements"][1]["tied_to"], "a");
  EXPECT_EQ(json["placements"][1]["shards"], (std::vector<int>{0, 1}));
}

TEST(PlanFile, OneRank_ItsBoxes) {
  const std::string path = FileWith(R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [4, 128]}]})");
  EXPECT_EQ(*PlanFile(path, Json(1)),
            "{\"rank\":1,\"shard\":1,\"boxes\":{\"a\":[{\"offsets\":[2,0],\"sizes\":[2,128]}]}}\n");
  EXPECT_EQ(*PlanFile(path, Text(1)),
            "rank 1 holds shard 1 of 2\n\n"
            "tensor  bucket  offsets  sizes\n"
            "a            0  [2,0]    [2,128]\n");
  EXPECT_THAT(PlanFile(path, Text(2)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("2")));
}

TEST(PlanFile, Reshard_ListsTheCopiesOfOneRank) {
  const std::string two = FileWith(R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [1024]}]})", "two.json");
  const std::string one = FileWith(R"({"mesh": "fsdp=1", "tensors": [{"name": "a", "shape": [1024]}]})", "one.json");
  EXPECT_EQ(*PlanFile(one, Json(0, two)),
            "{\"rank\":0,\"elements\":1024,\"copies\":["
            "{\"source\":0,\"source_bucket\":0,\"source_offset\":0,\"destination_bucket\":0,\"destination_offset\":0,"
            "\"elements\":512},"
            "{\"source\":1,\"source_bucket\":0,\"source_offset\":0,\"destination_bucket\":0,\"destination_offset\":512,"
            "\"elements\":512}]}\n");
  EXPECT_THAT(*PlanFile(one, Text(0, two)), HasSubstr("rank 0 copies 1024 elements in 2 runs\n\nfrom rank  bucket"));
  const std::string other = FileWith(R"({"mesh": "fsdp=2", "tensors": [{"name": "b", "shape": [1024]}]})", "b.json");
  EXPECT_THAT(PlanFile(one, Text(0, other)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"a\"")));
}

TEST(PlanFile, Errors_NameTheFile) {
  EXPECT_THAT(PlanFile("/nowhere/x.json", {}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere/x.json")));
  EXPECT_THAT(PlanFile(FileWith("{"), {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("spec.json: ")));
  EXPECT_THAT(PlanFile(FileWith(R"({"mesh": "fsdp=2", "tensors": [{"name": "a..b", "shape": [1]}]})"), {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("a..b")));
}

}  // namespace
}  // namespace shardmesh
