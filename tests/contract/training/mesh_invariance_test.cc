// Contract 1: for bit-identical gradients per slot, weights and optimizer state are bit-identical on every mesh, with
// every number of workers, hosts and threads, for attached and connected trainers, with every bucket size and
// residency, in every format and with every optimizer. What all must learn is what the reference kernels give for whole
// tensors; and the same kernels on pieces of them, through the collectives of every implementation on CPUs.
//
// A job of several hosts shares its steps over TCP, with TLS or in the clear, one of a single host in shared memory.
// Hosts are names here (--host-name) and the line between them is loopback; with real ones:
// tests/e2e/job_on_two_hosts_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <random>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/reshard.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"
#include "rpc/testing/test_authority.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/testing/group_families.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Trainer;
using ::shardmesh::testing::Variant;

constexpr int kSlots = 3;
constexpr int64_t kFew = 5;  // as few as two would use both parities of rotating storage
constexpr int64_t kMany = 0;  // StepsOf says how many

struct Combination {
  OptimizerKind kind;
  WeightFormat weights;
  StateFormat states;
  GatherFormat gather;
  int64_t steps = kMany;
  double clip_norm = 0;
  bool amsgrad = false;
};

// Every optimizer, every format of weights, of states and of gathered weights, each more than once.
constexpr Combination kCombinations[] = {
    {OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp32, GatherFormat::kStored},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Sr, StateFormat::kFp32, GatherFormat::kFp8Tensor, kMany,
     /*clip_norm=*/1.0},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Sr, StateFormat::kDyn8, GatherFormat::kFp8Row},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Plus8Sr, StateFormat::kFp8x32, GatherFormat::kNf4},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Plus16, StateFormat::kBf16Sr, GatherFormat::kFp8Block},
    {OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp8, GatherFormat::kInt8Row},
    {OptimizerKind::kAdamW, WeightFormat::kInt8Row, StateFormat::kDyn8, GatherFormat::kStored},
    {OptimizerKind::kAdam, WeightFormat::kBf16Plus8Sr, StateFormat::kDyn8, GatherFormat::kMx8, kMany, /*clip_norm=*/0,
     /*amsgrad=*/true},
    {OptimizerKind::kLion, WeightFormat::kBf16Sr, StateFormat::kBf16Sr, GatherFormat::kFp8Tensor, kMany,
     /*clip_norm=*/0.5},
    {OptimizerKind::kSgd, WeightFormat::kBf16Plus8Sr, StateFormat::kDyn4, GatherFormat::kMx8},
    {OptimizerKind::kMuon, WeightFormat::kFp32, StateFormat::kFp32, GatherFormat::kStored},
    {OptimizerKind::kMuon, WeightFormat::kBf16Sr, StateFormat::kDyn8, GatherFormat::kFp8Tensor, kMany,
     /*clip_norm=*/0.5},
    {OptimizerKind::kAdam, WeightFormat::kBf16, StateFormat::kFp8x32, GatherFormat::kStored},
    {OptimizerKind::kLion, WeightFormat::kBf16Plus16, StateFormat::kFp8, GatherFormat::kStored, kFew},
    {OptimizerKind::kSgd, WeightFormat::kBf16, StateFormat::kFp32, GatherFormat::kFp8Row, kFew},
    {OptimizerKind::kAdamW, WeightFormat::kInt8Row, StateFormat::kFp32, GatherFormat::kInt8Row, kFew,
     /*clip_norm=*/0.5},
    {OptimizerKind::kLion, WeightFormat::kInt8Row, StateFormat::kBf16Sr, GatherFormat::kStored, kFew},
    {OptimizerKind::kSgd, WeightFormat::kInt8Row, StateFormat::kDyn4, GatherFormat::kStored, kFew},
    {OptimizerKind::kSgd, WeightFormat::kInt8Row, StateFormat::kFp32, GatherFormat::kFp8Tensor, kFew,
     /*clip_norm=*/0.5},
    {OptimizerKind::kAdam, WeightFormat::kInt8Row, StateFormat::kDyn8, GatherFormat::kFp8Block, kFew},
    {OptimizerKind::kLion, WeightFormat::kInt8Row, StateFormat::kFp8x32, GatherFormat::kNf4, kFew},
    {OptimizerKind::kMuon, WeightFormat::kBf16, StateFormat::kDyn4, GatherFormat::kFp8Row, kFew},
    {OptimizerKind::kMuon, WeightFormat::kBf16Plus8Sr, StateFormat::kFp8x32, GatherFormat::kFp8Block, kFew},
    {OptimizerKind::kMuon, WeightFormat::kBf16Plus16, StateFormat::kFp8, GatherFormat::kMx8, kFew},
};
constexpr int kNumCombinations = static_cast<int>(std::size(kCombinations));

// 20 steps show what more do, since each begins with the bits of the one before; SHARDMESH_INVARIANCE_STEPS says others.
int64_t StepsOf(const Combination& c) {
  return c.steps != kMany ? c.steps : testing::NumberOfEnvironment("SHARDMESH_INVARIANCE_STEPS", 20);
}

std::string Describe(const Combination& c) {
  return absl::StrCat(OptimizerName(c.kind), c.amsgrad ? "-amsgrad" : "", " ", WeightFormatName(c.weights), " ",
                      StateFormatName(c.states), " ", GatherFormatName(c.gather));
}

// Gradients are in fp32 where states are: sums of three in bf16 are exact, whatever their order. Group 1 has the
// combination's optimizer, group 0 AdamW: it steps what Muon does not, and the last matrix. Parameters without elements
// or of another shape than a gather format codes are gathered as they are stored.
JobSpec JobOf(const Combination& c, const std::string& name) {
  JobSpec spec = testing::OddJob(name, "fsdp=1", kSlots);
  spec.parameters.push_back({"blocks", {70, 160}});
  spec.parameters.push_back({"last", {19, 64}});
  spec.clip_norm = c.clip_norm;
  spec.gradient_format = c.states == StateFormat::kFp32 ? Format::kFp32 : Format::kBf16;
  spec.more_groups = {OptimizerHyper::Defaults(c.kind)};
  spec.more_groups[0].weight_decay = 0.03;
  spec.more_groups[0].amsgrad = c.amsgrad;
  if (c.kind == OptimizerKind::kSgd) spec.more_groups[0].momentum = 0.8;
  for (ParameterSpec& p : spec.parameters) {
    p.format = c.weights;
    p.states = c.states;
    if (ScaleBlocksOf(c.gather, p.shape).ok()) p.gather = c.gather;
    p.group = p.name != "last" && (c.kind != OptimizerKind::kMuon || p.shape.size() == 2) ? 1 : 0;
  }
  spec.parameters.push_back({"base", {61, 130}, WeightFormat::kNf4});
  spec.parameters.back().frozen = true;
  return spec;
}

struct Place {
  int hosts, threads;
  bool tls = false;
};
constexpr Place kPlaces[] = {{1, 1}, {1, 2}, {2, 1, /*tls=*/true}, {2, 2}};

// 1 to 8 workers.
std::vector<Variant> VariantsOf(const Place& place) {
  const std::vector<Trainer> attached = {{{0, 1, 2}, true}}, connected = {{{0, 1, 2}, false}};
  const std::vector<Trainer> two = {{{2, 0}, true}, {{1}, true}}, mixed = {{{1}, true}, {{0, 2}, false}};
  constexpr Residency kBucket = Residency::kBucket;
  if (place.hosts > 1) {
    if (place.threads == 1) return {{"ddp=2,fsdp=2,abcd=2", attached, 1 << 14}};
    return {{"fsdp=8", mixed, 1 << 14}, {"ddp=4,fsdp=2", connected, 1 << 14}};
  }
  if (place.threads == 1) {
    return {{"fsdp=1", attached},
            {"fsdp=2", two, 1 << 14, kBucket},
            {"fsdp=4", connected},
            {"fsdp=8", mixed, 1024},
            {"ddp=2,fsdp=2,abcd=2", connected}};
  }
  return {{"fsdp=3", attached, 4096, kBucket},
          {"ddp=2,fsdp=4", two, kDefaultBucketElements},
          {"fsdp=8", connected, 1 << 14, kBucket},
          {"ddp=4,fsdp=2", attached}};
}

struct Family {
  const char* name;
  Groups (*make)(const std::vector<uint64_t>& epochs);
};
constexpr Family kFamilies[] = {
    {"local", [](const std::vector<uint64_t>& epochs) { return MakeLocalGroups(epochs); }},
    {"symmetric", [](const std::vector<uint64_t>& epochs) { return MakeSymmetricGroups(epochs); }},
    {"gloo", [](const std::vector<uint64_t>& epochs) { return MakeGlooGroups(epochs); }},
    {"tcp", [](const std::vector<uint64_t>& epochs) { return MakeSecureGroups(epochs, /*tls=*/false); }},
    {"tls", [](const std::vector<uint64_t>& epochs) { return MakeSecureGroups(epochs, /*tls=*/true); }}};

// What each rank learns where all train through the collectives of a group alone.
std::vector<Learnt> TrainOnGroup(const JobSpec& spec, int64_t steps, const Family& family, int ranks) {
  const Groups groups = family.make(std::vector<uint64_t>(ranks, 1));
  std::vector<Learnt> learnt(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { learnt[rank] = testing::ReferenceOf(spec, steps, groups[rank].get()); });
  }
  for (std::thread& thread : threads) thread.join();
  return learnt;
}

class MeshInvariance : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() {
    const TlsOptions service = testing::TestAuthority(certificates_.path(), "authority").Issue("service");
    for (const Place& place : kPlaces) {
      testing::ClusterOptions options;
      options.workers = 8;
      options.threads = place.threads;
      options.hosts = place.hosts;
      if (place.tls) options.tls = service;
      clusters_.push_back(Cluster::Start(std::move(options)));
    }
  }
  static void TearDownTestSuite() { clusters_.clear(); }

  static const testing::TempFolder certificates_;
  static std::vector<absl::StatusOr<std::unique_ptr<Cluster>>> clusters_;
};
const testing::TempFolder MeshInvariance::certificates_;
std::vector<absl::StatusOr<std::unique_ptr<Cluster>>> MeshInvariance::clusters_;

// On one cluster, every way; steps of jobs on two hosts wait more than they work, so places take their turns together.
void ExpectLearns(Cluster& cluster, const Place& place, const Combination& combination, const Learnt& reference) {
  ASSERT_OK_AND_ASSIGN(Client client, cluster.Connect());
  const JobSpec spec = JobOf(combination, "job");
  for (const Variant& variant : VariantsOf(place)) {
    SCOPED_TRACE(absl::StrCat(Describe(combination), " ", testing::Describe(variant), ", ", place.hosts, " hosts, ",
                              place.threads, " threads", place.tls ? ", TLS" : ""));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, spec, variant, StepsOf(combination)));
    ASSERT_EQ(learnt, reference);
  }
}

TEST_P(MeshInvariance, EveryMesh_LearnsTheReferencesBits) {
  const Combination& combination = kCombinations[GetParam()];
  const Learnt reference = testing::ReferenceOf(JobOf(combination, "job"), StepsOf(combination));
  std::vector<std::thread> places;
  for (size_t i = 0; i < std::size(kPlaces); ++i) {
    places.emplace_back([&, i] {
      ASSERT_OK(clusters_[i].status());
      ExpectLearns(**clusters_[i], kPlaces[i], combination, reference);
    });
  }
  for (std::thread& place : places) place.join();
}

TEST_P(MeshInvariance, EveryGroup_LearnsTheReferencesBits) {
  constexpr int kRanks[] = {3, 1, 4, 2};
  const Combination& combination = kCombinations[GetParam()];
  const int ranks = kRanks[GetParam() % std::size(kRanks)];
  const JobSpec spec = JobOf(combination, "job");
  const Learnt reference = testing::ReferenceOf(spec, StepsOf(combination));
  for (const Family& family : kFamilies) {
    SCOPED_TRACE(absl::StrCat(Describe(combination), ", ", family.name, " of ", ranks, " ranks"));
    for (const Learnt& learnt : TrainOnGroup(spec, StepsOf(combination), family, ranks)) ASSERT_EQ(learnt, reference);
  }
}

// Now and then a worker is killed, at some moment of a step; a node has its memory, and its next incarnation goes on.
absl::StatusOr<Learnt> TrainThroughKills(Cluster& cluster, const JobSpec& spec, int64_t steps, uint32_t seed) {
  std::mt19937 random(seed);
  ASSIGN_OR_RETURN(Client client, cluster.Connect());
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(testing::Initialize(*job));
  ASSIGN_OR_RETURN(const auto session, job->Attach({Slot(0), Slot(1), Slot(2)}));
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  const int64_t every = std::max<int64_t>(steps / 5, 2);
  for (int64_t step = 1; step <= steps; ++step) {
    const std::string name = absl::StrCat("w-", random() % job->plan().num_ranks());
    const pid_t pid = step % every == 1 ? cluster.PidOf(name) : 0;
    const int delay = static_cast<int>(random() % 4);
    std::thread killer([=] {
      testing::Pause(absl::Milliseconds(delay));
      if (pid > 0) kill(pid, SIGKILL);
    });
    const absl::Status trained = testing::TrainTo(*session, step);
    killer.join();
    RETURN_IF_ERROR(trained);
    if (pid > 0 && cluster.AwaitNextIncarnation(name, pid, absl::Seconds(20)) == 0)
      return absl::InternalError("no next incarnation");
  }
  ASSIGN_OR_RETURN(Learnt learnt, testing::Learn(*job, steps));
  RETURN_IF_ERROR(testing::Delete(client, spec.name));
  return learnt;
}

TEST_P(MeshInvariance, KilledWorkers_LearnTheReferencesBits) {
  constexpr const char* kMeshes[] = {"fsdp=4", "ddp=2,fsdp=2", "fsdp=2", "ddp=2"};
  const Combination& combination = kCombinations[GetParam()];
  JobSpec spec = JobOf(combination, "job");
  spec.mesh = ParseMeshSpec(kMeshes[GetParam() % std::size(kMeshes)]).value();
  const auto seed = static_cast<uint32_t>(std::random_device()());
  SCOPED_TRACE(absl::StrCat(Describe(combination), ", seed ", seed));
  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start({.workers = 4, .heartbeat_timeout = absl::Seconds(20), .retained = true}));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, TrainThroughKills(*cluster, spec, StepsOf(combination), seed));
  EXPECT_EQ(learnt, testing::ReferenceOf(spec, StepsOf(combination)));
}

// On two hosts: the first lead is killed and comes back; the second host is lost for good, and the job goes on with the
// first; then that host is there again, and the job is brought to a mesh on both.
absl::StatusOr<Learnt> TrainThroughHosts(Cluster& cluster, const JobSpec& spec, int64_t steps, bool attached) {
  constexpr absl::Duration kLong = absl::Seconds(30);
  ASSIGN_OR_RETURN(Client client, cluster.Connect());
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(testing::Initialize(*job));
  const auto train = [&](int64_t last) -> absl::Status {
    ASSIGN_OR_RETURN(job, client.OpenJob(spec.name));
    return testing::TrainOver(client, job, [&](Job& now) -> absl::Status {
      const std::vector<Slot> slots = {Slot(0), Slot(1), Slot(2)};
      ASSIGN_OR_RETURN(const auto session, attached ? now.Attach(slots) : now.Connect(slots));
      RETURN_IF_ERROR(session->AwaitWeights(kLong));
      return testing::TrainTo(*session, last, kLong);
    });
  };
  const auto kill_worker = [&](int worker) {
    const pid_t pid = cluster.PidOf(cluster.RetainedName(worker));
    if (pid > 0) kill(pid, SIGKILL);
  };
  RETURN_IF_ERROR(train(steps / 5));
  kill_worker(0);
  RETURN_IF_ERROR(train(steps * 2 / 5));
  cluster.node(1).Kill9();
  for (const int worker : {2, 3}) kill_worker(worker);
  RETURN_IF_ERROR(train(steps * 3 / 5));
  ASSIGN_OR_RETURN(job, client.OpenJob(spec.name));
  if (job->members().size() != 2) return absl::InternalError("the job did not lose its second host");
  RETURN_IF_ERROR(cluster.StartNode(1));
  const absl::Time deadline = MonotonicNow() + kLong;
  ReshardOptions options;
  options.timeout = kLong;
  absl::Status moved;
  do {
    moved = ReshardJob(client, spec.name, ParseMeshSpec("fsdp=4").value(), options).status();
    testing::Pause(absl::Milliseconds(20));
  } while (!moved.ok() && MonotonicNow() < deadline);
  RETURN_IF_ERROR(moved);
  RETURN_IF_ERROR(train(steps));
  ASSIGN_OR_RETURN(job, client.OpenJob(spec.name));
  return testing::Learn(*job, steps);
}

class HostsInvariance : public ::testing::TestWithParam<int> {};

TEST_P(HostsInvariance, RestartReformAndReshard_LearnTheReferencesBits) {
  const Combination& combination = kCombinations[GetParam()];
  JobSpec spec = JobOf(combination, "job");
  spec.mesh = ParseMeshSpec("ddp=2,fsdp=2").value();
  SCOPED_TRACE(Describe(combination));
  ASSERT_OK_AND_ASSIGN(
      const auto cluster,
      Cluster::Start({.workers = 4, .hosts = 2, .heartbeat_timeout = absl::Seconds(1), .retained = true}));
  const bool attached = GetParam() % 2 == 0;
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, TrainThroughHosts(*cluster, spec, StepsOf(combination), attached));
  EXPECT_EQ(learnt, testing::ReferenceOf(spec, StepsOf(combination)));
}

INSTANTIATE_TEST_SUITE_P(Combinations, MeshInvariance, ::testing::Range(0, kNumCombinations));
// Every format and optimizer once.
INSTANTIATE_TEST_SUITE_P(Combinations, HostsInvariance, ::testing::Range(0, 13));

// The comparisons above see one combination for another, and a difference of one bit in one slot's gradients.
TEST(MeshInvarianceSees, OtherCombinations) {
  std::set<uint64_t> digests;
  for (const Combination& combination : kCombinations) {
    EXPECT_TRUE(digests.insert(testing::ReferenceOf(JobOf(combination, "job"), 2).digest).second)
        << Describe(combination) << " learns what another one does";
  }
}

TEST(MeshInvarianceSees, OtherGradients) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  const JobSpec spec = JobOf(kCombinations[0], "other");
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1), Slot(2)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::TrainTo(*session, 4));
  ASSERT_OK(testing::WriteGradients(*session, Step(5)));
  ASSERT_OK_AND_ASSIGN(const TensorView bias, session->gradient(Slot(1), "layers.0.bias"));
  static_cast<uint16_t*>(bias.data)[3] ^= 1;
  StepOptions options;
  options.learning_rates = testing::LearningRates(spec, 5);
  ASSERT_OK(session->Step(options));
  ASSERT_OK_AND_ASSIGN(const Learnt other, testing::Learn(*job, 5));
  EXPECT_NE(other.digest, testing::ReferenceOf(spec, 5).digest);
}

}  // namespace
}  // namespace shardmesh
