// Streams whose peer lives and stands still end by themselves, and hold nothing of a deleted job.
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/clock.h"
#include "core/matchers.h"
#include "core/status.h"
#include "rpc/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/raw_trainer.h"
#include "tests/testing/training.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::RawTrainer;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(30);

bool Await(const std::function<bool()>& done) {
  const absl::Time deadline = MonotonicNow() + kLong;
  while (!done() && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(10));
  return done();
}

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
  // What a push of the same piece hears that ends before its data: Aborted, while this one is under way.
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
  StalledPush stalled(*trainer, 1);
  ASSERT_TRUE(Await([&] { return absl::IsAborted(StalledPush::Probe(*trainer, 1)); }));  // it has begun
  EXPECT_TRUE(Await([&] { return trainer->Push(0, 1, 0).ok(); }));
  EXPECT_THAT(stalled.End(), StatusIs(Code::kAborted, HasSubstr("no data of this push came for 4s")));
  EXPECT_OK(trainer->Step(0, {0}, 1));
}

TEST_F(StalledCalls, APushWithoutData_KeepsNothingOfADeletedJob) {
  StalledPush stalled(*trainer, 1);
  ASSERT_TRUE(Await([&] { return absl::IsAborted(StalledPush::Probe(*trainer, 1)); }));
  ASSERT_TRUE(WorkerHasMemory());
  ASSERT_OK(testing::Delete(*client, "job"));
  EXPECT_TRUE(Await([&] { return !WorkerHasMemory(); }));
  EXPECT_THAT(stalled.End(), StatusIs(Code::kNotFound, HasSubstr("deleted")));
}

}  // namespace
}  // namespace shardmesh
