// A connected trainer that asks a worker of an older build for a seat.
#include "client/cpp/transport/seat_transport.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "client/cpp/client.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/transport/fake_coordinator.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "proto/convert.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::NiceMock;
using ::testing::Return;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(20);

// Its service answers each call with UNIMPLEMENTED, as gRPC does for those that a worker does not know.
class OlderWorker : public ::testing::Test {
 protected:
  void SetUp() override {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    JobSpec spec;
    spec.name = "j";
    spec.mesh = ParseMeshSpec("fsdp=1").value();
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 1;
    spec.parameters = {{"w", {100}, WeightFormat::kFp32, ""}};
    *job_.mutable_spec() = ToProto(spec);
    job_.set_state(v1::JOB_STATE_READY);
    job_.set_plan_hash(Plan::Create(spec).value().hash());
    v1::Member& member = *job_.add_members();
    member.set_worker("w0");
    member.set_address(absl::StrCat("127.0.0.1:", port));
    member.set_alive(true);
    member.set_ready(true);
  }

  v1::Shard::Service service_;
  std::unique_ptr<grpc::Server> server_;
  v1::JobDescription job_;
};

TEST_F(OlderWorker, HasNoSeat_AndTheErrorSaysWhatWorks) {
  const auto coordinator = std::make_shared<NiceMock<FakeCoordinator>>();
  ON_CALL(*coordinator, DescribeJob).WillByDefault(Return(job_));
  Client client(coordinator);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.OpenJob("j"));
  EXPECT_THAT(job->ConnectPulling(),
              StatusIs(Code::kUnimplemented, AllOf(HasSubstr("worker w0 (rank 0)"),
                                                   HasSubstr("in which trainers that pull slots attach; install one "
                                                             "build on both, attach (Job::AttachPulling)"))));
  EXPECT_THAT(job->worker(Rank(0)).Trainer({}, kLong), StatusIs(Code::kUnimplemented, HasSubstr("Trainer")));
}

TEST_F(OlderWorker, ThatIsGone_IsUnavailable) {
  server_->Shutdown();
  server_.reset();
  ASSERT_OK_AND_ASSIGN(const auto worker, ShardTransport::Dial(job_.members(0), {}, kLong));
  EXPECT_THAT(worker->Seat({}, kLong), StatusIs(Code::kUnavailable, HasSubstr("worker w0")));
}

}  // namespace
}  // namespace shardmesh
