// Two hosts, as two network namespaces joined by a pair of virtual interfaces: coordinator and trainer on the one,
// workers on the other, TLS with certificates on both sides between them. Needs root and the right to make namespaces;
// skipped, with the reason, where there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "core/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::AwaitLine;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::RunCommand;
using ::testing::HasSubstr;

constexpr char kAddressA[] = "10.213.77.1", kAddressB[] = "10.213.77.2";
constexpr int64_t kSteps = 20;

// Words are separated by single blanks.
absl::Status RunLine(const std::string& command) { return RunCommand(absl::StrSplit(command, ' ')).status(); }

// Namespaces and interfaces of this process; they go with the object.
class TwoHosts {
 public:
  absl::Status Create() {
    if (geteuid() != 0) return absl::PermissionDeniedError("this user is not root");
    for (const std::string& host : {a_, b_}) {
      RETURN_IF_ERROR(RunLine("ip netns add " + host));
      RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", host, " link set lo up")));
    }
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " link add veth0 type veth peer name veth0 netns ", b_)));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " addr add ", kAddressA, "/24 dev veth0")));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", b_, " addr add ", kAddressB, "/24 dev veth0")));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " link set veth0 up")));
    return RunLine(absl::StrCat("ip -n ", b_, " link set veth0 up"));
  }
  ~TwoHosts() {
    for (const std::string& host : {a_, b_}) (void)RunLine("ip netns del " + host);
  }
  const std::string& a() const { return a_; }
  const std::string& b() const { return b_; }

 private:
  const std::string a_ = absl::StrCat("shardmesh-a-", getpid()), b_ = absl::StrCat("shardmesh-b-", getpid());
};

class TwoHostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status created = hosts_.Create();
    if (!created.ok()) GTEST_SKIP() << "SKIPPED: no network namespaces here: " << created.message();
    MakeCertificates();
    ASSERT_OK(StartProcesses());
  }
  void TearDown() override {
    if (!HasFailure()) return;
    for (const char* log : {"coordinator", "w0", "w1"})
      std::cout << "--- " << log << "\n" << testing::ReadFile(File(log));
  }
  std::string File(const std::string& name) const { return folder_.File(name); }

  // Prefixes: "good" for both hosts, "foreign" signed by an authority that the servers do not know.
  void MakeCertificates() {
    for (const std::string name : {"good", "foreign"}) {
      const std::string key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
      ASSERT_OK(RunLine(absl::StrCat("openssl req -x509 ", key, " -days 2 -subj /CN=authority -keyout ",
                                     File(name + "-ca.key"), " -out ", File(name + "-ca.pem"))));
      ASSERT_OK(RunLine(absl::StrCat("openssl req ", key, " -subj /CN=", name, " -keyout ", File(name + ".key"),
                                     " -out ", File(name + ".csr"))));
      std::ofstream(File(name + ".ext")) << "subjectAltName=IP:" << kAddressA << ",IP:" << kAddressB << "\n";
      ASSERT_OK(RunLine(absl::StrCat(
          "openssl x509 -req -days 2 -in ", File(name + ".csr"), " -CA ", File(name + "-ca.pem"), " -CAkey ",
          File(name + "-ca.key"), " -CAcreateserial -extfile ", File(name + ".ext"), " -out ", File(name + ".pem"))));
      // What a client trusts is the servers' authority in both cases.
      ASSERT_OK(RunLine(absl::StrCat("cp ", File("good-ca.pem"), " ", File(name + ".ca"))));
    }
  }
  std::vector<std::string> TlsFlags() const {
    return {"--tls-cert", File("good.pem"), "--tls-key", File("good.key"), "--tls-ca", File("good.ca")};
  }
  absl::StatusOr<std::unique_ptr<Process>> StartOn(const std::string& host, std::vector<std::string> command,
                                                   const std::string& log) {
    command.insert(command.begin(), {"ip", "netns", "exec", host});
    return Process::Start({std::move(command), File(log)});
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
