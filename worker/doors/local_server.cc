#include "worker/doors/local_server.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "local/memory/futex.h"
#include "local/process/process_end.h"
#include "proto/protocol_version.h"
#include "rpc/calls/fair_share.h"
#include "worker/job/second_look.h"
#include "worker/node/listener_watch.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSendTimeout = absl::Seconds(5);
constexpr absl::Duration kSlice = absl::Milliseconds(200);
constexpr absl::Duration kHelloTimeout = absl::Seconds(5);
constexpr absl::Duration kOpenTimeout =
    absl::Seconds(5);  // for the commit of a step that a slot's last holder declared
constexpr absl::Duration kOpenSlice = absl::Milliseconds(20);
constexpr absl::Duration kHangUpTimeout = absl::Seconds(1);   // for the slots of a trainer whose process is gone
constexpr absl::Duration kClosing = absl::Milliseconds(300);  // for those of a session that this process has just ended
constexpr absl::Duration kRefusal = absl::Milliseconds(50);   // for the hello of a connection too many

struct SlotFormatter {
  void operator()(std::string* out, Slot slot) const { absl::StrAppend(out, slot.value()); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Start(const std::string& path, Worker& worker,
                                                                const Clock& clock,
                                                                std::optional<uint32_t> first_session) {
  ASSIGN_OR_RETURN(LocalListener listener, LocalListener::Listen(path));
  const uint32_t first = first_session.has_value() ? *first_session : std::random_device()();
  return std::unique_ptr<LocalServer>(new LocalServer(std::move(listener), worker, clock, first));
}

LocalServer::LocalServer(LocalListener listener, Worker& worker, const Clock& clock, uint32_t first_session)
    : listener_(std::move(listener)), worker_(worker), clock_(clock), next_session_(first_session) {
  acceptor_ = std::thread([this] { AcceptLoop(); });
}

LocalServer::~LocalServer() {
  stop_.store(true);
  acceptor_.join();
  for (Connection& connection : connections_) connection.thread.join();
}

// REQUIRES: the hello was read: of a connection that closes with bytes unread the peer hears only that.
absl::Status LocalServer::SendError(LocalSocket& socket, const absl::Status& status) {
  v1::LocalWelcome welcome;
  welcome.set_code(static_cast<int>(status.code()));
  welcome.set_message(std::string(status.message()));
  return socket.Send(welcome.SerializeAsString(), {}, kSendTimeout);
}

void LocalServer::AcceptLoop() {
  ListenerWatch reachable(listener_, absl::StrCat("worker-", worker_.options().name));
  while (!stop_.load()) {
    reachable.Look(MonotonicNow());
    absl::StatusOr<LocalSocket> socket = listener_.Accept(kSlice);
    ReapConnections();
    if (!socket.ok()) continue;
    if (connections_.size() >= kMaxLocalConnections) {
      socket->Receive(kRefusal).IgnoreError();
      SendError(*socket, absl::ResourceExhaustedError(absl::StrCat("worker ", worker_.options().name, " has ",
                                                                   kMaxLocalConnections, " local connections already")))
          .IgnoreError();
      continue;
    }
    const auto owned = std::make_shared<LocalSocket>(*std::move(socket));
    Connection& connection = connections_.emplace_back();
    absl::StatusOr<std::thread> thread = StartThread("a connection to the attach socket", [this, &connection, owned] {
      const absl::Status served = WithoutThrowing([&] {
        Serve(std::move(*owned));
        return absl::OkStatus();
      });
      if (!served.ok()) spdlog::error("event=connection_failed error=\"{}\"", served.ToString());
      connection.done.store(true);
    });
    if (thread.ok()) {
      connection.thread = *std::move(thread);
      continue;
    }
    connections_.pop_back();
    spdlog::warn("event=connection_refused error=\"{}\"", thread.status().ToString());
    owned->Receive(kSlice).status().IgnoreError();  // closed with its hello unread, it would not get the answer
    SendError(*owned, thread.status()).IgnoreError();
  }
}

void LocalServer::ReapConnections() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (!it->done.load()) {
      ++it;
      continue;
    }
    it->thread.join();
    it = connections_.erase(it);
  }
}

void LocalServer::Serve(LocalSocket socket) {
  const auto peer = socket.Peer();
  const absl::StatusOr<LocalMessage> first = socket.Receive(kHelloTimeout);
  if (absl::IsUnavailable(first.status()) || absl::IsDeadlineExceeded(first.status())) return;
  if (!peer.ok() || (peer->first != getuid() && peer->first != 0)) {
    SendError(socket, absl::PermissionDeniedError(absl::StrCat("user ", peer.ok() ? peer->first : -1,
                                                               " may not attach to a worker of user ", getuid())))
        .IgnoreError();
    return;
  }
  v1::LocalHello hello;
  if (!first.ok()) {
    SendError(socket, first.status()).IgnoreError();
    return;
  }
  if (!hello.ParseFromString(first->bytes) || hello.purpose_case() == v1::LocalHello::PURPOSE_NOT_SET) {
    SendError(socket, absl::InvalidArgumentError("the first message is no LocalHello with a purpose")).IgnoreError();
    return;
  }
  if (const absl::Status same = CheckProtocol(hello.protocol(), "who connects"); !same.ok()) {
    SendError(socket, same).IgnoreError();
    return;
  }
  if (hello.has_peer()) {
    worker_.ServePeer(std::move(socket), hello.peer(), stop_);
  } else if (hello.has_session()) {
    Watch(socket);
    ServeSession(socket, hello.session());
  } else {
    Watch(socket);
    ServeTrainer(socket, hello.trainer());
  }
}

// Its end frees what it has, also while processes that it forked hold the connection open.
void LocalServer::Watch(LocalSocket& socket) {
  if (socket.WatchPeer()) return;
  spdlog::warn("event=trainer_not_watched hint=\"it is of another pid namespace, which this kernel cannot watch; what it "
               "has is free once its connection is closed\"");
}

absl::StatusOr<std::string> LocalServer::Grant(std::shared_ptr<JobShard> shard, std::vector<int> slots,
                                               const std::string& caller) {
  return Grant(OpenGrant{shard, std::move(slots), absl::ZeroDuration(), caller, {}});
}

absl::StatusOr<std::string> LocalServer::GrantReader(std::shared_ptr<JobShard> shard, absl::Duration ttl,
                                                     const std::string& caller) {
  return Grant(OpenGrant{shard, {}, ttl, caller, {}});
}

absl::StatusOr<std::string> LocalServer::Grant(OpenGrant granted) {
  std::string token = absl::BytesToHexString(RandomSecret());
  const absl::Time now = clock_.Now();
  MutexLock lock(mu_);
  for (auto it = grants_.begin(); it != grants_.end();) it = it->second.until < now ? grants_.erase(it) : std::next(it);
  const int64_t own = std::count_if(grants_.begin(), grants_.end(),
                                    [&](const auto& grant) { return grant.second.caller == granted.caller; });
  RETURN_IF_ERROR(CheckShare(granted.caller, {own, static_cast<int64_t>(grants_.size()), kMaxGrants}, "open grants",
                             "use them, wait 30 s, or ask from another host"));
  if (grants_.size() >= kMaxGrants) {
    return absl::ResourceExhaustedError(absl::StrCat(kMaxGrants, " grants are open; use them, or wait 30 s"));
  }
  granted.until = now + kGrantLifetime;
  grants_[token] = std::move(granted);
  return token;
}

absl::StatusOr<LocalServer::Granted> LocalServer::Redeem(const std::string& token) {
  OpenGrant open;
  {
    MutexLock lock(mu_);
    auto it = grants_.find(token);
    if (it == grants_.end() || it->second.until < clock_.Now()) {
      return absl::PermissionDeniedError("the token is unknown, used, or older than 30 s; call Attach again");
    }
    open = std::move(it->second);
    grants_.erase(it);
  }
  Granted granted{open.shard.lock(), std::move(open.slots), open.reader_ttl, false};
  if (granted.shard == nullptr) return absl::NotFoundError("the job was deleted, or moved to other workers");
  RETURN_IF_ERROR(granted.shard->CheckOpen());
  return granted;
}

// A trainer that died, or ended its session, holds its slot until its connection is seen to be closed: a moment.
absl::Status LocalServer::TakeSlot(JobShard& shard, int slot, uint64_t holder, pid_t own_pid) {
  StepProtocol& protocol = shard.protocol();
  const int64_t begin = MonotonicNanos(), deadline = begin + absl::ToInt64Nanoseconds(kHangUpTimeout);
  const int64_t closed = begin + absl::ToInt64Nanoseconds(kClosing);
  while (true) {
    RETURN_IF_ERROR(shard.Health());  // whoever held it died with its host, or opens the job again
    const absl::Status taken = protocol.slots().Take(Slot(slot), holder);
    if (taken.ok()) protocol.control()->slots[slot].holder_pid.store(own_pid);
    if (!absl::IsFailedPrecondition(taken) || MonotonicNanos() > deadline) return taken;
    const auto pid = static_cast<pid_t>(protocol.control()->slots[slot].holder_pid.load());
    const bool closing = pid == own_pid && MonotonicNanos() < closed;
    if (pid > 0 && !HasEnded(pid) && !closing) return taken;
    absl::SleepFor(absl::Milliseconds(10));
  }
}

// A trainer may have declared the next step, or buckets of it, for some of the slots and died: what others may complete
// meanwhile is the workers' until it is summed, or the step committed.
absl::Status LocalServer::AwaitSlotsOpen(StepProtocol& protocol, absl::Span<const Slot> slots, uint64_t holder) {
  if (!protocol.local().alone()) {
    const absl::Status given = protocol.slots().AwaitGiven(slots, holder, kOpenTimeout);
    if (!absl::IsDeadlineExceeded(given)) return given;
    return absl::UnavailableError(absl::StrCat(
        "slots ", absl::StrJoin(slots, ",", SlotFormatter()), ": ", given.message(),
        "; a trainer that is gone declared them for a step that is not committed yet (",
        protocol.outcomes().WaitsFor(protocol.committed_step().next()), "), or pushes to them; attach again later"));
  }
  const absl::Time deadline = MonotonicNow() + kOpenTimeout;
  protocol.buckets().SetWaiting(slots, true);
  std::optional<Step> pending;
  absl::Status status;
  while ((pending = protocol.slots().Open(slots)).has_value() && status.ok() && MonotonicNow() < deadline) {
    status = protocol.outcomes().AwaitCommit(*pending, kOpenSlice).status();
    if (absl::IsDeadlineExceeded(status)) status = absl::OkStatus();
  }
  protocol.buckets().SetWaiting(slots, false);
  if (!status.ok() || !pending.has_value()) return status;
  return absl::UnavailableError(
      absl::StrCat("slots ", absl::StrJoin(slots, ",", SlotFormatter()), " were declared for step ", pending->value(),
                   " by a trainer that is gone, and it is not committed yet (", protocol.outcomes().WaitsFor(*pending),
                   "); attach when it is, or together with the missing slots"));
}

// The first seat that is free.
bool LocalServer::TakeFreeSeat(Granted& granted, uint64_t holder, pid_t pid) {
  StepProtocol& protocol = granted.shard->protocol();
  for (int seat = 0; seat < granted.shard->spec().num_trainers; ++seat) {
    if (!protocol.slots().Take(Slot(seat), holder).ok()) continue;
    if (!protocol.local().alone() && !AwaitSlotsOpen(protocol, {Slot(seat)}, holder).ok()) {
      protocol.slots().Give(Slot(seat), holder);
      continue;
    }
    protocol.control()->slots[seat].holder_pid.store(pid);
    granted.slots = {seat};
    return true;
  }
  return false;
}

// Of a job whose slots are pulled. The seat of a trainer that hung up is free in a moment, and so is one that was held
// through a worker that died. If all stay taken, sessions that this process had before a worker's death, and did not claim
// again meanwhile, count as given up.
absl::Status LocalServer::TakeSeat(Granted& granted, uint64_t holder, pid_t pid) {
  const int seats = granted.shard->spec().num_trainers;
  const absl::Time deadline = MonotonicNow() + kHangUpTimeout, given_up = deadline - kHangUpTimeout / 2;
  while (!TakeFreeSeat(granted, holder, pid)) {
    RETURN_IF_ERROR(granted.shard->Health());  // else the trainer would not open the job again
    if (MonotonicNow() > deadline) {
      return absl::ResourceExhaustedError(absl::StrCat("job ", granted.shard->spec().name, " has its ", seats,
                                                       " trainers; end one, or create the job with more"));
    }
    const pid_t given_up_by = MonotonicNow() > given_up ? pid : 0;
    for (int seat = 0; seat < seats; ++seat) ForgetUnclaimed(*granted.shard, seat, given_up_by);
    absl::SleepFor(absl::Milliseconds(10));
  }
  return absl::OkStatus();
}

absl::Status LocalServer::TakeSlots(Granted& granted, uint64_t holder, pid_t pid) {
  if (granted.shard->spec().pulled()) return TakeSeat(granted, holder, pid);
  StepProtocol& protocol = granted.shard->protocol();
  absl::Status status;
  std::vector<Slot> slots;
  for (int slot : granted.slots) {
    ForgetUnclaimed(*granted.shard, slot, pid);
    status = TakeSlot(*granted.shard, slot, holder, pid);
    if (!status.ok()) break;
    slots.push_back(Slot(slot));
  }
  if (status.ok()) status = AwaitSlotsOpen(protocol, slots, holder);
  for (Slot slot : slots) {
    if (!status.ok()) protocol.slots().Give(slot, holder);
  }
  return status;
}

void LocalServer::ServeTrainer(LocalSocket& socket, const v1::TrainerHello& hello) {
  absl::StatusOr<Granted> granted = Redeem(hello.token());
  if (!granted.ok()) {
    SendError(socket, granted.status()).IgnoreError();
    return;
  }
  if (granted->reader_ttl > absl::ZeroDuration()) {
    ServeReader(socket, *granted);
    return;
  }
  granted->needs_all = hello.needs_all();
  const uint64_t holder = NewHolder(*granted->shard);
  const pid_t pid = socket.Peer().ok() ? socket.Peer()->second : 0;
  if (const absl::Status taken = TakeSlots(*granted, holder, pid); !taken.ok()) {
    SendError(socket, taken).IgnoreError();
    return;
  }
  spdlog::info("event=trainer_attached job={} slots={} pid={}", granted->shard->spec().name, granted->slots.size(),
               pid);
  const absl::Status welcome = Welcome(socket, *granted, holder);
  if (welcome.ok()) {
    AnswerRequests(socket, *granted);
  } else {
    SendError(socket, welcome).IgnoreError();
  }
  const SecondLook look(*granted->shard->protocol().control(), pid);
  GiveSlotsBack(granted->shard->protocol(), granted->slots, holder, stop_);
  spdlog::info("event=trainer_gone job={} pid={}", granted->shard->spec().name, pid);
}

absl::Status LocalServer::Welcome(LocalSocket& socket, const Granted& granted, uint64_t holder) {
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kAttaching));
  HostMemory& host = granted.shard->host();
  ASSIGN_OR_RETURN(UniqueFd window, host.window().ReadOnlyFd());
  v1::LocalWelcome welcome;
  std::vector<int> descriptors = {window.get()};
  const auto describe = [&](const Segment& segment) {
    v1::Segment* described = welcome.add_segments();
    described->set_num_bytes(segment.num_bytes());
    described->set_data_offset(segment.data_offset());
  };
  describe(host.window());
  for (int slot : granted.slots) {
    describe(host.slot(slot));
    descriptors.push_back(host.slot(slot).fd());
  }
  describe(host.notifier_segment());
  descriptors.push_back(host.notifier_segment().fd());
  if (const DeviceWindows* const device = host.device(); device != nullptr) {
    std::vector<const DeviceSegment*> there = {&device->window};
    for (int slot : granted.slots) there.push_back(&device->slots[slot]);
    for (const int fd : device->DescribeTo(welcome, there)) descriptors.push_back(fd);
  }
  FillWelcome(*granted.shard, holder, granted.slots, welcome);
  return socket.Send(welcome.SerializeAsString(), descriptors, kSendTimeout);
}

void LocalServer::AnswerRequests(LocalSocket& socket, const Granted& granted) {
  Connected here{BucketUses(granted.shard, granted.slots, granted.resumed), TrainerWatch(granted.shard->protocol())};
  while (!stop_.load()) {
    here.watch.Look(granted.shard->protocol());
    // Short: between two slices it is seen that the trainer hung up, and its slots are free.
    absl::StatusOr<LocalMessage> message = socket.Receive(std::min(worker_.heartbeat_timeout() / 4, kSlice));
    if (absl::IsDeadlineExceeded(message.status())) {
      if (!TellOfOpenMessage(socket, granted, here.watch).ok()) return;
      if (!granted.shard->CheckOpen().ok()) return;  // of an epoch that is over: hang up
      continue;
    }
    if (!message.ok()) return;
    v1::TrainerRequest request;
    if (!request.ParseFromString(message->bytes)) return;
    if (!Answer(socket, granted, here, request).ok()) return;
  }
}

}  // namespace shardmesh
