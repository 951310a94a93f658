#include "worker/doors/push_sink.h"

#include <fcntl.h>

#include <cstring>
#include <limits>

#include "core/base/matchers.h"
#include "local/memory/futex.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Two buckets; with two shards: bucket 0 holds w[0,512) and w[512,600) + b[0,7), bucket 1 holds c[0,33) and padding
// alone.
JobSpec TwoBuckets(const std::string& mesh, NonFinitePolicy policy) {
  JobSpec job = SmallJob(mesh, 2);
  job.parameters[0].shape = {3, 200};
  job.parameters.push_back({"c", {33}, WeightFormat::kBf16});
  job.non_finite = policy;
  return job;
}

// The workers of a job, without sockets: memory mapped from descriptors as a peer does.
struct Workers {
  explicit Workers(const JobSpec& job) : plan(*Plan::Create(job)) {
    HostMemory lead = *HostMemory::Create(*memory, job.name, job, plan);
    std::vector<HostMemory> hosts;
    for (int r = 1; r < plan.num_ranks(); ++r) {
      v1::LocalWelcome welcome;
      lead.DescribeTo(welcome);
      std::vector<UniqueFd> descriptors;
      for (int fd : lead.PeerDescriptors()) descriptors.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      hosts.push_back(*HostMemory::Map(welcome, std::move(descriptors), job.num_slots, plan));
    }
    hosts.insert(hosts.begin(), std::move(lead));
    for (int r = 0; r < plan.num_ranks(); ++r) {
      JobShardOptions options{job, Epoch(5), Rank(r), MemberNames(plan.num_ranks())};
      shards.push_back(*JobShard::Create(options, plan, std::move(hosts[r]), *memory));
    }
  }

  v1::PushHeader InitialHeader(int rank, uint64_t push_id) const {
    v1::PushHeader header;
    header.set_job("small");
    header.set_epoch(5);
    header.set_content(v1::PushHeader::CONTENT_INITIAL_WEIGHTS);
    header.set_total_bytes(plan.InitialShardBytes(0));
    header.set_shard(plan.PlaceOf(Rank(rank)).shard);
    header.set_push_id(push_id);
    return header;
  }

  v1::PushHeader GradientHeader(int rank, int slot, int64_t step) const {
    v1::PushHeader header = InitialHeader(rank, 0);
    header.set_content(v1::PushHeader::CONTENT_GRADIENT);
    header.set_total_bytes(plan.GradientShardBytes(0));
    header.set_slot(slot);
    header.set_step(step);
    return header;
  }

  absl::StatusOr<v1::PushReply> Push(int rank, const v1::PushHeader& header, absl::string_view bytes,
                                     size_t part = 1000) {
    ASSIGN_OR_RETURN(auto sink, PushSink::Begin(shards[rank], header));
    for (; !bytes.empty(); bytes.remove_prefix(std::min(part, bytes.size()))) {
      RETURN_IF_ERROR(sink->Append(bytes.substr(0, part)));
    }
    return sink->Finish();
  }

  absl::StatusOr<v1::PushReply> PushGradient(int rank, int slot, int64_t step, size_t part = 1000) {
    return Push(rank, GradientHeader(rank, slot, step), Bytes(Gradient(slot, step)), part);
  }

  // Finite values everywhere, in padding too.
  std::vector<float> Gradient(int slot, int64_t step) const {
    std::vector<float> gradient(plan.GradientShardBytes(0) / 4);
    for (size_t e = 0; e < gradient.size(); ++e) gradient[e] = RandomValue(step, slot, e) + 1;
    return gradient;
  }

  static std::string Bytes(const std::vector<float>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  }

  void PlaceWeights() {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      ASSERT_OK(Push(r, InitialHeader(r, 9), std::string(plan.InitialShardBytes(0), '\0')));
    }
    ASSERT_OK(protocol().outcomes().AwaitCommit(Step(0), kLong));
  }

  absl::StatusOr<StepOutcome> Finish(int64_t step) {
    v1::StepRequest request;
    request.set_epoch(5);
    request.set_step(step);
    for (int s = 0; s < 2; ++s) request.add_slots(s);
    RETURN_IF_ERROR(shards[0]->requests().Declare(request, /*attached=*/false));
    return protocol().outcomes().AwaitCommit(Step(step), kLong);
  }

  void RunStep(int64_t step) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (int s = 0; s < 2; ++s) {
        if (plan.PlaceOf(Rank(r)).replica != s % plan.num_replicas()) continue;
        ASSERT_OK(PushGradient(r, s, step));
      }
    }
    ASSERT_OK_AND_ASSIGN(StepOutcome outcome, Finish(step));
    EXPECT_FALSE(outcome.skipped);
  }

  StepProtocol& protocol() { return shards[0]->protocol(); }
  const float* InSlot(int slot, int bucket, int64_t e) {
    return reinterpret_cast<const float*>(shards[0]->host().slot(slot).data() +
                                          plan.buckets()[bucket].gradient_offset) +
           e;
  }

  const std::unique_ptr<Memory> memory = NewProcessMemory();
  const Plan plan;
  std::vector<std::shared_ptr<JobShard>> shards;
};

struct PushSinkTest : ::testing::Test, Workers {
  PushSinkTest() : Workers(TwoBuckets("fsdp=2", NonFinitePolicy::kSkip)) { PlaceWeights(); }
};

TEST_F(PushSinkTest, AnySplitting_GivesTheSameBytes) {
  for (size_t part : {size_t{1}, size_t{3}, size_t{5}, size_t{511}, size_t{100000}}) {
    std::memset(shards[0]->host().slot(0).data(), 0xEE, plan.gradient_window_bytes());
    std::memset(shards[0]->host().slot(1).data(), 0, plan.gradient_window_bytes());
    const int64_t step = protocol().committed_step().value() + 1;
    for (int rank : {0, 1}) {
      for (int slot : {0, 1}) ASSERT_OK(PushGradient(rank, slot, step, part));
    }
    const std::vector<float> gradient = Gradient(0, step);  // both shards got the same gradient shard
    for (int64_t e = 0; e < 512; ++e) ASSERT_EQ(*InSlot(0, 0, e), gradient[e]);
    for (int64_t e = 512; e < 600; ++e) ASSERT_EQ(*InSlot(0, 0, e), gradient[e - 512]);
    for (int64_t e = 768; e < 775; ++e) ASSERT_EQ(*InSlot(0, 0, e), gradient[e - 512]);
    for (int64_t e = 0; e < 33; ++e) ASSERT_EQ(*InSlot(0, 1, e), gradient[512 + e]);
    ASSERT_OK(Finish(step));
  }
}

TEST_F(PushSinkTest, TruncatedOrOversized_IsRefused_AndMayBePushedAgain) {
  const std::string bytes = Bytes(Gradient(0, 1));
  EXPECT_THAT(Push(0, GradientHeader(0, 0, 1), bytes.substr(1)),
              StatusIs(Code::kInvalidArgument, HasSubstr("ended after 3071 of the 3072 bytes")));
  EXPECT_THAT(Push(0, GradientHeader(0, 0, 1), ""), StatusIs(Code::kInvalidArgument, HasSubstr("ended after 0")));
  EXPECT_THAT(Push(0, GradientHeader(0, 0, 1), bytes + "x"),
              StatusIs(Code::kInvalidArgument, HasSubstr("more than the 3072 bytes")));
  for (int64_t wrong : {int64_t{3071}, int64_t{0}, int64_t{-1}, INT64_MAX}) {
    v1::PushHeader header = GradientHeader(0, 0, 1);
    header.set_total_bytes(wrong);
    EXPECT_THAT(Push(0, header, ""), StatusIs(Code::kInvalidArgument, HasSubstr("has 3072")));
  }
  EXPECT_FALSE(protocol().declarations().HasGradientShard(Slot(0), 0, Step(1)));
  RunStep(1);
}

TEST_F(PushSinkTest, WrongShardSlotEpochStep_AreRefused) {
  v1::PushHeader header = GradientHeader(1, 0, 1);
  EXPECT_THAT(Push(0, header, ""),
              StatusIs(Code::kInvalidArgument, HasSubstr("shard 1 sent to rank 0, which holds shard 0")));
  header = GradientHeader(0, 0, 1);
  header.set_epoch(4);
  EXPECT_THAT(Push(0, header, ""), StatusIs(Code::kAborted, HasSubstr("epoch 4")));
  EXPECT_THAT(Push(0, GradientHeader(0, 2, 1), ""), StatusIs(Code::kInvalidArgument, HasSubstr("slot 2")));
  EXPECT_THAT(Push(0, GradientHeader(0, -1, 1), ""), StatusIs(Code::kInvalidArgument, HasSubstr("slot -1")));
  EXPECT_THAT(Push(0, GradientHeader(0, 0, 2), ""), StatusIs(Code::kFailedPrecondition, HasSubstr("step 2 is ahead")));
  RunStep(1);
}

TEST_F(PushSinkTest, Replay_IsAppliedOnce) {
  ASSERT_OK(PushGradient(0, 0, 1));
  const float before = *InSlot(0, 0, 3);
  std::vector<float> other(plan.GradientShardBytes(0) / 4, 55.0f);
  ASSERT_OK_AND_ASSIGN(v1::PushReply again, Push(0, GradientHeader(0, 0, 1), Bytes(other)));
  EXPECT_FALSE(again.applied());
  EXPECT_EQ(*InSlot(0, 0, 3), before);  // the gradient shard lies there: the second one is dropped
  RunStep(1);
  ASSERT_OK_AND_ASSIGN(v1::PushReply late, Push(0, GradientHeader(0, 0, 1), Bytes(other)));
  EXPECT_TRUE(late.applied());
  EXPECT_EQ(*InSlot(0, 0, 3), before);
  ASSERT_OK_AND_ASSIGN(v1::PushReply weights,
                       Push(0, InitialHeader(0, 10), std::string(plan.InitialShardBytes(0), '\0')));
  EXPECT_TRUE(weights.applied());
  EXPECT_THAT(Push(0, GradientHeader(0, 0, 1), "short"), StatusIs(Code::kInvalidArgument, HasSubstr("ended after 5")));
}

TEST_F(PushSinkTest, ASecondPushAtOnce_IsAborted_UntilTheFirstEnds) {
  ASSERT_OK_AND_ASSIGN(auto first, PushSink::Begin(shards[0], GradientHeader(0, 0, 1)));
  EXPECT_THAT(PushGradient(0, 0, 1), StatusIs(Code::kAborted, HasSubstr("another push of this gradient shard")));
  EXPECT_OK(PushGradient(0, 1, 1));  // another slot
  EXPECT_OK(PushGradient(1, 0, 1));  // another shard
  first.reset();
  EXPECT_OK(PushGradient(0, 0, 1));
}

TEST_F(PushSinkTest, ASlotWithATrainer_IsNotPushedTo) {
  ASSERT_OK(protocol().slots().Take(Slot(0), uint64_t{2} << 32 | 3));
  EXPECT_THAT(PushGradient(0, 0, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("session 3 attached to rank 1")));
  protocol().slots().Give(Slot(0), uint64_t{2} << 32 | 3);
  EXPECT_OK(PushGradient(0, 0, 1));
}

TEST_F(PushSinkTest, Step_NeedsEveryGradientShard) {
  ASSERT_OK(PushGradient(0, 0, 1));
  EXPECT_THAT(Finish(1),
              StatusIs(Code::kFailedPrecondition, HasSubstr("slot 0 of step 1 lacks the gradient of shard 1")));
  RunStep(1);
}

TEST_F(PushSinkTest, NotFinite_UnderSkip_SkipsTheStep) {
  const float* window = reinterpret_cast<const float*>(shards[0]->host().window().data());
  RunStep(1);
  const std::vector<float> before(window, window + 1024);
  const float bad[] = {kNan, -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max() / 2};
  for (int i = 0; i < 3; ++i) {
    std::vector<float> gradient = Gradient(1, 2 + i);
    gradient[258] = bad[i];  // of shard 1: element 2 of layer.b
    for (int rank : {0, 1}) ASSERT_OK(PushGradient(rank, 0, 2 + i));
    ASSERT_OK(PushGradient(0, 1, 2 + i));
    ASSERT_OK(Push(1, GradientHeader(1, 1, 2 + i), Bytes(gradient), 7));
    ASSERT_OK_AND_ASSIGN(StepOutcome outcome, Finish(2 + i));
    EXPECT_TRUE(outcome.skipped);
    EXPECT_THAT(shards[1]->requests().ToReply(outcome).skip_reason(),
                AllOf(HasSubstr("slot 1"), HasSubstr("\"layer.b\"")));
    EXPECT_EQ(std::vector<float>(window, window + 1024), before);
  }
  RunStep(5);
}

TEST_F(PushSinkTest, NotFinite_InPadding_IsNotLookedAt_AndHidesNothing) {
  for (int64_t step : {1, 2}) {
    std::vector<float> gradient = Gradient(0, step);
    for (int e : {88, 200, 263, 511, 512, 767}) gradient[e] = kNan;  // shard 1: behind w, behind b, the second bucket
    if (step == 2) gradient[257] = kNan;                             // b[1], behind a NaN in padding
    ASSERT_OK(Push(1, GradientHeader(1, 0, step), Bytes(gradient)));
    ASSERT_OK(PushGradient(0, 0, step));
    for (int rank : {0, 1}) ASSERT_OK(PushGradient(rank, 1, step));
    ASSERT_OK_AND_ASSIGN(StepOutcome outcome, Finish(step));
    EXPECT_EQ(outcome.skipped, step == 2);
  }
}

TEST(PushSinkPolicyTest, NotFinite_UnderFail_IsRefusedAndMayBePushedAgain) {
  Workers workers(TwoBuckets("fsdp=2", NonFinitePolicy::kFail));
  workers.PlaceWeights();
  std::vector<float> gradient = workers.Gradient(0, 1);
  gradient[3] = kNan;
  EXPECT_THAT(
      workers.Push(1, workers.GradientHeader(1, 0, 1), Workers::Bytes(gradient), 9),
      StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("\"layer.w\" at element 515"), HasSubstr("push it again"))));
  EXPECT_FALSE(workers.protocol().declarations().HasGradientShard(Slot(0), 1, Step(1)));
  workers.RunStep(1);
}

TEST(PushSinkPolicyTest, InitialWeights_AreRoundedPlacedAndChecked) {
  Workers workers(TwoBuckets("fsdp=1", NonFinitePolicy::kSkip));
  EXPECT_THAT(workers.PushGradient(0, 0, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  std::vector<float> initial(workers.plan.InitialShardBytes(0) / 4, 1.0f + 0x1p-9f);
  initial[5] = kNan;
  EXPECT_THAT(workers.Push(0, workers.InitialHeader(0, 1), Workers::Bytes(initial)),
              StatusIs(Code::kInvalidArgument, HasSubstr("element 5")));
  initial[5] = 3;
  ASSERT_OK(workers.Push(0, workers.InitialHeader(0, 2), Workers::Bytes(initial), 1));
  ASSERT_OK(workers.protocol().outcomes().AwaitCommit(Step(0), kLong));
  const char* window = workers.shards[0]->host().window().data();
  EXPECT_EQ(reinterpret_cast<const float*>(window)[5], 3.0f);
  EXPECT_EQ(reinterpret_cast<const float*>(window)[6], 1.0f + 0x1p-9f);
  EXPECT_EQ(reinterpret_cast<const float*>(window)[600], 0.0f);  // padding
  uint16_t bf16;
  std::memcpy(&bf16, window + workers.plan.buckets()[1].weight_offset, 2);
  EXPECT_EQ(bf16, FloatToBf16Rne(1.0f + 0x1p-9f));
}

// The replicas of a shard share a slot's window: each gradient shard has one of them as its receiver.
TEST(PushSinkPolicyTest, AnotherReplica_IsNamed) {
  Workers workers(TwoBuckets("ddp=2,fsdp=2", NonFinitePolicy::kSkip));
  workers.PlaceWeights();
  EXPECT_THAT(workers.PushGradient(3, 0, 1), StatusIs(Code::kInvalidArgument, HasSubstr("push it to rank 1")));
  EXPECT_THAT(workers.PushGradient(0, 1, 1), StatusIs(Code::kInvalidArgument, HasSubstr("push it to rank 2")));
  workers.RunStep(1);
}

// ---- bucket residency ----

struct BucketPushTest : ::testing::Test, Workers {
  BucketPushTest() : Workers(BucketJob()) {}
  static JobSpec BucketJob() {
    JobSpec job = TwoBuckets("fsdp=2", NonFinitePolicy::kSkip);
    job.residency = Residency::kBucket;
    job.parameters.push_back({"frozen", {300}, WeightFormat::kFp32});
    job.parameters.back().frozen = true;
    return job;
  }
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(PlaceWeights());
    for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
      if (!plan.buckets()[b].frozen) trained.push_back(b);
    }
    ASSERT_EQ(trained.size(), 2u);
  }

  absl::StatusOr<v1::PushReply> PushBucket(int rank, int slot, int bucket, float value = 1, int64_t step = 1) {
    v1::PushHeader header = GradientHeader(rank, slot, step);
    header.set_bucket(bucket);
    const bool known = bucket >= 0 && bucket < static_cast<int>(plan.buckets().size());
    const std::vector<float> gradient(known ? plan.buckets()[bucket].shard_elements : 1, value);
    header.set_total_bytes(static_cast<int64_t>(gradient.size()) * 4);
    return Push(rank, header, Bytes(gradient));
  }

  std::vector<int> trained;
};

TEST_F(BucketPushTest, OneBucketsPiece_CountsByItselfAndTheFirstStays) {
  ASSERT_OK(PushBucket(0, 0, trained[1], 3));
  EXPECT_TRUE(protocol().buckets().HasShard(Slot(0), trained[1], 0, Step(1)));
  EXPECT_FALSE(protocol().buckets().HasShard(Slot(0), trained[1], 1, Step(1)));
  EXPECT_FALSE(protocol().buckets().HasShard(Slot(0), trained[0], 0, Step(1)));
  EXPECT_EQ(*InSlot(0, trained[1], 0), 3);
  ASSERT_OK(PushBucket(0, 0, trained[1], 5));  // repeated: dropped
  EXPECT_EQ(*InSlot(0, trained[1], 0), 3);
  ASSERT_OK(PushGradient(0, 0, 1));  // all of them: without that one
  EXPECT_EQ(*InSlot(0, trained[1], 0), 3);
  EXPECT_TRUE(protocol().buckets().HasShard(Slot(0), trained[0], 0, Step(1)));
  EXPECT_EQ(*InSlot(0, trained[0], 0), Gradient(0, 1)[0]);
}

TEST_F(BucketPushTest, StepOfBucketsAndOfWholePieces_IsCommitted) {
  for (int rank : {0, 1}) {
    ASSERT_OK(PushGradient(rank, 0, 1));
    for (int b : {trained[1], trained[0]}) ASSERT_OK(PushBucket(rank, 1, b));
  }
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, Finish(1));
  EXPECT_FALSE(outcome.skipped);
  ASSERT_OK_AND_ASSIGN(const v1::PushReply late, PushBucket(0, 0, trained[0]));
  EXPECT_TRUE(late.applied());
}

TEST_F(BucketPushTest, NotFiniteInABucket_SkipsTheStep) {
  for (int rank : {0, 1}) {
    ASSERT_OK(PushGradient(rank, 0, 1));
    for (int b : trained) ASSERT_OK(PushBucket(rank, 1, b, rank == 0 && b == trained[0] ? kNan : 1));
  }
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, Finish(1));
  EXPECT_TRUE(outcome.skipped);
  EXPECT_EQ(outcome.bad_slot, Slot(1));
}

TEST_F(BucketPushTest, WrongBuckets_AreRefused) {
  const int frozen = 3 - trained[0] - trained[1];
  for (int b : {-1, 3, INT32_MAX, frozen}) {
    EXPECT_THAT(PushBucket(0, 0, b), StatusIs(Code::kInvalidArgument, HasSubstr("is none of job small's"))) << b;
  }
  v1::PushHeader header = GradientHeader(0, 0, 1);  // the length of all
  header.set_bucket(trained[0]);
  EXPECT_THAT(PushSink::Begin(shards[0], header), StatusIs(Code::kInvalidArgument, HasSubstr("a gradient shard of")));
  EXPECT_THAT(PushBucket(0, 0, trained[0], 1, 2), StatusIs(Code::kFailedPrecondition, HasSubstr("is ahead")));
  EXPECT_THAT(Finish(1), StatusIs(Code::kFailedPrecondition, HasSubstr("lacks the gradients of bucket")));
}

TEST(BucketPushFullTest, FullResidency_HasNoBuckets) {
  Workers workers(TwoBuckets("fsdp=1", NonFinitePolicy::kSkip));
  ASSERT_NO_FATAL_FAILURE(workers.PlaceWeights());
  v1::PushHeader header = workers.GradientHeader(0, 0, 1);
  header.set_bucket(0);
  EXPECT_THAT(PushSink::Begin(workers.shards[0], header),
              StatusIs(Code::kFailedPrecondition, HasSubstr("full residency")));
}

}  // namespace
}  // namespace shardmesh
