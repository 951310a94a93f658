// Contract 1, of residency: a job that keeps the buckets in use trains to the bits of one that keeps all, on every
// mesh, with every kind of trainer, in whatever order they use and declare buckets. And what goes wrong with buckets is
// a typed error, or ends with its trainer.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/job/absent_weights.h"
#include "core/mesh/mesh_spec.h"
#include "local/descriptor/fd.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Trainer;
using ::shardmesh::testing::Variant;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kSteps = 4;
constexpr absl::Duration kTime = absl::Seconds(60);

// Codes, three groups, one of them of Muon, frozen weights stored and quantized, a tie, the norm.
JobSpec JobOf(const std::string& name, Residency residency) {
  JobSpec spec = testing::OddJob(name, "fsdp=1", 3);
  spec.residency = residency;
  spec.clip_norm = 0.5;
  spec.more_groups = {spec.optimizer};
  spec.more_groups[0].weight_decay = 0.1;
  spec.parameters[1].group = 1;
  const StateFormat fp32 = StateFormat::kFp32;
  spec.parameters.push_back({"rows", {70, 96}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kFp8Row});
  spec.parameters.push_back({"whole", {5000}, WeightFormat::kFp32, "", fp32, GatherFormat::kFp8Tensor});
  spec.parameters.push_back({"mx", {40, 128}, WeightFormat::kBf16, "", fp32, GatherFormat::kMx8});
  spec.parameters.push_back({"nf4", {70, 90}, WeightFormat::kFp32, "", fp32, GatherFormat::kNf4});
  spec.parameters.push_back({"int8", {50, 96}, WeightFormat::kInt8Row, "", StateFormat::kDyn8});
  spec.more_groups.push_back(OptimizerHyper::Defaults(OptimizerKind::kMuon));
  spec.parameters.push_back({"matrix", {60, 44}, WeightFormat::kBf16Sr});  // whole at one shard, alone in its bucket
  spec.parameters.back().group = 2;
  spec.parameters.push_back({"frozen", {3000}, WeightFormat::kFp32, "", fp32, GatherFormat::kStored, 0, true});
  spec.parameters.push_back({"codes", {48, 100}, WeightFormat::kBf16, "", fp32, GatherFormat::kInt8Row, 0, true});
  return spec;
}

std::vector<int> Shuffled(int n, std::mt19937_64& random) {
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

std::string BytesOf(const ConstTensorView& view) {
  return absl::StrCat(absl::string_view(static_cast<const char*>(view.data), view.data_bytes()),
                      absl::string_view(static_cast<const char*>(view.scales), view.scale_bytes()));
}

// Reads every parameter by bucket, one bucket ahead: by name, its bytes.
absl::Status ReadAll(Session& session, const std::vector<int>& order, std::map<std::string, std::string>& read) {
  for (size_t i = 0; i < order.size(); ++i) {
    if (i + 1 < order.size()) RETURN_IF_ERROR(session.Prefetch(order[i + 1]));
    RETURN_IF_ERROR(session.Acquire(order[i], kTime));
    for (const ParameterSpec& p : session.job().spec().parameters) {
      ASSIGN_OR_RETURN(const int bucket, session.bucket(p.name));
      if (bucket != order[i]) continue;
      ASSIGN_OR_RETURN(const ConstTensorView view, session.parameter(p.name));
      read[p.name] = BytesOf(view);
    }
    RETURN_IF_ERROR(session.Release(order[i]));
  }
  return absl::OkStatus();
}

// What trainers have seen of each version, each of them all of it.
using Seen = std::vector<std::map<std::string, std::string>>;

absl::Status TrainByBucket(Session& session, std::mt19937_64 random, Seen& seen) {
  const int buckets = static_cast<int>(session.job().plan().buckets().size());
  while (session.committed_step().value() < kSteps) {
    const Step step = session.committed_step().next();
    RETURN_IF_ERROR(ReadAll(session, Shuffled(buckets, random), seen[step.value() - 1]));
    const bool rest = random() % 4 == 0;  // left to Step
    for (int b : Shuffled(buckets, random)) {
      if (session.job().plan().buckets()[b].frozen) continue;
      RETURN_IF_ERROR(testing::WriteBucketGradients(session, step, b));
      if (rest && b % 2 == 0) continue;
      RETURN_IF_ERROR(session.DeclareBucket(b, kTime));
      if (random() % 8 == 0) RETURN_IF_ERROR(session.DeclareBucket(b, kTime));
    }
    StepOptions options;
    options.learning_rates = testing::LearningRates(session.job().spec(), step.value());
    RETURN_IF_ERROR(session.Step(options).status());
  }
  return ReadAll(session, Shuffled(buckets, random), seen[kSteps]);
}

absl::Status RunTrainer(Job& job, const Trainer& trainer, std::mt19937_64 random, Seen& seen) {
  std::vector<Slot> slots;
  for (int slot : trainer.slots) slots.push_back(Slot(slot));
  ASSIGN_OR_RETURN(const auto session, trainer.attached ? job.Attach(slots) : job.Connect(slots));
  RETURN_IF_ERROR(session->AwaitWeights(kTime));
  return TrainByBucket(*session, random, seen);
}

// Trains as TrainVariant, by bucket. `seen`: by trainer.
absl::StatusOr<Learnt> TrainBuckets(Client& client, JobSpec spec, const Variant& variant, uint64_t seed,
                                    std::vector<Seen>& seen) {
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(variant.mesh));
  spec.bucket_elements = variant.bucket_elements;
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(testing::Initialize(*job));
  std::vector<absl::Status> ends(variant.trainers.size());
  seen.assign(ends.size(), Seen(kSteps + 1));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ends.size(); ++i) {
    threads.emplace_back(
        [&, i] { ends[i] = RunTrainer(*job, variant.trainers[i], std::mt19937_64(seed + i), seen[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
  absl::StatusOr<Learnt> learnt = testing::Learn(*job, kSteps);
  RETURN_IF_ERROR(testing::Delete(client, spec.name));
  return learnt;
}

TEST(Residency, BucketedIsFull_BitForBit) {
  const uint64_t seed = std::random_device()();
  std::mt19937_64 random(seed);
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8, .threads = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  const std::vector<Trainer> alone = {{{0, 1, 2}, true}};
  ASSERT_OK_AND_ASSIGN(const Learnt full,
                       testing::TrainVariant(client, JobOf("full", Residency::kFull), {"fsdp=1", alone}, kSteps));
  for (const Variant& variant : testing::VariantsOfThreeSlots()) {
    JobSpec spec = JobOf("bucketed", Residency::kBucket);
    spec.prefetch_buckets = 1 + static_cast<int>(random() % 3);
    const std::string what =
        absl::StrCat(testing::Describe(variant), ", prefetch ", spec.prefetch_buckets, ", seed ", seed);
    SCOPED_TRACE(what);
    std::vector<Seen> seen;
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, TrainBuckets(client, spec, variant, seed, seen));
    EXPECT_EQ(learnt, full);
    for (size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i][kSteps], full.weights) << "trainer " << i;
      EXPECT_EQ(seen[i], seen[0]) << "trainer " << i;
    }
    // And by trainers that know of no buckets.
    ASSERT_OK_AND_ASSIGN(const Learnt plain, testing::TrainVariant(client, spec, variant, kSteps));
    EXPECT_EQ(plain, full);
  }
}

// A job of several buckets, and its client.
struct ResidencyErrors : ::testing::Test {
  void Start(int slots, int prefetch = 1) {
    ASSERT_OK_AND_ASSIGN(cluster, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client connected, cluster->Connect());
    client = std::make_unique<Client>(std::move(connected));
    JobSpec spec = JobOf("errors", Residency::kBucket);
    spec.mesh = *ParseMeshSpec("fsdp=2");
    spec.num_slots = slots;
    spec.prefetch_buckets = prefetch;
    ASSERT_OK_AND_ASSIGN(job, client->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job));
    for (int b = 0; b < static_cast<int>(job->plan().buckets().size()); ++b) {
      (job->plan().buckets()[b].frozen ? frozen : trained).push_back(b);
    }
    ASSERT_GE(trained.size(), 4u);
  }
  absl::StatusOr<std::unique_ptr<Session>> Open(std::vector<Slot> slots, bool attach = true) {
    ASSIGN_OR_RETURN(auto session, attach ? job->Attach(slots) : job->Connect(slots));
    RETURN_IF_ERROR(session->AwaitWeights(kTime));
    return session;
  }
  int64_t WindowBytes() {
    const absl::StatusOr<v1::GetStatusReply> status = job->worker(Rank(1)).GetStatus(kTime);
    return status.ok() && status->jobs_size() == 1 ? status->jobs(0).window_resident_bytes() : -1;
  }

  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<Client> client;
  std::shared_ptr<Job> job;
  std::vector<int> trained, frozen;
};

TEST_F(ResidencyErrors, WrongUses_AreTypedErrorsAndTheStepIsRight) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  ASSERT_OK_AND_ASSIGN(const Learnt expected, testing::Undisturbed(*client, job->spec(), 2));
  int64_t last = 0;
  for (const bool attach : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const auto session, Open({Slot(0)}, attach));
    const int none = static_cast<int>(job->plan().buckets().size());
    EXPECT_THAT(session->Acquire(none, kTime), StatusIs(Code::kInvalidArgument, HasSubstr("is none of job errors's")));
    EXPECT_THAT(session->DeclareBucket(-1, kTime), StatusIs(Code::kInvalidArgument, HasSubstr("bucket -1")));
    EXPECT_THAT(session->DeclareBucket(frozen[0], kTime), StatusIs(Code::kInvalidArgument, HasSubstr("frozen")));
    EXPECT_THAT(session->Release(0), StatusIs(Code::kFailedPrecondition, HasSubstr("acquire it first")));
    const std::string& name = job->spec().parameters[0].name;
    EXPECT_THAT(session->WriteGradient(Slot(0), name, "abc"),
                StatusIs(Code::kInvalidArgument, AllOf(HasSubstr(name), HasSubstr("bytes, not 3"))));
    EXPECT_THAT(session->WriteGradient(Slot(1), name, "abc"), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1")));
    EXPECT_THAT(session->WriteGradient(Slot(0), "none", ""), StatusIs(Code::kNotFound, HasSubstr("none")));
    EXPECT_THAT(session->WriteGradient(Slot(0), "frozen", ""), StatusIs(Code::kInvalidArgument, HasSubstr("frozen")));
    ASSERT_OK(session->Acquire(0, kTime));
    ASSERT_OK(session->Acquire(0, kTime));
    ASSERT_OK(session->Acquire(1, kTime));
    EXPECT_THAT(session->Acquire(2, kTime), StatusIs(Code::kResourceExhausted, HasSubstr("one more than the 2")));
    ASSERT_OK(session->Release(0));
    EXPECT_THAT(session->Acquire(2, kTime), StatusIs(Code::kResourceExhausted, HasSubstr("bucket 2")));
    ASSERT_OK(session->Release(0));
    ASSERT_OK(session->Acquire(2, kTime));
    ASSERT_OK(testing::WriteBucketGradients(*session, Step(last + 1), trained[0]));
    ASSERT_OK(session->DeclareBucket(trained[0], kTime));
    ASSERT_OK(session->DeclareBucket(trained[0], kTime));
    ASSERT_OK(testing::TrainTo(*session, ++last));
  }
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, last));
  EXPECT_EQ(learnt, expected);
}

// A declaration of another step, as a client that is wrong about it would send.
TEST_F(ResidencyErrors, BucketOfAnotherStep_IsRefusedOrDone) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  ASSERT_OK_AND_ASSIGN(const auto session, Open({Slot(0)}, false));
  v1::DeclareBucketRequest request;
  request.set_job(job->spec().name);
  request.set_epoch(job->epoch().value());
  request.add_slots(0);
  request.set_bucket(trained[0]);
  request.set_step(2);
  EXPECT_THAT(job->worker(Rank(0)).DeclareBucket(request, kTime),
              StatusIs(Code::kFailedPrecondition, HasSubstr("step 2 is ahead")));
  request.set_step(1);
  EXPECT_THAT(job->worker(Rank(0)).DeclareBucket(request, kTime),
              StatusIs(Code::kFailedPrecondition, HasSubstr("lacks gradient shards of bucket")));
  ASSERT_OK(testing::TrainTo(*session, 1));
  ASSERT_OK_AND_ASSIGN(const v1::DeclareBucketReply reply, job->worker(Rank(0)).DeclareBucket(request, kTime));
  EXPECT_TRUE(reply.already_declared());
  request.set_epoch(job->epoch().value() + 1);
  EXPECT_THAT(job->worker(Rank(0)).DeclareBucket(request, kTime), StatusIs(Code::kAborted, HasSubstr("epoch")));
}

TEST_F(ResidencyErrors, BucketAcquiredOverAStep_HoldsTheNewWeights) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  for (const bool attach : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const auto session, Open({Slot(0), Slot(1)}, attach));
    for (int b : {trained[1], trained[2]}) ASSERT_OK(session->Acquire(b, kTime));
    const int64_t last = session->committed_step().value() + 1;
    ASSERT_OK(testing::TrainTo(*session, last));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, last));
    int compared = 0;
    for (const ParameterSpec& p : job->spec().parameters) {
      const int bucket = *session->bucket(p.name);
      if (bucket != trained[1] && bucket != trained[2]) continue;
      EXPECT_EQ(BytesOf(*session->parameter(p.name)), learnt.weights.at(p.name)) << p.name;
      ++compared;
    }
    EXPECT_GE(compared, 2);
  }
}

TEST_F(ResidencyErrors, WeightsThatAreNotThere_AreNaN) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  for (const bool attach : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const auto session, Open({Slot(0)}, attach));
    ASSERT_OK_AND_ASSIGN(const ConstTensorView view, session->parameter("frozen"));
    const volatile float& first = *static_cast<const float*>(view.data);
    EXPECT_TRUE(std::isnan(first)) << attach;
    ASSERT_OK_AND_ASSIGN(const int bucket, session->bucket("frozen"));
    ASSERT_OK(session->Acquire(bucket, kTime));
    EXPECT_TRUE(std::isfinite(first)) << attach;
    ASSERT_OK(session->Release(bucket));
    const absl::Time deadline = MonotonicNow() + kTime;
    while (!std::isnan(first) && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(5));
    EXPECT_TRUE(std::isnan(first)) << attach;
  }
}

// A session that ends without a word is to its worker what a killed trainer is: a closed connection.
TEST_F(ResidencyErrors, TrainerThatIsGone_HoldsNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  ASSERT_OK_AND_ASSIGN(const auto stays, Open({Slot(1)}));
  const int64_t nothing = WindowBytes();
  int64_t absent = 0;
  for (size_t b = 0; b < job->plan().buckets().size(); ++b) {
    absent += AbsentWeights(job->plan()).PageBytes(static_cast<int>(b));
  }
  EXPECT_EQ(nothing, absent);
  {
    ASSERT_OK_AND_ASSIGN(const auto goes, Open({Slot(0)}));
    ASSERT_OK(goes->Acquire(0, kTime));
    ASSERT_OK(goes->Prefetch(1));
    ASSERT_OK(testing::WriteBucketGradients(*goes, Step(1), trained[0]));
    ASSERT_OK(goes->DeclareBucket(trained[0], kTime));
    EXPECT_GT(WindowBytes(), nothing);
  }
  const absl::Time deadline = MonotonicNow() + kTime;
  while (WindowBytes() != nothing && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(5));
  EXPECT_EQ(WindowBytes(), nothing);
  // Its slot waits for the other trainer's bucket, which may be summed with it.
  std::thread other([&] { EXPECT_OK(testing::TrainTo(*stays, 2)); });
  {
    absl::StatusOr<std::unique_ptr<Session>> again = Open({Slot(0)});
    while (absl::IsUnavailable(again.status()) && MonotonicNow() < deadline) again = Open({Slot(0)});
    EXPECT_OK(again.ok() ? testing::TrainTo(**again, 2) : again.status());
  }
  other.join();
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, 2));
  ASSERT_OK_AND_ASSIGN(const Learnt expected, testing::Undisturbed(*client, job->spec(), 2));
  EXPECT_EQ(learnt, expected);
}

TEST_F(ResidencyErrors, SlotsThatAreBehind_AreNamedInTime) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  for (const bool attach : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const auto ahead, Open({Slot(0)}, attach));
    ASSERT_OK_AND_ASSIGN(const auto behind, Open({Slot(1)}));
    const Step step = ahead->committed_step().next();
    ASSERT_OK(testing::WriteGradients(*ahead, step));
    ASSERT_OK(ahead->DeclareBucket(trained[0], kTime));
    const absl::Time begin = MonotonicNow();
    EXPECT_THAT(ahead->DeclareBucket(trained[1], absl::Seconds(2)),
                StatusIs(Code::kDeadlineExceeded, AllOf(HasSubstr("lacks slots 1"))));
    EXPECT_LT(MonotonicNow() - begin, absl::Seconds(20));
    std::thread other([&] { EXPECT_OK(testing::TrainTo(*behind, step.value())); });
    EXPECT_OK(ahead->DeclareBucket(trained[1], kTime));  // it was declared: only waits
    EXPECT_OK(testing::TrainTo(*ahead, step.value()));
    other.join();
  }
}

// More buckets than either may be ahead, in opposite orders.
TEST_F(ResidencyErrors, OppositeOrders_GoOn) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  const auto train = [&](Slot slot, std::vector<int> order) {
    absl::StatusOr<std::unique_ptr<Session>> session = Open({slot});
    ASSERT_OK(session.status());
    for (int64_t step = 1; step <= 3; ++step) {
      for (int b : order) {
        ASSERT_OK(testing::WriteBucketGradients(**session, Step(step), b));
        ASSERT_OK((*session)->DeclareBucket(b, kTime));
      }
      ASSERT_OK((*session)->Step().status());
    }
  };
  std::thread other([&] { train(Slot(1), {trained.rbegin(), trained.rend()}); });
  train(Slot(0), trained);
  other.join();
}

// Whether a byte can be read, or written with what it holds: as a system call sees it, which ends no process.
bool CanTouch(const void* address, bool write) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  const UniqueFd out(ends[0]), in(ends[1]);
  if (!write) return ::write(in.get(), address, 1) == 1;
  const char zero = 0;
  return ::write(in.get(), &zero, 1) == 1 && read(out.get(), const_cast<void*>(address), 1) == 1;
}

TEST_F(ResidencyErrors, GuardedBuckets_CannotBeTouched) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  ClientOptions options;
  options.guard_buckets = true;
  ASSERT_OK_AND_ASSIGN(Client guarding, cluster->Connect(options));
  ASSERT_OK_AND_ASSIGN(const auto guarded, guarding.OpenJob("errors"));
  for (const bool attach : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const auto session, attach ? guarded->Attach({Slot(0)}) : guarded->Connect({Slot(0)}));
    ASSERT_OK(session->AwaitWeights(kTime));
    ASSERT_OK_AND_ASSIGN(const int bucket, session->bucket("layers.0.weight"));
    const void* const weights = session->parameter("layers.0.weight")->data;
    const void* const gradient = session->gradient(Slot(0), "layers.0.weight")->data;
    EXPECT_FALSE(CanTouch(weights, false));
    ASSERT_OK(session->Acquire(bucket, kTime));
    EXPECT_TRUE(CanTouch(weights, false));
    ASSERT_OK(session->Release(bucket));
    EXPECT_FALSE(CanTouch(weights, false));
    EXPECT_TRUE(CanTouch(gradient, true));
    ASSERT_OK(testing::WriteBucketGradients(*session, session->committed_step().next(), bucket));
    ASSERT_OK(session->DeclareBucket(bucket, kTime));
    EXPECT_FALSE(CanTouch(gradient, true));
    ASSERT_OK(session->Step().status());
    EXPECT_TRUE(CanTouch(gradient, true));
  }
}

}  // namespace
}  // namespace shardmesh
