// StepPulling: slots that are pulled (pulled_words.h): taken, finished, and summed as they come. Seats are places of
// trainers. A part of StepProtocol, for the lead's engine thread.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/step/seat_requests.h"
#include "worker/step/step_view.h"

namespace shardmesh {

class StepPulling {
 public:
  StepPulling(const StepView& view, std::vector<SeatRequest>& seat_requests)
      : view_(view), seat_requests_(seat_requests) {}

  // Slots whose trainers are gone or late are open again: how many.
  int Reopen(int64_t now_nanos) const;
  // The slot of the open step that the seat writes now. nullopt: none yet. ResourceExhausted: it is beyond kMaxStep.
  absl::StatusOr<std::optional<PulledSlots::Grant>> TakeNext(int seat, int64_t now_nanos) const;
  // Whether its trainer waits for one: then a result of its own is summed for the window.
  void SetWaits(int seat, bool waits, int64_t now_nanos) const;
  // nullopt: of a job on several hosts the leads count it in their next round (ResultOf). Nothing is finished on an
  // error, and the trainer may finish the slot again.
  //   Aborted: it was taken back, and the step went on without this result. InvalidArgument: a slot that the trainer
  //   did not take, settings as Declare, tokens that are missing, negative or of a job without them, or a gradient that
  //   is not finite under policy fail. FailedPrecondition: a future step. Unavailable: aborted.
  absl::StatusOr<std::optional<PulledSlots::Result>> Finish(int seat, const FinishedSlot& finished) const;
  // Of a job on several hosts: what became of the slot that the seat finished last; said once. nullopt: not known yet.
  std::optional<absl::StatusOr<PulledSlots::Result>> ResultOf(int seat) const;
  // Counts it, on every host the same. Errors as Finish.
  absl::StatusOr<PulledSlots::Result> CountFinished(int seat, const FinishedSlot& finished) const;
  // What trainers of this host asked for.
  std::vector<SeatRequest>& seat_requests() const { return seat_requests_; }

 private:
  bool IsStepped(Step step) const;
  absl::Status TakenBack(const FinishedSlot& finished) const;
  absl::Status CheckFinished(const FinishedSlot& finished) const;
  absl::StatusOr<bool> MayFinish(int seat, const FinishedSlot& finished) const;

  const StepView& view_;
  std::vector<SeatRequest>& seat_requests_;
};

}  // namespace shardmesh
