#include "worker/lead/step_mail.h"

#include <sched.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {
constexpr int kQuickLooks = 1000;
// A step of all slots, each with a gradient that is not finite and its tokens.
static_assert(kMaxMessageBytes >= sizeof(double) * kMaxGroups + 32 * kMaxSlots + 512);
constexpr absl::Duration kSlowLook = absl::Milliseconds(1), kTakingTimeout = absl::Seconds(60);
}  // namespace

StepMail::StepMail(const HostMemory& host, StepProtocol& protocol, int num_writers, const TrainerRequests& requests)
    : host_(host), protocol_(protocol), requests_(requests), open_(num_writers) {}

// The bytes lie there until the trainer writes its next message, which it does not before it has this one's answer, or
// gave it up.
void StepMail::TakeOver() {
  for (int slot = 0; slot < static_cast<int>(open_.size()); ++slot) {
    Mailbox& box = host_.mailbox(slot);
    uint32_t taken = box.request.number.load();
    if (box.open()) box.request.taken.compare_exchange_strong(taken, taken - 1);
  }
}

void StepMail::Poll() {
  const bool pulled = protocol_.job().pulled();
  if (pulled) Reopen();
  for (int slot = 0; slot < static_cast<int>(open_.size()); ++slot) {
    Message& message = host_.mailbox(slot).request;
    if (message.number.load() != message.taken.load()) Take(slot);
    if (!open_[slot].answer.empty()) {
      Deliver(slot);
    } else if (open_[slot].step != 0) {
      AnswerIfDone(slot);
    }
  }
  if (pulled) PollPulling();
}

void StepMail::AnswerIfDone(int slot) {
  const Step step(open_[slot].step);
  if (std::optional<StepOutcome> outcome = protocol_.outcomes().OutcomeOf(step)) {
    outcome->already_applied = false;
    Reach(FaultPoint::kAnswering);
    Answer(slot, *outcome);
  } else if (const absl::Status health = protocol_.members().Health(); !health.ok()) {
    Answer(slot, health);
  } else if (const absl::Status stands = protocol_.declarations().CheckStands(open_[slot].slots, step); !stands.ok()) {
    Answer(slot, stands);  // another host's word came first
  }
}

void StepMail::Take(int slot) {
  Mailbox& box = host_.mailbox(slot);
  std::atomic<uint32_t>& taking = protocol_.control()->taking_messages;
  taking.fetch_add(1);  // before the holder is read
  const bool taken = TakeMessage(box.request, bytes_);
  const bool counts = taken && request_.ParseFromString(bytes_) && request_.session() != 0 &&
                      request_.session() == protocol_.slots().HolderOf(Slot(slot));
  Open& open = open_[slot];
  open.step = 0;
  open.id = request_.id();
  open.session = request_.session();
  open.slots.clear();
  open.answer.clear();
  open.takes = false;
  if (protocol_.job().pulled()) {
    TakePulling(slot, counts);
    taking.fetch_add(1);
    return;
  }
  absl::StatusOr<std::optional<StepOutcome>> declared = std::optional<StepOutcome>();
  if (counts) {
    absl::Status may = ErrorAt(FaultPoint::kMessageTaken);
    may.Update(CheckSlots(request_));
    may.Update(protocol_.members().CheckEpoch(request_.step().epoch()));
    declared = may.ok() ? protocol_.declarations().Declare(DeclarationOf(request_.step(), /*in_place=*/true)) : may;
    Reach(FaultPoint::kMessageDeclared);
  }
  taking.fetch_add(1);
  open.step = counts ? request_.step().step() : 0;
  for (const int other : request_.step().slots()) open.slots.push_back(Slot(other));
  if (!counts) return box.answered.store(box.request.taken.load());
  if (!declared.ok()) return Answer(slot, declared.status());
  if (declared->has_value()) Answer(slot, **declared);
}

absl::Status StepMail::CheckSlots(const v1::TrainerRequest& request) const {
  for (const int slot : request.step().slots()) {
    if (slot >= 0 && slot < static_cast<int>(open_.size()) &&
        protocol_.slots().HolderOf(Slot(slot)) == request.session())
      continue;
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " is not one that this session attached to"));
  }
  return absl::OkStatus();
}

void StepMail::Answer(int slot, const absl::StatusOr<StepOutcome>& outcome) {
  reply_.Clear();
  if (outcome.ok()) {
    *reply_.mutable_step() = requests_.ToReply(*outcome);
  } else {
    reply_.mutable_step()->set_step(open_[slot].step);
    reply_.set_code(static_cast<int>(outcome.status().code()));
    reply_.set_message(std::string(outcome.status().message().substr(0, kMaxMessageBytes / 2)));
  }
  reply_.set_id(open_[slot].id);
  reply_.SerializeToString(&open_[slot].answer);
  Deliver(slot);
}

void StepMail::Deliver(int slot) {
  Mailbox& box = host_.mailbox(slot);
  Open& open = open_[slot];
  if (!PutMessage(box.reply, open.answer)) return;  // an answer that was given up is not taken yet; at the next poll
  open.step = 0;
  open.answer.clear();
  box.answered.store(box.request.taken.load());
  FutexWake(box.reply.number);
}

void GiveSlotsBack(StepProtocol& protocol, absl::Span<const int> slots, uint64_t holder,
                   const std::atomic<bool>& stop) {
  for (const int slot : slots) {
    protocol.slots().Leave(Slot(slot), holder);
    protocol.control()->slots[slot].times_left.fetch_add(1);  // of a slot of the granted session
  }
  protocol.buckets().DropUses(slots, holder);
  // Who takes a message from here on sees that its session is gone.
  const std::atomic<uint32_t>& taking = protocol.control()->taking_messages;
  const uint32_t seen = taking.load();
  const absl::Time deadline = MonotonicNow() + kTakingTimeout;
  for (int looks = 0; seen % 2 == 1 && taking.load() == seen; ++looks) {
    if (stop.load() || !protocol.members().Health().ok() || MonotonicNow() > deadline) return;
    looks < kQuickLooks ? void(sched_yield()) : absl::SleepFor(kSlowLook);  // the lead may be dead, and come back
  }
  for (const int slot : slots) protocol.slots().Give(Slot(slot), holder | kLeaving);
}

}  // namespace shardmesh
