// Workers of two hosts in one process: how their leads meet, and who is refused.
#include <functional>

#include "core/base/clock.h"
#include "local/testing/temp_folder.h"
#include "rpc/testing/test_authority.h"
#include "worker/lead/hosts/host_meeting.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Two workers; each is the one of its host, and asks the other in this process.
struct TwoWorkers {
  explicit TwoWorkers(absl::Duration prepare_timeout = kLong,
                      const std::vector<std::string>& addresses = {"127.0.0.1", "127.0.0.1"},
                      const std::vector<TlsOptions>& tls = {{}, {}}) {
    for (int i = 0; i < 2; ++i) {
      WorkerOptions options;
      options.name = absl::StrCat("w", i);
      options.heartbeat_timeout = kLong;
      options.prepare_timeout = prepare_timeout;
      options.group_address = addresses[i];
      options.transport.tls = tls[i];
      options.meet = [this](const v1::Peer& lead, const v1::MeetRequest& request, absl::Duration) {
        return workers[lead.rank()]->Meet(change ? change(request) : request);
      };
      workers.push_back(std::make_unique<Worker>(options, NewProcessMemory()));
    }
  }
  ~TwoWorkers() {
    for (auto& worker : workers) worker->Reconcile({});
    while (!workers.empty()) workers.pop_back();
  }

  static v1::Assignment AssignmentOf(const JobSpec& job, int rank, int epoch = 3) {
    v1::Assignment assignment;
    *assignment.mutable_spec() = ToProto(job);
    assignment.set_epoch(epoch);
    assignment.set_rank(rank);
    assignment.set_plan_hash(Plan::Create(job)->hash());
    assignment.set_secret(kJobSecret);
    for (int r = 0; r < 2; ++r) {
      v1::Peer* peer = assignment.add_peers();
      peer->set_rank(r);
      peer->set_worker(absl::StrCat("w", r));
      peer->set_incarnation(100 + r);
      peer->set_local_socket("none");
      peer->set_pid(getpid());
      peer->set_host_id(absl::StrCat("host", r));
      peer->set_address(absl::StrCat("10.0.0.", r, ":1"));
    }
    return assignment;
  }
  v1::MemberStatus AwaitState(int i, v1::MemberState state) {
    v1::MemberStatus status;
    EXPECT_TRUE(Await([&] {
      const auto statuses = workers[i]->Statuses();
      if (!statuses.empty()) status = statuses[0];
      return status.state() == state;
    })) << status.DebugString();
    return status;
  }
  void Start(const JobSpec& job) {
    for (int i : {1, 0}) workers[i]->Reconcile({AssignmentOf(job, i)});
  }

  std::function<v1::MeetRequest(v1::MeetRequest)> change;
  std::vector<std::unique_ptr<Worker>> workers;
};

TEST(WorkerHosts, LeadsMeetAndStep) {
  TwoWorkers two;
  two.Start(SmallJob("fsdp=2", 1));
  for (int i : {0, 1}) two.AwaitState(i, v1::MEMBER_STATE_READY);
  std::shared_ptr<JobShard> shards[2];
  for (int i : {0, 1}) {
    ASSERT_OK_AND_ASSIGN(shards[i], two.workers[i]->Find("small"));
    ASSERT_OK(shards[i]->run().engine.StageInitial(InitialShard(shards[i]->plan().InitialShardBytes(i) / 4, 1.0f), 5));
  }
  for (int i : {0, 1}) ASSERT_OK(shards[i]->protocol().outcomes().AwaitCommit(Step(0), kLong));
  v1::StepRequest request;
  request.set_epoch(3);
  request.set_step(1);
  request.add_slots(0);
  ASSERT_OK(shards[1]->requests().Declare(request, /*attached=*/true));
  for (int i : {0, 1}) ASSERT_OK(shards[i]->protocol().outcomes().AwaitCommit(Step(1), kLong));
  // One leaves: the other knows who.
  two.workers[1]->Leave();
  ASSERT_TRUE(Await([&] { return !shards[0]->Health().ok(); }));
  EXPECT_THAT(shards[0]->Health(), StatusIs(Code::kUnavailable, HasSubstr("worker w1 at 10.0.0.1:1 (rank 1")));
  for (auto& shard : shards) shard.reset();
}

TEST(WorkerHosts, StrangersAreRefused) {
  struct {
    const char* what;
    std::function<v1::MeetRequest(v1::MeetRequest)> change;
  } const cases[] = {
      {"plan hash", [](v1::MeetRequest request) { return request.set_plan_hash(std::string(32, 'a')), request; }},
      {"epoch 2", [](v1::MeetRequest request) { return request.set_epoch(2), request; }},
      {"incarnation", [](v1::MeetRequest request) { return request.set_incarnation(9), request; }},
      {"first rank of their host", [](v1::MeetRequest request) { return request.set_rank(0), request; }},
      {"first rank of their host", [](v1::MeetRequest request) { return request.set_rank(-7), request; }},
      {"secret of job small", [](v1::MeetRequest request) { return request.clear_secret(), request; }},
      {"secret of job small", [](v1::MeetRequest request) { return request.set_secret("guessed"), request; }},
  };
  for (const auto& c : cases) {
    TwoWorkers two(absl::Seconds(10));
    two.change = c.change;
    two.Start(SmallJob("fsdp=2", 1));
    EXPECT_THAT(two.AwaitState(1, v1::MEMBER_STATE_FAILED).error(), HasSubstr(c.what));
  }
}

// What a worker says of the job, and what members of its host see on their control block.
void ExpectNotMet(const Worker& worker, const v1::MemberStatus& status, const std::string& cause) {
  EXPECT_THAT(status.error(), AllOf(HasSubstr("could not prepare it"), HasSubstr(cause)));
  const auto shard = worker.Find("small");
  ASSERT_OK(shard);
  const absl::Status health = (*shard)->Health();
  EXPECT_THAT(health, StatusIs(Code::kUnavailable, AllOf(HasSubstr("could not meet the workers of other hosts"),
                                                         HasSubstr(cause), HasSubstr("create it again"))));
}

TEST(WorkerHosts, OneCannotMeet_TheJobFailsOnBothWithOneCause_AndANewOneWorks) {
  for (const int bad : {0, 1}) {
    std::vector<std::string> addresses = {"127.0.0.1", "127.0.0.1"};
    addresses[bad] = "192.0.2.1";  // nobody's
    TwoWorkers two(kLong, addresses);
    two.Start(SmallJob("fsdp=2", 1));
    for (int i : {0, 1}) {
      const v1::MemberStatus status = two.AwaitState(i, v1::MEMBER_STATE_FAILED);
      ExpectNotMet(*two.workers[i], status,
                   absl::StrCat("rank ", bad, ": nothing can listen at group address 192.0.2.1"));
    }
    for (int i : {0, 1}) {
      two.workers[i]->Reconcile({});
      EXPECT_TRUE(two.workers[i]->Statuses().empty());
    }
  }
}

// Of another authority, revoked, or expired: of the lead that dials and of the one that listens. Both know whose
// certificate it is and what is wrong with it, long before the time is up, and the next job works.
TEST(WorkerHosts, ACertificateThatDoesNotCount_IsNamedOnBoth) {
  const testing::TempFolder folder;
  testing::TestAuthority ours(folder.path(), "ours"), other(folder.path(), "other");
  const TlsOptions good = ours.Issue("good");
  TlsOptions stranger = other.Issue("stranger");
  stranger.ca_file = good.ca_file;
  const TlsOptions revoked = ours.Issue("taken-back"), expired = ours.Issue("expired", -1);
  ours.Revoke("taken-back");
  TlsOptions with_list = good;
  with_list.ca_file = ours.FileWithList();
  const struct {
    const TlsOptions& tls;
    const TlsOptions& others;
    std::string to_dialer[2];  // if it is the listener's certificate, and if it is its own
  } cases[] = {{stranger, good, {"CN = stranger, issued by CN = other", "stranger.pem"}},
               {revoked, with_list, {"revoked, of the peer's certificate, CN = taken-back", "taken-back.pem"}},
               {expired, good, {"expired.pem expired at", "expired.pem expired at"}}};
  constexpr absl::Duration kTime = absl::Seconds(10);
  for (const auto& c : cases) {
    for (const int bad : {0, 1}) {
      SCOPED_TRACE(absl::StrCat(c.tls.cert_file, " of rank ", bad));
      TwoWorkers two(kTime, {"127.0.0.1", "127.0.0.1"}, {bad == 0 ? c.tls : c.others, bad == 1 ? c.tls : c.others});
      const absl::Time since = MonotonicNow();
      two.Start(SmallJob("fsdp=2", 1));
      for (int i : {0, 1}) {
        ExpectNotMet(*two.workers[i], two.AwaitState(i, v1::MEMBER_STATE_FAILED), c.to_dialer[bad]);
      }
      EXPECT_LT(MonotonicNow() - since, 2 * kTime);
    }
  }
}

TEST(WorkerHosts, OneThatNeverComes_IsNamedWithinTheTime) {
  constexpr absl::Duration kTime = absl::Seconds(1);
  for (const int comes : {0, 1}) {
    TwoWorkers two(kTime);
    const absl::Time since = MonotonicNow();
    const JobSpec job = SmallJob("fsdp=2", 1);
    two.workers[comes]->Reconcile({TwoWorkers::AssignmentOf(job, comes)});
    const v1::MemberStatus status = two.AwaitState(comes, v1::MEMBER_STATE_FAILED);
    EXPECT_LT(MonotonicNow() - since, 10 * kTime);
    ExpectNotMet(*two.workers[comes], status, comes == 0 ? "could not connect rank 1" : "worker w0");
    // Deleted, and made again: with both.
    two.workers[comes]->Reconcile({});
    for (int i : {1, 0}) two.workers[i]->Reconcile({TwoWorkers::AssignmentOf(job, i, 4)});
    for (int i : {0, 1}) two.AwaitState(i, v1::MEMBER_STATE_READY);
  }
}

TEST(WorkerHosts, AnotherPlan_FailsTheJobOnBoth) {
  TwoWorkers two;
  two.change = [](v1::MeetRequest request) { return request.set_plan_hash(std::string(32, 'a')), request; };
  two.Start(SmallJob("fsdp=2", 1));
  for (int i : {0, 1}) {
    ExpectNotMet(*two.workers[i], two.AwaitState(i, v1::MEMBER_STATE_FAILED), "run one build of shardmesh everywhere");
  }
}

// A stranger knows all of the job that is not secret: it can neither write nor read, nor make the job fail.
TEST(WorkerHosts, WithoutTheSecret_NothingIsWrittenReadOrEnded) {
  TwoWorkers two;
  const JobSpec job = SmallJob("fsdp=2", 1);
  two.workers[0]->Reconcile({TwoWorkers::AssignmentOf(job, 0)});
  ASSERT_TRUE(Await([&] { return two.workers[0]->Find("small").ok(); }));
  v1::MeetRequest forged;
  forged.set_job("small");
  forged.set_epoch(3);
  forged.set_rank(1);
  forged.set_incarnation(101);
  forged.set_plan_hash(Plan::Create(job)->hash());
  forged.set_key(absl::StrCat(MeetingPlace::kFirst, "/of-a-stranger"));
  const auto expect_denied = [&](const v1::MeetRequest& request) {
    EXPECT_THAT(two.workers[0]->Meet(request), StatusIs(Code::kPermissionDenied, HasSubstr("secret of job small")));
  };
  expect_denied(forged);
  forged.set_value("gathered elsewhere");
  expect_denied(forged);
  v1::MeetRequest other_plan = forged;
  other_plan.set_plan_hash(std::string(32, 'a'));
  expect_denied(other_plan);
  v1::MeetRequest not_met = forged;
  not_met.set_key(kNotMetKey);
  expect_denied(not_met);
  forged.clear_value();
  forged.set_secret(kJobSecret);
  ASSERT_OK_AND_ASSIGN(const v1::MeetReply read, two.workers[0]->Meet(forged));
  EXPECT_EQ(read.value(), "") << "it was not written";
  two.workers[1]->Reconcile({TwoWorkers::AssignmentOf(job, 1)});
  for (int i : {0, 1}) two.AwaitState(i, v1::MEMBER_STATE_READY);
}

TEST(WorkerHosts, UnevenOrMixedHosts_AreRefused) {
  TwoWorkers two;
  v1::Assignment mixed = TwoWorkers::AssignmentOf(SmallJob("fsdp=3", 1), 0);
  *mixed.add_peers() = mixed.peers(0);
  mixed.mutable_peers(2)->set_rank(2);
  two.workers[0]->Reconcile({mixed});
  EXPECT_THAT(two.AwaitState(0, v1::MEMBER_STATE_FAILED).error(), HasSubstr("not ordered by host: rank 2"));
  v1::Assignment uneven = mixed;
  uneven.set_epoch(4);
  uneven.mutable_peers(2)->set_host_id("host1");
  two.workers[1]->Reconcile({uneven});
  EXPECT_THAT(two.AwaitState(1, v1::MEMBER_STATE_FAILED).error(),
              AllOf(HasSubstr("host 1 has 2 ranks"), HasSubstr("host 0 has 1")));
}

TEST(WorkerHosts, WithoutAGroupAddress_TheJobFailsAndSaysSo) {
  WorkerOptions options;
  options.name = "w0";
  Worker worker(options, NewProcessMemory());
  worker.Reconcile({TwoWorkers::AssignmentOf(SmallJob("fsdp=2", 1), 0)});
  ASSERT_TRUE(Await([&] { return worker.Statuses()[0].state() == v1::MEMBER_STATE_FAILED; }));
  EXPECT_THAT(worker.Statuses()[0].error(), HasSubstr("--group-address"));
}

}  // namespace
}  // namespace shardmesh
