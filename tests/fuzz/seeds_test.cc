// Every kept input of the fuzzers: hand-written seeds, and whatever a fuzzer once found.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/base/matchers.h"
#include "tests/fuzz/targets.h"

namespace shardmesh::fuzz {
namespace {

template <typename Target>
int RunAll(const char* folder, Target target) {
  int runs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string("tests/fuzz/seeds/") + folder)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    target(std::string(std::istreambuf_iterator<char>(file), {}));
    ++runs;
  }
  return runs;
}

TEST(Seeds, Names) { EXPECT_GE(RunAll("names", Names), 4); }

TEST(Seeds, Manifests) { EXPECT_GE(RunAll("manifest", Manifests), 6); }

TEST(Seeds, SafetensorsHeads) { EXPECT_GE(RunAll("safetensors", SafetensorsHeads), 4); }

TEST(Seeds, PlanSpecs) { EXPECT_GE(RunAll("plan_spec", PlanSpec), 4); }

}  // namespace
}  // namespace shardmesh::fuzz
