// Contract 1, over hosts: a job whose workers count as on two hosts learns, bit for bit, what it learns on one: shards
// and replicas over hosts, clipped, quantized and frozen, attached and connected trainers. The hosts are names
// (--host-name), and the line between them is loopback; with real ones: tests/e2e/job_on_two_hosts_test.cc.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/descriptor/fd.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;

constexpr int64_t kSteps = 10;

JobSpec Spec(const std::string& mesh) {
  JobSpec spec = testing::OddJob("job", mesh, 3);
  spec.clip_norm = 0.5;
  spec.parameters.push_back({"quantized", {70, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
  const StateFormat fp32 = StateFormat::kFp32;
  spec.parameters.push_back({"nf4", {310, 190}, WeightFormat::kFp32, "", fp32, GatherFormat::kNf4});  // four factors
  spec.parameters.push_back({"frozen", {5000}, WeightFormat::kBf16});
  spec.parameters.back().frozen = true;
  return spec;
}

// Slots 0 and 1 are attached, slot 2 is connected.
absl::StatusOr<Learnt> Train(Client& client, const JobSpec& spec) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(testing::Initialize(*job));
  ASSIGN_OR_RETURN(const auto attached, job->Attach({Slot(0), Slot(1)}));
  ASSIGN_OR_RETURN(const auto connected, job->Connect({Slot(2)}));
  for (Session* session : {attached.get(), connected.get()}) RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  absl::Status other;
  std::thread thread([&] { other = testing::TrainTo(*connected, kSteps); });
  const absl::Status mine = testing::TrainTo(*attached, kSteps);
  thread.join();
  RETURN_IF_ERROR(mine);
  RETURN_IF_ERROR(other);
  ASSIGN_OR_RETURN(Learnt learnt, testing::Learn(*job, kSteps));
  RETURN_IF_ERROR(testing::Delete(client, spec.name));
  return learnt;
}

TEST(SeveralHosts, TheSameBitsAsOnOne) {
  ASSERT_OK_AND_ASSIGN(const auto one, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(const auto two, Cluster::Start({.workers = 4, .hosts = 2}));
  ASSERT_OK_AND_ASSIGN(Client on_one, one->Connect());
  ASSERT_OK_AND_ASSIGN(Client on_two, two->Connect());
  for (const char* mesh : {"fsdp=4", "ddp=4", "ddp=2,fsdp=2", "fsdp=2,ddp=2"}) {
    ASSERT_OK_AND_ASSIGN(const Learnt expected, Train(on_one, Spec(mesh)));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, Train(on_two, Spec(mesh)));
    EXPECT_EQ(learnt, expected) << mesh;
  }
}

// Each remote shard crosses to a host once, in its gather format, however many workers the host has; a slot's gradients
// leave for the hosts that need them once.
TEST(SeveralHosts, BytesIntoAHost_AreThoseThatItLacks) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4, .hosts = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::TinyJob("job", "fsdp=4", 2, 100'000);
  spec.gradient_format = Format::kBf16;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::TrainTo(*session, kSteps));
  int64_t weights = 0, gradients = 0;
  for (const int lead : {0, 2}) {
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(lead)).GetStatus(absl::Seconds(20)));
    ASSERT_EQ(status.jobs_size(), 1);
    const double model = static_cast<double>(job->plan().version_bytes());
    EXPECT_LE(static_cast<double>(status.jobs(0).host_weight_bytes_in()), 1.05 * (kSteps + 1) * model / 2);
    weights += status.jobs(0).host_weight_bytes_in();
    gradients += status.jobs(0).host_gradient_bytes_in();
  }
  EXPECT_EQ(weights, (kSteps + 1) * job->plan().version_bytes());  // half of it into each host
  // Both slots are on one host: the other's shards of both cross.
  EXPECT_EQ(gradients, kSteps * 2 * job->plan().gradient_window_bytes() / 2);
}

// Ports at which processes listen for TCP, now.
std::set<int> ListeningPorts(const std::vector<pid_t>& pids) {
  std::set<std::string> sockets;
  std::error_code error;
  for (const pid_t pid : pids) {
    for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
      sockets.insert(std::filesystem::read_symlink(entry.path(), error).string());
    }
  }
  std::set<int> ports;
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() < 10 || fields[3] != "0A" || sockets.count(absl::StrCat("socket:[", fields[9], "]")) == 0) continue;
    ports.insert(std::stoi(fields[1].substr(fields[1].find(':') + 1), nullptr, 16));
  }
  return ports;
}

// Connects to every port that workers begin to listen at while it lives, and says nothing, or what no rank says.
class Strangers {
 public:
  explicit Strangers(std::vector<pid_t> pids) : pids_(std::move(pids)), known_(ListeningPorts(pids_)) {
    thread_ = std::thread([this] {
      while (!stop_.load()) ConnectToAll();
    });
  }
  ~Strangers() {
    stop_.store(true);
    thread_.join();
  }
  int connected() const { return connected_.load(); }

 private:
  void ConnectToAll() {
    for (const int port : ListeningPorts(pids_)) {
      if (known_.count(port) != 0) continue;
      for (const bool talks : {false, true}) {
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<uint16_t>(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) break;
        const uint64_t bytes[] = {64, 1, 7, 0, 16, 0, 0, 0};  // a message of Gloo's that nobody waits for
        if (talks) (void)send(fd.get(), bytes, sizeof(bytes), MSG_NOSIGNAL);
        connected_.fetch_add(1);
        open_.push_back(std::move(fd));
        if (open_.size() > 200) open_.pop_front();
      }
    }
  }

  const std::vector<pid_t> pids_;
  const std::set<int> known_;
  std::deque<UniqueFd> open_;
  std::atomic<int> connected_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Port scanners and health checks come while the hosts of a job find each other.
TEST(SeveralHosts, StrangersAtEveryPort_NoJobIsLost) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4, .hosts = 4}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  std::vector<pid_t> pids;
  for (const char* worker : {"w0", "w1", "w2", "w3"}) pids.push_back(cluster->worker(worker).pid());
  const Strangers strangers(pids);
  // On a busy machine strangers take more jobs to come: a port is listened at for some milliseconds of each.
  const absl::Time deadline = MonotonicNow() + absl::Minutes(3);
  for (int i = 0; i < 12 || strangers.connected() <= 100; ++i) {
    ASSERT_LT(MonotonicNow(), deadline) << strangers.connected() << " came during " << i << " jobs";
    ASSERT_OK_AND_ASSIGN(const auto job, client.CreateJob(testing::TinyJob("job", "fsdp=4", 1, 1000)));
    ASSERT_OK(testing::Initialize(*job)) << "job " << i;
    ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
    ASSERT_OK(session->AwaitWeights(absl::Seconds(20))) << "job " << i;
    ASSERT_OK(testing::TrainTo(*session, 2)) << "job " << i;
    ASSERT_OK(testing::Delete(client, "job"));
  }
}

}  // namespace
}  // namespace shardmesh
