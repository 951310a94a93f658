// A short training of the digits example by its own programs: two trainers, one of which has `_orig_mod.` before every
// name, and a reader that scores published versions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/base/matchers.h"
#include "tests/testing/cluster.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Process;

constexpr char kSteps[] = "600";

class Digits : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Process>> Run(std::vector<std::string> command, const std::string& log) {
    command.insert(command.end(), {"--coordinator", cluster_->coordinator_address(), "--steps", kSteps});
    return Process::Start({std::move(command), cluster_->folder().File(log)});
  }
  std::unique_ptr<Cluster> cluster_;
};

TEST_F(Digits, TwoTrainersAndAReader) {
  ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(const auto first, Run({"examples/digits/digits_trainer", "--create", "--mesh", "fsdp=2",
                                              "--slots", "4", "--my-slots", "0,1"},
                                             "first"));
  ASSERT_OK_AND_ASSIGN(
      const auto second,
      Run({"examples/digits/digits_trainer", "--slots", "4", "--my-slots", "2,3", "--prefix", "_orig_mod."}, "second"));
  ASSERT_OK_AND_ASSIGN(const auto reader, Run({"examples/digits/digits_reader"}, "reader"));
  for (Process* process : {first.get(), second.get(), reader.get()}) {
    ASSERT_OK_AND_ASSIGN(const int status, process->Wait(absl::Seconds(240)));
    ASSERT_EQ(status, 0) << process->Log();
  }
  std::istringstream lines(reader->Log());
  std::string line;
  double best = 0;
  int64_t last_step = -1;
  while (std::getline(lines, line)) {
    const auto event = nlohmann::json::parse(line);
    EXPECT_GT(event["step"].get<int64_t>(), last_step);
    last_step = event["step"];
    best = std::max(best, event["accuracy"].get<double>());
  }
  EXPECT_EQ(std::to_string(last_step), kSteps);
  EXPECT_GE(best, 0.96);
  std::cout << "accuracy " << best << ", last version " << last_step << "\n";
}

}  // namespace
}  // namespace shardmesh
