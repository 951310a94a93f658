// ShardService: the gRPC adapter of a worker (shard.proto). It decides nothing: validate, find the job, call, convert.
// Push, Pull and Transfer move raw buffers; calls that wait hold no thread (waiters.h). Thread-safe. Outlived by its
// arguments.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "proto/shardmesh/v1/shard.grpc.pb.h"
#include "worker/doors/local_server.h"
#include "worker/doors/seat_session.h"
#include "worker/process/worker.h"

namespace shardmesh {

using ShardServiceBase = v1::Shard::WithRawCallbackMethod_Push<v1::Shard::WithRawCallbackMethod_Pull<
    v1::Shard::WithRawCallbackMethod_Transfer<v1::Shard::WithCallbackMethod_Step<v1::Shard::WithCallbackMethod_Attach<
        v1::Shard::WithCallbackMethod_Digest<v1::Shard::WithCallbackMethod_GetStatus<
            v1::Shard::WithCallbackMethod_GetTrace<v1::Shard::WithCallbackMethod_DeclareBucket<
                v1::Shard::WithCallbackMethod_Meet<v1::Shard::WithCallbackMethod_Save<
                    v1::Shard::WithCallbackMethod_Copy<v1::Shard::WithCallbackMethod_Load<
                        v1::Shard::WithCallbackMethod_UseLoaded<v1::Shard::WithCallbackMethod_AcquireLease<
                            v1::Shard::WithCallbackMethod_RenewLease<v1::Shard::WithCallbackMethod_ReleaseLease<
                                v1::Shard::WithCallbackMethod_ListLeases<v1::Shard::WithCallbackMethod_Publish<
                                    v1::Shard::WithCallbackMethod_AwaitWeights<v1::Shard::WithCallbackMethod_Trainer<
                                        v1::Shard::WithCallbackMethod_Seat<v1::Shard::Service>>>>>>>>>>>>>>>>>>>>>>;

class ShardService final : public ShardServiceBase {
 public:
  ShardService(Worker& worker, LocalServer& local, std::string host_id, int64_t incarnation)
      : worker_(worker), local_(local), host_id_(std::move(host_id)), incarnation_(incarnation) {}
  // As which it joined, where the coordinator had it take another one.
  void SetIncarnation(int64_t incarnation) { incarnation_.store(incarnation); }

  grpc::ServerReadReactor<grpc::ByteBuffer>* Push(grpc::CallbackServerContext* context,
                                                  grpc::ByteBuffer* reply) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Pull(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Transfer(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Step(grpc::CallbackServerContext* context, const v1::StepRequest* request,
                                 v1::StepReply* reply) override;
  grpc::ServerUnaryReactor* DeclareBucket(grpc::CallbackServerContext* context, const v1::DeclareBucketRequest* request,
                                          v1::DeclareBucketReply* reply) override;
  grpc::ServerUnaryReactor* Trainer(grpc::CallbackServerContext* context, const v1::TrainerRequest* request,
                                    v1::TrainerReply* reply) override;
  grpc::ServerWriteReactor<v1::SeatReply>* Seat(grpc::CallbackServerContext* context,
                                                const v1::SeatRequest* request) override;
  grpc::ServerUnaryReactor* Attach(grpc::CallbackServerContext* context, const v1::AttachRequest* request,
                                   v1::AttachReply* reply) override;
  grpc::ServerUnaryReactor* Digest(grpc::CallbackServerContext* context, const v1::DigestRequest* request,
                                   v1::DigestReply* reply) override;
  grpc::ServerWriteReactor<v1::FileProgress>* Save(grpc::CallbackServerContext* context,
                                                   const v1::SaveRequest* request) override;
  grpc::ServerWriteReactor<v1::FileProgress>* Copy(grpc::CallbackServerContext* context,
                                                   const v1::CopyRequest* request) override;
  grpc::ServerWriteReactor<v1::FileProgress>* Load(grpc::CallbackServerContext* context,
                                                   const v1::LoadRequest* request) override;
  grpc::ServerUnaryReactor* UseLoaded(grpc::CallbackServerContext* context, const v1::UseLoadedRequest* request,
                                      v1::UseLoadedReply* reply) override;
  grpc::ServerUnaryReactor* AwaitWeights(grpc::CallbackServerContext* context, const v1::AwaitWeightsRequest* request,
                                         v1::AwaitWeightsReply* reply) override;
  // shard_versions.cc
  grpc::ServerUnaryReactor* AcquireLease(grpc::CallbackServerContext* context, const v1::AcquireLeaseRequest* request,
                                         v1::Lease* reply) override;
  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context, const v1::RenewLeaseRequest* request,
                                       v1::Lease* reply) override;
  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* context, const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseReply* reply) override;
  grpc::ServerUnaryReactor* ListLeases(grpc::CallbackServerContext* context, const v1::ListLeasesRequest* request,
                                       v1::ListLeasesReply* reply) override;
  grpc::ServerUnaryReactor* Publish(grpc::CallbackServerContext* context, const v1::PublishRequest* request,
                                    v1::PublishReply* reply) override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                      v1::GetStatusReply* reply) override;
  grpc::ServerUnaryReactor* GetTrace(grpc::CallbackServerContext* context, const v1::GetTraceRequest* request,
                                     v1::GetTraceReply* reply) override;
  grpc::ServerUnaryReactor* Meet(grpc::CallbackServerContext* context, const v1::MeetRequest* request,
                                 v1::MeetReply* reply) override;

 private:
  Worker& worker_;
  LocalServer& local_;
  const std::string host_id_;
  std::atomic<int64_t> incarnation_;
  SeatSessions seats_;
};

}  // namespace shardmesh
