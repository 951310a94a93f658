// Of LocalServer: readers that map publications.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "worker/doors/local_server.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSendTimeout = absl::Seconds(5);
constexpr absl::Duration kSlice = absl::Milliseconds(200);
}  // namespace

// Each reader gets descriptions of its own: what it holds is known by them.
absl::Status LocalServer::WelcomeReader(LocalSocket& socket, JobShard& shard, int place) {
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kAttaching));
  const HostMemory& host = shard.host();
  v1::LocalWelcome welcome;
  std::vector<UniqueFd> owned;
  std::vector<int> descriptors;
  for (int i = -1; i < host.num_publications(); ++i) {
    const Segment& segment = i < 0 ? host.board_segment() : host.publication(i);
    ASSIGN_OR_RETURN(UniqueFd fd, segment.ReadOnlyFd());
    v1::Segment& described = *welcome.add_segments();
    described.set_num_bytes(segment.num_bytes());
    described.set_data_offset(segment.data_offset());
    descriptors.push_back(fd.get());
    owned.push_back(std::move(fd));
  }
  if (const DeviceWindows* const device = host.device(); device != nullptr) {
    std::vector<const DeviceSegment*> there;
    for (const DeviceSegment& segment : device->publications) there.push_back(&segment);
    for (const int fd : device->DescribeTo(welcome, there)) descriptors.push_back(fd);
  }
  FillWelcome(shard, 0, {}, welcome);
  welcome.set_seat(place);
  return socket.Send(welcome.SerializeAsString(), descriptors, kSendTimeout);
}

void LocalServer::ServeReader(LocalSocket& socket, const Granted& granted) {
  const int64_t pid = socket.Peer().ok() ? socket.Peer()->second : 0;
  JobShard& shard = *granted.shard;
  const absl::StatusOr<int> place = shard.leases().TakePlace(pid, granted.reader_ttl);
  if (!place.ok()) {
    SendError(socket, place.status()).IgnoreError();
    return;
  }
  if (const absl::Status welcome = WelcomeReader(socket, shard, *place); welcome.ok()) {
    spdlog::info("event=reader_attached job={} place={} pid={}", shard.spec().name, *place, pid);
    AnswerReader(socket, shard, *place);
    spdlog::info("event=reader_gone job={} place={} pid={}", shard.spec().name, *place, pid);
  } else {
    SendError(socket, welcome).IgnoreError();
  }
  shard.leases().LeavePlace(*place);
}

void LocalServer::AnswerReader(LocalSocket& socket, JobShard& shard, int place) {
  while (!stop_.load()) {
    absl::StatusOr<LocalMessage> message = socket.Receive(kSlice);
    if (absl::IsDeadlineExceeded(message.status())) {
      if (!shard.CheckOpen().ok()) return;  // deleted: hang up
      continue;
    }
    v1::TrainerRequest request;
    if (!message.ok() || !request.ParseFromString(message->bytes)) return;
    shard.leases().Heard(place);
    v1::TrainerReply reply;
    reply.set_alive(true);
    reply.set_id(request.id());
    const absl::Status health = shard.Health();
    reply.set_code(static_cast<int>(health.code()));
    reply.set_message(std::string(health.message()));
    if (!socket.Send(reply.SerializeAsString(), {}, kSendTimeout).ok()) return;
  }
}

}  // namespace shardmesh
