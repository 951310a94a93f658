// Jobs on several hosts when something goes wrong: other learning rates, two trainers for a slot, members and leads
// that die, stop or are late; and publications that somebody reads on one host.
#include <array>
#include <atomic>
#include <thread>

#include "worker/lead/hosts/testing/job_on_hosts.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobSpec Job(const std::string& mesh, int slots) { return SmallJob(mesh, slots); }

Declaration Declared(int slot, int64_t step, double lr) {
  Declaration declaration{{Slot(slot)}, Step(step), {lr}, {}};
  declaration.in_place = true;
  return declaration;
}

// Until the declaration of one of both does not stand any more, or kLongWait: what each says of its own, slot 0 at `a`
// and slot 1 at `b`.
std::array<absl::Status, 2> AwaitRefusal(StepProtocol& a, StepProtocol& b, Step step) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kLongWait);
  std::array<absl::Status, 2> stand;
  while (stand[0].ok() && stand[1].ok() && MonotonicNanos() < deadline) {
    const uint32_t word = b.control()->finished.load();
    stand = {a.declarations().CheckStands({Slot(0)}, step), b.declarations().CheckStands({Slot(1)}, step)};
    if (stand[0].ok() && stand[1].ok()) FutexWait(b.control()->finished, word, absl::Milliseconds(50));
  }
  return stand;
}

TEST(HostFaults, OtherLearningRatesOnAnotherHost_AreRefusedAndMayBeSaidAgain) {
  for (const bool at_once : {true, false}) {
    JobOnHosts job(Job("fsdp=2", 2), 2);
    ASSERT_OK(job.PlaceWeights());
    StepProtocol &a = *job.hosts[0]->protocol, &b = *job.hosts[1]->protocol;
    ASSERT_OK(b.declarations().Declare(Declared(1, 1, 0.5)));
    if (at_once) {  // perhaps in one round: then the first host's rates count, and if not, those that came first
      ASSERT_OK(a.declarations().Declare(Declared(0, 1, 0.25)).status());
      const auto [of_a, of_b] = AwaitRefusal(a, b, Step(1));
      ASSERT_NE(of_a.ok(), of_b.ok()) << of_a << "; " << of_b;
      EXPECT_THAT(of_a.ok() ? of_b : of_a, StatusIs(Code::kInvalidArgument, HasSubstr("learning rates")));
      ASSERT_OK(of_a.ok() ? b.declarations().Declare(Declared(1, 1, 0.25)).status()
                          : a.declarations().Declare(Declared(0, 1, 0.5)).status());
    } else {  // known there for long
      while (a.control()->settings_claim.load() >> 16 != 1)
        FutexWait(a.control()->finished, a.control()->finished.load(), absl::Milliseconds(5));
      EXPECT_THAT(a.declarations().Declare(Declared(0, 1, 0.25)),
                  StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("another host"), HasSubstr("0.5"))));
      ASSERT_OK(a.declarations().Declare(Declared(0, 1, 0.5)).status());
    }
    EXPECT_OK(job.AwaitStep(1));
  }
}

TEST(HostFaults, TrainersOnTwoHostsForOneSlot_OneHasIt) {
  JobOnHosts job(Job("fsdp=2", 1), 2);
  ASSERT_OK(job.PlaceWeights());
  const uint64_t holders[] = {uint64_t{1} << 32 | 1, uint64_t{2} << 32 | 1};
  std::vector<absl::Status> given(2);
  std::vector<std::thread> trainers;
  for (int h : {0, 1}) {
    trainers.emplace_back([&, h] {
      StepProtocol& protocol = *job.hosts[h]->protocol;
      given[h] = protocol.slots().Take(Slot(0), holders[h]);
      if (given[h].ok()) given[h] = protocol.slots().AwaitGiven({Slot(0)}, holders[h], kLongWait);
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  const int has = given[0].ok() ? 0 : 1;
  StepProtocol &a = *job.hosts[has]->protocol, &b = *job.hosts[1 - has]->protocol;
  ASSERT_OK(given[has]);
  EXPECT_THAT(given[1 - has], StatusIs(Code::kFailedPrecondition, HasSubstr("on another host")));
  // Who comes later is told at once.
  EXPECT_THAT(b.slots().Take(Slot(0), holders[1 - has] + 1),
              StatusIs(Code::kFailedPrecondition, HasSubstr("on another host")));
  a.slots().Give(Slot(0), holders[has]);
  b.slots().AwaitFree({Slot(0)}, kLongWait);
  ASSERT_OK(b.slots().Take(Slot(0), holders[1 - has]));
  ASSERT_OK(b.slots().AwaitGiven({Slot(0)}, holders[1 - has], kLongWait));
  ASSERT_OK(b.declarations().Declare(Declared(0, 1, 0.5)).status());
  EXPECT_OK(job.AwaitStep(1));
}

TEST(HostFaults, AbortOnOneHost_IsOnAll) {
  JobOnHosts job(Job("fsdp=4", 1), 2);
  ASSERT_OK(job.PlaceWeights());
  job.hosts[1]->protocol->members().Abort(AbortReason::kGone, 3, Rank(2));
  for (auto& host : job.hosts) {
    EXPECT_THAT(host->protocol->outcomes().AwaitCommit(Step(1), kLongWait),
                StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-3 (rank 3"), HasSubstr("is gone"))));
  }
}

TEST(HostFaults, LeadThatDoesNotCome_IsNamedInTime) {
  constexpr absl::Duration kTimeout = absl::Seconds(3);
  JobOnHosts job(Job("fsdp=4", 1), 1);  // for its plan alone
  OneOfHosts alone(job.job, job.plan, HostRanks{0, 2, 2});
  const auto group = [](int) {
    return std::make_unique<LocalGroup>(std::make_shared<LocalHub>(2, RankNames{0, 2}), 0, 1);
  };
  const int64_t since = MonotonicNanos();
  alone.lead =
      std::make_unique<HostLead>(*alone.protocol, alone.host, *alone.passes[0], job.job, job.plan,
                                 HostGroups{group(0), group(1), group(2)}, HostLeadOptions{kTimeout, kLongWait});
  EXPECT_THAT(alone.protocol->outcomes().AwaitCommit(Step(0), kLongWait),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-2 (rank 2"), HasSubstr("other hosts"))));
  EXPECT_LT(absl::Nanoseconds(MonotonicNanos() - since), 2 * kTimeout);
}

// A group whose rank says in rounds something else than it should.
class LyingGroup final : public ExchangeGroup {
 public:
  using Lie = std::function<void(HostFacts*, HostBucket*)>;  // one of them is null

  LyingGroup(std::unique_ptr<ExchangeGroup> group, Lie lie)
      : ExchangeGroup(group->rank(), group->size(), group->epoch()), group_(std::move(group)), lie_(std::move(lie)) {}
  absl::string_view name() const override { return group_->name(); }
  void Abort(absl::string_view reason) override { group_->Abort(reason); }

 protected:
  absl::Status DoBarrier(const CallHeader&, absl::Duration timeout) override { return group_->Barrier(timeout); }
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) override {
    std::vector<char> said(mine, mine + header.bytes);
    const bool facts = header.bytes >= static_cast<int64_t>(sizeof(HostFacts));
    lie_(facts ? reinterpret_cast<HostFacts*>(said.data()) : nullptr,
         facts ? nullptr : reinterpret_cast<HostBucket*>(said.data()));
    return group_->AllGather(said.data(), all, header.bytes, timeout);
  }
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) override {
    return group_->AllToAll(mine, theirs, header.bytes, timeout);
  }
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) override {
    return group_->Broadcast(memory, header.bytes, root, timeout);
  }
  absl::Status DoExchange(const CallHeader&, absl::Span<const PeerTransfer> transfers,
                          absl::Duration timeout) override {
    return group_->Exchange(transfers, timeout);
  }

 private:
  const std::unique_ptr<ExchangeGroup> group_;
  const Lie lie_;
};

// Host 1 says what no host can: host 0 ends the job, and says which host it was and what it said.
TEST(HostFaults, FactsThatCannotBe_EndTheJobAndAreNamed) {
  struct {
    const char* what;
    std::function<void(HostFacts&)> facts;
    std::function<void(HostBucket&)> bucket;
    bool pulled = false;
  } const lies[] = {
      {"slot 1 is declared for step 9 after step 0", [](HostFacts& facts) { facts.slots[1].declared = 9; }, {}},
      {"slot 0 has attached trainers on host 0 and on host 1",
       [](HostFacts& facts) { facts.slots[0].holder = uint64_t{2} << 32 | 5; }, {}},
      {"publication 3 of 3", [](HostFacts& facts) { facts.publish = 3; }, {}},
      {"slot 1 has -1 tokens", [](HostFacts& facts) { facts.slots[1].tokens = -1; }, {}},
      {"committed step 7, where host 0 has 0", [](HostFacts& facts) { facts.committed = 7; }, {}},
      {"slot 1 has a gradient of tensor 4711",
       [](HostFacts& facts) { facts.slots[1].nonfinite = NonFiniteWord(1, 4711); }, {}},
      {"1000000 words of buckets", [](HostFacts& facts) { facts.num_buckets = 1'000'000; }, {}},
      {"bucket 7 of 1", {}, [](HostBucket& bucket) { bucket.bucket = 7; }},
      {"slot 5 of bucket 0", {}, [](HostBucket& bucket) { bucket.slot = 5; }},
      {"seat 1 has finished slot 99", [](HostFacts& facts) { facts.seats[1].finishes = 1, facts.seats[1].slot = 99; }, {},
       true},
      {"seat 1 has finished a slot of step 9 after step 0",
       [](HostFacts& facts) { facts.seats[1].finishes = 1, facts.seats[1].step = 9; }, {}, true},
      {"seat 0 has attached trainers on host 0 and on host 1",
       [](HostFacts& facts) { facts.slots[0].holder = uint64_t{2} << 32 | 5; }, {}, true},
  };
  for (const auto& lie : lies) {
    JobSpec spec = Job("fsdp=2", 2);
    if (lie.pulled) {
      spec.slot_mode = SlotMode::kPulled;
      spec.num_trainers = 2;
    } else {
      spec.residency = Residency::kBucket;
    }
    std::atomic<bool> lies_now{false};
    std::vector<HostGroups> groups(2);
    const RankNames names{0, 1};
    const auto rounds = std::make_shared<LocalHub>(2, names), gradients = std::make_shared<LocalHub>(2, names),
               results = std::make_shared<LocalHub>(2, names);
    for (int h : {0, 1}) {
      groups[h] = {std::make_unique<LocalGroup>(rounds, h, 1), std::make_unique<LocalGroup>(gradients, h, 1),
                   std::make_unique<LocalGroup>(results, h, 1)};
    }
    groups[1].rounds = std::make_unique<LyingGroup>(
        std::move(groups[1].rounds), [&](HostFacts* facts, HostBucket* bucket) {
          if (!lies_now.load()) return;
          if (facts != nullptr && lie.facts) lie.facts(*facts);
          if (bucket != nullptr && lie.bucket) lie.bucket(*bucket);
        });
    JobOnHosts job(spec, 2, {kLongWait, kLongWait}, std::move(groups));
    ASSERT_OK(job.PlaceWeights());
    StepProtocol &honest = *job.hosts[0]->protocol, &other = *job.hosts[1]->protocol;
    ASSERT_OK(honest.slots().Take(Slot(0), uint64_t{1} << 32 | 1));
    ASSERT_OK(honest.slots().AwaitGiven({Slot(0)}, uint64_t{1} << 32 | 1, kLongWait));
    lies_now.store(true);
    if (!lie.pulled) {
      ASSERT_OK(other.buckets().Acquire(0));  // news, so that there are rounds with words of buckets
    }
    EXPECT_THAT(honest.outcomes().AwaitCommit(Step(1), kLongWait),
                StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-1 (rank 1"), HasSubstr("said for its host what"),
                                                   HasSubstr(lie.what))))
        << lie.what;
    EXPECT_THAT(other.outcomes().AwaitCommit(Step(1), kLongWait), StatusIs(Code::kUnavailable, ::testing::_))
        << lie.what;
  }
}

TEST(HostFaults, LeadThatEnds_IsMissedAtOnce) {
  JobOnHosts job(Job("ddp=2", 1), 2);
  ASSERT_OK(job.PlaceWeights());
  job.hosts[0]->lead.reset();
  EXPECT_THAT(job.hosts[1]->protocol->outcomes().AwaitCommit(Step(1), kLongWait),
              StatusIs(Code::kUnavailable, HasSubstr("worker-0 (rank 0")));
}

TEST(HostFaults, VersionThatIsReadOnOneHost_IsReplacedOnNone) {
  JobOnHosts job(Job("fsdp=2", 2), 2);
  ASSERT_OK(job.PlaceWeights());
  const auto step = [&](int64_t k) {
    for (int slot : {0, 1}) ASSERT_OK(job.GiveSlot(slot, k, GradientWay::kAttached));
    ASSERT_OK(job.AwaitStep(k));
  };
  ASSERT_NO_FATAL_FAILURE(step(1));
  const std::optional<int> pinned = job.hosts[1]->protocol->publications().Pin(Step(0));
  ASSERT_TRUE(pinned.has_value());
  ASSERT_NO_FATAL_FAILURE(step(2));
  for (auto& host : job.hosts) {
    EXPECT_THAT(host->protocol->publications().Published(), ::testing::ElementsAre(Step(0), Step(1)));
  }
  job.hosts[1]->protocol->publications().Unpin(*pinned);
  ASSERT_NO_FATAL_FAILURE(step(3));
  for (auto& host : job.hosts) {
    EXPECT_THAT(host->protocol->publications().Published(), ::testing::ElementsAre(Step(1), Step(3)));
  }
  EXPECT_EQ(job.Published(0, 3), job.Published(1, 3));
}

TEST(HostFaults, ReplicaWithOtherBitsOnAnotherHost_IsDataLoss) {
  JobOnHosts job(Job("ddp=2", 1), 2);
  ASSERT_OK(job.PlaceWeights());
  ASSERT_OK(job.Digest(1));
  static_cast<float*>(job.hosts[1]->storages[0]->state(0, 0, 0, 0).codes)[5] = 1e-30f;  // memory lies
  for (int h : {0, 1}) {
    EXPECT_THAT(job.Digest(h), StatusIs(Code::kDataLoss, AllOf(HasSubstr("worker-0"), HasSubstr("worker-1"))));
  }
}

}  // namespace
}  // namespace shardmesh
