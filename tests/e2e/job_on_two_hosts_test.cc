// One job whose workers are on two hosts, as network namespaces: it learns what it learns on one host, and a worker
// that dies or stops is named on both in time. What crosses between them does so over TLS. Needs root and the right to
// make namespaces; skipped, with the reason, where there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"
#include "tests/testing/two_hosts.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::AwaitLine;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::kAddressA;
using ::shardmesh::testing::kAddressB;
using ::shardmesh::testing::Process;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 20;
constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(3);
constexpr absl::Duration kPlenty = absl::Seconds(60);

class JobOnTwoHosts : public ::testing::Test {
 protected:
  // Workers a0, a1, ... on the one host, b0, b1, ... on the other.
  void Start(int workers_each) {
    const absl::Status created = hosts_.Create();
    if (!created.ok()) GTEST_SKIP() << "SKIPPED: no network namespaces here: " << created.message();
    ASSERT_OK(testing::MakeCertificate(folder_, "good"));
    ASSERT_OK(StartCoordinator());
    for (int i = 0; i < workers_each; ++i) {
      ASSERT_OK(StartWorker(hosts_.a(), kAddressA, absl::StrCat("a", i)));
      ASSERT_OK(StartWorker(hosts_.b(), kAddressB, absl::StrCat("b", i)));
    }
  }
  void TearDown() override {
    if (!HasFailure()) return;
    std::cout << "--- coordinator\n" << testing::ReadFile(File("coordinator"));
    for (const auto& [name, worker] : workers_) std::cout << "--- " << name << "\n" << testing::ReadFile(File(name));
  }
  std::string File(const std::string& name) const { return folder_.File(name); }

  absl::StatusOr<std::unique_ptr<Process>> StartServer(const std::string& host, std::vector<std::string> command,
                                                       const std::string& name) {
    const std::vector<std::string> tls = testing::TlsFlags(folder_);
    command.insert(command.end(), tls.begin(), tls.end());
    command.insert(command.end(), {"--address-file", File(name + ".address")});
    ASSIGN_OR_RETURN(auto process, testing::StartOn(host, std::move(command), File(name)));
    RETURN_IF_ERROR(AwaitLine(File(name + ".address"), *process, kPlenty).status());
    return process;
  }
  absl::Status StartCoordinator() {
    const std::vector<std::string> command = {"server/shardmesh-coordinator",
                                              "--listen",
                                              absl::StrCat(kAddressA, ":7000"),
                                              "--state",
                                              ":memory:",
                                              "--heartbeat-interval-ms",
                                              "100",
                                              "--heartbeat-timeout-ms",
                                              absl::StrCat(absl::ToInt64Milliseconds(kHeartbeatTimeout))};
    ASSIGN_OR_RETURN(coordinator_, StartServer(hosts_.a(), command, "coordinator"));
    return absl::OkStatus();
  }
  absl::Status StartWorker(const std::string& host, const std::string& address, const std::string& name) {
    const std::vector<std::string> command = {"worker/shardmesh-worker",
                                              "--coordinator",
                                              absl::StrCat(kAddressA, ":7000"),
                                              "--listen",
                                              absl::StrCat(address, ":0"),
                                              "--group-address",
                                              address,
                                              "--name",
                                              name,
                                              "--local-dir",
                                              File("s")};
    ASSIGN_OR_RETURN(workers_[name], StartServer(host, command, name));
    return absl::OkStatus();
  }
  // A trainer of one slot, in the background.
  std::unique_ptr<Process> Trainer(const std::string& host, const std::string& way, int64_t last, int slot) {
    std::vector<std::string> command = {"env",
                                        absl::StrCat("SHARDMESH_TEST_TLS=", File("good")),
                                        "tests/testing/test_trainer",
                                        absl::StrCat(kAddressA, ":7000"),
                                        "job",
                                        absl::StrCat(last),
                                        way,
                                        absl::StrCat(slot)};
    auto process = testing::StartOn(host, std::move(command), File(absl::StrCat("trainer-", ++trainers_)));
    EXPECT_OK(process);
    return process.ok() ? *std::move(process) : nullptr;
  }
  void Create(const std::string& mesh) {
    const auto creator = Trainer(hosts_.b(), "create:" + mesh, 0, 0);
    ASSERT_OK_AND_ASSIGN(const int status, creator->Wait(kPlenty));
    ASSERT_EQ(status, 0) << creator->Log();
  }

  // Both ways of giving gradients; each trainer asks for the digest.
  void ExpectLearnsAsOnOneHost(const std::string& mesh) {
    ASSERT_NO_FATAL_FAILURE(Create(mesh));
    ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = static_cast<int>(workers_.size())}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
    int64_t last = 0;
    for (const std::string way : {"attach", "connect"}) {
      last += kSteps;
      const auto a = Trainer(hosts_.a(), way, last, 0), b = Trainer(hosts_.b(), way, last, 1);
      ASSERT_OK_AND_ASSIGN(const auto alone, testing::Undisturbed(client, testing::OddJob("job", mesh, 2), last));
      for (const char* lead : {"a0", "b0"}) {
        EXPECT_THAT(testing::ReadFile(File(lead)), HasSubstr("event=hosts_met job=job epoch=1 hosts=2 transport=tls"));
      }
      for (Process* trainer : {a.get(), b.get()}) {
        ASSERT_OK_AND_ASSIGN(const int status, trainer->Wait(kPlenty));
        EXPECT_EQ(status, 0);
        EXPECT_THAT(trainer->Log(), HasSubstr(absl::StrFormat("digest %x\n", alone.digest))) << way;
      }
    }
  }

  // While both train something happens: each trainer ends with an error that names its worker, in time.
  void ExpectNamed(const std::string& what, const std::function<void()>& happens, const std::string& to_a,
                   const std::string& to_b) {
    ASSERT_NO_FATAL_FAILURE(Create("ddp=2,fsdp=2"));
    const auto a = Trainer(hosts_.a(), "attach", 1'000'000, 0), b = Trainer(hosts_.b(), "attach", 1'000'000, 1);
    for (Process* trainer : {a.get(), b.get()}) {
      const absl::Time until = MonotonicNow() + kPlenty;
      while (trainer->Log().find("step 5\n") == std::string::npos && MonotonicNow() < until) {
        testing::Pause(absl::Milliseconds(10));
      }
    }
    const absl::Time since = MonotonicNow();
    happens();
    for (Process* trainer : {a.get(), b.get()}) {
      ASSERT_OK_AND_ASSIGN(const int status, trainer->Wait(kPlenty));
      const absl::Duration took = MonotonicNow() - since;
      const std::string log = trainer->Log();
      const std::string error = log.substr(std::min(log.find("UNAVAILABLE"), log.size()));
      std::cout << what << ", " << (trainer == a.get() ? "a" : "b") << " knew after " << absl::FormatDuration(took)
                << ": " << error;
      EXPECT_EQ(status, 1) << log;
      // Where the coordinator misses the worker first, the job goes on without it before its leads name it.
      EXPECT_THAT(error, AnyOf(HasSubstr("worker " + (trainer == a.get() ? to_a : to_b)),
                               HasSubstr("goes on at a later epoch")))
          << log;
      EXPECT_LT(took, 2 * kHeartbeatTimeout);
    }
  }
  void ExpectNamed(const std::string& worker, bool kill) {
    ExpectNamed((kill ? "killed " : "stopped ") + worker,
                [&] { kill ? workers_.at(worker)->Kill9() : workers_.at(worker)->Stop(); }, worker, worker);
  }

  testing::TwoHosts hosts_;
  const testing::TempFolder folder_;
  int trainers_ = 0;
  std::unique_ptr<Process> coordinator_;
  std::map<std::string, std::unique_ptr<Process>> workers_;
};

TEST_F(JobOnTwoHosts, ShardsOverHosts_LearnTheSame) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  if (!IsSkipped()) ExpectLearnsAsOnOneHost("fsdp=2");
}
TEST_F(JobOnTwoHosts, ReplicasOverHosts_LearnTheSame) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  if (!IsSkipped()) ExpectLearnsAsOnOneHost("ddp=2");
}
TEST_F(JobOnTwoHosts, ReplicasOverHostsOfShards_LearnTheSame) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  if (!IsSkipped()) ExpectLearnsAsOnOneHost("ddp=2,fsdp=2");
}

TEST_F(JobOnTwoHosts, KilledLead_IsNamedOnBoth) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  if (!IsSkipped()) ExpectNamed("b0", /*kill=*/true);
}
TEST_F(JobOnTwoHosts, StoppedLead_IsNamedOnBoth) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  if (!IsSkipped()) ExpectNamed("b0", /*kill=*/false);
}
TEST_F(JobOnTwoHosts, KilledMember_IsNamedOnBoth) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  if (!IsSkipped()) ExpectNamed("b1", /*kill=*/true);
}
TEST_F(JobOnTwoHosts, StoppedMember_IsNamedOnBoth) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  if (!IsSkipped()) ExpectNamed("b1", /*kill=*/false);
}

// Each host names the other one's lead. The job can be deleted meanwhile; over the link that is there again a new one
// learns.
TEST_F(JobOnTwoHosts, DroppedLink_IsNamedOnBoth_AndANewJobLearns) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(ExpectNamed(
      "link cut", [&] { ASSERT_OK(hosts_.CutLink()); }, "b0", "a0"));
  const auto deletes = Trainer(hosts_.a(), "delete", 0, 0);
  ASSERT_OK_AND_ASSIGN(const int status, deletes->Wait(kPlenty));
  ASSERT_EQ(status, 0) << deletes->Log();
  ASSERT_OK(hosts_.JoinLink());
  ExpectLearnsAsOnOneHost("ddp=2,fsdp=2");
}

}  // namespace
}  // namespace shardmesh
