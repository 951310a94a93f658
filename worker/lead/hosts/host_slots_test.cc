// Who may write a slot, of a job on two hosts: trainers' calls and leads' rounds in thousands of orders, one after the
// other in one thread. In none of them is a window written that a step reads, is a step made of two trainers'
// gradients, or is a declaration forgotten.
#include "worker/lead/hosts/host_slots.h"

#include <cstring>
#include <functional>
#include <random>

#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::_;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kHosts = 2;  // of one shard each

// One host: its control block, and what its lead did last.
struct Host {
  Host(const JobSpec& job, const Plan& plan, int h)
      : memory(NewProcessMemory()),
        host(*HostMemory::Create(*memory, job.name, job, plan)),
        protocol(host.control(), &host.notifier(), &job, &plan, MemberNames(kHosts), HostRanks{h, kHosts, 1}) {}
  const std::unique_ptr<Memory> memory;
  HostMemory host;
  StepProtocol protocol;
  int wrote[kHosts] = {};    // by shard: who wrote the gradient shard in this host's window last
  bool writes[kHosts] = {};  // somebody is at it
};

// Both hosts of a job of one slot, and their leads, a part of a round at a time.
struct TwoHosts {
  TwoHosts() {
    for (int h = 0; h < kHosts; ++h) hosts.push_back(std::make_unique<Host>(job, plan, h));
    Begin();
  }
  // As after the initial weights.
  void Begin() {
    for (int h = 0; h < kHosts; ++h) {
      std::memset(static_cast<void*>(at(h).control()), 0, sizeof(ControlBlock));
      at(h).control()->committed_step_plus_one.store(1);
      words[h] = before[h] = HostWords();
    }
    agreed = false;
    declared_by = 0;
  }
  StepProtocol& at(int h) { return hosts[h]->protocol; }
  int64_t open() { return at(0).committed_step().value() + 1; }

  // The parts of a round: each host's words are read, and then each takes in what all said; in any order.
  void Read(int h) { words[h] = ReadHostWords(at(h), job, plan); }
  void TakeIn(int h) {
    MirrorSlots(at(h), views(words), h, 1);
    if (!agreed) SettleSlots(at(h), views(before), views(words), h, 1);
  }
  void EndRound() {
    const Facts all = MergeFacts(views(words), ReadCommitted(*at(0).control()), job, plan, *at(0).control());
    before[0] = words[0];
    before[1] = words[1];
    if (agreed || !all.slots_complete) return;
    agreed = true;
    const HostWords* const said[] = {&words[0], &words[1]};
    EXPECT_EQ(hosts[HostOfShard(said, 0, 0)]->wrote[0], declared_by)
        << "the gradient shards of one who did not declare";
    EXPECT_EQ(hosts[HostOfShard(said, 0, 1)]->wrote[1], declared_by)
        << "the gradient shards of one who did not declare";
    ExpectNobodyWrites();
  }
  void Round() {
    for (int h : {0, 1}) Read(h);
    for (int h : {0, 1}) TakeIn(h);
    EndRound();
  }
  void ExpectNobodyWrites() {
    for (const auto& host : hosts) EXPECT_FALSE(host->writes[0] || host->writes[1]) << "a window that a step reads";
  }
  // What is agreed on is executed and committed.
  void Commit() {
    if (!agreed) return;
    ExpectNobodyWrites();
    for (auto& host : hosts) {
      for (int s = 0; s < kHosts; ++s) host->protocol.control()->gradient_shards[0][s].store(open());
      host->protocol.control()->slots[0].declared.store(open());
    }
    const int64_t step = open();
    for (auto& host : hosts) {
      host->protocol.control()->elsewhere[0].gradient_shards.store(0);
      host->protocol.control()->committed_step_plus_one.store(step + 1);
    }
    agreed = false;
    declared_by = 0;
  }
  void Write(int h, int shard, int who) {
    EXPECT_FALSE(hosts[h]->writes[shard]) << "two at once";
    EXPECT_FALSE(agreed) << "a window that a step reads";
    hosts[h]->writes[shard] = true;
    hosts[h]->wrote[shard] = who;
  }

  static std::vector<const HostWords*> views(const HostWords (&words)[kHosts]) { return {&words[0], &words[1]}; }

  const JobSpec job = SmallJob("fsdp=2", 1);
  const Plan plan = *Plan::Create(job);
  std::vector<std::unique_ptr<Host>> hosts;
  HostWords words[kHosts], before[kHosts];
  bool agreed = false;
  int declared_by = 0;
};

// A trainer, a call at a time.
struct Actor {
  Actor(TwoHosts& both, int who) : both(both), who(who) {}
  virtual ~Actor() = default;
  virtual void Next() = 0;
  void Declared(const absl::StatusOr<std::optional<StepOutcome>>& said) {
    if (!said.ok() || said->has_value()) return;
    if (both.declared_by == 0) both.declared_by = who;  // who declares it again changes nothing
  }
  TwoHosts& both;
  const int who;
  int at = 0;  // calls made
};

// Attaches, writes, declares, and leaves without waiting.
struct Attached final : Actor {
  Attached(TwoHosts& both, int who, int h) : Actor(both, who), h(h), holder(uint64_t(h + 1) << 32 | who) {}
  void Next() override {
    StepProtocol& protocol = both.at(h);
    if (at == 0) {
      if (!protocol.slots().Take(Slot(0), holder).ok()) at = 4;
    } else if (at == 1) {
      const absl::Status given = protocol.slots().AwaitGiven({Slot(0)}, holder, absl::ZeroDuration());
      if (absl::IsDeadlineExceeded(given)) return;
      if (!given.ok()) at = 4;
      for (int s = 0; s < kHosts && given.ok(); ++s) both.Write(h, s, who);
      was_given = given.ok();
    } else if (at == 2) {
      for (bool& writes : both.hosts[h]->writes) writes = false;
      Declaration declaration{{Slot(0)}, Step(both.open()), {0.5}, {}};
      declaration.in_place = true;
      Declared(protocol.declarations().Declare(declaration));
    } else if (at == 3) {
      protocol.slots().Give(Slot(0), holder);
    }
    ++at;
  }
  const int h;
  const uint64_t holder;
  bool was_given = false;
};

// Pushes its two gradient shards, each to its host, and declares on one of them.
struct Connected final : Actor {
  Connected(TwoHosts& both, int who, int h) : Actor(both, who), h(h) {}
  void Next() override {
    const int to = at / 3;  // the gradient shard, and its host
    if (to < kHosts) {
      Push(to);
    } else if (at == 6) {
      both.at(h).control()->slots[0].declaring[0].fetch_add(1);
    } else if (at == 7) {
      const bool whole = both.at(h).declarations().HasGradientShard(Slot(0), h, step);  // JobShard::Declare
      if (whole) Declared(both.at(h).declarations().Declare({{Slot(0)}, step, {0.5}, {}}));
      both.at(h).control()->slots[0].declaring[0].fetch_sub(1);
    }
    ++at;
  }
  // As PushSink does it.
  void Push(int to) {
    StepProtocol& protocol = both.at(to);
    if (at % 3 == 0) {
      pushing = protocol.slots().ClaimPush(Slot(0), to, Rank(to));
      EXPECT_TRUE(pushing);
    } else if (at % 3 == 1) {
      const auto open = protocol.declarations().CheckStep(Slot(0), step);
      const bool dropped =
          !open.ok() || open->has_value() || protocol.declarations().HasGradientShard(Slot(0), to, step);
      const bool refused = !dropped && protocol.slots().HolderOf(Slot(0)) != 0;
      pushing = !dropped && !refused;
      if (pushing) both.Write(to, to, who);
      if (!pushing) protocol.slots().ReleasePush(Slot(0), to);
      if (refused) at = 100;  // it gives up
    } else if (at % 3 == 2 && pushing) {
      both.hosts[to]->writes[to] = false;
      EXPECT_OK(protocol.declarations().GradientShardReady(Slot(0), to, step));
      protocol.slots().ReleasePush(Slot(0), to);
    }
  }
  const int h;
  const Step step{1};
  bool pushing = false;
};

// Any order of the actors' calls and the parts of rounds; then rounds alone, until nothing changes.
void Run(uint64_t seed, TwoHosts& both, const std::function<std::vector<std::unique_ptr<Actor>>(TwoHosts&)>& make,
         int* agreed) {
  SCOPED_TRACE(seed);
  both.Begin();
  const std::vector<std::unique_ptr<Actor>> actors = make(both);
  std::mt19937_64 random(seed);
  const auto some = [&] {
    while (random() % 3 != 0) actors[random() % actors.size()]->Next();
  };
  for (int round = 0; round < 8; ++round) {
    const int first = static_cast<int>(random() % 2);
    for (int h : {first, 1 - first}) some(), both.Read(h);
    const bool decided = both.agreed;
    for (int h : {1 - first, first}) some(), both.TakeIn(h);
    both.EndRound();
    *agreed += both.agreed && !decided;
    some();
    if (random() % 2 == 0) both.Commit();
    const bool two = (both.at(0).slots().HolderOf(Slot(0)) & kAsking) == 0 &&
                     (both.at(1).slots().HolderOf(Slot(0)) & kAsking) == 0 &&
                     both.at(0).control()->slots[0].holder != 0 && both.at(1).control()->slots[0].holder != 0;
    EXPECT_FALSE(two) << "two hosts' trainers have the slot";
  }
  for (int i = 0; i < 12; ++i) {  // whoever is at something ends it
    for (const auto& actor : actors) actor->Next();
    for (int round = 0; round < 3; ++round) both.Round();
    EXPECT_TRUE(both.declared_by == 0 || both.agreed) << "declared, and forgotten";
    both.Commit();
  }
  for (int h : {0, 1}) EXPECT_EQ(both.at(h).control()->slots[0].holder.load(), 0u);
}

void RunMany(const std::function<std::vector<std::unique_ptr<Actor>>(TwoHosts&)>& make) {
  TwoHosts both;
  int agreed = 0;
  for (uint64_t seed = 0; seed < 1000 && !::testing::Test::HasFailure(); ++seed) Run(seed, both, make, &agreed);
  EXPECT_GT(agreed, 100);
}

TEST(HostSlots, AttachedOnTwoHosts) {
  RunMany([](TwoHosts& both) {
    std::vector<std::unique_ptr<Actor>> actors;
    for (int h : {0, 1}) actors.push_back(std::make_unique<Attached>(both, h + 1, h));
    return actors;
  });
}

TEST(HostSlots, AttachedAndConnected) {
  for (const int attaches : {0, 1}) {
    for (const int declares : {0, 1}) {
      RunMany([&](TwoHosts& both) {
        std::vector<std::unique_ptr<Actor>> actors;
        actors.push_back(std::make_unique<Attached>(both, 1, attaches));
        actors.push_back(std::make_unique<Connected>(both, 2, declares));
        return actors;
      });
    }
  }
}

TEST(HostSlots, AllOfThem) {
  RunMany([](TwoHosts& both) {
    std::vector<std::unique_ptr<Actor>> actors;
    for (int h : {0, 1}) actors.push_back(std::make_unique<Attached>(both, h + 1, h));
    actors.push_back(std::make_unique<Connected>(both, 3, 0));
    return actors;
  });
}

constexpr uint64_t kOnA = uint64_t{1} << 32 | 7, kOnB = uint64_t{2} << 32 | 9;

// The order of calls that gave wrong bits: a step is decided from gradient shards on A and B while somebody attaches on
// B.
TEST(HostSlots, AttachInTheRoundOfTheDecision_WaitsForTheCommit) {
  TwoHosts both;
  for (int h : {0, 1}) ASSERT_OK(both.at(h).declarations().GradientShardReady(Slot(0), h, Step(1)));
  both.Round();
  ASSERT_OK(both.at(0).declarations().Declare({{Slot(0)}, Step(1), {0.5}, {}}));
  both.Read(0);
  both.Read(1);
  ASSERT_OK(both.at(1).slots().Take(Slot(0), kOnB));  // after B's words were read
  for (int h : {0, 1}) both.TakeIn(h);
  both.EndRound();
  both.Round();
  ASSERT_TRUE(both.agreed) << "who asks does not count";
  EXPECT_THAT(both.at(1).slots().AwaitGiven({Slot(0)}, kOnB, absl::ZeroDuration()),
              StatusIs(Code::kDeadlineExceeded, _));
  both.declared_by = 0;
  both.Commit();
  for (int i = 0; i < 2; ++i) both.Round();
  EXPECT_OK(both.at(1).slots().AwaitGiven({Slot(0)}, kOnB, absl::ZeroDuration()));
}

TEST(HostSlots, BothAskInOneRound_TheFirstHostsHasIt) {
  TwoHosts both;
  ASSERT_OK(both.at(1).slots().Take(Slot(0), kOnB));
  ASSERT_OK(both.at(0).slots().Take(Slot(0), kOnA));
  both.Round();
  EXPECT_THAT(both.at(0).slots().AwaitGiven({Slot(0)}, kOnA, absl::ZeroDuration()),
              StatusIs(Code::kDeadlineExceeded, _));
  both.Round();
  EXPECT_OK(both.at(0).slots().AwaitGiven({Slot(0)}, kOnA, absl::ZeroDuration()));
  EXPECT_THAT(both.at(1).slots().AwaitGiven({Slot(0)}, kOnB, absl::ZeroDuration()),
              StatusIs(Code::kFailedPrecondition, HasSubstr("session 7 attached to rank 0, on another host")));
  both.at(0).slots().Give(Slot(0), kOnA);
  both.Round();
  EXPECT_THAT(both.at(1).slots().AwaitGiven({Slot(0)}, kOnB, absl::ZeroDuration()),
              StatusIs(Code::kAborted, HasSubstr("attach again")));
}

TEST(HostSlots, APushElsewhere_IsAwaited) {
  TwoHosts both;
  ASSERT_TRUE(both.at(1).slots().ClaimPush(Slot(0), 1, Rank(1)));
  ASSERT_OK(both.at(0).slots().Take(Slot(0), kOnA));
  for (int i = 0; i < 3; ++i) both.Round();
  EXPECT_THAT(both.at(0).slots().AwaitGiven({Slot(0)}, kOnA, absl::ZeroDuration()),
              StatusIs(Code::kDeadlineExceeded, _));
  ASSERT_OK(both.at(1).declarations().GradientShardReady(Slot(0), 1, Step(1)));
  both.at(1).slots().ReleasePush(Slot(0), 1);
  both.Round();
  EXPECT_OK(both.at(0).slots().AwaitGiven({Slot(0)}, kOnA, absl::ZeroDuration()));
  EXPECT_FALSE(both.at(1).declarations().HasGradientShard(Slot(0), 1, Step(1))) << "taken back";
}

// Whose gradient shards may cross before other slots are complete: not of a slot that the next round takes back.
TEST(HostSlots, SettledSlots_HaveTheFirstHostsRates) {
  TwoHosts both;
  const auto settled = [&] {
    both.Read(0);
    both.Read(1);
    return SettledSlots(TwoHosts::views(both.words), both.job, both.plan).test(0);
  };
  EXPECT_FALSE(settled());
  Declaration declaration{{Slot(0)}, Step(1), {0.5}, {}};
  declaration.in_place = true;
  ASSERT_OK(both.at(1).declarations().Declare(declaration));
  EXPECT_TRUE(settled());
  // As if another slot of the first host said its rates in this round.
  GroupTable::Rate& rate = GroupTable(both.at(0).control(), both.plan).said(0)[0];
  both.at(0).control()->slots[0].loss_scale.store(1);
  rate.store(0.5);
  both.at(0).control()->settings_claim.store(uint64_t{1} << 16);
  EXPECT_TRUE(settled());
  rate.store(0.25);
  EXPECT_FALSE(settled());
  rate.store(0.5);
  both.at(0).control()->slots[0].loss_scale.store(2);
  EXPECT_FALSE(settled());
}

TEST(HostSlots, WhatLiesElsewhere_IsNotPushedAgain) {
  TwoHosts both;
  ASSERT_OK(both.at(0).declarations().GradientShardReady(Slot(0), 1, Step(1)));
  EXPECT_FALSE(both.at(1).declarations().HasGradientShard(Slot(0), 1, Step(1)));
  both.Round();
  EXPECT_TRUE(both.at(1).declarations().HasGradientShard(Slot(0), 1, Step(1)));
  EXPECT_FALSE(both.at(1).declarations().HasGradientShard(Slot(0), 1, Step(2)));
  EXPECT_FALSE(both.at(1).declarations().HasGradientShard(Slot(0), 0, Step(1)));
}

TEST(HostSlots, SessionsWhoseProcessLivesOn_AreKnownElsewhere_UntilTheyAreNoMore) {
  TwoHosts both;
  for (const uint32_t sessions : {2, 1, 0}) {
    both.at(0).control()->looks_again.store(sessions);
    both.Round();
    EXPECT_EQ(both.at(1).control()->elsewhere_looks_again.load(), sessions > 0 ? 1u : 0u);
    EXPECT_EQ(both.at(0).control()->elsewhere_looks_again.load(), 0u);
  }
}

TEST(HostSlots, ConnectedTrainer_DoesNotDeclareWhatIsHeld) {
  TwoHosts both;
  ASSERT_OK(both.at(0).slots().Take(Slot(0), kOnA));
  EXPECT_THAT(both.at(0).declarations().Declare({{Slot(0)}, Step(1), {0.5}, {}}),
              StatusIs(Code::kFailedPrecondition, HasSubstr("session 7 attached to rank 0")));
  both.Round();
  EXPECT_THAT(both.at(1).declarations().Declare({{Slot(0)}, Step(1), {0.5}, {}}),
              StatusIs(Code::kFailedPrecondition, _));
  both.at(0).slots().Give(Slot(0), kOnA);
  both.at(0).control()->slots[0].declaring[0].store(1);
  EXPECT_THAT(both.at(0).slots().Take(Slot(0), kOnA + 1), StatusIs(Code::kAborted, HasSubstr("declares slot 0")));
  EXPECT_EQ(both.at(0).slots().HolderOf(Slot(0)), 0u);
}

}  // namespace
}  // namespace shardmesh
