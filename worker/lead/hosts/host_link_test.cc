// The line between two hosts of a job stops or breaks in the middle of a step: each host names the other in time, the
// step is committed on neither, and a new job over a new line works.
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "worker/lead/hosts/testing/job_on_hosts.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/testing/relayed_rendezvous.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::RelayedRendezvous;
using ::shardmesh::testing::TcpRelay;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kTimeout = absl::Seconds(4);  // of heartbeats
constexpr int64_t kElements = 1 << 20;                 // half of their gradients cross each way, 2 MiB

JobSpec Job() {
  JobSpec job = SmallJob("fsdp=2", 2);
  job.parameters.push_back({"large", {kElements}, WeightFormat::kFp32});
  return job;
}

std::vector<HostGroups> GroupsOver(TcpRelay& relay) {
  const auto common = std::make_shared<MemoryRendezvous>();
  std::vector<HostGroups> groups(2);
  std::vector<std::thread> hosts;
  for (int h : {0, 1}) {
    hosts.emplace_back([&, h] {
      const auto rendezvous = std::make_shared<RelayedRendezvous>(&relay, common, h, 1);
      for (auto& [name, group] : {std::pair("gradients", &groups[h].gradients),
                                  {"results", &groups[h].results},
                                  {"rounds", &groups[h].rounds}}) {
        GlooOptions options;
        options.rank = h;
        options.size = 2;
        options.names = {0, 1};
        options.key = name;
        options.host = absl::StrCat("127.0.0.", h + 1);
        auto connected = GlooGroup::Connect(rendezvous, options);
        ASSERT_OK(connected);
        *group = *std::move(connected);
      }
    });
  }
  for (std::thread& host : hosts) host.join();
  return groups;
}

void Steps(JobOnHosts& job, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) {
    for (int slot : {0, 1}) ASSERT_OK(job.GiveSlot(slot, step, GradientWay::kAttached));
    ASSERT_OK(job.AwaitStep(step));
  }
}

void Cut(void (TcpRelay::*how)()) {
  HostLeadOptions options;
  options.round_timeout = kTimeout;
  options.step_timeout = kLongWait;
  {
    TcpRelay relay;
    JobOnHosts job(Job(), 2, options, GroupsOver(relay));
    ASSERT_OK(job.PlaceWeights());
    ASSERT_NO_FATAL_FAILURE(Steps(job, 1, 2));
    relay.SetLine(absl::ZeroDuration(), 4e6);
    const int64_t before = relay.forwarded_bytes();
    for (int slot : {0, 1}) ASSERT_OK(job.GiveSlot(slot, 3, GradientWay::kAttached));
    while (relay.forwarded_bytes() < before + kElements && job.hosts[0]->protocol->members().Health().ok()) {
      std::this_thread::yield();
    }
    const int64_t since = MonotonicNanos();
    (relay.*how)();
    for (int h : {0, 1}) {
      const absl::StatusOr<StepOutcome> outcome = job.hosts[h]->protocol->outcomes().AwaitCommit(Step(3), kLongWait);
      EXPECT_THAT(outcome,
                  StatusIs(Code::kUnavailable, AllOf(HasSubstr(absl::StrCat("worker-", 1 - h, " (rank ", 1 - h)),
                                                     HasSubstr("the link between them broke"))));
      EXPECT_LT(absl::Nanoseconds(MonotonicNanos() - since), 2 * kTimeout) << "host " << h;
      EXPECT_EQ(job.hosts[h]->protocol->committed_step(), Step(2));
    }
  }
  TcpRelay relay;
  JobOnHosts job(Job(), 2, options, GroupsOver(relay));
  ASSERT_OK(job.PlaceWeights());
  ASSERT_NO_FATAL_FAILURE(Steps(job, 1, 3));
}

TEST(HostLink, StopsInAStep) { Cut(&TcpRelay::Stop); }
TEST(HostLink, BreaksInAStep) { Cut(&TcpRelay::Drop); }

}  // namespace
}  // namespace shardmesh
