// A client that has the .proto files and their comments alone trains a job: everything it uses comes out of a reply.
// docs/operations.md, "A client from the .proto alone", says the same in words.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/process.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSlots = 3, kSteps = 3;
constexpr int64_t kElements = 5000;  // of "w": more than a shard holds
constexpr int kMilliseconds = 30'000;

void SetDeadline(grpc::ClientContext& context, int milliseconds = kMilliseconds) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(milliseconds));
}

// Sums of few of these are exact in fp32.
float InitialOf(int tensor, int64_t element) { return static_cast<float>((element * 7 + tensor * 3) % 64) / 16; }
float GradientOf(int64_t step, int slot, int tensor, int64_t element) {
  return static_cast<float>((element + step * 5 + slot * 11 + tensor) % 32 - 16) / 4;
}

class ProtoClient : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 4}));
    coordinator_ = v1::Coordinator::NewStub(
        grpc::CreateChannel(cluster_->coordinator_address(), grpc::InsecureChannelCredentials()));
  }

  static v1::CreateJobRequest JobRequest() {
    v1::CreateJobRequest request;
    request.mutable_protocol()->set_major(1);
    v1::JobSpec& spec = *request.mutable_spec();
    spec.set_name("job");
    for (const char* name : {"ddp", "fsdp"}) {
      v1::MeshDimension& dimension = *spec.add_mesh();
      dimension.set_name(name);
      dimension.set_size(2);
    }
    spec.set_slots(kSlots);
    spec.set_gradient_format(v1::FORMAT_FP32);
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_KIND_SGD);
    spec.mutable_optimizer()->set_learning_rate(3);
    for (const auto& [name, size] : std::map<std::string, int64_t>{{"b", 70}, {"w", kElements}}) {
      v1::Parameter& parameter = *spec.add_parameters();
      parameter.set_name(name);
      parameter.add_shape(size);
    }
    return request;
  }

  void Create(bool pulled = false) {
    v1::CreateJobRequest request = JobRequest();
    if (pulled) request.mutable_spec()->set_slot_mode(v1::SLOT_MODE_PULLED);
    if (pulled) request.mutable_spec()->set_trainers(2);
    v1::CreateJobReply reply;
    grpc::ClientContext context;
    SetDeadline(context);
    const grpc::Status created = coordinator_->CreateJob(&context, request, &reply);
    ASSERT_TRUE(created.ok()) << created.error_message();
    EXPECT_EQ(reply.job().protocol().major(), 1);
    const absl::Time deadline = MonotonicNow() + absl::Milliseconds(kMilliseconds);
    v1::DescribeJobRequest describe;
    describe.set_job("job");
    while (job_.state() != v1::JOB_STATE_READY && MonotonicNow() < deadline) {
      grpc::ClientContext again;
      SetDeadline(again);
      ASSERT_TRUE(coordinator_->DescribeJob(&again, describe, &job_).ok());
    }
    ASSERT_EQ(job_.state(), v1::JOB_STATE_READY);
    for (const v1::Member& member : job_.members()) {
      workers_.push_back(v1::Shard::NewStub(grpc::CreateChannel(member.address(), grpc::InsecureChannelCredentials())));
    }
    v1::GetPlanRequest get;
    get.set_job("job");
    grpc::ClientContext planning;
    SetDeadline(planning);
    ASSERT_TRUE(coordinator_->GetPlan(&planning, get, &plan_).ok());
    ASSERT_EQ(plan_.hash(), job_.plan_hash());
  }

  // What a shard holds of values that belong to (tensor, element); zeros elsewhere.
  template <class Value>
  std::string ShardOf(int shard, const Value& value) const {
    std::string bytes;
    for (int b = 0; b < plan_.buckets_size(); ++b) {
      std::vector<float> flat(static_cast<size_t>(plan_.buckets(b).num_elements()));
      for (int t = 0; t < plan_.placements_size(); ++t) {
        const v1::GetPlanReply::Placement& at = plan_.placements(t);
        for (int64_t i = 0; at.bucket() == b && i < at.num_elements(); ++i) flat[at.offset() + i] = value(t, i);
      }
      const int64_t elements = plan_.buckets(b).shard_elements();
      bytes.append(reinterpret_cast<const char*>(flat.data() + shard * elements), elements * sizeof(float));
    }
    return bytes;
  }

  void Push(const v1::Member& member, v1::PushHeader header, const std::string& bytes) {
    header.set_shard(member.shard());
    Push(member.rank(), std::move(header), bytes);
  }
  void Push(int rank, v1::PushHeader header, const std::string& bytes) {
    header.set_job("job");
    header.set_epoch(job_.epoch());
    header.set_total_bytes(static_cast<int64_t>(bytes.size()));
    grpc::ClientContext context;
    SetDeadline(context);
    v1::PushReply reply;
    const auto writer = workers_[rank]->Push(&context, &reply);
    v1::PushChunk chunk;
    *chunk.mutable_header() = header;
    chunk.set_data(bytes);
    writer->Write(chunk);
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
  }

  grpc::Status AwaitWeights(int rank, int milliseconds, v1::AwaitWeightsReply& reply) {
    v1::AwaitWeightsRequest request;
    request.set_job("job");
    request.set_epoch(job_.epoch());
    grpc::ClientContext context;
    SetDeadline(context, milliseconds);
    return workers_[rank]->AwaitWeights(&context, request, &reply);
  }

  void Initialize() {
    v1::PushHeader header;
    header.set_content(v1::PushHeader::CONTENT_INITIAL_WEIGHTS);
    header.set_push_id(12345);
    for (const v1::Member& member : job_.members()) Push(member, header, ShardOf(member.shard(), InitialOf));
  }

  void TrainStep(int64_t step) {
    v1::StepRequest request;
    request.set_job("job");
    request.set_epoch(job_.epoch());
    request.set_step(step);
    for (int slot = 0; slot < kSlots; ++slot) {
      request.add_slots(slot);
      v1::PushHeader header;
      header.set_content(v1::PushHeader::CONTENT_GRADIENT);
      header.set_slot(slot);
      header.set_step(step);
      for (const v1::Member& member : job_.members()) {
        if (member.replica() != slot % plan_.replicas()) continue;
        Push(member, header, ShardOf(member.shard(), [&](int tensor, int64_t element) {
               return GradientOf(step, slot, tensor, element);
             }));
      }
    }
    grpc::ClientContext context;
    SetDeadline(context);
    v1::StepReply reply;
    const grpc::Status status = workers_[step % workers_.size()]->Step(&context, request, &reply);  // any
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.step(), step);
    EXPECT_FALSE(reply.skipped());
  }

  std::string PullStep(int64_t step) {
    v1::PullRequest request;
    request.set_exact(step);
    return Pull(job_.members_size() - 1, request);
  }
  std::string Pull(int rank, v1::PullRequest request) {
    request.set_job("job");
    grpc::ClientContext context;
    SetDeadline(context);
    const auto reader = workers_[rank]->Pull(&context, request);
    std::string bytes;
    for (v1::PullChunk chunk; reader->Read(&chunk);) bytes += chunk.data();
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return bytes;
  }

  void ExpectTrained(const std::string& bytes, int64_t steps) {
    int64_t begin = 0;
    for (int b = 0; b < plan_.buckets_size(); ++b) {
      for (int t = 0; t < plan_.placements_size(); ++t) {
        const v1::GetPlanReply::Placement& at = plan_.placements(t);
        for (int64_t i = 0; at.bucket() == b && i < at.num_elements(); ++i) {
          float expected = InitialOf(t, i), value = 0;
          for (int64_t step = 1; step <= steps; ++step) {
            float sum = 0;
            for (int slot = 0; slot < kSlots; ++slot) sum += GradientOf(step, slot, t, i);
            expected -= sum;  // the mean over the slots, times the learning rate
          }
          ASSERT_LE(begin + (at.offset() + i + 1) * 4, static_cast<int64_t>(bytes.size()));
          std::memcpy(&value, bytes.data() + begin + (at.offset() + i) * 4, sizeof value);
          ASSERT_NEAR(value, expected, 1e-4) << at.name() << " " << i;
        }
      }
      begin += plan_.buckets(b).weight_bytes();
    }
    EXPECT_EQ(begin, static_cast<int64_t>(bytes.size()));
  }

  // One trainer of a job with pulled slots: takes, pushes and finishes slots until `last` is committed, and says how
  // many.
  void PullSlots(int rank, int64_t last, int& slots) {
    v1::SeatRequest seat_request;
    seat_request.set_job("job");
    seat_request.set_epoch(job_.epoch());
    grpc::ClientContext open;  // no deadline: the seat is there as long as the call
    const auto seat_call = workers_[rank]->Seat(&open, seat_request);
    v1::SeatReply seat;
    ASSERT_TRUE(seat_call->Read(&seat));
    v1::TrainerRequest request;
    request.set_session(seat.session());
    request.mutable_slot()->set_take(true);
    request.mutable_slot()->set_after_step(seat.committed_step());
    while (request.slot().after_step() < last) {
      grpc::ClientContext context;
      SetDeadline(context);
      v1::TrainerReply reply;
      const grpc::Status status = workers_[rank]->Trainer(&context, request, &reply);
      ASSERT_TRUE(status.ok()) << status.error_message();
      request.mutable_slot()->clear_finished();
      if (!reply.slot().has_slot()) {
        request.mutable_slot()->set_after_step(reply.slot().committed().step());
        continue;
      }
      const int slot = reply.slot().slot();
      const int64_t step = reply.slot().step();
      v1::PullRequest weights;  // that the slot is computed with
      weights.set_for_slot(slot);
      ASSERT_NO_FATAL_FAILURE(ExpectTrained(Pull(rank, weights), step - 1));
      PushSlot(rank, seat.session(), slot, step);
      request.mutable_slot()->mutable_finished()->set_slot(slot);
      request.mutable_slot()->mutable_finished()->set_step(step);
      ++slots;
    }
    open.TryCancel();
    seat_call->Finish();
  }
  void PushSlot(int rank, uint64_t session, int slot, int64_t step) {
    v1::PushHeader header;
    header.set_content(v1::PushHeader::CONTENT_GRADIENT);
    header.set_session(session);
    header.set_slot(slot);
    header.set_step(step);
    for (int shard = 0; shard < plan_.shards(); ++shard) {
      header.set_shard(shard);
      Push(rank, header,
           ShardOf(shard, [&](int tensor, int64_t element) { return GradientOf(step, slot, tensor, element); }));
    }
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<v1::Coordinator::Stub> coordinator_;
  std::vector<std::unique_ptr<v1::Shard::Stub>> workers_;  // by rank
  v1::JobDescription job_;
  v1::GetPlanReply plan_;
};

// Two trainers, each through another worker: they share the slots of each step.
TEST_F(ProtoClient, PullsSlots_WithWhatRepliesSay) {
  ASSERT_NO_FATAL_FAILURE(Create(/*pulled=*/true));
  ASSERT_NO_FATAL_FAILURE(Initialize());
  v1::AwaitWeightsReply reply;
  ASSERT_TRUE(AwaitWeights(1, kMilliseconds, reply).ok());
  ASSERT_TRUE(AwaitWeights(2, kMilliseconds, reply).ok());
  int slots[2] = {0, 0};
  std::thread other([&] { PullSlots(2, kSteps, slots[1]); });
  PullSlots(1, kSteps, slots[0]);
  other.join();
  EXPECT_EQ(slots[0] + slots[1], kSteps * kSlots);
  ExpectTrained(PullStep(kSteps), kSteps);
}

TEST_F(ProtoClient, Trains_WithWhatRepliesSay) {
  ASSERT_NO_FATAL_FAILURE(Create());
  EXPECT_EQ(plan_.shards() * plan_.replicas(), job_.members_size());
  v1::AwaitWeightsReply reply;
  EXPECT_EQ(AwaitWeights(3, 200, reply).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  ASSERT_NO_FATAL_FAILURE(Initialize());
  for (int rank = 0; rank < job_.members_size(); ++rank) {
    const grpc::Status status = AwaitWeights(rank, kMilliseconds, reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.step(), 0);
  }
  for (int64_t step = 1; step <= kSteps; ++step) ASSERT_NO_FATAL_FAILURE(TrainStep(step));
  ExpectTrained(PullStep(kSteps), kSteps);
}

TEST_F(ProtoClient, OfAnotherMajorVersion_IsRefusedEverywhere_AndBothAreNamed) {
  const auto refused = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), AllOf(HasSubstr("protocol version 2.7"), HasSubstr("1.3")));
  };
  v1::ProtocolVersion later;
  later.set_major(2);
  later.set_minor(7);
  v1::CreateJobRequest create = JobRequest();
  *create.mutable_protocol() = later;
  v1::CreateJobReply created;
  grpc::ClientContext contexts[4];
  for (grpc::ClientContext& context : contexts) SetDeadline(context);
  refused(coordinator_->CreateJob(&contexts[0], create, &created));
  v1::DescribeJobRequest describe;
  describe.set_job("job");
  *describe.mutable_protocol() = later;
  refused(coordinator_->DescribeJob(&contexts[1], describe, &job_));
  v1::JoinRequest join;
  join.set_name("late");
  join.set_incarnation(1);
  join.set_address("127.0.0.1:1");
  join.set_host_id("host");
  *join.mutable_protocol() = later;
  v1::JoinReply joined;
  refused(coordinator_->Join(&contexts[2], join, &joined));
  create.mutable_protocol()->set_major(1);  // a later minor version is understood
  EXPECT_TRUE(coordinator_->CreateJob(&contexts[3], create, &created).ok());
}

}  // namespace
}  // namespace shardmesh
