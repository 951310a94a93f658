#include "worker/versions/version_leases.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "rpc/calls/fair_share.h"

namespace shardmesh {
namespace {

VersionLeases::Lease LeaseIn(const LeaseWords& row) {
  return {row.id.load(), Step(row.step.load()), static_cast<int>(row.buffer.load()), row.expires_nanos.load()};
}

uint64_t NewId() {
  uint64_t id = 0;
  while (id == 0) std::memcpy(&id, RandomBytes(sizeof(id)).data(), sizeof(id));
  return id;
}

}  // namespace

absl::Status VersionLeases::Unknown(uint64_t id) const {
  return absl::NotFoundError(
      absl::StrCat("lease ", absl::StrFormat("%016x", id), " of job ", job_->name,
                   " is unknown here: it has ended, was released, or is another worker's; acquire a new one"));
}

// Everybody may list ids. The nonce only its holder knows.
absl::Status VersionLeases::CheckNonce(const LeaseWords& row, uint64_t nonce) const {
  if (row.nonce.load() == nonce) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("lease ", absl::StrFormat("%016x", row.id.load()), " of job ",
                                                  job_->name,
                                                  " was acquired with another nonce than this call has; "
                                                  "only who acquired it may renew or release it, with that nonce"));
}

// This worker's, while it has not ended.
LeaseWords* VersionLeases::LiveRow(uint64_t id) const {
  const int64_t now = now_();
  for (LeaseWords& row : control_->leases) {
    if (row.owner.load() == self_.value() + 1 && row.id.load() == id && row.expires_nanos.load() > now) return &row;
  }
  return nullptr;
}

LeaseWords* VersionLeases::FreeRow() {
  for (LeaseWords& row : control_->leases) {
    int32_t nobody = 0;
    if (row.owner.compare_exchange_strong(nobody, self_.value() + 1)) return &row;
  }
  return nullptr;
}

absl::Status VersionLeases::CheckShareOf(const std::string& caller) const {
  Share share;
  share.room = kMaxLeases;
  for (const LeaseWords& row : control_->leases) share.used += row.owner.load() != 0;
  for (const auto& [id, who] : callers_) share.own += who == caller;
  return CheckShare(caller, share, absl::StrCat("leases of job ", job_->name, " on this host"),
                    "release some, or let them end");
}

absl::StatusOr<std::optional<VersionLeases::Lease>> VersionLeases::Acquire(Step step, absl::Duration ttl,
                                                                           uint64_t nonce, const std::string& caller) {
  const uint64_t id = NewId();
  Sweep();
  MutexLock lock(mu_);
  for (const LeaseWords& row : control_->leases) {
    const bool own = row.owner.load() == self_.value() + 1 && row.expires_nanos.load() > now_();
    if (own && nonce != 0 && row.nonce.load() == nonce) return std::make_optional(LeaseIn(row));
  }
  const std::optional<int> buffer = publications_->Find(step);
  if (!buffer.has_value()) return std::optional<Lease>();
  RETURN_IF_ERROR(CheckShareOf(caller));
  LeaseWords* const row = FreeRow();
  if (row == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("job ", job_->name, " has ", kMaxLeases,
                                                     " leases on this host already; release one, or let it end"));
  }
  // From the last store on it counts: and then the version must still be there.
  row->id.store(id);
  row->nonce.store(nonce);
  row->step.store(step.value());
  row->buffer.store(*buffer);
  row->expires_nanos.store(now_() + absl::ToInt64Nanoseconds(ttl));
  if (publications_->Find(step) == buffer) {
    if (!caller.empty()) callers_[id] = caller;
    return std::make_optional(LeaseIn(*row));
  }
  row->expires_nanos.store(0);
  row->owner.store(0);
  return std::optional<Lease>();
}

// Within the grace after its end the lead counts it still; so when it is renewed by then, it was never free.
absl::StatusOr<VersionLeases::Lease> VersionLeases::Renew(uint64_t id, uint64_t nonce, absl::Duration ttl) {
  MutexLock lock(mu_);
  LeaseWords* const row = LiveRow(id);
  if (row == nullptr) return Unknown(id);
  RETURN_IF_ERROR(CheckNonce(*row, nonce));
  const int64_t counted_until = row->expires_nanos.load() + absl::ToInt64Nanoseconds(kLeaseGrace);
  row->expires_nanos.store(now_() + absl::ToInt64Nanoseconds(ttl));
  if (now_() < counted_until) return LeaseIn(*row);
  row->expires_nanos.store(0);  // this process slept
  return Unknown(id);
}

absl::Status VersionLeases::Release(uint64_t id, uint64_t nonce) {
  MutexLock lock(mu_);
  LeaseWords* const row = LiveRow(id);
  if (row == nullptr) return Unknown(id);
  RETURN_IF_ERROR(CheckNonce(*row, nonce));
  row->expires_nanos.store(0);
  return absl::OkStatus();
}

// While a lease lives nobody writes there, whatever the version's word says meanwhile.
absl::StatusOr<VersionLeases::Lease> VersionLeases::PinLeased(uint64_t id) {
  for (const LeaseWords& row : control_->leases) {
    if (row.owner.load() == 0 || row.id.load() != id || row.expires_nanos.load() <= now_()) continue;
    const Lease lease = LeaseIn(row);
    publications_->PinHeld(lease.buffer);
    if (row.id.load() == id && row.buffer.load() == lease.buffer && row.expires_nanos.load() > now_()) return lease;
    publications_->Unpin(lease.buffer);
  }
  return Unknown(id);
}

bool VersionLeases::Knows(uint64_t id) const {
  return std::any_of(std::begin(control_->leases), std::end(control_->leases), [&](const LeaseWords& row) {
    return row.owner.load() != 0 && row.id.load() == id && row.expires_nanos.load() > now_();
  });
}

bool VersionLeases::Any() const {
  const int64_t counted_since = now_() - absl::ToInt64Nanoseconds(kLeaseGrace);
  return std::any_of(std::begin(control_->leases), std::end(control_->leases), [&](const LeaseWords& row) {
    return row.owner.load() != 0 && row.expires_nanos.load() > counted_since;
  });
}

void VersionLeases::Sweep() {
  MutexLock lock(mu_);
  const int64_t counted_since = now_() - absl::ToInt64Nanoseconds(kLeaseGrace);
  for (LeaseWords& row : control_->leases) {
    const int64_t expires = row.expires_nanos.load();
    const bool ended = expires == 0 || expires <= counted_since;
    if (row.owner.load() != self_.value() + 1 || !ended) continue;
    row.expires_nanos.store(0);
    callers_.erase(row.id.load());
    row.id.store(0);
    row.owner.store(0);
  }
  for (int place = 0; place < kMaxReaders; ++place) {
    ReaderWords& reader = control_->readers[place];
    const bool gone = reader.owner.load() == self_.value() + 1 && reader.gone.load() != 0;
    if (gone && !HoldsAny(place)) reader.owner.store(0);
  }
}

bool VersionLeases::HoldsAny(int place) const {
  for (int b = 0; b < job_->publications; ++b) {
    if (mapped_at_(b, place)) return true;
  }
  return false;
}

absl::StatusOr<int> VersionLeases::TakePlace(int64_t pid, absl::Duration ttl) {
  Sweep();
  MutexLock lock(mu_);
  for (int place = 0; place < kMaxReaders; ++place) {
    ReaderWords& row = control_->readers[place];
    int32_t nobody = 0;
    if (!row.owner.compare_exchange_strong(nobody, self_.value() + 1)) continue;
    row.gone.store(0);
    row.pid.store(pid);
    row.ttl_nanos.store(absl::ToInt64Nanoseconds(ttl));
    row.heard_nanos.store(now_());
    return place;
  }
  return absl::ResourceExhaustedError(absl::StrCat("job ", job_->name, " has ", kMaxReaders,
                                                   " attached readers on this host already; end one, or pull"));
}

void VersionLeases::Heard(int place) { control_->readers[place].heard_nanos.store(now_()); }

void VersionLeases::LeavePlace(int place) {
  control_->readers[place].gone.store(1);
  Sweep();
}

void VersionLeases::TakeOver() {
  for (ReaderWords& row : control_->readers) {
    if (row.owner.load() == self_.value() + 1) row.gone.store(1);
  }
  Sweep();
}

std::vector<VersionLeases::Holder> VersionLeases::List() const {
  const int64_t now = now_();
  std::vector<Holder> holders;
  for (const LeaseWords& row : control_->leases) {
    const Lease lease = LeaseIn(row);
    if (row.owner.load() == 0 || lease.expires_nanos <= now) continue;
    holders.push_back({lease.step, lease.id, -1, 0, lease.expires_nanos - now});
  }
  for (int place = 0; place < kMaxReaders; ++place) {
    const ReaderWords& reader = control_->readers[place];
    if (reader.owner.load() == 0) continue;
    const int64_t left = reader.heard_nanos.load() + reader.ttl_nanos.load() - now;
    for (int b = 0; b < job_->publications; ++b) {
      if (!mapped_at_(b, place)) continue;
      const Step step((control_->publications[b].version_plus_one.load() & ~kTaken) - 1);
      holders.push_back({step, 0, place, reader.pid.load(), left});
    }
  }
  std::stable_sort(holders.begin(), holders.end(), [](const Holder& a, const Holder& b) { return a.step < b.step; });
  return holders;
}

}  // namespace shardmesh
