#include "client/cpp/transport/shard_transport.h"

#include <grpcpp/client_context.h>
#include <grpcpp/impl/codegen/sync_stream.h>
#include <grpcpp/impl/rpc_method.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/transport_reconnect.h"
#include "core/base/status.h"
#include "proto/bulk.h"
#include "proto/shardmesh/v1/shard.grpc.pb.h"
#include "rpc/base/deadline.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"

namespace shardmesh {
namespace {

constexpr int64_t kPushChunkBytes = 1 << 20;

void SetDeadline(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(DeadlineIn(timeout));
}

std::string NameOf(const v1::Member& member) {
  return absl::StrCat("worker ", member.worker(), " (rank ", member.rank(), ") at ", member.address());
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardTransport>> ShardTransport::Dial(const v1::Member& member, const TlsOptions& tls,
                                                                     absl::Duration peer_timeout) {
  ChannelOptions options;
  options.peer_timeout = std::max(peer_timeout, absl::Seconds(1));
  ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, NewChannel(member.address(), tls, options));
  return std::unique_ptr<ShardTransport>(new ShardTransport(NameOf(member), tls, std::move(channel)));
}

std::unique_ptr<ShardTransport> ShardTransport::As(const v1::Member& member) const {
  return std::unique_ptr<ShardTransport>(new ShardTransport(NameOf(member), tls_, channel_));
}

bool ShardTransport::broken() const {
  return channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_TRANSIENT_FAILURE;
}

// A call that nobody here cancelled was cancelled by a worker that ends.
absl::Status ShardTransport::Named(const absl::Status& status) const {
  if (!absl::IsCancelled(status)) return Annotate(ExplainTlsFailure(status, tls_), name_);
  return absl::UnavailableError(absl::StrCat(name_, " ended the call: ", status.message()));
}

absl::StatusOr<v1::StepReply> ShardTransport::Step(const v1::StepRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::StepReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->Step(&context, request, &reply), "Step")));
  return reply;
}

absl::StatusOr<v1::DeclareBucketReply> ShardTransport::DeclareBucket(const v1::DeclareBucketRequest& request,
                                                                     absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::DeclareBucketReply reply;
  const grpc::Status status = v1::Shard::NewStub(channel_)->DeclareBucket(&context, request, &reply);
  RETURN_IF_ERROR(Named(FromGrpc(status, "DeclareBucket")));
  return reply;
}

absl::StatusOr<v1::TrainerReply> ShardTransport::Trainer(const v1::TrainerRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::TrainerReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->Trainer(&context, request, &reply), "Trainer")));
  return reply;
}

absl::StatusOr<std::unique_ptr<SeatTransport>> ShardTransport::Seat(const v1::SeatRequest& request,
                                                                    absl::Duration timeout) {
  HelpReconnect(*channel_, timeout);
  absl::StatusOr<std::unique_ptr<SeatTransport>> seat = SeatTransport::Open(channel_, request, timeout);
  RETURN_IF_ERROR(Named(seat.status()));
  return seat;
}

absl::StatusOr<v1::AttachReply> ShardTransport::Attach(const v1::AttachRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::AttachReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->Attach(&context, request, &reply), "Attach")));
  return reply;
}

absl::StatusOr<v1::DigestReply> ShardTransport::Digest(const v1::DigestRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::DigestReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->Digest(&context, request, &reply), "Digest")));
  return reply;
}

absl::StatusOr<v1::GetStatusReply> ShardTransport::GetStatus(absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::GetStatusReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->GetStatus(&context, {}, &reply), "GetStatus")));
  return reply;
}

absl::StatusOr<v1::MeetReply> ShardTransport::Meet(const v1::MeetRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::MeetReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->Meet(&context, request, &reply), "Meet")));
  return reply;
}

absl::StatusOr<v1::GetTraceReply> ShardTransport::GetTrace(const std::string& job, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::GetTraceRequest request;
  request.set_job(job);
  v1::GetTraceReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->GetTrace(&context, request, &reply), "GetTrace")));
  return reply;
}

absl::StatusOr<v1::Lease> ShardTransport::AcquireLease(const v1::AcquireLeaseRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::Lease reply;
  RETURN_IF_ERROR(
      Named(FromGrpc(v1::Shard::NewStub(channel_)->AcquireLease(&context, request, &reply), "AcquireLease")));
  return reply;
}

absl::StatusOr<v1::Lease> ShardTransport::RenewLease(const v1::RenewLeaseRequest& request, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::Lease reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->RenewLease(&context, request, &reply), "RenewLease")));
  return reply;
}

absl::StatusOr<v1::ReleaseLeaseReply> ShardTransport::ReleaseLease(const v1::ReleaseLeaseRequest& request,
                                                                   absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::ReleaseLeaseReply reply;
  RETURN_IF_ERROR(
      Named(FromGrpc(v1::Shard::NewStub(channel_)->ReleaseLease(&context, request, &reply), "ReleaseLease")));
  return reply;
}

absl::StatusOr<v1::ListLeasesReply> ShardTransport::ListLeases(const std::string& job, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::ListLeasesRequest request;
  request.set_job(job);
  v1::ListLeasesReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->ListLeases(&context, request, &reply), "ListLeases")));
  return reply;
}

absl::StatusOr<v1::PublishReply> ShardTransport::Publish(const std::string& job, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::PublishRequest request;
  request.set_job(job);
  v1::PublishReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->Publish(&context, request, &reply), "Publish")));
  return reply;
}

absl::StatusOr<v1::PushReply> ShardTransport::Push(v1::PushHeader header, absl::Span<const absl::string_view> parts,
                                                   absl::Duration timeout) {
  int64_t total = 0;
  for (absl::string_view part : parts) total += static_cast<int64_t>(part.size());
  header.set_total_bytes(total);
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  const grpc::internal::RpcMethod method("/shardmesh.v1.Shard/Push", grpc::internal::RpcMethod::CLIENT_STREAMING,
                                         channel_);
  grpc::ByteBuffer raw_reply;
  std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> writer(
      grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(channel_.get(), method, &context, &raw_reply));
  bool writable = writer->Write(EncodeChunk(header.SerializeAsString(), grpc::Slice()));
  for (absl::string_view part : parts) {
    // The slices borrow the caller's memory; gRPC may read it until Finish, which is called below in every case.
    for (size_t at = 0; at < part.size() && writable; at += kPushChunkBytes) {
      const size_t size = std::min<size_t>(kPushChunkBytes, part.size() - at);
      writable = writer->Write(
          EncodeChunk({}, grpc::Slice(const_cast<char*>(part.data()) + at, size, grpc::Slice::STATIC_SLICE)));
    }
  }
  writer->WritesDone();
  RETURN_IF_ERROR(Named(FromGrpc(writer->Finish(), "Push")));
  v1::PushReply reply;
  RETURN_IF_ERROR(Named(DecodeMessage(raw_reply, reply)));
  return reply;
}

absl::Status ShardTransport::ReadStream(const char* method, const grpc::ByteBuffer& request,
                                        const std::function<absl::Status(const std::string&)>& header,
                                        const std::function<absl::Status(absl::string_view)>& data,
                                        absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  const std::string path = absl::StrCat("/shardmesh.v1.Shard/", method);
  const grpc::internal::RpcMethod rpc(path.c_str(), grpc::internal::RpcMethod::SERVER_STREAMING, channel_);
  std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> reader(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(channel_.get(), rpc, &context, request));
  grpc::ByteBuffer message;
  absl::Status status;
  while (status.ok() && reader->Read(&message)) {
    std::string header_bytes;
    bool has_header = false;
    const auto tell = [&] { return std::exchange(has_header, false) ? header(header_bytes) : absl::OkStatus(); };
    status = DecodeChunk(message, header_bytes, has_header, [&](absl::string_view bytes) -> absl::Status {
      RETURN_IF_ERROR(tell());
      return data(bytes);
    });
    if (status.ok()) status = tell();
    message.Clear();
  }
  if (!status.ok()) context.TryCancel();
  const grpc::Status finished = reader->Finish();
  RETURN_IF_ERROR(Named(status));
  return Named(FromGrpc(finished, method));
}

namespace {

// The bytes of a stream against those that its first header announced.
template <typename Header>
struct Announced {
  Header header;
  bool begun = false;
  int64_t received = 0;

  absl::Status Take(absl::string_view bytes) {
    if (!begun) return absl::DataLossError("the stream has no header");
    received += static_cast<int64_t>(bytes.size());
    if (received <= header.total_bytes()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("more than the ", header.total_bytes(), " bytes announced"));
  }
  absl::Status End() const {
    if (begun && received == header.total_bytes()) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("the stream ended after ", received, " of ", header.total_bytes(), " bytes"));
  }
};

}  // namespace

absl::StatusOr<v1::PullHeader> ShardTransport::Pull(const v1::PullRequest& request,
                                                    const std::function<absl::Status(const v1::PullHeader&)>& begin,
                                                    const std::function<absl::Status(absl::string_view)>& data,
                                                    absl::Duration timeout) {
  Announced<v1::PullHeader> announced;
  RETURN_IF_ERROR(ReadStream(
      "Pull", EncodeMessage(request),
      [&](const std::string& bytes) -> absl::Status {
        if (std::exchange(announced.begun, true)) return absl::OkStatus();
        if (!announced.header.ParseFromString(bytes)) return absl::DataLossError("the stream has no header");
        return begin(announced.header);
      },
      [&](absl::string_view bytes) -> absl::Status {
        RETURN_IF_ERROR(announced.Take(bytes));
        return data(bytes);
      },
      timeout));
  RETURN_IF_ERROR(Named(announced.End()));
  return announced.header;
}

absl::StatusOr<v1::TransferHeader> ShardTransport::Transfer(
    const v1::TransferRequest& request, const std::function<absl::Status(const v1::TransferHeader&)>& begin,
    const std::function<absl::Status(absl::string_view)>& data, absl::Duration timeout) {
  Announced<v1::TransferHeader> announced;
  v1::TransferHeader last;
  RETURN_IF_ERROR(ReadStream(
      "Transfer", EncodeMessage(request),
      [&](const std::string& bytes) -> absl::Status {
        if (!last.ParseFromString(bytes)) return absl::DataLossError("a header of the stream cannot be parsed");
        if (std::exchange(announced.begun, true)) return absl::OkStatus();
        announced.header = last;
        return begin(last);
      },
      [&](absl::string_view bytes) -> absl::Status {
        RETURN_IF_ERROR(announced.Take(bytes));
        return data(bytes);
      },
      timeout));
  RETURN_IF_ERROR(Named(announced.End()));
  return last;
}

absl::StatusOr<v1::FileProgress> ShardTransport::ReadProgress(const char* method, grpc::ClientContext& context,
                                                              grpc::ClientReader<v1::FileProgress>& reader,
                                                              const Progress& progress) const {
  v1::FileProgress last;
  absl::Status wanted;
  bool any = false;
  for (v1::FileProgress next; wanted.ok() && reader.Read(&next); any = true) {
    last = next;
    wanted = progress(last);
  }
  if (!wanted.ok()) context.TryCancel();
  const absl::Status ended = Named(FromGrpc(reader.Finish(), method));
  RETURN_IF_ERROR(wanted);
  RETURN_IF_ERROR(ended);
  if (any && last.bytes_done() == last.bytes_total()) return last;
  return absl::DataLossError(
      absl::StrCat(name_, ": ", method, " ended with ", last.bytes_done(), " of ", last.bytes_total(), " bytes done"));
}

absl::StatusOr<v1::FileProgress> ShardTransport::Save(const v1::SaveRequest& request, const Progress& progress,
                                                      absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  return ReadProgress("Save", context, *v1::Shard::NewStub(channel_)->Save(&context, request), progress);
}

absl::StatusOr<v1::FileProgress> ShardTransport::Copy(const v1::CopyRequest& request, const Progress& progress,
                                                      absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  return ReadProgress("Copy", context, *v1::Shard::NewStub(channel_)->Copy(&context, request), progress);
}

absl::StatusOr<v1::FileProgress> ShardTransport::Load(const v1::LoadRequest& request, const Progress& progress,
                                                      absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  return ReadProgress("Load", context, *v1::Shard::NewStub(channel_)->Load(&context, request), progress);
}

absl::StatusOr<v1::UseLoadedReply> ShardTransport::UseLoaded(const v1::UseLoadedRequest& request,
                                                             absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(context, timeout);
  HelpReconnect(*channel_, timeout);
  v1::UseLoadedReply reply;
  RETURN_IF_ERROR(Named(FromGrpc(v1::Shard::NewStub(channel_)->UseLoaded(&context, request, &reply), "UseLoaded")));
  return reply;
}

}  // namespace shardmesh
