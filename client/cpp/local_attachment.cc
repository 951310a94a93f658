#include "client/cpp/local_attachment.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/process/host_id.h"
#include "proto/protocol_version.h"

namespace shardmesh {

absl::Status GoneOrStopped(const Job& job, Rank rank, absl::string_view why) {
  const v1::Member& member = job.members()[rank.value()];
  return absl::UnavailableError(absl::StrCat("worker ", member.worker(), " (rank ", member.rank(), ", pid ",
                                             member.pid(), ") of job ", job.spec().name, " is gone or stopped: ", why));
}

namespace {

constexpr absl::Duration kHandshake = absl::Seconds(10);

// A worker that was stopped since the call keeps its socket open. One that is there may take its time, as until a slot is
// free, and answers a call meanwhile.
absl::StatusOr<LocalMessage> AwaitWelcome(const Job& job, Rank rank, LocalSocket& socket, absl::Duration most) {
  const absl::Time deadline = MonotonicNow() + most;
  while (true) {
    const absl::Duration left = deadline - MonotonicNow(), slice = job.peer_timeout() / 2;
    absl::StatusOr<LocalMessage> answer = socket.Receive(std::min(left, slice));
    if (!absl::IsDeadlineExceeded(answer.status()) || left <= slice) return answer;
    const absl::Status there = job.worker(rank).GetStatus(job.peer_timeout()).status();
    if (!there.ok()) return GoneOrStopped(job, rank, absl::StrCat("it sent no welcome; ", there.message()));
  }
}

}  // namespace

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
  const absl::Duration most = std::min(kHandshake, job.options().opening_call());
  RETURN_IF_ERROR(socket.Send(hello.SerializeAsString(), {}, most));
  ASSIGN_OR_RETURN(LocalMessage answer, AwaitWelcome(job, rank, socket, most));
  LocalAttachment attachment{grant.socket_path(), std::move(socket), {}, std::move(answer.descriptors)};
  if (!attachment.welcome.ParseFromString(answer.bytes)) {
    return absl::InternalError("the worker sent a message that is no welcome");
  }
  return attachment;
}

}  // namespace shardmesh
