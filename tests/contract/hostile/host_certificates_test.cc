// What crosses between the hosts of a job: over TLS where workers have certificates, and never in the clear beyond one
// machine unless somebody says so. Who shows a certificate that does not count is told which, and why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "rpc/testing/test_authority.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Process;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

constexpr int64_t kSteps = 5;
constexpr absl::Duration kCall = absl::Seconds(20);

JobSpec Spec() { return testing::OddJob("job", "ddp=2,fsdp=2", 2); }

class HostCertificates : public ::testing::Test {
 protected:
  ClusterOptions TwoHosts() const {
    ClusterOptions options;
    options.workers = 4;
    options.hosts = 2;
    return options;
  }
  std::string LogOf(const Cluster& cluster, const std::string& worker) const {
    return testing::ReadFile(cluster.folder().File(worker + ".log"));
  }
  // What `shardctl COMMAND` of the cluster says, as JSON.
  Json Shardctl(const Cluster& cluster, std::vector<std::string> command) const {
    command.insert(command.begin(), "client/cli/shardctl");
    command.insert(command.end(), {"--coordinator", cluster.coordinator_address(), "--json", "--tls-cert",
                                   client_.cert_file, "--tls-key", client_.key_file, "--tls-ca", client_.ca_file});
    const absl::StatusOr<std::string> out = testing::RunCommand(std::move(command));
    EXPECT_OK(out);
    return Json::parse(out.value_or("null"), nullptr, /*allow_exceptions=*/false);
  }

  // The leads of both hosts say how bytes cross, in the log and in status; other workers do not.
  void ExpectTransport(const Cluster& cluster, const Job& job, const std::string& transport) {
    const std::string line = absl::StrCat("event=hosts_met job=job epoch=1 hosts=2 transport=", transport, "\n");
    for (const int rank : {0, 1, 2, 3}) {
      const bool lead = rank % 2 == 0;
      const auto status = job.worker(Rank(rank)).GetStatus(kCall);
      ASSERT_OK(status);
      ASSERT_EQ(status->jobs_size(), 1);
      EXPECT_EQ(status->jobs(0).transport(), lead ? transport : "") << "rank " << rank;
      const std::string log = LogOf(cluster, absl::StrCat("w", rank));
      if (lead) {
        EXPECT_THAT(log, HasSubstr(line));
      } else {
        EXPECT_THAT(log, Not(HasSubstr("event=hosts_met")));
      }
    }
  }
  absl::StatusOr<std::shared_ptr<Job>> Train(Client& client) {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(Spec()));
    RETURN_IF_ERROR(testing::Initialize(*job));
    ASSIGN_OR_RETURN(const auto session, job->Attach({Slot(0), Slot(1)}));
    RETURN_IF_ERROR(session->AwaitWeights(kCall));
    RETURN_IF_ERROR(testing::TrainTo(*session, kSteps));
    return job;
  }
  // A worker that joins, or says why it cannot: its status and its log.
  std::pair<int, std::string> Start(const Cluster& cluster, const TlsOptions& tls) {
    std::vector<std::string> command = {"worker/shardmesh-worker",
                                        "--coordinator",
                                        cluster.coordinator_address(),
                                        "--name",
                                        "stranger",
                                        "--local-dir",
                                        folder_.File("s"),
                                        "--join-timeout",
                                        "2",
                                        "--tls-cert",
                                        tls.cert_file,
                                        "--tls-key",
                                        tls.key_file,
                                        "--tls-ca",
                                        tls.ca_file};
    const auto process = Process::Start({std::move(command), folder_.File(absl::StrCat("stranger-", ++strangers_))});
    EXPECT_OK(process);
    if (!process.ok()) return {-1, ""};
    const absl::StatusOr<int> status = (*process)->Wait(2 * absl::Seconds(20));
    EXPECT_OK(status);
    return {status.value_or(-1), (*process)->Log()};
  }

  const testing::TempFolder folder_;
  testing::TestAuthority authority_{folder_.path(), "authority"};
  const TlsOptions service_ = authority_.Issue("service"), client_ = authority_.Issue("client");
  int strangers_ = 0;
};

TEST_F(HostCertificates, WithCertificates_BytesCrossOverTls_AndTheBitsAreTheSame) {
  ClusterOptions options = TwoHosts();
  options.tls = service_;
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, Train(client));
  ExpectTransport(*cluster, *job, "tls");
  EXPECT_THAT(LogOf(*cluster, "w0"), HasSubstr("protection=\"TLSv1.3 TLS_AES_128_GCM_SHA256"));
  for (const Json& worker : Shardctl(*cluster, {"status"})) {
    EXPECT_EQ(worker["jobs"][0]["transport"], worker["jobs"][0]["rank"].get<int>() % 2 == 0 ? "tls" : "");
  }
  const Json top = Shardctl(*cluster, {"top", "job", "--count", "1"});
  for (const Json& worker : top["jobs"][0]["workers"]) {
    EXPECT_EQ(worker["transport"], worker["rank"].get<int>() % 2 == 0 ? "tls" : "");
  }

  ASSERT_OK_AND_ASSIGN(const auto alone, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(Client on_one, alone->Connect());
  ASSERT_OK_AND_ASSIGN(const Learnt expected, testing::Undisturbed(on_one, Spec(), kSteps));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
  EXPECT_EQ(learnt, expected);
}

TEST_F(HostCertificates, WithoutThem_OnOneMachine_BytesCrossInTheClear) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(TwoHosts()));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, Train(client));
  ExpectTransport(*cluster, *job, "tcp");
}

TEST_F(HostCertificates, WhereSomebodySaysSo_BytesCrossByGloo) {
  ClusterOptions options = TwoHosts();
  options.tls = service_;
  options.worker_flags = {"--insecure-transport"};
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, Train(client));
  ExpectTransport(*cluster, *job, "gloo");
  EXPECT_THAT(LogOf(*cluster, "w1"),
              HasSubstr("event=insecure_transport worker=w1 remedy=\"leave --insecure-transport out, and give TLS\""));
}

// Of another authority, expired, revoked: none of them becomes a worker, each is told which certificate it is, and the
// workers that are there train on.
TEST_F(HostCertificates, ThatDoNotCount_LetNoWorkerIn) {
  testing::TestAuthority other(folder_.path(), "other");
  const TlsOptions revoked = authority_.Issue("taken-back"), expired = authority_.Issue("expired", -1);
  TlsOptions stranger = other.Issue("stranger");
  stranger.ca_file = authority_.file();
  authority_.Revoke("taken-back");
  ClusterOptions options = TwoHosts();
  options.tls = service_;
  options.tls.ca_file = authority_.FileWithList();
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  struct {
    const TlsOptions& tls;
    const char* what;
  } const cases[] = {{stranger, "did not sign --tls-cert "},
                     {revoked, "or has it on a revocation list"},
                     {expired, "expired.pem expired at "}};
  for (const auto& c : cases) {
    const auto [status, log] = Start(*cluster, c.tls);
    EXPECT_EQ(status, 1) << log;
    EXPECT_THAT(log, AllOf(HasSubstr(c.what), HasSubstr(c.tls.cert_file)));
  }
  EXPECT_THAT(cluster->coordinator().Log(),
              HasSubstr("event=certificate_refused because=\"certificate revoked: CN = taken-back, issued by CN = "
                        "authority\""));
  ASSERT_OK_AND_ASSIGN(const auto job, Train(client));
  ExpectTransport(*cluster, *job, "tls");
}

}  // namespace
}  // namespace shardmesh
