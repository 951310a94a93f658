// A worker whose memory a node has, killed at every instruction of a step: the trainer's message taken and declared,
// the norm, the step, the gather and the digest decided, executed and committed, the answer. The next incarnation
// leaves every byte of memory as an undisturbed one does.
//
// The worker is a child process that is single-stepped once; behind each instruction it is looked what it changed in
// the memory that outlives it. From each state that there was, the next incarnation starts, here. So every instruction
// counts, and only the states that differ take an incarnation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cstddef>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "local/memory/futex.h"
#include "local/memory/mailbox.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "tests/testing/system/memory_image.h"
#include "tests/testing/system/single_step.h"
#include "worker/control/residency.h"
#include "worker/job/job_shard.h"
#include "worker/memory/host_memory.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using testing::MemoryStates;
using testing::RetainedSegments;
using testing::SingleStep;

constexpr uint64_t kHolder = uint64_t{1} << 32 | 7;  // session 7 of the only member
constexpr uint64_t kPushId = 17;
constexpr int64_t kTail = 100;  // instructions behind the last one that counts
constexpr int64_t kMaxInstructions = 5'000'000;
constexpr int64_t kRunNanos = 60'000'000'000;

// A member of a job, over memory that outlives it: the lead, which is the only one, with the trainer that has all the
// slots; or another one, with nobody else but the words of the lead, which the test says for it.
class Member {
 public:
  explicit Member(const JobSpec& spec, Rank rank = Rank(0))
      : rank(rank),
        job(spec),
        plan(*Plan::Create(job)),
        host(*HostMemory::Create(memory, job.name, job, plan)),
        protocol(host.control(), &host.notifier(), &job, &plan, MemberNames(plan.num_ranks())) {
    for (int s = 0; s < job.num_slots; ++s) EXPECT_OK(protocol.slots().Take(Slot(s), kHolder));
    // All segments are there before an image of them is saved.
    Parts parts = Prepare(/*resumed=*/false);
    EXPECT_OK(
        JobShard::Create(std::move(parts.options), std::move(parts.plan), std::move(parts.host), memory).status());
    made_ = true;
  }

  // What an incarnation begins with.
  struct Parts {
    JobShardOptions options;
    Plan plan;
    HostMemory host;
  };
  Parts Prepare(bool resumed) {
    Parts parts{{}, plan, *HostMemory::Create(memory, job.name, job, plan)};
    parts.options.spec = job;
    parts.options.epoch = Epoch(1);
    parts.options.rank = rank;
    parts.options.worker_names = MemberNames(plan.num_ranks());
    parts.options.step_timeout = absl::Seconds(600);
    // The first incarnation of a job with bucket residency would give all its pages back.
    parts.options.resumed = resumed || (plan.bucketed() && made_);
    return parts;
  }

  // An incarnation begins. Before the initial weights it is given them, too.
  std::unique_ptr<JobShard> Begin(Parts parts) {
    auto shard = JobShard::Create(std::move(parts.options), std::move(parts.plan), std::move(parts.host), memory);
    if (target == 0) (void)(*shard)->run().engine.StageInitial({initial.begin(), initial.end()}, kPushId);
    return *std::move(shard);
  }

  bool lead() const { return rank == Rank(0); }
  // Of bucket residency: the window has what is used, and no more.
  bool BucketsAreThere() const {
    const ResidencyTable table(host.control(), plan);
    for (int b = 0; plan.bucketed() && b < static_cast<int>(plan.buckets().size()); ++b) {
      const int32_t held = table.bucket(b).held.load();
      if (held != (table.IsUsed(b) ? kBucketHeld : kBucketAbsent)) return false;
    }
    return true;
  }
  // Where the outcome of step 0 lies in an image of memory. It is open while it is written, and ends as it began.
  int64_t FirstOutcome() const {
    return memory.Begin(absl::StrCat("shardmesh-", job.name, "-control")) + int64_t{offsetof(ControlBlock, outcomes)};
  }
  // What the trainer asked for is done, and nothing is under way. Of another than the lead: it has executed what is
  // decided.
  bool Over() const {
    const ControlBlock& control = *host.control();
    if (!lead())
      return control.decided.load() > 0 && control.members[rank.value()].done.load() == control.decided.load();
    return control.committed_step_plus_one.load() == target + 1 && control.committed.load() == control.decided.load() &&
           control.digest_done.load() >= control.digest_wanted.load() && !host.mailbox(0).open() && BucketsAreThere();
  }

  // A whole incarnation. Of a job that was aborted: why.
  absl::Status Live(bool resumed) {
    const std::unique_ptr<JobShard> shard = Begin(Prepare(resumed));
    if (!lead() && protocol.decided() == 0) {  // it has its initial weights
      protocol.commands().InitialShardReady(Rank(0), kPushId);
      DecideNext(protocol, plan);
    }
    const int64_t deadline = MonotonicNanos() + kRunNanos;
    while (!Over()) {
      RETURN_IF_ERROR(shard->Health());
      RETURN_IF_ERROR(TakeAnswer());
      if (MonotonicNanos() > deadline) return absl::DeadlineExceededError("the step is not over");
      sched_yield();
    }
    return absl::OkStatus();
  }

  // The trainer asks for a step. Every other one has a digest after it.
  void Ask(int64_t step, bool finite = true) {
    target = step;
    if (step % 2 == 0) protocol.tickets().AskForDigest();
    if (step == 0) return;
    WriteGradients(step);
    AskForBuckets(step);
    v1::TrainerRequest request;
    request.set_session(kHolder);
    request.set_id(100 + step);
    request.mutable_step()->set_epoch(1);
    request.mutable_step()->set_step(step);
    for (int s = 0; s < job.num_slots; ++s) request.mutable_step()->add_slots(s);
    if (!finite) {
      v1::NonFinite* const bad = request.mutable_step()->add_non_finite();
      bad->set_slot(1);
      bad->set_tensor(0);
    }
    skips = !finite;
    ASSERT_TRUE(PutMessage(host.mailbox(0).request, request.SerializeAsString()));
  }

  // Of bucket residency: all gradients are handed over; of one bucket more the weights are wanted, of another one no
  // more, of a third one they are wanted over the step.
  void AskForBuckets(int64_t step) {
    const int buckets = plan.bucketed() ? static_cast<int>(plan.buckets().size()) : 0;
    for (int b = 0; b < buckets; ++b) {
      if (plan.buckets()[b].frozen) continue;
      std::vector<Slot> slots;
      for (int s = 0; s < job.num_slots; ++s) slots.push_back(Slot(s));
      EXPECT_OK(protocol.buckets().Declare({slots, Step(step), b, {}, /*in_place=*/true}));
    }
    if (buckets == 0) return;
    EXPECT_OK(protocol.buckets().Use(static_cast<int>(step - 1) % buckets, Slot(0), UseWord(3 * step, 0)));
    EXPECT_OK(protocol.buckets().Use(static_cast<int>(step) % buckets, Slot(0), UseWord(3 * step + 1, 1)));
    EXPECT_OK(protocol.buckets().Use(buckets - 1, Slot(0), UseWord(3 * step + 2, 1)));
  }

  void WriteGradients(int64_t step) {
    for (int slot = 0; slot < job.num_slots; ++slot) {
      for (const Placement& tensor : plan.placements()) {
        const Bucket& bucket = plan.buckets()[tensor.bucket];
        if (bucket.frozen) continue;
        auto* const to = reinterpret_cast<float*>(host.slot(slot).data() + bucket.gradient_offset) + tensor.offset;
        for (int64_t e = 0; e < tensor.num_elements; ++e) to[e] = RandomValue(step * 128 + slot, tensor.offset, e);
      }
    }
  }

  // Internal: it is not one to what was asked. A message that was answered, and then taken again, is answered twice.
  absl::Status TakeAnswer() {
    std::string bytes;
    if (!TakeMessage(host.mailbox(0).reply, bytes)) return absl::OkStatus();
    FutexBump(host.notifier());
    v1::TrainerReply reply;
    const bool good = reply.ParseFromString(bytes) && reply.id() == static_cast<uint64_t>(100 + target) &&
                      reply.code() == 0 && reply.step().step() == target && reply.step().skipped() == skips;
    if (!good) return absl::InternalError(reply.ShortDebugString());
    ++answers;
    return absl::OkStatus();
  }

  // Sets words to zero that are not the same after other incarnations: how often somebody was woken, and the answers,
  // which are looked at by what they say.
  void Settle() {
    EXPECT_OK(TakeAnswer());
    ControlBlock& control = *host.control();
    EXPECT_EQ(control.taking_messages.load() % 2 + control.digest_writing.load() % 2, 0u);
    control.decision.store(0);
    control.finished.store(0);
    host.notifier().store(0);
    host.board().notifier.store(0);
    control.taking_messages.store(0);
    control.digest_writing.store(0);
    for (MemberWords& words : control.members) {
      words.incarnations_of.store(0);
      words.incarnations_in_command.store(0);
    }
    for (int s = 0; s < job.num_slots; ++s) std::memset(static_cast<void*>(&host.mailbox(s).reply), 0, sizeof(Message));
    for (Command& command : control.commands) {  // it is copied with its padding
      char* const kind = reinterpret_cast<char*>(&command.kind);
      std::memset(kind + sizeof(command.kind), 0, reinterpret_cast<char*>(&command.step) - kind - sizeof(command.kind));
    }
  }

  RetainedSegments memory;
  const Rank rank;
  const JobSpec job;
  const Plan plan;
  HostMemory host;
  StepProtocol protocol;
  const std::vector<float> initial = InitialShard();
  int64_t target = 0;  // the step that was asked for; 0: the initial weights
  bool skips = false;
  int answers = 0;

 private:
  bool made_ = false;

  std::vector<float> InitialShard() const {
    std::vector<float> weights(plan.InitialShardBytes(plan.PlaceOf(rank).shard) / sizeof(float));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = 16 * RandomValue(1000, 0, i);
    return weights;
  }
};

struct Counts {
  int64_t instructions = 0, states = 0, aborted = 0;
};

// Initial weights that were acknowledged or decided on, and are not placed, were in the process that was killed: nobody
// else has them.
bool LosesInitialWeights(const Member& member) {
  const ControlBlock& control = *member.host.control();
  const MemberWords& words = control.members[member.rank.value()];
  const bool given = control.decided.load() > 0 || words.initial_id.load() != 0;
  return member.target == 0 && given && words.done.load() == 0;
}

// The states that an incarnation leaves that begins with memory as it is and is killed at any instruction.
void StepThrough(Member& member, bool resumed, MemoryStates& states, Counts& counts) {
  int64_t tail = 0;
  testing::SingleStepOptions options;
  std::optional<Member::Parts> parts;
  options.prepare = [&] { parts.emplace(member.Prepare(resumed)); };
  options.body = [&] { (void)member.Begin(*std::move(parts)).release(); };
  options.step_body = resumed;  // where it takes over; a first incarnation finds nothing to change
  options.after = [&] {
    states.Add();
    return !member.Over() || ++tail < kTail;
  };
  options.max_instructions = kMaxInstructions;
  const absl::StatusOr<int64_t> instructions = SingleStep(options);
  if (absl::IsUnimplemented(instructions.status())) GTEST_SKIP() << instructions.status();
  ASSERT_OK(instructions);
  ASSERT_TRUE(member.Over());
  ASSERT_EQ(states.late(), 0);
  counts.instructions += *instructions;
}

// From each of these states the next incarnation goes on, and leaves `expected`.
void NextIncarnations(Member& member, const MemoryStates& states, const std::vector<char>& expected, Counts& counts) {
  states.ForEach([&](int64_t number, const std::vector<char>& image) {
    if (::testing::Test::HasFailure()) return;  // the first one says enough
    member.memory.Load(image);
    const bool lost = LosesInitialWeights(member);
    member.answers = 0;
    const absl::Status lived = member.Live(/*resumed=*/true);
    ++counts.states;
    if (lost) {
      ++counts.aborted;
      EXPECT_THAT(lived, StatusIs(absl::StatusCode::kUnavailable, ::testing::HasSubstr("worker-0 (rank 0")));
      return;
    }
    ASSERT_OK(lived) << "state " << number << " of " << states.size();
    member.Settle();
    EXPECT_EQ(member.answers > 0, member.lead() && member.target > 0);
    ASSERT_EQ(member.memory.Differs(expected), "") << "state " << number << " of " << states.size();
  });
}

// The next incarnations of `some` of these states, spread evenly over them, killed at every instruction, too. `likely`:
// to change (MemoryStates).
Counts KillNextIncarnations(Member& member, const MemoryStates& states, int some, const std::vector<char>& expected) {
  Counts counts;
  const int64_t each = states.size() / (some + 1);
  states.ForEach([&](int64_t number, const std::vector<char>& image) {
    if (some == 0 || number == 0 || number % each != 0 || number / each > some) return;
    member.memory.Load(image);
    if (LosesInitialWeights(member) || ::testing::Test::HasFailure()) return;
    // The trainer reads an answer that lies there, and does not know that its message still counts as open. Nobody reads
    // while the next incarnation is stepped, which answers again only if there is room.
    if (member.host.mailbox(0).open()) {
      ASSERT_OK(member.TakeAnswer());
    }
    MemoryStates next(member.memory, states);
    StepThrough(member, /*resumed=*/true, next, counts);
    NextIncarnations(member, next, expected, counts);
  });
  return counts;
}

// What was asked for, killed at every instruction. `again`: KillNextIncarnations. Memory ends as after an undisturbed
// incarnation.
void KillAtEveryInstruction(Member& member, const std::string& what, int again) {
  const std::vector<char> before = member.memory.Save();
  ASSERT_OK(member.Live(/*resumed=*/false));
  const std::vector<char> after = member.memory.Save();
  member.Settle();
  const std::vector<char> expected = member.memory.Save();
  EXPECT_NE(before, expected);

  Counts counts;
  member.memory.Load(before);
  MemoryStates states(member.memory, after, {member.FirstOutcome()});
  StepThrough(member, /*resumed=*/false, states, counts);
  if (::testing::Test::IsSkipped() || ::testing::Test::HasFatalFailure()) return;
  NextIncarnations(member, states, expected, counts);
  const Counts of_next = KillNextIncarnations(member, states, again, expected);
  std::cout << what << ": " << counts.instructions << " instructions, " << counts.states << " states recovered";
  if (counts.aborted > 0) std::cout << " (" << counts.aborted << " of them: told that initial weights are lost)";
  if (again > 0) std::cout << "; next incarnations: " << of_next.instructions << ", " << of_next.states;
  std::cout << std::endl;
  member.memory.Load(expected);
}

// Initial weights undisturbed, then steps walking up and down the shard.
void KillInSteps(const JobSpec& job, int again = 0, bool finite = true) {
  Member member(job);
  member.Ask(0);
  ASSERT_OK(member.Live(/*resumed=*/false));
  member.Settle();
  for (int64_t step : {1, 2}) {
    ASSERT_NO_FATAL_FAILURE(member.Ask(step, finite));
    KillAtEveryInstruction(member, absl::StrCat(job.name, ", step ", step), again);
    if (::testing::Test::IsSkipped() || ::testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(member.host.control()->members[0].damage.load(), 0u);
}

JobSpec Job(const std::string& name, std::vector<ParameterSpec> parameters) {
  JobSpec job = SmallJob("fsdp=1", 2);
  job.name = name;
  job.seed = 77;
  job.parameters = std::move(parameters);
  return job;
}

JobSpec QuantizedJob() {
  JobSpec job = Job("quantized", {{"a", {3, 96}, WeightFormat::kFp32},
                                  {"b", {4, 80}, WeightFormat::kBf16Sr},
                                  {"c", {2, 64}, WeightFormat::kFp32},
                                  {"d", {3, 70}, WeightFormat::kInt8Row},
                                  {"e", {50}, WeightFormat::kBf16}});
  job.parameters[0].gather = GatherFormat::kMx8;
  job.parameters[1].gather = GatherFormat::kFp8Tensor;
  job.parameters[2].gather = GatherFormat::kNf4;
  job.parameters[4].frozen = true;
  job.clip_norm = 0.5;
  return job;
}

TEST(RestartEveryInstruction, Fp32_ClippedInTwoChunks) {
  JobSpec job = Job("fp32", {{"w", {4096 + 300}, WeightFormat::kFp32}});
  job.clip_norm = 0.5;
  KillInSteps(job);
}

TEST(RestartEveryInstruction, RoundedWeightsAndQuantizedStates_LookedOver_NextIncarnationsToo) {
  JobSpec job = Job("checked", {{"w", {5, 60}, WeightFormat::kBf16Sr}, {"v", {70}, WeightFormat::kBf16Plus8Sr}});
  job.parameters[0].states = StateFormat::kDyn8;
  job.parameters[1].states = StateFormat::kFp8x32;
  job.check_every = 1;
  KillInSteps(job, /*again=*/2);
}

TEST(RestartEveryInstruction, ASkippedStep) {
  KillInSteps(Job("skipped", {{"w", {100}, WeightFormat::kFp32}}), /*again=*/2, /*finite=*/false);
}

TEST(RestartEveryInstruction, WeightsGatheredInCodes) { KillInSteps(QuantizedJob()); }

TEST(RestartEveryInstruction, Muon) {
  JobSpec job = Job("muon", {{"w", {4, 8}, WeightFormat::kFp32}, {"v", {8, 3}, WeightFormat::kBf16}});
  job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  for (ParameterSpec& parameter : job.parameters) parameter.group = 1;
  KillInSteps(job);
}

JobSpec BucketJob() {
  JobSpec job = QuantizedJob();
  job.name = "buckets";
  job.residency = Residency::kBucket;
  return job;
}

// Buckets that are summed, gathered, rewritten and given back.
TEST(RestartEveryInstruction, BucketResidency) { KillInSteps(BucketJob(), /*again=*/1); }

const char* NameOf(CommandKind kind) {
  switch (kind) {
    case CommandKind::kNorm:
      return "norm";
    case CommandKind::kStep:
      return "step";
    case CommandKind::kReduceBucket:
      return "reduce_bucket";
    case CommandKind::kGatherBucket:
      return "gather_bucket";
    default:
      return "quantize";
  }
}

// One that is not the lead: each command for itself.
void KillAnotherMember(JobSpec job) {
  job.mesh = *ParseMeshSpec("fsdp=2");
  Member member(job, Rank(1));
  StepProtocol& lead = member.protocol;
  ASSERT_OK(member.Live(/*resumed=*/false));
  const auto commit = [&] {
    lead.commands().Done(Rank(0), lead.decided());
    ASSERT_TRUE(lead.commands().AllDone());
    Lead::CommitNewest(lead);
  };
  commit();
  for (int64_t step = 0; step <= 2; ++step) {
    member.target = step;
    if (step > 0) {
      member.WriteGradients(step);
      member.AskForBuckets(step);
      ASSERT_OK(lead.declarations().Declare({{Slot(0), Slot(1)}, Step(step), {}, {}, /*in_place=*/true}));
    }
    while (DecideNext(lead, member.plan)) {
      KillAtEveryInstruction(member, absl::StrCat("rank 1, step ", step, ", ", NameOf(lead.command().kind)), 0);
      if (::testing::Test::IsSkipped() || ::testing::Test::HasFailure()) return;
      commit();
    }
    ASSERT_EQ(lead.committed_step(), Step(step));
  }
}

TEST(RestartEveryInstruction, AnotherMember) { KillAnotherMember(QuantizedJob()); }
TEST(RestartEveryInstruction, AnotherMember_BucketResidency) { KillAnotherMember(BucketJob()); }

// Those that are placed go on; of others the trainer is told.
TEST(RestartEveryInstruction, InitialWeights) {
  Member member(QuantizedJob());
  member.Ask(0);
  KillAtEveryInstruction(member, "initial weights", 0);
}

}  // namespace
}  // namespace shardmesh
