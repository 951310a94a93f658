// Two hosts, as two network namespaces joined by a pair of virtual interfaces: coordinator and trainer on the one,
// workers on the other, TLS with certificates on both sides between them. Needs root and the right to make namespaces;
// skipped, with the reason, where there is none.
#include "tests/testing/two_hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::AwaitLine;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::kAddressA;
using ::shardmesh::testing::kAddressB;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::TwoHosts;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 20;

class TwoHostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status created = hosts_.Create();
    if (!created.ok()) GTEST_SKIP() << "SKIPPED: no network namespaces here: " << created.message();
    for (const char* name : {"good", "foreign"}) ASSERT_OK(testing::MakeCertificate(folder_, name));
    ASSERT_OK(StartProcesses());
  }
  void TearDown() override {
    if (!HasFailure()) return;
    for (const char* log : {"coordinator", "w0", "w1"})
      std::cout << "--- " << log << "\n" << testing::ReadFile(File(log));
  }
  std::string File(const std::string& name) const { return folder_.File(name); }

  std::vector<std::string> TlsFlags() const { return testing::TlsFlags(folder_); }
  absl::StatusOr<std::unique_ptr<Process>> StartOn(const std::string& host, std::vector<std::string> command,
                                                   const std::string& log) {
    return testing::StartOn(host, std::move(command), File(log));
  }
  absl::Status StartProcesses() {
    std::vector<std::string> command = {"server/shardmesh-coordinator",
                                        "--listen",
                                        absl::StrCat(kAddressA, ":7000"),
                                        "--state",
                                        ":memory:",
                                        "--address-file",
                                        File("coordinator.address")};
    const std::vector<std::string> tls = TlsFlags();
    command.insert(command.end(), tls.begin(), tls.end());
    ASSIGN_OR_RETURN(coordinator_, StartOn(hosts_.a(), command, "coordinator"));
    ASSIGN_OR_RETURN(address_, AwaitLine(File("coordinator.address"), *coordinator_, absl::Seconds(20)));
    for (const std::string name : {"w0", "w1"}) {
      command = {"worker/shardmesh-worker",
                 "--coordinator",
                 address_,
                 "--listen",
                 absl::StrCat(kAddressB, ":0"),
                 "--name",
                 name,
                 "--local-dir",
                 File("s"),
                 "--address-file",
                 File(name + ".address")};
      command.insert(command.end(), tls.begin(), tls.end());
      ASSIGN_OR_RETURN(auto worker, StartOn(hosts_.b(), command, name));
      RETURN_IF_ERROR(AwaitLine(File(name + ".address"), *worker, absl::Seconds(20)).status());
      workers_.push_back(std::move(worker));
    }
    return absl::OkStatus();
  }
  // A test_trainer on a host, to its end: its exit status and what it printed.
  std::pair<int, std::string> Train(const std::string& host, const std::string& certificate, const std::string& way,
                                    int64_t last) {
    static int count = 0;
    const std::string log = absl::StrCat("trainer-", ++count);
    std::vector<std::string> command;
    if (!certificate.empty()) command = {"env", absl::StrCat("SHARDMESH_TEST_TLS=", File(certificate))};
    command.insert(command.end(), {"tests/testing/test_trainer", address_, "job", absl::StrCat(last), way, "0", "1"});
    const auto process = StartOn(host, std::move(command), log);
    if (!process.ok()) return {-1, std::string(process.status().message())};
    const absl::StatusOr<int> status = (*process)->Wait(absl::Seconds(60));
    return {status.value_or(-1), (*process)->Log()};
  }

  TwoHosts hosts_;
  const testing::TempFolder folder_;
  std::string address_;
  std::unique_ptr<Process> coordinator_;
  std::vector<std::unique_ptr<Process>> workers_;
};

// How the same job ends on one host, without TLS.
absl::StatusOr<uint64_t> LocalDigest() {
  ASSIGN_OR_RETURN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSIGN_OR_RETURN(Client client, cluster->Connect());
  ASSIGN_OR_RETURN(const Learnt learnt, testing::Undisturbed(client, testing::OddJob("job", "fsdp=2", 2), kSteps));
  return learnt.digest;
}

TEST_F(TwoHostsTest, TrainerOnTheOtherHost_LearnsTheSame) {
  const auto [status, output] = Train(hosts_.a(), "good", "create", kSteps);
  ASSERT_EQ(status, 0) << output;
  ASSERT_OK_AND_ASSIGN(const uint64_t digest, LocalDigest());
  EXPECT_THAT(output, HasSubstr(absl::StrFormat("digest %x\n", digest)));
  // Shared memory does not reach over hosts; on the workers' own host it does.
  const auto [attach_status, attach_output] = Train(hosts_.a(), "good", "attach", kSteps + 1);
  EXPECT_EQ(attach_status, 1);
  EXPECT_THAT(attach_output, HasSubstr("FAILED_PRECONDITION"));
  EXPECT_THAT(attach_output, HasSubstr("use Push and Pull"));
  const auto [local_status, local_output] = Train(hosts_.b(), "good", "attach", kSteps + 1);
  EXPECT_EQ(local_status, 0) << local_output;
}

TEST_F(TwoHostsTest, ClientsWithoutAGoodCertificate_AreRefused) {
  const auto [none, none_output] = Train(hosts_.a(), "", "create", 1);
  EXPECT_EQ(none, 1);
  EXPECT_THAT(none_output, HasSubstr("--tls-cert"));
  const auto [foreign, foreign_output] = Train(hosts_.a(), "foreign", "create", 1);
  EXPECT_EQ(foreign, 1);
  EXPECT_THAT(foreign_output, HasSubstr("UNAVAILABLE"));
  // A client that is not ours and shows no certificate.
  const auto openssl = StartOn(hosts_.a(),
                               {"sh", "-c",
                                absl::StrCat("exec openssl s_client -ign_eof -alpn h2 -connect ", address_, " -CAfile ",
                                             File("good.ca"), " </dev/null")},
                               "openssl");
  ASSERT_OK(openssl);
  ASSERT_OK((*openssl)->Wait(absl::Seconds(30)));
  EXPECT_THAT(coordinator_->Log(), HasSubstr("peer did not return a certificate"));
  // After all of them, one with a certificate is served.
  const auto [good, good_output] = Train(hosts_.a(), "good", "create", 1);
  EXPECT_EQ(good, 0) << good_output;
}

TEST_F(TwoHostsTest, WorkerOffLoopbackWithoutTls_DoesNotStart) {
  ASSERT_OK_AND_ASSIGN(const auto worker,
                       StartOn(hosts_.b(),
                               {"worker/shardmesh-worker", "--coordinator", "127.0.0.1:7000", "--listen",
                                absl::StrCat(kAddressB, ":0"), "--name", "open", "--local-dir", File("s")},
                               "open"));
  ASSERT_OK_AND_ASSIGN(const int status, worker->Wait(absl::Seconds(20)));
  EXPECT_EQ(status, 1);
  for (const char* flag : {"--tls-cert", "--tls-key", "--tls-ca"}) EXPECT_THAT(worker->Log(), HasSubstr(flag));
}

}  // namespace
}  // namespace shardmesh
