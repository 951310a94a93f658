#include "worker/lead/hosts/host_progress.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "worker/control/group_table.h"
#include "worker/control/residency.h"
#include "worker/lead/hosts/gradient_sources.h"

namespace shardmesh {

static_assert(std::is_trivially_copyable_v<HostProgressHead>);

namespace {

size_t NumTakers(const Plan& plan) { return plan.bucketed() ? plan.buckets().size() : 0; }

template <typename Value>
char* Append(const Value* from, size_t count, char* to) {
  if (count > 0) std::memcpy(to, from, count * sizeof(Value));
  return to + count * sizeof(Value);
}
template <typename Value>
const char* Take(const char* from, size_t count, Value* to) {
  if (count > 0) std::memcpy(to, from, count * sizeof(Value));
  return from + count * sizeof(Value);
}

template <typename... What>
absl::Status Cannot(const What&... what) {
  return absl::InvalidArgumentError(absl::StrCat(what...));
}

// Of one host.
absl::Status Check(const HostProgress& says, const JobSpec& job, const Plan& plan, size_t num_hosts) {
  if (says.committed > says.decided || says.decided - says.committed > 1) {
    return Cannot("command ", says.decided, " is decided and ", says.committed, " committed");
  }
  if (says.committed_step < kNoStep || says.committed_step > kMaxStep) {
    return Cannot("committed step ", says.committed_step);
  }
  const Command& command = says.command;
  if (command.kind < CommandKind::kNone || command.kind > CommandKind::kPublish) {
    return Cannot("command of kind ", static_cast<int32_t>(command.kind));
  }
  if (command.step < kNoStep || command.step > kMaxStep) return Cannot("command of step ", command.step);
  if (command.publish < -1 || command.publish >= job.publications) return Cannot("publication ", command.publish);
  if (command.bucket < -1 || command.bucket >= static_cast<int>(plan.buckets().size())) {
    return Cannot("command of bucket ", command.bucket);
  }
  const int partials = job.pulled() ? plan.slots().num_partials() : 1;  // 0: of no command yet
  if (command.partial < -1 || command.partial >= partials) return Cannot("command of partial sum ", command.partial);
  if (command.first_slot < 0 || command.num_slots < 0 || command.first_slot > job.num_slots - command.num_slots) {
    return Cannot("command of ", command.num_slots, " slots from ", command.first_slot, " on");
  }
  if (command.parity < 0 || command.parity > 1 || command.groups < 0 || command.groups > 1) {
    return Cannot("command of parity ", command.parity, " and groups ", command.groups);
  }
  for (int s = 0; s < job.num_slots; ++s) {
    for (int p = 0; p < plan.num_shards(); ++p) {
      if (says.sources[s][p] >= num_hosts && says.sources[s][p] != kNoSource) {
        return Cannot("gradient shard ", p, " of slot ", s, " lies on host ", says.sources[s][p]);
      }
    }
  }
  return plan.pulled() ? CheckSeatTable(says.seats, job, plan, static_cast<int>(num_hosts)) : absl::OkStatus();
}

bool SameDecision(const Command& one, const Command& other) {
  return one.kind == other.kind && one.step == other.step && one.bucket == other.bucket &&
         one.publish == other.publish && one.parity == other.parity && one.apply == other.apply;
}

}  // namespace

int64_t HostProgressBytes(const JobSpec& job, const Plan& plan) {
  return static_cast<int64_t>(sizeof(HostProgressHead) + sizeof(double) * job.num_groups() +
                              sizeof(uint64_t) * NumTakers(plan) + (plan.pulled() ? sizeof(SeatTable) : 0));
}

void PackHostProgress(const HostProgress& progress, const Plan& plan, char* bytes) {
  const HostProgressHead& head = progress;
  bytes = Append(&head, 1, bytes);
  bytes = Append(progress.learning_rates.data(), progress.learning_rates.size(), bytes);
  bytes = Append(progress.takers.data(), progress.takers.size(), bytes);
  if (plan.pulled()) Append(&progress.seats, 1, bytes);
}

HostProgress UnpackHostProgress(const char* bytes, const JobSpec& job, const Plan& plan) {
  HostProgress progress;
  HostProgressHead& head = progress;
  bytes = Take(bytes, 1, &head);
  progress.learning_rates.resize(job.num_groups());
  bytes = Take(bytes, progress.learning_rates.size(), progress.learning_rates.data());
  progress.takers.resize(NumTakers(plan));
  bytes = Take(bytes, progress.takers.size(), progress.takers.data());
  if (plan.pulled()) Take(bytes, 1, &progress.seats);
  return progress;
}

HostProgress ReadHostProgress(const StepProtocol& protocol) {
  const ControlBlock& control = *protocol.control();
  HostProgress progress;
  progress.decided = protocol.decided();
  progress.committed = protocol.committed();
  progress.committed_step = protocol.committed_step().value();
  progress.sources_step = control.gradient_sources_step.load();
  progress.command = protocol.command();
  const HostRanks& ranks = protocol.local();
  for (int r = ranks.first(); r < ranks.end(); ++r) progress.digests[r - ranks.first()] = control.members[r].digest;
  for (int s = 0; s < protocol.job().num_slots; ++s) {
    for (int p = 0; p < protocol.plan().num_shards(); ++p) {
      progress.sources[s][p] = control.gradient_sources[s][p].load();
    }
  }
  const GroupTable groups(protocol.control(), protocol.plan());
  progress.learning_rates.resize(protocol.job().num_groups());
  if (progress.command.kind == CommandKind::kStep) {
    for (size_t g = 0; g < progress.learning_rates.size(); ++g) {
      progress.learning_rates[g] = groups.rates(progress.command.groups)[g];
    }
  }
  progress.takers.resize(NumTakers(protocol.plan()));
  for (size_t b = 0; b < progress.takers.size(); ++b) {
    progress.takers[b] = ResidencyTable(protocol.control(), protocol.plan()).bucket(static_cast<int>(b)).takers.load();
  }
  if (protocol.plan().pulled()) progress.seats = ReadSeatTable(control, protocol.job());
  return progress;
}

absl::Status CheckProgress(absl::Span<const HostProgress> all, const JobSpec& job, const Plan& plan, int& host) {
  uint64_t first = all[0].committed, last = all[0].decided;
  for (host = 0; host < static_cast<int>(all.size()); ++host) {
    const HostProgress& says = all[host];
    if (absl::Status status = Check(says, job, plan, all.size()); !status.ok()) return status;
    first = std::min(first, says.committed);
    last = std::max(last, says.decided);
    // Nobody decides anew before all are done with what was decided before.
    if (last - first > 2)
      return Cannot("command ", last, " is decided on one host, and ", first + 1, " open on another");
    for (const HostProgress& other : all.first(host)) {
      if (other.decided != says.decided || SameDecision(other.command, says.command)) continue;
      return Cannot("another command ", says.decided, " than an earlier host's is decided");
    }
  }
  return absl::OkStatus();
}

int HostThatCommitted(absl::Span<const HostProgress> all, uint64_t seq) {
  for (size_t h = 0; h < all.size(); ++h) {
    if (all[h].committed >= seq) return static_cast<int>(h);
  }
  return -1;
}

int HostThatDecided(absl::Span<const HostProgress> all, uint64_t seq) {
  for (size_t h = 0; h < all.size(); ++h) {
    if (all[h].decided == seq) return static_cast<int>(h);
  }
  return -1;
}

const SeatTable* NewestSeats(absl::Span<const HostProgress> all, int mine) {
  int newest = mine;
  for (int h = 0; h < static_cast<int>(all.size()); ++h) {
    const bool ahead = all[h].committed > all[newest].committed &&
                       !IsNewer(all[newest].seats, all[h].seats);  // one round, of which one host has committed more
    if (ahead || IsNewer(all[h].seats, all[newest].seats)) newest = h;
  }
  return newest == mine ? nullptr : &all[newest].seats;
}

void AdoptSources(ControlBlock& control, absl::Span<const HostProgress> all) {
  for (const HostProgress& other : all) {
    if (other.sources_step <= control.gradient_sources_step.load()) continue;
    for (int s = 0; s < kMaxSlots; ++s) {
      for (int p = 0; p < kMaxHostRanks; ++p) control.gradient_sources[s][p].store(other.sources[s][p]);
    }
    control.gradient_sources_step.store(other.sources_step);
  }
}

}  // namespace shardmesh
