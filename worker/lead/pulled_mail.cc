// Of StepMail: messages of trainers that pull slots.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/lead/step_mail.h"

namespace shardmesh {
namespace {

v1::SlotResult ToProto(PulledSlots::Result result) {
  switch (result) {
    case PulledSlots::Result::kAccepted:
      return v1::SLOT_RESULT_ACCEPTED;
    case PulledSlots::Result::kSame:
      return v1::SLOT_RESULT_SAME;
    case PulledSlots::Result::kDiffers:
      break;
  }
  return v1::SLOT_RESULT_DIFFERS;
}

}  // namespace

absl::Status StepMail::Finish(int seat, const v1::SlotRequest& request, v1::SlotReply& reply) {
  const v1::FinishedSlot& said = request.finished();
  FinishedSlot finished;
  finished.slot = Slot(said.slot());
  finished.step = Step(said.step());
  finished.digest = said.digest();
  finished.learning_rates.assign(said.learning_rates().begin(), said.learning_rates().end());
  if (said.has_loss_scale()) finished.loss_scale = said.loss_scale();
  finished.tokens = said.tokens();
  if (said.has_non_finite()) finished.non_finite = said.non_finite().tensor();
  ASSIGN_OR_RETURN(const std::optional<PulledSlots::Result> result, protocol_.pulling().Finish(seat, finished));
  open_[seat].finishes = !result.has_value();
  open_[seat].finished_slot = said.slot();
  if (result.has_value()) Finished(seat, *result, reply);
  return absl::OkStatus();
}

void StepMail::Finished(int seat, PulledSlots::Result result, v1::SlotReply& reply) const {
  reply.set_result(ToProto(result));
  if (result != PulledSlots::Result::kDiffers) return;
  spdlog::warn(
      "event=slot_differs job={} slot={} step={} seat={} remedy=\"the same slot and step gave other gradients on "
      "another trainer: make trainers deterministic\"",
      protocol_.job().name, open_[seat].finished_slot, protocol_.committed_step().value() + 1, seat);
}

// Of a job on several hosts. False: what the trainer has finished is not counted yet, or it was answered.
bool StepMail::FinishIsKnown(int seat) {
  Open& open = open_[seat];
  if (!open.finishes) return true;
  if (protocol_.slots().HolderOf(Slot(seat)) != open.session) {  // nobody is there to be told
    open.finishes = open.takes = false;
    host_.mailbox(seat).answered.store(host_.mailbox(seat).request.taken.load());
    return false;
  }
  absl::Status status = protocol_.members().Health();
  const auto result = protocol_.pulling().ResultOf(seat);
  if (status.ok() && !result.has_value()) return false;
  open.finishes = false;
  if (status.ok()) status = result->status();
  if (status.ok()) Finished(seat, **result, open.pull);
  if (status.ok() && open.takes) return true;
  open.takes = false;
  protocol_.pulling().SetWaits(seat, false, MonotonicNanos());
  AnswerPulling(seat, status);
  return false;
}

void StepMail::Reopen() {
  const int slots = protocol_.pulling().Reopen(MonotonicNanos());
  if (slots == 0) return;
  spdlog::warn("event=slots_reopened job={} step={} slots={} reason=\"their trainers are gone or late\"",
               protocol_.job().name, protocol_.committed_step().value() + 1, slots);
}

// A message that has come: what it has finished now, the slot that it asks for when there is one.
void StepMail::TakePulling(int seat, bool counts) {
  Open& open = open_[seat];
  Mailbox& box = host_.mailbox(seat);
  protocol_.pulling().SetWaits(seat, false, MonotonicNanos());  // a message before this one was given up
  open.finishes = false;
  Reopen();                                           // the session may be new
  if (!counts) return box.answered.store(box.request.taken.load());
  const v1::SlotRequest& request = request_.slot();
  open.pull.Clear();
  absl::Status status = ErrorAt(FaultPoint::kMessageTaken);
  if (!status.ok()) {
    // injected
  } else if (!request_.has_slot() || (!request.take() && !request.has_finished())) {
    status = absl::FailedPreconditionError("slots of this job are pulled: finish or take one");
  } else if (request.take() && request.timeout_ms() < 1) {
    status = absl::InvalidArgumentError(absl::StrCat("timeout_ms is ", request.timeout_ms(), "; it is 1 or more"));
  } else if (request.has_finished()) {
    status = Finish(seat, request, open.pull);
  }
  Reach(FaultPoint::kMessageDeclared);
  if (!status.ok() || (!request.take() && !open.finishes)) return AnswerPulling(seat, status);
  if (!request.take()) return;
  open.takes = true;
  open.after_step = request.after_step();
  open.until_nanos = MonotonicNanos() + std::min(request.timeout_ms(), kMaxSlotTimeoutMs) * 1'000'000;
  protocol_.pulling().SetWaits(seat, true, MonotonicNanos());
}

// In the order of seats: who asks in vain goes on waiting. A trainer that is gone, or gave up, is not answered.
void StepMail::PollPulling() {
  const int64_t now = MonotonicNanos();
  for (int seat = 0; seat < static_cast<int>(open_.size()); ++seat) {
    Open& open = open_[seat];
    if (!FinishIsKnown(seat) || !open.takes) continue;
    const bool asks = protocol_.slots().HolderOf(Slot(seat)) == open.session && now < open.until_nanos;
    absl::Status status = protocol_.members().Health();
    if (asks && status.ok()) {
      const absl::StatusOr<bool> taken = TryTake(seat, now, open.pull);
      if (taken.ok() && !*taken) continue;
      status = taken.status();
    }
    open.takes = false;
    protocol_.pulling().SetWaits(seat, false, now);
    if (!asks) {
      host_.mailbox(seat).answered.store(host_.mailbox(seat).request.taken.load());
      continue;
    }
    Reach(FaultPoint::kAnswering);
    AnswerPulling(seat, status);
  }
}

absl::StatusOr<bool> StepMail::TryTake(int seat, int64_t now_nanos, v1::SlotReply& reply) {
  const Step committed = protocol_.committed_step();
  if (committed.value() == kNoStep) return false;
  if (committed.value() > open_[seat].after_step) {
    std::optional<StepOutcome> outcome = protocol_.outcomes().OutcomeOf(committed);
    outcome->already_applied = false;
    *reply.mutable_committed() = requests_.ToReply(*outcome);
    return true;
  }
  ASSIGN_OR_RETURN(const std::optional<PulledSlots::Grant> grant, protocol_.pulling().TakeNext(seat, now_nanos));
  if (!grant.has_value()) return false;
  reply.set_slot(grant->slot);
  reply.set_step(committed.value() + 1);
  reply.set_window(grant->window);
  return true;
}

void StepMail::AnswerPulling(int seat, const absl::Status& status) {
  Open& open = open_[seat];
  reply_.Clear();
  *reply_.mutable_slot() = open.pull;
  if (!status.ok()) {
    reply_.set_code(static_cast<int>(status.code()));
    reply_.set_message(std::string(status.message().substr(0, kMaxMessageBytes / 2)));
  }
  reply_.set_id(open.id);
  reply_.SerializeToString(&open.answer);
  Deliver(seat);
}

}  // namespace shardmesh
