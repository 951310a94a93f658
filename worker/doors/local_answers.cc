// Of LocalServer: the answers to an attached trainer's requests. While one waits, the trainer is told that this worker
// is alive, and what for.
#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "worker/doors/local_server.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(200);
constexpr int64_t kMaxTimeoutMs = int64_t{24} * 3600 * 1000;

absl::StatusOr<absl::Duration> TimeoutOf(int64_t milliseconds) {
  if (milliseconds >= 1 && milliseconds <= kMaxTimeoutMs) return absl::Milliseconds(milliseconds);
  return absl::InvalidArgumentError(absl::StrCat("timeout_ms is ", milliseconds, "; it is 1 to ", kMaxTimeoutMs));
}

// Nobody else will bring the slots of a trainer that has left, as far as this session is concerned.
absl::Status SomeLeft(const std::string& waits_for) {
  return absl::FailedPreconditionError(absl::StrCat("a trainer has left the job, and the step cannot be done without "
                                                    "its slot; ", waits_for));
}

// A trainer that is stopped reads nothing. What does not fit into its socket it need not hear: it has not read what
// says the same.
absl::Status Remind(LocalSocket& socket, const v1::TrainerReply& reply) {
  const absl::Status sent = socket.Send(reply.SerializeAsString(), {}, absl::ZeroDuration());
  return absl::IsDeadlineExceeded(sent) ? absl::OkStatus() : sent;
}

}  // namespace

// What an attached trainer waits for: `wait` gives DeadlineExceeded as long as it is not there.
absl::Status LocalServer::AwaitAlive(LocalSocket& socket, const Granted& granted, Connected& here, uint64_t id,
                                     absl::Time deadline, const std::function<absl::Status(absl::Duration)>& wait,
                                     const std::function<std::string()>& waits_for) {
  // Short: between two slices it is seen that the trainer hung up, and its slots are free.
  const absl::Duration slice = std::min(worker_.heartbeat_timeout() / 4, kSlice);
  while (true) {
    const absl::Status status = wait(std::max(std::min(slice, deadline - MonotonicNow()), absl::ZeroDuration()));
    if (!absl::IsDeadlineExceeded(status) || MonotonicNow() >= deadline) return status;
    v1::TrainerReply alive;
    alive.set_alive(true);
    alive.set_id(id);
    alive.set_message(waits_for());
    here.watch.Look(granted.shard->protocol());
    const bool left = here.watch.Tell(granted.shard->protocol(), alive);
    RETURN_IF_ERROR(Remind(socket, alive));  // also: the trainer's process has ended
    RETURN_IF_ERROR(granted.shard->Health());
    if (left && granted.needs_all) return SomeLeft(alive.message());
    if (stop_.load()) return absl::UnavailableError("the worker stops");
  }
}

// A trainer whose message is not answered yet hears that this worker is alive, and what the step waits for; or why it
// will not be answered.
absl::Status LocalServer::TellOfOpenMessage(LocalSocket& socket, const Granted& granted, const TrainerWatch& watch) {
  if (granted.slots.empty() || !granted.shard->host().mailbox(granted.slots[0]).open()) return absl::OkStatus();
  absl::Status status = granted.shard->Health();
  const StepProtocol& protocol = granted.shard->protocol();
  const std::string waits_for = protocol.outcomes().WaitsFor(protocol.committed_step().next());
  v1::TrainerReply reply;
  const bool left = watch.Tell(protocol, reply);
  if (status.ok() && left && granted.needs_all) status = SomeLeft(waits_for);
  reply.set_alive(status.ok());
  reply.set_code(static_cast<int>(status.code()));
  reply.set_message(status.ok() ? waits_for : std::string(status.message()));
  return Remind(socket, reply);
}

absl::Status LocalServer::CheckSlots(const Granted& granted, absl::Span<const int> slots) {
  for (int slot : slots) {
    if (std::find(granted.slots.begin(), granted.slots.end(), slot) != granted.slots.end()) continue;
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " is not one that this session attached to"));
  }
  return granted.shard->Health();
}

// Declares, and waits for the commit.
absl::Status LocalServer::AnswerStep(LocalSocket& socket, const Granted& granted, Connected& here,
                                     const v1::TrainerRequest& message, v1::TrainerReply& reply) {
  const v1::StepRequest& request = message.step();
  reply.mutable_step()->set_step(request.step());
  RETURN_IF_ERROR(CheckSlots(granted, request.slots()));
  ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, granted.shard->requests().Declare(request, /*attached=*/true));
  const Step step(request.step());
  StepProtocol& protocol = granted.shard->protocol();
  const auto wait = [&](absl::Duration slice) -> absl::Status {
    const absl::StatusOr<StepOutcome> committed = protocol.outcomes().AwaitCommit(step, slice);
    if (committed.ok()) outcome = *committed;
    if (absl::IsDeadlineExceeded(committed.status())) {
      RETURN_IF_ERROR(granted.shard->Health());
      RETURN_IF_ERROR(granted.shard->requests().CheckStands(request));
    }
    return committed.status();
  };
  if (!outcome.has_value()) {
    RETURN_IF_ERROR(AwaitAlive(socket, granted, here, message.id(), absl::InfiniteFuture(), wait,
                               [&] { return protocol.outcomes().WaitsFor(step); }));
  }
  *reply.mutable_step() = granted.shard->requests().ToReply(*outcome);
  return absl::OkStatus();
}

// Declares, and waits until the slots may have another bucket.
absl::Status LocalServer::AnswerDeclare(LocalSocket& socket, const Granted& granted, Connected& here,
                                        const v1::TrainerRequest& message, v1::TrainerReply& reply) {
  const v1::DeclareBucketRequest& request = message.declare();
  RETURN_IF_ERROR(CheckSlots(granted, request.slots()));
  ASSIGN_OR_RETURN(const absl::Duration timeout, TimeoutOf(request.timeout_ms()));
  ASSIGN_OR_RETURN(const bool before, granted.shard->requests().DeclareBucket(request, /*attached=*/true));
  reply.mutable_declare()->set_already_declared(before);
  StepProtocol& protocol = granted.shard->protocol();
  std::vector<Slot> slots;
  for (int slot : granted.slots) slots.push_back(Slot(slot));
  const Step step(request.step());
  if (protocol.buckets().MayGoOn(slots, step)) return absl::OkStatus();
  protocol.buckets().SetWaiting(slots, true);
  const absl::Status status = AwaitAlive(
      socket, granted, here, message.id(), MonotonicNow() + timeout,
      [&](absl::Duration slice) { return protocol.buckets().AwaitSums(slots, step, slice); },
      [&] { return protocol.buckets().WaitFor(slots, step); });
  protocol.buckets().SetWaiting(slots, false);
  return status;
}

absl::Status LocalServer::AnswerUse(LocalSocket& socket, const Granted& granted, Connected& here,
                                    const v1::TrainerRequest& message) {
  const v1::BucketUse& request = message.use();
  const bool waits = request.kind() == v1::BucketUse::ACQUIRE || request.kind() == v1::BucketUse::AWAIT;
  absl::Duration timeout;
  if (waits) {
    ASSIGN_OR_RETURN(timeout, TimeoutOf(request.timeout_ms()));
  }
  RETURN_IF_ERROR(granted.shard->Health());
  switch (request.kind()) {
    case v1::BucketUse::RELEASE:
      return here.uses.Drop(request.bucket(), message.id());
    case v1::BucketUse::PREFETCH:
      return here.uses.Add(request.bucket(), message.id());
    case v1::BucketUse::ACQUIRE:
      RETURN_IF_ERROR(here.uses.Add(request.bucket(), message.id()));
      break;
    case v1::BucketUse::AWAIT:
      RETURN_IF_ERROR(here.uses.CheckUsed(request.bucket()));
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("kind of a bucket's use is ", static_cast<int>(request.kind()), "; it is 1 to 4"));
  }
  StepProtocol& protocol = granted.shard->protocol();
  const absl::Status status = AwaitAlive(
      socket, granted, here, message.id(), MonotonicNow() + timeout,
      [&](absl::Duration slice) { return protocol.buckets().Await(request.bucket(), slice); },
      [&] { return absl::StrCat("bucket ", request.bucket(), " is being gathered"); });
  if (!status.ok() && request.kind() == v1::BucketUse::ACQUIRE) here.uses.TakeBack(request.bucket());
  return status;
}

absl::Status LocalServer::Answer(LocalSocket& socket, const Granted& granted, Connected& here,
                                 const v1::TrainerRequest& message) {
  v1::TrainerReply reply;
  reply.set_id(message.id());
  absl::Status status;
  if (message.has_declare()) {
    status = AnswerDeclare(socket, granted, here, message, reply);
  } else if (message.has_use()) {
    status = AnswerUse(socket, granted, here, message);
  } else {
    status = AnswerStep(socket, granted, here, message, reply);
  }
  if (!status.ok()) {
    reply.set_code(static_cast<int>(status.code()));
    reply.set_message(std::string(status.message()));
  }
  while (true) {
    const absl::Status sent = socket.Send(reply.SerializeAsString(), {}, kSlice);
    if (!absl::IsDeadlineExceeded(sent) || stop_.load() || !granted.shard->CheckOpen().ok()) return sent;
  }
}

}  // namespace shardmesh
