#include <grpcpp/client_context.h>

#include <atomic>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/transport/coordinator_transport.h"
#include "client/cpp/transport/transport_reconnect.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"
#include "proto/protocol_version.h"
#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "rpc/base/deadline.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/tls/tls.h"

namespace shardmesh {
namespace {

// What a program says of itself before anything else, and what the coordinator says of itself (ProtocolVersion). The
// other calls come after one of these.
template <typename Request>
Request Introduced(const Request& request) {
  return request;
}
template <typename Request>
Request WithProtocol(Request request) {
  *request.mutable_protocol() = OwnProtocol();
  return request;
}
v1::CreateJobRequest Introduced(const v1::CreateJobRequest& request) { return WithProtocol(request); }
v1::DescribeJobRequest Introduced(const v1::DescribeJobRequest& request) { return WithProtocol(request); }
v1::JoinRequest Introduced(const v1::JoinRequest& request) { return WithProtocol(request); }

template <typename Reply>
absl::Status CheckAnswer(const Reply&) {
  return absl::OkStatus();
}
absl::Status CheckAnswer(const v1::JobDescription& reply) { return CheckProtocol(reply.protocol(), "the coordinator"); }
absl::Status CheckAnswer(const v1::CreateJobReply& reply) { return CheckAnswer(reply.job()); }
absl::Status CheckAnswer(const v1::JoinReply& reply) { return CheckProtocol(reply.protocol(), "the coordinator"); }

class GrpcCoordinatorTransport final : public CoordinatorTransport {
 public:
  GrpcCoordinatorTransport(std::string address, const TlsOptions& tls, const std::shared_ptr<grpc::Channel>& channel)
      : address_(std::move(address)), tls_(tls), channel_(channel), stub_(v1::Coordinator::NewStub(channel)) {}

  bool has_answered() const override { return answered_.load(); }
#define SHARDMESH_METHOD(name, Request, Reply)                                                \
  absl::StatusOr<Reply> name(const Request& request, absl::Duration timeout) override {       \
    return Call<Reply>(&v1::Coordinator::Stub::name, request, timeout, "coordinator " #name); \
  }
  SHARDMESH_METHOD(CreateJob, v1::CreateJobRequest, v1::CreateJobReply)
  SHARDMESH_METHOD(DescribeJob, v1::DescribeJobRequest, v1::JobDescription)
  SHARDMESH_METHOD(ListJobs, v1::ListJobsRequest, v1::ListJobsReply)
  SHARDMESH_METHOD(DeleteJob, v1::DeleteJobRequest, v1::DeleteJobReply)
  SHARDMESH_METHOD(ReshardJob, v1::ReshardJobRequest, v1::JobDescription)
  SHARDMESH_METHOD(RecordCheckpoint, v1::RecordCheckpointRequest, v1::RecordCheckpointReply)
  SHARDMESH_METHOD(ResolveNames, v1::ResolveNamesRequest, v1::ResolveNamesReply)
  SHARDMESH_METHOD(GetPlan, v1::GetPlanRequest, v1::GetPlanReply)
  SHARDMESH_METHOD(ListVersions, v1::ListVersionsRequest, v1::ListVersionsReply)
  SHARDMESH_METHOD(Join, v1::JoinRequest, v1::JoinReply)
  SHARDMESH_METHOD(Heartbeat, v1::HeartbeatRequest, v1::HeartbeatReply)
  SHARDMESH_METHOD(Leave, v1::LeaveRequest, v1::LeaveReply)
#undef SHARDMESH_METHOD

 private:
  // The status, with the incarnation that the coordinator would not refuse, if it said one.
  static absl::Status WithHint(absl::Status status, const grpc::ClientContext& context) {
    const auto& metadata = context.GetServerTrailingMetadata();
    const auto found = metadata.find(kNextIncarnationKey);
    int64_t next = 0;
    if (found == metadata.end() || !absl::SimpleAtoi({found->second.data(), found->second.size()}, &next)) {
      return status;
    }
    return WithNextIncarnation(std::move(status), next);
  }

  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Call(grpc::Status (v1::Coordinator::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                           Reply*),
                             const Request& request, absl::Duration timeout, absl::string_view what) {
    grpc::ClientContext context;
    context.set_deadline(DeadlineIn(timeout));
    HelpReconnect(*channel_, timeout);
    Reply reply;
    const grpc::Status ended = ((*stub_).*method)(&context, Introduced(request), &reply);
    if (ended.error_code() != grpc::StatusCode::UNAVAILABLE &&
        ended.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED) {
      answered_.store(true);
    }
    const std::string named = absl::StrCat(what, " at ", address_);
    if (!ended.ok()) return WithHint(ExplainTlsFailure(FromGrpc(ended, named), tls_), context);
    RETURN_IF_ERROR(Annotate(CheckAnswer(reply), named));
    return reply;
  }

  const std::string address_;
  const TlsOptions tls_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Coordinator::Stub> stub_;
  std::atomic<bool> answered_{false};
};

}  // namespace

absl::StatusOr<std::unique_ptr<CoordinatorTransport>> NewGrpcCoordinatorTransport(const std::string& address,
                                                                                  const TlsOptions& tls) {
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, NewChannel(address, tls));
  return std::unique_ptr<CoordinatorTransport>(new GrpcCoordinatorTransport(address, tls, channel));
}

}  // namespace shardmesh
