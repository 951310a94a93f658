#include "client/cli/plan_file.h"

#include <fstream>

#include "core/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

std::string FileWith(const std::string& text) {
  const std::string path = ::testing::TempDir() + "/spec.json";
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(PlanFile, ForPeopleAndForPrograms) {
  const std::string path = FileWith(R"({"mesh": "ddp=2,fsdp=2", "tensors": [
      {"name": "a", "shape": [4, 128], "granule": "rows:1"}, {"name": "b", "shape": [4, 128], "tied_to": "a", "granule": "rows:1"}]})");
  EXPECT_THAT(*PlanFile(path, false), HasSubstr("2 tensors in 1 buckets on 2 shards"));
  const auto json = nlohmann::json::parse(*PlanFile(path, true));
  EXPECT_EQ(json["shards"], 2);
  EXPECT_EQ(json["padding"]["rows"]["padding"], 0);
  EXPECT_EQ(json["buckets"][0]["shard_elements"], 256);
  EXPECT_EQ(json["placements"][1]["tied_to"], "a");
  EXPECT_EQ(json["placements"][1]["shards"], (std::vector<int>{0, 1}));
}

TEST(PlanFile, Errors_NameTheFile) {
  EXPECT_THAT(PlanFile("/nowhere/x.json", false), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere/x.json")));
  EXPECT_THAT(PlanFile(FileWith("{"), false), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("spec.json: ")));
  EXPECT_THAT(PlanFile(FileWith(R"({"mesh": "fsdp=2", "tensors": [{"name": "a..b", "shape": [1]}]})"), false),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("a..b")));
}

}  // namespace
}  // namespace shardmesh
