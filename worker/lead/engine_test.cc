#include "worker/lead/engine.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "core/base/matchers.h"
#include "local/memory/futex.h"
#include "worker/lead/one_host.h"
#include "worker/pass/pass.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);

// The members of a job as threads of this process; each with its own view of the control block, as processes have.
struct Members : TestHost {
  explicit Members(const JobSpec& spec, absl::Duration step_timeout = kLong)
      : TestHost(spec), step_timeout(step_timeout) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      storages.push_back(
          std::make_unique<ShardStorage>(*ShardStorage::Open(*memory, "shard", plan, plan.PlaceOf(Rank(r)).shard)));
      passes.push_back(std::make_unique<Pass>(job, plan, plan.PlaceOf(Rank(r)), host, *storages[r], 2));
      protocols.push_back(
          std::make_unique<StepProtocol>(host.control(), &host.notifier(), &job, &plan, MemberNames(plan.num_ranks())));
      engines.push_back(nullptr);
    }
  }

  void Start(int r) {
    EngineOptions options;
    options.step_timeout = step_timeout;
    if (r == 0) {
      lead.emplace(*protocols[0], *passes[0], job, plan, LeadOptions{step_timeout, nullptr, {}});
      options.lead = &lead->lead;
    }
    options.progress = [this] { ++progress; };
    engines[r] = std::make_unique<Engine>(*protocols[r], *passes[r], Rank(r), std::move(options));
  }
  void StartAll() {
    for (int r = 0; r < plan.num_ranks(); ++r) Start(r);
  }

  absl::Status Stage(int r, uint64_t push_id, float value) {
    const int64_t bytes = plan.InitialShardBytes(plan.PlaceOf(Rank(r)).shard);
    return engines[r]->StageInitial(InitialShard(bytes / 4, value), push_id);
  }

  void DeclareAll(int64_t step) {
    for (int s = 0; s < job.num_slots; ++s) {
      float* gradients = reinterpret_cast<float*>(host.slot(s).data());
      for (int64_t e = 0; e < plan.gradient_window_bytes() / 4; ++e) gradients[e] = RandomValue(step, s, e);
      for (int p = 0; p < plan.num_shards(); ++p)
        ASSERT_OK(protocol.declarations().GradientShardReady(Slot(s), p, Step(step)));
      ASSERT_OK(protocol.declarations().Declare({{Slot(s)}, Step(step), {0.125}, {}}));
    }
  }

  // The digest of the committed step.
  absl::StatusOr<std::pair<Step, uint64_t>> Digest() {
    const uint64_t ticket = protocol.tickets().AskForDigest();
    while (true) {
      const uint32_t word = host.control()->finished.load();
      ASSIGN_OR_RETURN(auto digest, protocol.tickets().DigestOf(ticket));
      if (digest.has_value()) return *digest;
      FutexWait(host.control()->finished, word, kLong);
    }
  }

  float WindowElement(int64_t e) const {
    float value;
    std::memcpy(&value, host.window().data() + e * 4, 4);
    return value;
  }

  const absl::Duration step_timeout;
  std::atomic<int> progress{0};
  std::vector<std::unique_ptr<ShardStorage>> storages;
  std::vector<std::unique_ptr<Pass>> passes;
  std::vector<std::unique_ptr<StepProtocol>> protocols;
  std::optional<OneHostLead> lead;
  std::vector<std::unique_ptr<Engine>> engines;  // last: they use all the others
};

TEST(EngineTest, InitStepsDigest_OnEveryMeshTheSame) {
  std::vector<uint64_t> digests;
  for (const char* mesh : {"fsdp=1", "fsdp=2", "ddp=2", "ddp=2,fsdp=2"}) {
    Members members(SmallJob(mesh, 2));
    members.StartAll();
    for (int r = 0; r < members.plan.num_ranks(); ++r) ASSERT_OK(members.Stage(r, 7, 1.0f));
    ASSERT_OK(members.protocol.outcomes().AwaitCommit(Step(0), kLong));
    EXPECT_EQ(members.WindowElement(0), 1.0f);
    for (int64_t step = 1; step <= 20; ++step) {
      ASSERT_NO_FATAL_FAILURE(members.DeclareAll(step));
      ASSERT_OK_AND_ASSIGN(StepOutcome outcome, members.protocol.outcomes().AwaitCommit(Step(step), kLong));
      EXPECT_FALSE(outcome.skipped);
    }
    ASSERT_OK_AND_ASSIGN(auto digest, members.Digest());
    EXPECT_EQ(digest.first, Step(20));
    digests.push_back(digest.second);
    EXPECT_NE(members.WindowElement(0), 1.0f);
    EXPECT_OK(members.protocol.members().Health());
    EXPECT_THAT(members.Stage(0, 8, 2.0f), StatusIs(Code::kAborted, HasSubstr("initial weights already")));
  }
  for (uint64_t digest : digests) EXPECT_EQ(digest, digests[0]);
}

// Reads until the job gets its weights, and then a little more.
absl::Status ReadAndBeLate(StepProtocol& protocol, char* to, std::atomic<bool>& reading) {
  reading.store(true);
  while (protocol.decided() == 0) *to = static_cast<char>(*to + 1);
  for (int i = 0; i < 10'000'000; ++i) static_cast<volatile char*>(to)[0] = 5;
  return absl::OkStatus();
}

TEST(EngineTest, LoadUnderWay_InitialWeightsWaitForIt_AndCount) {
  Members members(SmallJob("fsdp=2", 2));
  members.StartAll();
  std::atomic<bool> reading{false};
  absl::Status loaded;
  char* const to = static_cast<char*>(members.storages[1]->weights(0, 0, 0).codes);
  std::thread loader([&] {
    loaded = members.engines[1]->Load(9, Step(3), [&] { return ReadAndBeLate(*members.protocols[1], to, reading); });
  });
  while (!reading.load()) std::this_thread::yield();
  EXPECT_THAT(members.engines[1]->Load(10, Step(3), [] { return absl::OkStatus(); }),
              StatusIs(Code::kAborted, HasSubstr("another load")));
  for (int r = 0; r < 2; ++r) ASSERT_OK(members.Stage(r, 7, 1.0f));
  EXPECT_OK(members.protocol.outcomes().AwaitCommit(Step(0), kLong));
  loader.join();
  EXPECT_THAT(loaded, StatusIs(Code::kAborted, HasSubstr("weights already")));
  EXPECT_THAT(members.engines[1]->UseLoaded(9), StatusIs(Code::kNotFound, HasSubstr("load it first")));
  float first = 0;
  std::memcpy(&first, to, sizeof(first));
  EXPECT_EQ(first, 1.0f);
  EXPECT_OK(members.protocol.members().Health());
}

TEST(EngineTest, LoadedAnew_TheOlderOneIsWithdrawn) {
  Members members(SmallJob("fsdp=2", 2));
  members.StartAll();
  const auto load = [&](int r, uint64_t id, absl::Status read) {
    return members.engines[r]->Load(id, Step(3), [&] { return read; });
  };
  ASSERT_OK(load(1, 9, absl::OkStatus()));
  ASSERT_OK(members.engines[1]->UseLoaded(9));
  EXPECT_THAT(load(1, 10, absl::DataLossError("damaged")), StatusIs(Code::kDataLoss, HasSubstr("damaged")));
  EXPECT_THAT(members.engines[1]->UseLoaded(9), StatusIs(Code::kNotFound, HasSubstr("load it first")));
  EXPECT_THAT(members.engines[1]->UseLoaded(10), StatusIs(Code::kNotFound, HasSubstr("load it first")));
  ASSERT_OK(load(0, 9, absl::OkStatus()));
  ASSERT_OK(members.engines[0]->UseLoaded(9));  // would be all members' now
  EXPECT_EQ(members.host.control()->decided.load(), 0u);
  for (const int r : {0, 1}) ASSERT_OK(load(r, 11, absl::OkStatus()));
  for (const int r : {1, 0}) ASSERT_OK(members.engines[r]->UseLoaded(11));
  EXPECT_OK(members.protocol.outcomes().AwaitCommit(Step(3), kLong));
  EXPECT_THAT(load(0, 12, absl::OkStatus()), StatusIs(Code::kAborted, HasSubstr("weights already")));
}

// Engines go on to the codes by themselves: whoever waits for a step sees them.
TEST(EngineTest, QuantizedWeights_AreThereWhenTheStepIsCommitted) {
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=2"}) {
    JobSpec job = SmallJob(mesh, 2);
    for (ParameterSpec& p : job.parameters) p.gather = GatherFormat::kFp8Tensor;
    Members members(job);
    members.StartAll();
    for (int r = 0; r < members.plan.num_ranks(); ++r) ASSERT_OK(members.Stage(r, 7, 1.0f));
    ASSERT_OK(members.protocol.outcomes().AwaitCommit(Step(0), kLong));
    const Placement& at = members.plan.placements()[0];
    const auto scale = [&] {
      float value;
      std::memcpy(&value, members.host.window().data() + at.scale_offset, sizeof(value));
      return value;
    };
    EXPECT_EQ(scale(), 448.0f);
    EXPECT_EQ(members.host.window().data()[149], 0x7E);  // 448
    for (int64_t step = 1; step <= 3; ++step) {
      ASSERT_NO_FATAL_FAILURE(members.DeclareAll(step));
      ASSERT_OK(members.protocol.outcomes().AwaitCommit(Step(step), kLong));
    }
    EXPECT_NE(scale(), 448.0f);
    EXPECT_NE(std::string(members.host.window().data(), 150), std::string(150, 0x7E));
    EXPECT_OK(members.Digest());
  }
}

TEST(EngineTest, ReplicaWithOtherBits_IsDataLoss) {
  Members members(SmallJob("ddp=2", 1));
  members.StartAll();
  for (int r = 0; r < 2; ++r) ASSERT_OK(members.Stage(r, 7, 1.0f));
  ASSERT_OK(members.protocol.outcomes().AwaitCommit(Step(0), kLong));
  ASSERT_OK(members.Digest());
  static_cast<float*>(members.storages[1]->state(0, 0, 0, 0).codes)[5] = 1e-30f;  // memory lies
  EXPECT_THAT(members.Digest(), StatusIs(Code::kDataLoss, AllOf(HasSubstr("worker-0"), HasSubstr("worker-1"))));
}

TEST(EngineTest, MemberThatNeverAnswers_IsNamed) {
  Members members(SmallJob("fsdp=3", 1), absl::Milliseconds(200));
  members.Start(0);
  members.Start(1);
  for (int r = 0; r < 2; ++r) ASSERT_OK(members.Stage(r, 7, 1.0f));
  members.protocol.commands().InitialShardReady(Rank(2), 7);  // said so, and stopped
  EXPECT_THAT(members.protocol.outcomes().AwaitCommit(Step(0), kLong),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-2 (rank 2"), HasSubstr("did not finish"))));
  members.engines.clear();
  EXPECT_GE(members.progress.load(), 2);  // both told who waits on them
}

TEST(EngineTest, LeadThatNeverCommits_IsNamedByAPeer) {
  Members members(SmallJob("fsdp=2", 1), absl::Milliseconds(100));
  members.Start(1);
  ASSERT_OK(members.Stage(1, 7, 1.0f));
  members.protocol.commands().InitialShardReady(Rank(0), 7);
  ASSERT_TRUE(DecideNext(members.protocol, members.plan));  // by a lead that then stopped
  EXPECT_THAT(members.protocol.outcomes().AwaitCommit(Step(0), kLong),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-0 (rank 0"), HasSubstr("seen by rank 1"))));
}

// A set of initial weights that came after another set was decided is not mixed into it.
TEST(EngineTest, DecidedSetOfInitialWeights_IsTheOnePlaced) {
  Members members(SmallJob("fsdp=2", 1));
  members.Start(1);
  ASSERT_OK(members.Stage(1, 7, 1.0f));
  ASSERT_OK(members.Stage(1, 8, 2.0f));
  members.protocol.commands().InitialShardReady(Rank(0), 7);
  members.protocol.commands().InitialShardReady(Rank(1), 7);  // as the lead saw it, before set 8 came
  ASSERT_TRUE(DecideNext(members.protocol, members.plan));
  while (members.protocol.commands().NotDone().size() > 1) {
    ASSERT_OK(members.protocol.members().Health());
    FutexWait(members.host.notifier(), members.host.notifier().load(), absl::Milliseconds(10));
  }
  EXPECT_EQ(members.WindowElement(members.plan.buckets()[0].shard_elements), 1.0f);
}

TEST(EngineTest, Destructor_EndsIdleAndBusyEngines) {
  for (int round = 0; round < 10; ++round) {
    Members members(SmallJob("fsdp=3", 1));
    members.StartAll();
    for (int r = 0; r < 3 && round % 2 == 1; ++r) ASSERT_OK(members.Stage(r, 7, 1.0f));
    for (int r : {round % 3, (round + 1) % 3, (round + 2) % 3}) members.engines[r].reset();
  }
}

TEST(EngineTest, Abort_EndsAllEngines) {
  Members members(SmallJob("fsdp=2", 1));
  members.StartAll();
  members.protocol.members().Abort(AbortReason::kGone, 1, Rank(0));
  members.engines.clear();
  EXPECT_EQ(members.progress.load(), 2);
}

}  // namespace
}  // namespace shardmesh
