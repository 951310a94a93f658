// Streams whose peer lives and stands still end by themselves, and hold nothing of a deleted job.
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/shardctl.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "rpc/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/await.h"
#include "tests/testing/training/counting_job.h"
#include "tests/testing/training/raw_trainer.h"
#include "tests/testing/training/training.h"
#include "worker/doors/stalled_call.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Await;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::RawTrainer;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(30);

// A push of which the header is sent, and nothing else.
struct StalledPush {
  StalledPush(RawTrainer& trainer, int64_t step) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    writer = trainer.stub(Rank(0)).Push(&context, &reply);
    v1::PushChunk first;
    *first.mutable_header() = trainer.Header(0, step, 0);
    writer->Write(first);
  }
  ~StalledPush() {
    context.TryCancel();
    if (!over) writer->Finish();
  }
  // What a push of the same gradient shard hears that ends before its data: Aborted, while this one is under way.
  static absl::Status Probe(RawTrainer& trainer, int64_t step) {
    StalledPush probe(trainer, step);
    probe.writer->WritesDone();
    return probe.End();
  }
  absl::Status End() {
    over = true;
    return FromGrpc(writer->Finish(), "Push");
  }
  grpc::ClientContext context;
  v1::PushReply reply;
  std::unique_ptr<grpc::ClientWriter<v1::PushChunk>> writer;
  bool over = false;
};

// One that has begun: a probe hears of it. A probe that the worker saw first has taken its place for a moment, so that
// it ended: then another one begins. Null: none did.
std::unique_ptr<StalledPush> BeginStalled(RawTrainer& trainer, int64_t step) {
  constexpr int kProbes = 50;
  const absl::Time deadline = MonotonicNow() + kLong;
  do {
    auto stalled = std::make_unique<StalledPush>(trainer, step);
    for (int i = 0; i < kProbes; ++i) {
      if (absl::IsAborted(StalledPush::Probe(trainer, step))) return stalled;
      testing::Pause(absl::Milliseconds(10));
    }
  } while (MonotonicNow() < deadline);
  return nullptr;
}

struct StalledCalls : ::testing::Test {
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster, Cluster::Start({.workers = 1, .heartbeat_timeout = absl::Seconds(2)}));
    ASSERT_OK_AND_ASSIGN(Client made, cluster->Connect());
    client = std::make_unique<Client>(std::move(made));
    ASSERT_OK_AND_ASSIGN(job, client->CreateJob(testing::TinyJob("job", "fsdp=1", 1)));
    ASSERT_OK(testing::Initialize(*job));
    ASSERT_OK_AND_ASSIGN(trainer, RawTrainer::Create(job));
  }
  bool WorkerHasMemory() const {
    bool has = false;
    std::error_code error;
    for (const auto& fd :
         fs::directory_iterator(absl::StrCat("/proc/", cluster->worker("w0").pid(), "/fd"), error)) {
      has = has || absl::StrContains(fs::read_symlink(fd, error).string(), "memfd:shardmesh-");
    }
    return has;
  }
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<Client> client;
  std::shared_ptr<Job> job;
  std::unique_ptr<RawTrainer> trainer;
};

TEST_F(StalledCalls, APushWithoutData_EndsAfterTwoTimeOuts_AndAnotherMayBegin) {
  const std::unique_ptr<StalledPush> stalled = BeginStalled(*trainer, 1);
  ASSERT_NE(stalled, nullptr);
  EXPECT_TRUE(Await([&] { return trainer->Push(0, 1, 0).ok(); }));
  EXPECT_THAT(stalled->End(), StatusIs(Code::kAborted, HasSubstr("no data of this push came for 4s")));
  EXPECT_OK(trainer->Step(0, {0}, 1));
}

TEST_F(StalledCalls, APushWithoutData_KeepsNothingOfADeletedJob) {
  const std::unique_ptr<StalledPush> stalled = BeginStalled(*trainer, 1);
  ASSERT_NE(stalled, nullptr);
  ASSERT_TRUE(WorkerHasMemory());
  ASSERT_OK(testing::Delete(*client, "job"));
  EXPECT_TRUE(Await([&] { return !WorkerHasMemory(); }));
  EXPECT_THAT(stalled->End(), StatusIs(Code::kNotFound, HasSubstr("deleted")));
}

// A pull of which nothing is read. Its connection's window takes less than a message.
struct StalledPull {
  StalledPull(const std::string& worker, const v1::PullRequest& request) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    stub = v1::Shard::NewStub(grpc::CreateCustomChannel(worker, grpc::InsecureChannelCredentials(), arguments));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    reader = stub->Pull(&context, request);
  }
  ~StalledPull() {
    context.TryCancel();
    reader->Finish();
  }
  std::unique_ptr<v1::Shard::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::PullChunk>> reader;
};

struct StalledPulls : testing::CountingCluster {
  // That stand still: their messages wait to be taken.
  std::vector<v1::ListLeasesReply::Holder> Named(int rank) {
    std::vector<v1::ListLeasesReply::Holder> named;
    const auto listed = job_->worker(Rank(rank)).ListLeases(testing::kJob, kLong);
    EXPECT_OK(listed);
    if (!listed.ok()) return named;
    for (const v1::ListLeasesReply::Holder& holder : listed->holders()) {
      if (!holder.puller().empty() && holder.left_ms() < absl::ToInt64Milliseconds(kPullSilence))
        named.push_back(holder);
    }
    return named;
  }
  CommandResult Shardctl(std::vector<std::string> more) {
    std::vector<std::string> words = {"leases", testing::kJob, "--coordinator", cluster_->coordinator_address()};
    words.insert(words.end(), more.begin(), more.end());
    return RunShardctl(words);
  }
};

TEST_F(StalledPulls, AreNamed_ByListLeases_ShardctlAndTheRefusalToPublish) {
  Begin(testing::CountingJob(/*publications=*/2));
  ASSERT_OK(trainer_->To(1));
  ASSERT_OK_AND_ASSIGN(const v1::Lease lease, Lease(0, absl::Seconds(60)));
  v1::PullRequest exact, leased;
  exact.set_job(testing::kJob);
  exact.set_exact(0);
  leased.set_job(testing::kJob);
  leased.set_lease(lease.id());
  {
    const StalledPull one(job_->members()[1].address(), exact), two(job_->members()[1].address(), leased);
    ASSERT_TRUE(Await([&] { return Named(1).size() == 2; }));
    for (const v1::ListLeasesReply::Holder& holder : Named(1)) {
      EXPECT_EQ(holder.step(), 0);
      EXPECT_EQ(holder.epoch(), job_->epoch().value());
      EXPECT_THAT(holder.puller(), HasSubstr("127.0.0.1:"));
      EXPECT_GT(holder.left_ms(), 0);
    }
    EXPECT_EQ(Named(0).size(), 0u);  // they are not that worker's
    const std::string puller = Named(1)[0].puller();

    const CommandResult table = Shardctl({}), json = Shardctl({"--json"});
    EXPECT_THAT(table.out, ContainsRegex(absl::StrCat("0 +pull of ", puller,
                                                      " at w1 +its end; cut off in [0-9.]+ s if "
                                                      "nothing is read")));
    EXPECT_THAT(table.out, HasSubstr("1 of 2 publications kept"));
    EXPECT_THAT(json.out, HasSubstr(absl::StrCat("\"puller\":\"", puller, "\"")));

    ASSERT_OK(trainer_->To(4));
    EXPECT_THAT(job_->worker(Rank(1)).Publish(testing::kJob, kLong),
                StatusIs(Code::kResourceExhausted, AllOf(HasSubstr("version 0 (2 pulls: "), HasSubstr(puller))));
    EXPECT_THAT(job_->worker(Rank(0)).Publish(testing::kJob, kLong),
                StatusIs(Code::kResourceExhausted, HasSubstr("2 pulls: 2 through other workers")));
  }
  EXPECT_TRUE(Await([&] { return Named(1).empty(); }));
  EXPECT_THAT(Shardctl({}).out, Not(HasSubstr("pull of")));
}

}  // namespace
}  // namespace shardmesh
