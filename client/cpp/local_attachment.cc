#include "client/cpp/local_attachment.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/process/host_id.h"
#include "proto/protocol_version.h"

namespace shardmesh {

absl::Status GoneOrStopped(const Job& job, Rank rank, absl::string_view why) {
  const v1::Member& member = job.members()[rank.value()];
  return absl::UnavailableError(absl::StrCat("worker ", member.worker(), " (rank ", member.rank(), ", pid ",
                                             member.pid(), ") of job ", job.spec().name, " is gone or stopped: ", why));
}

absl::StatusOr<LocalAttachment> AttachAtWorker(const Job& job, Rank rank, v1::AttachRequest request,
                                               v1::TrainerHello trainer) {
  ASSIGN_OR_RETURN(const std::string host_id, HostId());
  request.set_job(job.spec().name);
  request.set_epoch(job.epoch().value());
  request.set_host_id(host_id);
  ASSIGN_OR_RETURN(const v1::AttachReply grant, job.worker(rank).Attach(request, job.options().opening_call()));
  ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(grant.socket_path()));
  v1::LocalHello hello;
  *hello.mutable_protocol() = OwnProtocol();
  *hello.mutable_trainer() = std::move(trainer);
  hello.mutable_trainer()->set_token(grant.token());
  // A worker that was stopped since the call keeps its socket open: its silence tells.
  const absl::Duration silence = std::min(job.peer_timeout(), job.options().opening_call());
  absl::Status sent = socket.Send(hello.SerializeAsString(), {}, silence);
  absl::StatusOr<LocalMessage> answer = sent.ok() ? socket.Receive(silence) : std::move(sent);
  if (absl::IsDeadlineExceeded(answer.status()) && silence == job.peer_timeout()) {
    return GoneOrStopped(job, rank, absl::StrCat("it sent ", answer.status().message()));
  }
  RETURN_IF_ERROR(answer.status());
  LocalAttachment attachment{grant.socket_path(), std::move(socket), {}, std::move(answer->descriptors)};
  if (!attachment.welcome.ParseFromString(answer->bytes)) {
    return absl::InternalError("the worker sent a message that is no welcome");
  }
  return attachment;
}

}  // namespace shardmesh
