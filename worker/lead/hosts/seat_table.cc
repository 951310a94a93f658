#include "worker/lead/hosts/seat_table.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "worker/lead/hosts/host_seats.h"

namespace shardmesh {
namespace {

static_assert(std::is_trivially_copyable_v<SeatTable>);

bool IsWhole(uint64_t rounds) { return rounds % 2 == 0; }

int Bits(int64_t word) { return static_cast<int>(word & 0xffff); }

}  // namespace

SeatTable ReadSeatTable(const ControlBlock& control, const JobSpec& job) {
  SeatTable table;
  const PulledWords& words = control.pull;
  table.rounds = words.rounds.load();
  table.peak = words.peak.load();
  for (int s = 0; s < job.num_slots; ++s) {
    const PulledSlotWords& from = words.slots[s];
    table.slots[s] = {from.state.load(),
                      from.window.load(),
                      0,
                      from.digest.load(),
                      control.slots[s].tokens.load(),
                      control.slots[s].nonfinite.load()};
  }
  for (int seat = 0; seat < job.num_trainers; ++seat) {
    SeatTable::OfSeat& to = table.seats[seat];
    to.session = words.seats[seat].session.load();
    for (int w = 0; w < kWindowsOfSeat; ++w) {
      to.windows[w] = words.seats[seat].windows[w].load();
      to.host_of_window[w] = words.seats[seat].host_of_window[w].load();
    }
  }
  for (int p = 0; p < kMaxPartials; ++p) table.partials[p] = words.partials[p].load();
  return table;
}

absl::Status CheckSeatTable(const SeatTable& table, const JobSpec& job, const Plan& plan, int num_hosts) {
  const auto wrong = [](const char* what, int of, int64_t word) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", of, " has the word ", word));
  };
  for (int s = 0; s < job.num_slots; ++s) {
    const SeatTable::OfSlot& slot = table.slots[s];
    if (Bits(slot.state) > static_cast<int>(SlotState::kMerged)) return wrong("slot", s, slot.state);
    if (slot.window < 0 || slot.window >= job.num_trainers * kWindowsOfSeat) return wrong("slot", s, slot.window);
    if (slot.tokens < 0 || slot.tokens > kMaxTokens) return wrong("slot", s, slot.tokens);
    const int tensor = NonFiniteTensorOf(slot.nonfinite);
    if (tensor < -1 || tensor >= static_cast<int>(job.parameters.size())) return wrong("slot", s, slot.nonfinite);
  }
  for (int seat = 0; seat < job.num_trainers; ++seat) {
    for (int w = 0; w < kWindowsOfSeat; ++w) {
      const int64_t window = table.seats[seat].windows[w];
      const int32_t host = table.seats[seat].host_of_window[w];
      if (Bits(window) >> 8 > static_cast<int>(WindowState::kResult)) return wrong("seat", seat, window);
      if ((Bits(window) & 0xff) >= job.num_slots) return wrong("seat", seat, window);
      if (host < 0 || host >= num_hosts) return wrong("seat", seat, host);
    }
  }
  for (int p = 0; p < kMaxPartials; ++p) {
    const int bits = Bits(table.partials[p]);
    const bool there = p < plan.slots().num_partials() && (bits >> 8) + (bits & 0xff) <= job.num_slots;
    if (bits != 0 && !there) return wrong("sum", p, table.partials[p]);
  }
  return absl::OkStatus();
}

bool IsNewer(const SeatTable& one, const SeatTable& other) {
  if (IsWhole(one.rounds) != IsWhole(other.rounds)) return IsWhole(one.rounds);
  return one.rounds > other.rounds;
}

void AdoptSeatTable(ControlBlock& control, const SeatTable& table, const JobSpec& job, int64_t now_nanos) {
  PulledWords& words = control.pull;
  words.rounds.store(table.rounds | 1);  // not whole until it is
  words.peak.store(table.peak);
  for (int p = 0; p < kMaxPartials; ++p) words.partials[p].store(table.partials[p]);
  for (int seat = 0; seat < job.num_trainers; ++seat) {
    const SeatTable::OfSeat& from = table.seats[seat];
    words.seats[seat].session.store(from.session);
    for (int w = 0; w < kWindowsOfSeat; ++w) {
      words.seats[seat].windows[w].store(from.windows[w]);
      words.seats[seat].host_of_window[w].store(from.host_of_window[w]);
    }
  }
  for (int s = 0; s < job.num_slots; ++s) {
    const SeatTable::OfSlot& from = table.slots[s];
    const bool here = control.slots[from.window / kWindowsOfSeat].holder.load() != 0;
    words.slots[s].window.store(from.window);
    words.slots[s].until_nanos.store((here ? now_nanos : HostSeats::kNoClock) + job.slot_timeout_ms * 1'000'000);
    words.slots[s].digest.store(from.digest);
    control.slots[s].tokens.store(from.tokens);
    control.slots[s].nonfinite.store(from.nonfinite);
    words.slots[s].state.store(from.state);
  }
  words.rounds.store(table.rounds + table.rounds % 2);
}

}  // namespace shardmesh
