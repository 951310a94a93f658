// A bit that flips in the memory of a worker is found and named: by the comparison of replicas within check_every
// steps, and by the digest that a chunk was written with; the trainers' next step says where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/uio.h>

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Variant;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kTimeout = absl::Seconds(20);

// Where a rank's shard lies in its worker; 0: nowhere.
uint64_t ShardAt(pid_t pid, const std::string& job, int rank) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    if (!absl::StrContains(line, absl::StrCat("memfd:shardmesh-", job, "-shard-", rank, " "))) continue;
    uint64_t begin = 0;
    std::istringstream(line) >> std::hex >> begin;
    return begin;
  }
  return 0;
}

// Flips a bit of the exponent of element 7 of the shard's first range, in a stream, as it lies after `steps` steps.
// (The last bit of a mantissa may be rounded away by the next step.)
void FlipBit(Cluster& cluster, const Job& job, int rank, int stream, int64_t steps) {
  const Plan& plan = job.plan();
  ASSERT_OK_AND_ASSIGN(const ShardStorage storage, ShardStorage::Cut(plan, plan.PlaceOf(Rank(rank)).shard, {}));
  const StorageRange& range = storage.ranges()[0];
  const pid_t pid = cluster.worker(job.members()[rank].worker()).pid();
  const uint64_t begin = ShardAt(pid, job.spec().name, rank);
  ASSERT_NE(begin, 0u);
  const int64_t element = range.Base(static_cast<int>(steps % 2)) + 7;
  const uint64_t at = begin + storage.StreamAt(0, stream) + range.parts[stream].BytesOf(element + 1) - 1;
  uint8_t byte = 0;
  const iovec here = {&byte, 1}, there = {reinterpret_cast<void*>(at), 1};
  ASSERT_EQ(process_vm_readv(pid, &here, 1, &there, 1, 0), 1) << strerror(errno);
  byte ^= 1;
  ASSERT_EQ(process_vm_writev(pid, &here, 1, &there, 1, 0), 1) << strerror(errno);
}

struct Training {
  static absl::StatusOr<Training> Start(Client& client, const JobSpec& spec, bool attached) {
    Training training;
    ASSIGN_OR_RETURN(training.job, client.CreateJob(spec));
    RETURN_IF_ERROR(testing::Initialize(*training.job));
    ASSIGN_OR_RETURN(training.session, attached ? training.job->Attach({Slot(0)}) : training.job->Connect({Slot(0)}));
    RETURN_IF_ERROR(training.session->AwaitWeights(kTimeout));
    return training;
  }
  // The first step that fails, up to `last`, and how.
  std::pair<int64_t, absl::Status> StepUntilRefused(int64_t from, int64_t last) {
    for (int64_t step = from; step <= last; ++step) {
      if (const absl::Status status = testing::TrainTo(*session, step); !status.ok()) return {step, status};
    }
    return {last + 1, absl::OkStatus()};
  }
  std::shared_ptr<Job> job;
  std::unique_ptr<Session> session;
};

JobSpec Checked(const std::string& name, const std::string& mesh, int check_every) {
  JobSpec spec = testing::OddJob(name, mesh, 1);
  spec.check_every = check_every;
  return spec;
}

TEST(SilentCorruption, Replicas_DifferenceIsFoundWithinCheckEverySteps) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  for (const bool attached : {true, false}) {
    const JobSpec spec = Checked(absl::StrCat("replicas-", attached), "ddp=2", 4);
    ASSERT_OK_AND_ASSIGN(Training training, Training::Start(client, spec, attached));
    ASSERT_OK(testing::TrainTo(*training.session, 5));
    ASSERT_NO_FATAL_FAILURE(FlipBit(*cluster, *training.job, 1, /*stream=*/1, 5));
    const auto [step, status] = training.StepUntilRefused(6, 20);
    // The comparison is behind the commit of step 8; the trainer hears of it with the next call.
    EXPECT_LE(step, 9);
    EXPECT_THAT(status,
                StatusIs(Code::kDataLoss,
                         AllOf(HasSubstr(absl::StrCat("worker ", training.job->members()[1].worker())),
                               HasSubstr("(rank 1, "), HasSubstr("may be wrong; the last committed step is 8"))));
  }
}

TEST(SilentCorruption, NoReplicas_ChunkIsCheckedWhenItIsReadNext) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  for (const int stream : {0, 1, 2}) {  // weights, both states
    ASSERT_OK_AND_ASSIGN(Training training,
                         Training::Start(client, Checked(absl::StrCat("stream-", stream), "fsdp=2", 1), stream != 1));
    ASSERT_OK(testing::TrainTo(*training.session, 3 + stream));
    ASSERT_NO_FATAL_FAILURE(FlipBit(*cluster, *training.job, 1, stream, 3 + stream));
    const auto [step, status] = training.StepUntilRefused(4 + stream, 10);
    EXPECT_EQ(step, 4 + stream);
    EXPECT_THAT(status, StatusIs(Code::kDataLoss, AllOf(HasSubstr("(rank 1, "), HasSubstr("changed between two steps"),
                                                        HasSubstr("element 1024 of parameter \"layers.2.weight\""))));
    v1::DeleteJobRequest done;
    done.set_job(training.job->spec().name);
    ASSERT_OK(client.coordinator().DeleteJob(done, kTimeout));
  }
}

TEST(SilentCorruption, UndisturbedJob_LearnsTheSame) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  const Variant variant = {"ddp=2,fsdp=2", {{{0}, true}}};
  ASSERT_OK_AND_ASSIGN(const Learnt plain,
                       testing::TrainVariant(client, testing::OddJob("plain", variant.mesh, 1), variant, 12));
  for (const int check_every : {1, 5}) {
    const JobSpec spec = Checked(absl::StrCat("checked-", check_every), variant.mesh, check_every);
    ASSERT_OK_AND_ASSIGN(const Learnt checked, testing::TrainVariant(client, spec, variant, 12));
    EXPECT_EQ(checked, plain) << check_every;
  }
}

}  // namespace
}  // namespace shardmesh
