#include "worker/step/pulled_slots.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/fault_point.h"
#include "core/base/reduction.h"

namespace shardmesh {

bool Frontier::Covers(SlotRange range) const {
  if (count[range.first] == range.count) return true;
  if (range.count == 1) return false;
  const int left = LeftLeaves(range.count);
  return Covers({range.first, left}) && Covers({range.first + left, range.count - left});
}

bool Frontier::AllResults(SlotRange range) const {
  for (int s = range.first; s < range.first + range.count; ++s) {
    if (count[s] != 1 || source[s] >= 0) return false;
  }
  return true;
}

WindowState PulledSlots::WindowOf(int seat, int window, int* slot) const {
  const int bits = BitsOf(words_.seats[seat].windows[window].load(), step_);
  if (slot != nullptr) *slot = bits & 0xff;
  return WindowState(bits >> 8);
}

void PulledSlots::SetWindow(int seat, int window, WindowState state, int slot) {
  words_.seats[seat].windows[window].store(OfStep(step_, int(state) << 8 | slot));
}

int PulledSlots::WindowWith(int seat, WindowState state, int slot) const {
  for (int w = 0; w < kWindowsOfSeat; ++w) {
    int has = 0;
    if (WindowOf(seat, w, &has) == state && (slot < 0 || slot == has)) return w;
  }
  return -1;
}

Frontier PulledSlots::Sums() const {
  Frontier sums;
  for (int p = 0; p < plan_.slots().num_partials(); ++p) {
    const int bits = BitsOf(words_.partials[p].load(), step_);
    if (bits == 0) continue;
    sums.count[bits >> 8] = bits & 0xff;
    sums.source[bits >> 8] = p;
  }
  for (int s = 0; s < job_.num_slots; ++s) {
    if (StateOf(s) != SlotState::kFinished) continue;
    sums.count[s] = 1;
    sums.source[s] = -1 - words_.slots[s].window.load();
  }
  return sums;
}

int PulledSlots::Live() const {
  int live = 0;
  for (int p = 0; p < plan_.slots().num_partials(); ++p) live += BitsOf(words_.partials[p].load(), step_) != 0;
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    for (int w = 0; w < kWindowsOfSeat; ++w) live += WindowOf(seat, w) != WindowState::kFree;
  }
  return live;
}

void PulledSlots::NotePeak() {
  const int live = Live();
  if (live > BitsOf(words_.peak.load(), step_)) words_.peak.store(OfStep(step_, live));
}

std::optional<PulledSlots::Grant> PulledSlots::Take(int seat, int64_t now_nanos) {
  Grant grant;
  grant.window = WindowWith(seat, WindowState::kWritten);
  if (grant.window >= 0) WindowOf(seat, grant.window, &grant.slot);
  if (grant.window >= 0 && IsFinished(grant.slot)) {  // by another trainer, meanwhile
    Leave(seat, grant.window, grant.slot);
    grant = {0, -1};
  }
  const bool repeated = grant.window >= 0;
  if (!repeated) {
    bool taken = false;
    for (int s = 0; s < job_.num_slots; ++s) taken = taken || StateOf(s) == SlotState::kTaken;
    while (grant.slot < job_.num_slots && StateOf(grant.slot) != SlotState::kOpen) ++grant.slot;
    grant.window = WindowWith(seat, WindowState::kFree);
    if (grant.slot == job_.num_slots || grant.window < 0) return std::nullopt;
    if (taken && Live() >= plan_.slots().live_gradients()) return std::nullopt;
  }
  if (StateOf(grant.slot) != SlotState::kOpen) return grant;
  words_.slots[grant.slot].window.store(seat * kWindowsOfSeat + grant.window);
  words_.slots[grant.slot].until_nanos.store(now_nanos + job_.slot_timeout_ms * 1'000'000);
  if (!repeated) {
    SetWindow(seat, grant.window, WindowState::kWritten, grant.slot);
    Reach(FaultPoint::kSlotTaken);
    NotePeak();
  }
  SetState(grant.slot, SlotState::kTaken);
  return grant;
}

void PulledSlots::EndTakes(int64_t now_nanos) {
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    for (int w = 0; w < kWindowsOfSeat; ++w) {
      int slot = 0;
      if (WindowOf(seat, w, &slot) != WindowState::kWritten || StateOf(slot) != SlotState::kOpen) continue;
      const PulledSlotWords& words = words_.slots[slot];
      const bool newest = words.window.load() == seat * kWindowsOfSeat + w;
      if (newest && now_nanos < words.until_nanos.load()) SetState(slot, SlotState::kTaken);
    }
  }
}

// Whether the result that counts is the seat's.
bool PulledSlots::Owns(int seat, int slot) const {
  return IsFinished(slot) && words_.slots[slot].window.load() / kWindowsOfSeat == seat;
}

bool PulledSlots::Has(int seat, int slot) const {
  return WindowWith(seat, WindowState::kWritten, slot) >= 0 || Owns(seat, slot);
}

bool PulledSlots::Counted(int seat, int slot, uint64_t digest) const {
  return Owns(seat, slot) && words_.slots[slot].digest.load() == digest;
}

PulledSlots::Result PulledSlots::Finish(int seat, int slot, uint64_t digest, int64_t tokens) {
  PulledSlotWords& words = words_.slots[slot];
  const int window = WindowWith(seat, WindowState::kWritten, slot);
  if (Owns(seat, slot)) {  // this call was repeated, or its last incarnation ended behind the next three lines
    if (window >= 0) SetWindow(seat, window, WindowState::kResult, slot);
    return words.digest.load() == digest ? Result::kAccepted : Result::kDiffers;
  }
  if (IsFinished(slot)) {
    SetWindow(seat, window, WindowState::kFree, 0);
    if (words.digest.load() == digest && control_->slots[slot].tokens.load() == tokens) return Result::kSame;
    words_.differing.fetch_add(1);
    return Result::kDiffers;
  }
  words.digest.store(digest);
  control_->slots[slot].tokens.store(tokens);
  words.window.store(seat * kWindowsOfSeat + window);
  SetState(slot, SlotState::kFinished);
  Reach(FaultPoint::kSlotFinished);
  SetWindow(seat, window, WindowState::kResult, slot);
  words_.seats[seat].slots_finished.fetch_add(1);
  return Result::kAccepted;
}

// The slot that is written in a window will not be finished from there.
void PulledSlots::Leave(int seat, int window, int slot) {
  const bool mine = words_.slots[slot].window.load() == seat * kWindowsOfSeat + window;
  if (mine && StateOf(slot) == SlotState::kFinished) {  // the lead's last incarnation ended in Finish
    SetWindow(seat, window, WindowState::kResult, slot);
    return;
  }
  if (mine && StateOf(slot) == SlotState::kTaken) SetState(slot, SlotState::kOpen);
  SetWindow(seat, window, WindowState::kFree, 0);
}

// What the last session of a seat was writing. Results stay.
void PulledSlots::Abandon(int seat) {
  for (int w = 0; w < kWindowsOfSeat; ++w) {
    int slot = 0;
    if (WindowOf(seat, w, &slot) == WindowState::kWritten) Leave(seat, w, slot);
  }
}

bool PulledSlots::IsLate(int seat, int64_t now_nanos) const {
  for (int s = 0; s < job_.num_slots; ++s) {
    if (StateOf(s) != SlotState::kTaken || words_.slots[s].window.load() / kWindowsOfSeat != seat) continue;
    if (now_nanos >= words_.slots[s].until_nanos.load()) return true;
  }
  return false;
}

std::optional<int> PulledSlots::WrittenWindow(int seat, int slot) const {
  const int window = WindowWith(seat, WindowState::kWritten, slot);
  return window < 0 ? std::nullopt : std::make_optional(window);
}

std::optional<PulledSlots::Grant> PulledSlots::Given(int seat) const {
  for (int s = 0; s < job_.num_slots; ++s) {
    const int window = words_.slots[s].window.load();
    if (StateOf(s) == SlotState::kTaken && window / kWindowsOfSeat == seat) return Grant{s, window % kWindowsOfSeat};
  }
  return std::nullopt;
}

int PulledSlots::Reopen(int64_t now_nanos) {
  SeatNow seats[kMaxTrainers];
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    seats[seat] = {control_->slots[seat].holder.load(), IsLate(seat, now_nanos)};
  }
  return Reopen(absl::MakeConstSpan(seats, job_.num_trainers));
}

int PulledSlots::Reopen(absl::Span<const SeatNow> seats) {
  int reopened = 0;
  for (int s = 0; s < job_.num_slots; ++s) {
    if (StateOf(s) != SlotState::kTaken) continue;
    const int seat = words_.slots[s].window.load() / kWindowsOfSeat;
    if (seats[seat].holder == words_.seats[seat].session.load() && !seats[seat].late) continue;
    SetState(s, SlotState::kOpen);
    ++reopened;
  }
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    SeatWords& words = words_.seats[seat];
    if (seats[seat].holder == words.session.load()) continue;
    Abandon(seat);
    words.waits.store(0);
    words.session.store(seats[seat].holder);
  }
  words_.reopened.fetch_add(reopened);
  return reopened;
}

std::optional<SlotRange> PulledSlots::Largest(const Frontier& sums, SlotRange range) const {
  if (sums.count[range.first] == range.count) {
    // One result of one slot has to become a sum, too.
    return range.count == job_.num_slots && sums.source[range.first] < 0 ? std::make_optional(range) : std::nullopt;
  }
  if (range.count == 1) return std::nullopt;
  if (sums.Covers(range)) return range;
  const int left = LeftLeaves(range.count);
  const std::optional<SlotRange> found = Largest(sums, {range.first, left});
  return found ? found : Largest(sums, {range.first + left, range.count - left});
}

std::optional<SlotRange> PulledSlots::NextMerge() const {
  const Frontier sums = Sums();
  const std::optional<SlotRange> largest = Largest(sums, {0, job_.num_slots});
  if (largest.has_value()) return largest;
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    if (words_.seats[seat].waits.load() == 0 || WindowWith(seat, WindowState::kFree) >= 0) continue;
    for (int w = 0; w < kWindowsOfSeat; ++w) {
      int slot = 0;
      if (WindowOf(seat, w, &slot) == WindowState::kResult) return SlotRange{slot, 1};
    }
  }
  return std::nullopt;
}

int PulledSlots::FreePartial() const {
  for (int p = 0; p < plan_.slots().num_partials(); ++p) {
    if (BitsOf(words_.partials[p].load(), step_) == 0) return p;
  }
  return -1;
}

void PulledSlots::Merged(SlotRange range, int partial) {
  const auto within = [&](int slot) { return slot >= range.first && slot < range.first + range.count; };
  words_.partials[partial].store(OfStep(step_, range.first << 8 | range.count));
  Reach(FaultPoint::kMergeCounted);
  for (int p = 0; p < plan_.slots().num_partials(); ++p) {
    const int bits = BitsOf(words_.partials[p].load(), step_);
    if (p != partial && bits != 0 && within(bits >> 8)) words_.partials[p].store(0);
  }
  for (int s = range.first; s < range.first + range.count; ++s) SetState(s, SlotState::kMerged);
  for (int seat = 0; seat < job_.num_trainers; ++seat) {
    for (int w = 0; w < kWindowsOfSeat; ++w) {
      int slot = 0;
      if (WindowOf(seat, w, &slot) == WindowState::kResult && within(slot)) SetWindow(seat, w, WindowState::kFree, 0);
    }
  }
}

int PulledSlots::Root() const {
  for (int p = 0; p < plan_.slots().num_partials(); ++p) {
    if (BitsOf(words_.partials[p].load(), step_) == job_.num_slots) return p;  // from slot 0 on
  }
  return -1;
}

std::vector<std::pair<int, int>> PulledSlots::Taken() const {
  std::vector<std::pair<int, int>> taken;
  for (int s = 0; s < job_.num_slots; ++s) {
    if (StateOf(s) == SlotState::kTaken) taken.emplace_back(s, words_.slots[s].window.load() / kWindowsOfSeat);
  }
  return taken;
}

std::string PulledSlots::WaitsFor() const {
  std::vector<std::string> open, taken;
  for (int s = 0; s < job_.num_slots; ++s) {
    if (StateOf(s) == SlotState::kOpen) open.push_back(absl::StrCat(s));
  }
  for (const auto& [s, seat] : Taken()) {
    taken.push_back(
        IsConnected(*control_, seat)
            ? absl::StrCat(s, " (a trainer connected to rank ", AttachedTo(control_->slots[seat].holder.load()), ")")
            : absl::StrCat(s, " (trainer pid ", control_->slots[seat].holder_pid.load(), ")"));
  }
  if (open.empty() && taken.empty()) return "all slots are finished, the workers are at it";
  return absl::StrCat(open.empty() ? "" : absl::StrCat("open slots: ", absl::StrJoin(open, ",")),
                      open.empty() || taken.empty() ? "" : "; ",
                      taken.empty() ? "" : absl::StrCat("taken slots: ", absl::StrJoin(taken, ",")));
}

}  // namespace shardmesh
