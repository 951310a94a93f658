// Contract 6 for processes: one that cannot start ends with status 1 and a line that says what is wrong and what would
// be right; those that run are not disturbed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Process;
using ::testing::HasSubstr;

class BadStart : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 1})); }
  // Who runs is not disturbed.
  void TearDown() override {
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    EXPECT_OK(testing::Undisturbed(client, testing::TinyJob("job", "fsdp=1", 1), 2));
  }
  // Runs it to its end: status 1 and one line that holds `text`.
  void ExpectRefuses(std::vector<std::string> command, const std::string& text) {
    const std::string log = cluster_->folder().File(absl::StrCat("refused-", ++count_));
    ASSERT_OK_AND_ASSIGN(const auto process, Process::Start({std::move(command), log}));
    ASSERT_OK_AND_ASSIGN(const int status, process->Wait(absl::Seconds(20)));
    EXPECT_EQ(status, 1);
    EXPECT_THAT(process->Log(), HasSubstr(text));
  }

  std::unique_ptr<Cluster> cluster_;
  int count_ = 0;
};

TEST_F(BadStart, PortInUse) {
  ExpectRefuses({"server/shardmesh-coordinator", "--state", ":memory:", "--listen", cluster_->coordinator_address()},
                "in use");
  ExpectRefuses({"worker/shardmesh-worker", "--coordinator", cluster_->coordinator_address(), "--name", "other",
                 "--local-dir", cluster_->folder().File("s"), "--listen", cluster_->worker_address("w0")},
                "in use");
}

TEST_F(BadStart, NameThatIsAlive) {
  ExpectRefuses({"worker/shardmesh-worker", "--coordinator", cluster_->coordinator_address(), "--name", "w0",
                 "--local-dir", cluster_->folder().File("s")},
                "is alive");
}

TEST_F(BadStart, WorkersOfANodeOnOneUnixSocket) {
  ExpectRefuses({"worker/shardmesh-node", "--coordinator", cluster_->coordinator_address(), "--workers", "2",
                 "--local-dir", cluster_->folder().File("n"), "--worker-binary", "worker/shardmesh-worker", "--",
                 "--listen", absl::StrCat("unix:", cluster_->folder().File("w.sock"))},
                "all 2 workers would listen on one UNIX socket");
}

TEST_F(BadStart, OffLoopbackWithoutTls) {
  ExpectRefuses({"worker/shardmesh-worker", "--coordinator", cluster_->coordinator_address(), "--name", "open",
                 "--local-dir", cluster_->folder().File("s"), "--listen", "0.0.0.0:0"},
                "--tls-cert");
}

// What hosts send each other would cross a network in the clear, and nobody said that it may.
TEST_F(BadStart, GroupAddressOffThisMachineWithoutTls) {
  ExpectRefuses(
      {"worker/shardmesh-worker", "--coordinator", cluster_->coordinator_address(), "--name", "open", "--local-dir",
       cluster_->folder().File("s"), "--group-address", "192.0.2.1"},
      "--group-address 192.0.2.1 is not on this machine alone, so TLS is needed between hosts: give --tls-cert, "
      "--tls-key and --tls-ca, or set SHARDMESH_TLS_CERT, SHARDMESH_TLS_KEY and SHARDMESH_TLS_CA, or "
      "--insecure-transport on a network that nobody else reaches");
}

TEST_F(BadStart, StateFileOfANewerVersion) {
  const std::string state = cluster_->folder().File("newer.db");
  const std::string log = cluster_->folder().File("newer.log");
  {
    ASSERT_OK_AND_ASSIGN(const auto process,
                         Process::Start({{"server/shardmesh-coordinator", "--state", state, "--listen", "127.0.0.1:0",
                                          "--address-file", log + ".address"},
                                         log}));
    ASSERT_OK(testing::AwaitLine(log + ".address", *process, absl::Seconds(20)));
    process->Signal(SIGTERM);
    ASSERT_OK_AND_ASSIGN(const int status, process->Wait(absl::Seconds(20)));
    ASSERT_EQ(status, 0) << process->Log();
  }
  // SQLite keeps the schema version in bytes 60 to 63 of the file, the highest byte first.
  std::fstream file(state, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(60);
  file.write("\0\0\0\x63", 4);
  file.close();
  ExpectRefuses({"server/shardmesh-coordinator", "--state", state, "--listen", "127.0.0.1:0"}, "version 99");
}

}  // namespace
}  // namespace shardmesh
