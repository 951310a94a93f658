// ShardTransport: one worker's methods as plain calls with a time limit; bulk bytes move without a protobuf copy.
// Thread-safe. Every error names the worker.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/sync_stream.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/transport/seat_transport.h"
#include "proto/shardmesh/v1/job.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "rpc/tls/tls.h"

namespace shardmesh {

class ShardTransport {
 public:
  // Errors of NewChannel. `peer_timeout`: silence after which a stopped worker counts as gone (Unavailable).
  static absl::StatusOr<std::unique_ptr<ShardTransport>> Dial(const v1::Member& member, const TlsOptions& tls,
                                                              absl::Duration peer_timeout);
  // For calls over the same connection to a worker at the same address, which errors name as this member.
  std::unique_ptr<ShardTransport> As(const v1::Member& member) const;
  // Its connection broke, and the last attempt to connect again failed.
  bool broken() const;

  absl::StatusOr<v1::StepReply> Step(const v1::StepRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::DeclareBucketReply> DeclareBucket(const v1::DeclareBucketRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::TrainerReply> Trainer(const v1::TrainerRequest& request, absl::Duration timeout);
  // A connected trainer's seat, as long as the object lives. `timeout`: until it is given.
  absl::StatusOr<std::unique_ptr<SeatTransport>> Seat(const v1::SeatRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::AttachReply> Attach(const v1::AttachRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::DigestReply> Digest(const v1::DigestRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::GetStatusReply> GetStatus(absl::Duration timeout);
  absl::StatusOr<v1::MeetReply> Meet(const v1::MeetRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::GetTraceReply> GetTrace(const std::string& job, absl::Duration timeout);

  // Pushes a gradient shard, or initial weights: `parts` in order are the bytes (borrowed for the call).
  // header.total_bytes is filled in here.
  absl::StatusOr<v1::PushReply> Push(v1::PushHeader header, absl::Span<const absl::string_view> parts,
                                     absl::Duration timeout);

  // Pulls a version: `begin` is called with the header, then `data` with every part in order. DataLoss: the stream
  // ended before, or went on after, the bytes that its header announced.
  absl::StatusOr<v1::PullHeader> Pull(const v1::PullRequest& request,
                                      const std::function<absl::Status(const v1::PullHeader&)>& begin,
                                      const std::function<absl::Status(absl::string_view)>& data,
                                      absl::Duration timeout);

  // What the worker held of a job at an older epoch: `begin` and `data` as Pull; returns the header of the last
  // message.
  absl::StatusOr<v1::TransferHeader> Transfer(const v1::TransferRequest& request,
                                              const std::function<absl::Status(const v1::TransferHeader&)>& begin,
                                              const std::function<absl::Status(absl::string_view)>& data,
                                              absl::Duration timeout);

  // Write the worker's shard to files, read it from there, and begin with it: `progress` is called with every answer,
  // and ends the call with an error. Both return the last answer. DataLoss: it ended before all bytes were done.
  using Progress = std::function<absl::Status(const v1::FileProgress&)>;
  absl::StatusOr<v1::FileProgress> Copy(const v1::CopyRequest& request, const Progress& progress,
                                        absl::Duration timeout);
  absl::StatusOr<v1::FileProgress> Save(const v1::SaveRequest& request, const Progress& progress,
                                        absl::Duration timeout);
  absl::StatusOr<v1::FileProgress> Load(const v1::LoadRequest& request, const Progress& progress,
                                        absl::Duration timeout);
  absl::StatusOr<v1::UseLoadedReply> UseLoaded(const v1::UseLoadedRequest& request, absl::Duration timeout);

  // Leases of versions, and publishing on demand.
  absl::StatusOr<v1::Lease> AcquireLease(const v1::AcquireLeaseRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::Lease> RenewLease(const v1::RenewLeaseRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::ReleaseLeaseReply> ReleaseLease(const v1::ReleaseLeaseRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::ListLeasesReply> ListLeases(const std::string& job, absl::Duration timeout);
  absl::StatusOr<v1::PublishReply> Publish(const std::string& job, absl::Duration timeout);

  const std::string& name() const { return name_; }  // "worker w1 (rank 1) at 127.0.0.1:7001"

 private:
  ShardTransport(std::string name, TlsOptions tls, std::shared_ptr<grpc::Channel> channel)
      : name_(std::move(name)), tls_(std::move(tls)), channel_(std::move(channel)) {}
  absl::Status Named(const absl::Status& status) const;
  absl::StatusOr<v1::FileProgress> ReadProgress(const char* method, grpc::ClientContext& context,
                                                grpc::ClientReader<v1::FileProgress>& reader,
                                                const Progress& progress) const;
  // Reads a stream of bulk messages: of each its header, if it has one, and then its data.
  absl::Status ReadStream(const char* method, const grpc::ByteBuffer& request,
                          const std::function<absl::Status(const std::string&)>& header,
                          const std::function<absl::Status(absl::string_view)>& data, absl::Duration timeout);

  const std::string name_;
  const TlsOptions tls_;
  const std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace shardmesh
