// A worker with a relative --local-dir: trainers in other working directories attach to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Process;

TEST(LocalDir, Relative_IsFoundFromAnotherWorkingDirectory) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 0}));
  const std::string program = std::filesystem::absolute("worker/shardmesh-worker");
  ASSERT_OK_AND_ASSIGN(
      const auto worker,
      Process::Start({{"/bin/sh", "-c", R"(cd "$0" && exec "$1" --coordinator "$2" --name w --local-dir l)",
                       cluster->folder().path(), program, cluster->coordinator_address()},
                      cluster->folder().File("w.log")}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::TinyJob("job", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  EXPECT_TRUE(std::filesystem::is_directory(cluster->folder().File("l"))) << worker->Log();
}

}  // namespace
}  // namespace shardmesh
