// Jobs that have both bucket residency and pulled slots: weights are there bucket by bucket, gradients slot by slot.
// Whoever takes which slot and uses which bucket, on whatever mesh and number of hosts, what trainers read and what the
// job learns are the bits of one process; and a trainer or worker that is killed takes nothing with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/job/absent_weights.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/await.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/pulling_jobs.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::PulledJob;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Work = PullingSession::Work;

constexpr int64_t kSteps = 4;
constexpr absl::Duration kLong = absl::Seconds(60);

JobSpec ResidentJob(const std::string& name, const std::string& mesh, int slots, int trainers) {
  JobSpec spec = PulledJob(name, mesh, slots, trainers);
  spec.residency = Residency::kBucket;
  spec.prefetch_buckets = 2;
  spec.bucket_elements = 4096;
  return spec;
}

// Codes, a second group of Muon, frozen weights, the norm, replicas that are compared.
JobSpec MixedJob(const std::string& mesh, int slots, int trainers) {
  JobSpec spec = ResidentJob("job", mesh, slots, trainers);
  spec.clip_norm = 0.5;
  spec.check_every = 2;
  const StateFormat fp32 = StateFormat::kFp32;
  spec.parameters.push_back({"rows", {70, 96}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kFp8Row});
  spec.parameters.push_back({"nf4", {70, 90}, WeightFormat::kFp32, "", fp32, GatherFormat::kNf4});
  spec.parameters.push_back({"int8", {50, 96}, WeightFormat::kInt8Row, "", StateFormat::kDyn8});
  spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  spec.parameters.push_back({"matrix", {60, 44}, WeightFormat::kBf16Sr});
  spec.parameters.back().group = 1;
  spec.parameters.push_back({"frozen", {3000}, WeightFormat::kFp32, "", fp32, GatherFormat::kStored, 0, true});
  return spec;
}

using Weights = std::map<std::string, std::string>;  // by name

std::string BytesOf(const ConstTensorView& view) {
  return absl::StrCat(absl::string_view(static_cast<const char*>(view.data), view.data_bytes()),
                      absl::string_view(static_cast<const char*>(view.scales), view.scale_bytes()));
}

absl::Status Read(PullingSession& session, int bucket, Weights& weights) {
  for (const ParameterSpec& p : session.job().spec().parameters) {
    ASSIGN_OR_RETURN(const int of, session.bucket(p.name));
    if (of != bucket) continue;
    ASSIGN_OR_RETURN(const ConstTensorView view, session.parameter(p.name));
    weights[p.name] = BytesOf(view);
  }
  return absl::OkStatus();
}

// All of them, by bucket, in an order that is drawn, one ahead.
absl::StatusOr<Weights> ReadAll(PullingSession& session, std::mt19937_64& random) {
  std::vector<int> order(session.job().plan().buckets().size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  Weights weights;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i + 1 < order.size()) RETURN_IF_ERROR(session.Prefetch(order[i + 1]));
    RETURN_IF_ERROR(session.Acquire(order[i], kLong));
    RETURN_IF_ERROR(Read(session, order[i], weights));
    RETURN_IF_ERROR(session.Release(order[i]));
  }
  return weights;
}

// What the job has after each step, as one process computes it.
std::vector<Learnt> References(const JobSpec& spec, int64_t steps) {
  std::vector<Learnt> all;
  for (int64_t step = 0; step <= steps; ++step) all.push_back(testing::ReferenceOf(spec, step));
  return all;
}

// Takes slots until the last step is committed, reads all weights for each, and keeps a bucket in use all the time.
absl::Status PullReading(PullingSession& session, const std::vector<Learnt>& expected, std::mt19937_64 random) {
  const auto last = static_cast<int64_t>(expected.size()) - 1;
  const int kept = static_cast<int>(random() % session.job().plan().buckets().size());
  RETURN_IF_ERROR(session.Acquire(kept, kLong));
  while (session.committed_step().value() < last) {
    ASSIGN_OR_RETURN(const Work work, session.Take(kLong));
    if (!work.slot.has_value()) continue;
    const Weights& before = expected[work.step.value() - 1].weights;
    Weights of_kept;
    RETURN_IF_ERROR(Read(session, kept, of_kept));
    for (const auto& [name, bytes] : of_kept) {
      if (bytes != before.at(name)) return absl::DataLossError(absl::StrCat("the kept weights of ", name));
    }
    ASSIGN_OR_RETURN(const Weights weights, ReadAll(session, random));
    if (weights != before) return absl::DataLossError(absl::StrCat("weights for step ", work.step.value()));
    ASSIGN_OR_RETURN(const FinishOptions options, testing::WriteTaken(session, work));
    RETURN_IF_ERROR(session.Finish(options).status());
  }
  return session.Release(kept);
}

struct PulledResidency : testing::PullingJobs {
  // Trains with as many trainers as the job may have, every third one connected.
  void Train(Job& job, const std::vector<Learnt>& expected, uint64_t seed) {
    std::vector<absl::Status> ends(job.spec().num_trainers);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ends.size(); ++i) {
      threads.emplace_back([&, i] {
        const auto session = Join(job, /*connects=*/i % 3 == 1);
        ends[i] = session.ok() ? PullReading(**session, expected, std::mt19937_64(seed + i)) : session.status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < ends.size(); ++i) EXPECT_OK(ends[i]) << "trainer " << i;
  }
  void ExpectReferences(const JobSpec& spec, uint64_t seed) {
    SCOPED_TRACE(absl::StrCat(spec.mesh.ToString(), ", ", spec.num_trainers, " trainers, seed ", seed));
    const std::vector<Learnt> expected = References(spec, kSteps);
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
    ASSERT_NO_FATAL_FAILURE(Train(*job, expected, seed));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
    EXPECT_EQ(learnt, expected.back());
    ASSERT_OK(testing::Delete(*client_, spec.name));
  }
  static v1::GetStatusReply::Job StatusOf(Job& job) {
    const absl::StatusOr<v1::GetStatusReply> status = job.worker(Rank(0)).GetStatus(kLong);
    return status.ok() && status->jobs_size() == 1 ? status->jobs(0) : v1::GetStatusReply::Job();
  }
  static int64_t SlotBytes(Job& job) { return StatusOf(job).slot_resident_bytes(); }
  static int64_t WindowBytes(Job& job) { return StatusOf(job).window_resident_bytes(); }
  template <typename Is>
  static void Await(const Is& is) {
    EXPECT_TRUE(testing::Await(is, kLong, absl::Milliseconds(2)));
  }
};

TEST_F(PulledResidency, AnyMesh_IsTheBitsOfOneProcess) {
  const uint64_t seed = std::random_device()();
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=2", "fsdp=4"}) {
    for (const int trainers : {1, 3}) ASSERT_NO_FATAL_FAILURE(ExpectReferences(MixedJob(mesh, 5, trainers), seed));
  }
}

TEST_F(PulledResidency, MoreTrainersThanSlots) {
  ASSERT_NO_FATAL_FAILURE(ExpectReferences(ResidentJob("job", "fsdp=2", 2, 6), std::random_device()()));
}

TEST_F(PulledResidency, OnTwoHosts_IsTheBitsOfOneProcess) {
  const uint64_t seed = std::random_device()();
  ClusterOptions options;
  options.hosts = 2;
  ASSERT_NO_FATAL_FAILURE(Start(options));
  for (const char* mesh : {"ddp=2,fsdp=2", "fsdp=4", "fsdp=2,ddp=2"}) {
    for (const int trainers : {2, 4}) ASSERT_NO_FATAL_FAILURE(ExpectReferences(MixedJob(mesh, 5, trainers), seed));
  }
}

// The same job with whole windows and assigned slots, and each of the two alone.
TEST_F(PulledResidency, DigestsAreThoseOfOtherJobs) {
  JobSpec spec = MixedJob("ddp=2,fsdp=2", 5, 2);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  Train(*job, References(spec, kSteps), 17);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
  for (const Residency residency : {Residency::kFull, Residency::kBucket}) {
    spec.name = absl::StrCat("assigned-", static_cast<int>(residency));
    spec.residency = residency;
    ASSERT_OK_AND_ASSIGN(const Learnt other, testing::Undisturbed(*client_, spec, kSteps));
    EXPECT_EQ(learnt, other);
  }
}

// Pages of gradients are there while they are written, and until they are part of a sum.
TEST_F(PulledResidency, ResultsGiveTheirPagesBack_WhenTheyAreSummed) {
  JobSpec spec = ResidentJob("job", "fsdp=2", 3, 2);
  spec.slot_timeout_ms = 1;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto late, Join(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
  ASSERT_OK_AND_ASSIGN(Work abandoned, late->Take(kLong));  // and one message of each has been in its mailbox
  ASSERT_OK(testing::PullTo(*session, 1));
  const int64_t mail = SlotBytes(*job);
  const int64_t one = job->plan().gradient_window_bytes();
  for (int64_t step = 2; step <= 3; ++step) {
    while (late->committed_step().value() < step - 1) ASSERT_OK(late->Take(kLong));
    ASSERT_OK_AND_ASSIGN(abandoned, late->Take(kLong));
    ASSERT_OK(testing::WriteTaken(*late, abandoned).status());  // in a window that nobody sums
    EXPECT_GT(SlotBytes(*job), mail + one / 2);
    testing::Pause(absl::Milliseconds(5));  // its slot is open again, and the first one to be taken
    for (int merged = 0; merged < 2; ++merged) {
      ASSERT_OK_AND_ASSIGN(const Work work, session->Take(kLong));
      ASSERT_OK(Finish(*session, work));
    }
    Await([&] { return SlotBytes(*job) <= mail + one + kPageBytes; });  // that of `late` alone
    ASSERT_OK(testing::PullTo(*session, step));
    EXPECT_EQ(SlotBytes(*job), mail);
  }
  ExpectTheReference(*job, 3);
}

TEST_F(PulledResidency, WrongUses_AreTypedErrors) {
  JobSpec spec = ResidentJob("job", "fsdp=2", 2, 2);
  spec.prefetch_buckets = 1;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  const int none = static_cast<int>(job->plan().buckets().size());
  ASSERT_GE(none, 3);
  for (const bool connects : {false, true}) {
    SCOPED_TRACE(connects);
    ASSERT_OK_AND_ASSIGN(const auto session, connects ? job->ConnectPulling() : job->AttachPulling());
    ASSERT_OK(session->AwaitWeights(kLong));
    EXPECT_THAT(session->Acquire(none, kLong), StatusIs(Code::kInvalidArgument, HasSubstr("is none of job job's")));
    EXPECT_THAT(session->Release(0), StatusIs(Code::kFailedPrecondition, HasSubstr("acquire it first")));
    EXPECT_THAT(session->bucket("none"), StatusIs(Code::kNotFound, HasSubstr("none")));
    ASSERT_OK(session->Acquire(0, kLong));
    ASSERT_OK(session->Acquire(0, kLong));
    ASSERT_OK(session->Acquire(1, kLong));
    EXPECT_THAT(session->Acquire(2, kLong), StatusIs(Code::kResourceExhausted, HasSubstr("one more than the 2")));
    ASSERT_OK(session->Release(0));
    EXPECT_THAT(session->Acquire(2, kLong), StatusIs(Code::kResourceExhausted, HasSubstr("bucket 2")));
    ASSERT_OK(session->Release(0));
    ASSERT_OK(session->Acquire(2, kLong));
  }
  JobSpec full = PulledJob("full", "fsdp=2", 2, 1);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> whole, Create(full));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*whole));
  EXPECT_OK(session->Acquire(0, kLong));  // one program trains with both
  EXPECT_OK(session->Prefetch(1));
  EXPECT_OK(session->Release(1));
}

// A process that is killed at any moment: it uses buckets and writes slots all the time
// (tests/testing/trainer_main.cc).
TEST_F(PulledResidency, ATrainerThatIsKilled_HoldsNothing) {
  const JobSpec spec = ResidentJob("job", "fsdp=2", 4, 2);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
  int64_t absent = 0;
  for (size_t b = 0; b < job->plan().buckets().size(); ++b) {
    absent += AbsentWeights(job->plan()).PageBytes(static_cast<int>(b));
  }
  EXPECT_EQ(WindowBytes(*job), absent);
  int64_t step = 0;
  for (const char* way : {"pull", "pull-connected", "pull", "pull"}) {
    ASSERT_OK_AND_ASSIGN(const auto process,
                         testing::Process::Start(
                             {{"tests/testing/test_trainer", cluster_->coordinator_address(), "job", "1000000", way}}));
    Await([&] { return StatusOf(*job).trainers_size() == 2; });
    if (std::string(way) == "pull") Await([&] { return WindowBytes(*job) > absent; });
    process->Kill9();
    Await([&] { return WindowBytes(*job) == absent; });
    while (session->committed_step().value() < step + 1) {
      ASSERT_OK_AND_ASSIGN(const Work work, session->Take(kLong));
      if (!work.slot.has_value()) continue;
      ASSERT_OK(Finish(*session, work));
    }
    step = session->committed_step().value();
  }
  ExpectTheReference(*job, step);
}

// Workers that a node keeps come back with the words of buckets and seats, between any two instructions.
TEST_F(PulledResidency, WorkersThatAreKilled_LoseNothing) {
  ClusterOptions options;
  options.retained = true;
  options.heartbeat_timeout = absl::Minutes(5);
  ASSERT_NO_FATAL_FAILURE(Start(options));
  std::mt19937_64 random(testing::NumberOfEnvironment("SHARDMESH_SEED", 4711));
  const JobSpec spec = ResidentJob("job", "ddp=2,fsdp=2", 6, 3);
  const std::vector<Learnt> expected = References(spec, 25);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  std::atomic<int> running{spec.num_trainers};
  std::vector<std::thread> trainers;
  for (int i = 0; i < spec.num_trainers; ++i) {
    trainers.emplace_back([&, i] {
      const auto session = Join(*job);
      EXPECT_OK(session.ok() ? PullReading(**session, expected, std::mt19937_64(i)) : session.status());
      --running;
    });
  }
  int kills = 0;
  for (; running.load() > 0 && kills < 30; ++kills) {
    const std::string name = absl::StrCat("w-", random() % 4);
    const pid_t pid = cluster_->PidOf(name);
    if (pid > 0) kill(pid, SIGKILL);
    EXPECT_GT(cluster_->AwaitNextIncarnation(name, pid, kLong), 0);
    testing::Pause(absl::Milliseconds(random() % 40));
  }
  for (std::thread& trainer : trainers) trainer.join();
  std::cout << kills << " kills\n";
  EXPECT_GT(kills, 3);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, 25));
  EXPECT_EQ(learnt, expected.back());
}

}  // namespace
}  // namespace shardmesh
