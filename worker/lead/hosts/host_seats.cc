#include "worker/lead/hosts/host_seats.h"

#include "absl/strings/str_cat.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {

FinishedSlot FinishedOf(const HostSeat& said) {
  FinishedSlot finished;
  finished.slot = Slot(said.slot);
  finished.step = Step(said.step);
  finished.digest = said.digest;
  finished.tokens = said.tokens;
  if (said.non_finite >= 0) finished.non_finite = said.non_finite;
  return finished;
}

}  // namespace

HostSeats::HostSeats(StepProtocol& protocol, const JobSpec& job, const Plan& plan)
    : protocol_(protocol), job_(job), plan_(plan) {}

void HostSeats::Read(HostWords& words) const {
  const ControlBlock& control = *protocol_.control();
  const PulledSlots table(protocol_.control(), job_, plan_, words.committed + 1);
  const int64_t now = MonotonicNanos();
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    HostSeat& says = words.seats[seat];
    says = HostSeat();
    if (control.slots[seat].holder.load() == 0) continue;
    says.waits = control.pull.seats[seat].waits.load() != 0 ? 1 : 0;
    says.late = table.IsLate(seat, now) ? 1 : 0;
    const std::optional<FinishedSlot>& finished = protocol_.pulling().seat_requests()[seat].finished;
    if (!finished.has_value()) continue;
    says.finishes = 1;
    says.slot = finished->slot.value();
    says.step = finished->step.value();
    says.digest = finished->digest;
    says.tokens = finished->tokens;
    says.non_finite = finished->non_finite.value_or(-1);
  }
}

// Learning rates and loss scale are those of the first host that said some (host_words.h); what was finished with
// others does not count, and may be finished again.
void HostSeats::Finish(int seat, int host, AllHostWords words) {
  const FinishedSlot finished = FinishedOf(words[host]->seats[seat]);
  const int first = HostOfRates(words);
  absl::StatusOr<PulledSlots::Result> result = PulledSlots::Result::kAccepted;
  if (first >= 0 && words[host]->rates_step == words[first]->rates_step && !SaidTheSame(*words[host], *words[first])) {
    result = absl::InvalidArgumentError(
        absl::StrCat("slot ", finished.slot.value(), " of step ", finished.step.value(),
                     " was finished with other learning rates, or another loss scale, than a slot on another host; all "
                     "slots of a step must agree"));
  } else {
    const PulledSlots table(protocol_.control(), job_, plan_, finished.step.value());
    const std::optional<int> window = table.WrittenWindow(seat, finished.slot.value());
    if (window.has_value()) protocol_.control()->pull.seats[seat].host_of_window[*window].store(host);
    result = protocol_.pulling().CountFinished(seat, finished);
  }
  if (host != protocol_.local().host) return;
  SeatRequest& request = protocol_.pulling().seat_requests()[seat];
  request.finished.reset();
  request.result = result;
}

void HostSeats::TakeIn(AllHostWords words) {
  const int64_t open = words[0]->committed + 1;
  if (open < 1) return;
  std::atomic<uint64_t>& rounds = protocol_.control()->pull.rounds;
  rounds.store(rounds.load() | 1);
  PulledSlots table(protocol_.control(), job_, plan_, open);
  std::vector<PulledSlots::SeatNow> seats(job_.num_trainers);
  std::vector<int> hosts(job_.num_trainers);
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    hosts[seat] = HostOfWriter(words, seat);
    if (hosts[seat] < 0) continue;
    seats[seat] = {words[hosts[seat]]->slots[seat].holder, words[hosts[seat]]->seats[seat].late != 0};
  }
  table.Reopen(seats);
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    if (hosts[seat] >= 0 && words[hosts[seat]]->seats[seat].finishes != 0) Finish(seat, hosts[seat], words);
  }
  const int64_t now = MonotonicNanos();
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    const bool waits = hosts[seat] >= 0 && words[hosts[seat]]->seats[seat].waits != 0;
    const bool here = hosts[seat] == protocol_.local().host;
    if (!here) protocol_.control()->pull.seats[seat].waits.store(waits ? 1 : 0);
    if (waits && open <= kMaxStep) table.Take(seat, here ? now : kNoClock);
  }
  rounds.fetch_add(1);
}

std::vector<SeatWindow> HostSeats::WindowsOf(const Command& command) const {
  const Frontier sums = PulledSlots(protocol_.control(), job_, plan_, command.step).Sums();
  std::vector<SeatWindow> windows;
  for (int s = command.first_slot; s < command.first_slot + command.num_slots; ++s) {
    if (sums.count[s] != 1 || sums.source[s] >= 0) continue;
    const int window = -1 - sums.source[s];
    const int seat = window / kWindowsOfSeat, of_seat = window % kWindowsOfSeat;
    windows.push_back({seat, of_seat, protocol_.control()->pull.seats[seat].host_of_window[of_seat].load()});
  }
  return windows;
}

}  // namespace shardmesh
