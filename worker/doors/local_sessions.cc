// Of LocalServer: the sessions of attached trainers over the incarnations of a worker.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/process/process_end.h"
#include "worker/doors/local_server.h"
#include "worker/job/second_look.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSendTimeout = absl::Seconds(5);
}  // namespace

// Numbers of the last incarnation's sessions may be in use yet, by trainers that do not know that theirs ended; so each
// incarnation begins somewhere else. Numbers come again after 2^30, and some trainers stay that long.
uint64_t LocalServer::NewHolder(JobShard& shard) {
  const uint64_t attached_here = static_cast<uint64_t>(shard.rank().value() + 1) << 32;
  const SessionsHere sessions = shard.protocol().slots().Sessions();
  uint64_t session, holder;
  do {
    session = SessionOf(next_session_.fetch_add(1));
    holder = attached_here | session;
  } while (session == 0 || shard.unclaimed().Knows(session) || sessions.staying.count(holder) > 0 ||
           sessions.leaving.count(holder) > 0);
  return holder;
}

void LocalServer::FillWelcome(JobShard& shard, uint64_t holder, absl::Span<const int> slots,
                              v1::LocalWelcome& welcome) const {
  const StepProtocol& protocol = shard.protocol();
  welcome.set_session(holder);
  welcome.set_committed_step(protocol.committed_step().value());
  welcome.set_heartbeat_timeout_ms(absl::ToInt64Milliseconds(worker_.heartbeat_timeout()));
  welcome.set_worker(worker_.options().name);
  welcome.set_rank(shard.rank().value());
  welcome.set_plan_hash(shard.plan().hash());
  if (shard.spec().pulled() && !slots.empty()) welcome.set_seat(slots[0]);
  welcome.set_retained(protocol.members().ComesBack(shard.rank().value()));
}

// A trainer that attaches anew has given up the session that its process had. Nobody comes back for one of a process that
// has ended: a trainer's, or a worker's, through which a trainer was connected.
void LocalServer::ForgetUnclaimed(JobShard& shard, int slot, pid_t pid) {
  const auto held_by = static_cast<pid_t>(shard.protocol().control()->slots[slot].holder_pid.load());
  if (held_by <= 0 || (held_by != pid && !HasEnded(held_by))) return;
  uint64_t session = 0;
  const std::vector<int> slots = shard.unclaimed().Forget(slot, session);
  if (slots.empty()) return;
  shard.protocol().control()->looks_again.fetch_add(1);  // it lives, and may have what it gave up mapped still
  GiveSlotsBack(shard.protocol(), slots, session, stop_);
}

absl::StatusOr<LocalServer::HeldSeat> LocalServer::TakeSeat(const std::shared_ptr<JobShard>& shard) {
  if (!shard->spec().pulled()) {
    return absl::FailedPreconditionError(
        absl::StrCat("slots of job ", shard->spec().name, " are assigned: push and declare those that you compute"));
  }
  Granted granted;
  granted.shard = shard;
  const uint64_t holder = NewHolder(*shard);
  RETURN_IF_ERROR(TakeSeat(granted, holder, getpid()));
  return HeldSeat{granted.slots[0], holder};
}

void LocalServer::GiveSeatBack(JobShard& shard, const HeldSeat& seat) {
  GiveSlotsBack(shard.protocol(), {seat.seat}, seat.holder, stop_);
}

// Until the job is taken over there is nothing to claim: whoever asks tries again.
absl::Status LocalServer::ClaimSession(LocalSocket& socket, const v1::SessionHello& hello, Granted& granted) {
  absl::StatusOr<std::shared_ptr<JobShard>> shard = worker_.Find(hello.job());
  if (!shard.ok()) return absl::UnavailableError(shard.status().message());
  RETURN_IF_ERROR((*shard)->protocol().members().CheckEpoch(hello.epoch()));
  granted.slots.assign(hello.slots().begin(), hello.slots().end());
  for (const int slot : granted.slots) {
    if (slot >= 0 && slot < (*shard)->spec().num_writers() &&
        (*shard)->protocol().slots().HolderOf(Slot(slot)) == hello.session())
      continue;
    return absl::NotFoundError(absl::StrCat("slot ", slot, " is not this session's any more; attach again"));
  }
  RETURN_IF_ERROR((*shard)->unclaimed().Claim(hello.session(), granted.slots));
  granted.shard = *std::move(shard);
  granted.needs_all = hello.needs_all();
  granted.resumed = true;
  v1::LocalWelcome welcome;
  FillWelcome(*granted.shard, hello.session(), granted.slots, welcome);
  socket.Send(welcome.SerializeAsString(), {}, kSendTimeout).IgnoreError();  // a trainer that is gone is seen next
  return absl::OkStatus();
}

void LocalServer::ServeSession(LocalSocket& socket, const v1::SessionHello& hello) {
  Granted granted;
  if (const absl::Status claimed = ClaimSession(socket, hello, granted); !claimed.ok()) {
    SendError(socket, claimed).IgnoreError();
    return;
  }
  spdlog::info("event=trainer_back job={} slots={}", granted.shard->spec().name, granted.slots.size());
  const ControlBlock& control = *granted.shard->protocol().control();
  const int64_t pid = granted.slots.empty() ? 0 : control.slots[granted.slots[0]].holder_pid.load();
  AnswerRequests(socket, granted);
  const SecondLook look(*granted.shard->protocol().control(), static_cast<pid_t>(pid));
  GiveSlotsBack(granted.shard->protocol(), granted.slots, hello.session(), stop_);
  spdlog::info("event=trainer_gone job={}", granted.shard->spec().name);
}

}  // namespace shardmesh
