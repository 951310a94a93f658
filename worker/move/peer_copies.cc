#include "worker/move/peer_copies.h"

#include <utility>

#include "core/base/status.h"
#include "core/mesh/reform.h"

namespace shardmesh {
namespace {

// Whose keeper it is.
Rank KeptFor(Rank rank, int ranks, int per_host) { return Rank((rank.value() + ranks - per_host) % ranks); }

}  // namespace

PeerCopies::PeerCopies(JobSpec spec, Plan plan, Epoch epoch, Rank rank, HostRanks ranks, std::string secret)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      epoch_(epoch),
      own_(rank),
      other_(KeptFor(rank, plan_.num_ranks(), ranks.per_host)),
      hosts_(plan_.num_ranks() / ranks.per_host),
      secret_(std::move(secret)) {}

// A copy that somebody reads keeps its memory.
void PeerCopies::Empty(Shelf& shelf, std::optional<Copy>& copy) {
  if (copy.has_value() && copy->snapshot.use_count() == 1) shelf.free = std::move(copy->snapshot);
  copy.reset();
}

absl::StatusOr<std::shared_ptr<Snapshot>> PeerCopies::Room(Rank rank) {
  {
    MutexLock lock(mu_);
    Shelf& shelf = ShelfOf(rank);
    Empty(shelf, shelf.newest);
    if (shelf.free != nullptr) return std::move(shelf.free);
  }
  return Snapshot::Create(plan_, plan_.PlaceOf(rank).shard);
}

void PeerCopies::Put(Rank rank, Copy copy) {
  MutexLock lock(mu_);
  Shelf& shelf = ShelfOf(rank);
  Empty(shelf, shelf.newest);
  shelf.newest = std::move(copy);
}

std::optional<PeerCopies::Copy> PeerCopies::Find(Rank rank, int64_t step) const {
  if (rank != own_ && rank != other_) return std::nullopt;
  MutexLock lock(mu_);
  const Shelf& shelf = ShelfOf(rank);
  for (const std::optional<Copy>* copy : {&shelf.newest, &shelf.whole}) {
    if (copy->has_value() && (*copy)->step == step) return *copy;
  }
  return std::nullopt;
}

std::optional<int64_t> PeerCopies::NewestStep(Rank rank) const {
  if (rank != own_ && rank != other_) return std::nullopt;
  MutexLock lock(mu_);
  const Shelf& shelf = ShelfOf(rank);
  if (shelf.newest.has_value()) return shelf.newest->step;
  return shelf.whole.has_value() ? std::make_optional(shelf.whole->step) : std::nullopt;
}

bool PeerCopies::SetWhole(const v1::WholeCopies& whole) {
  MutexLock lock(mu_);
  if (whole_.has_value() && whole_->step() == whole.step()) return true;
  for (Shelf& shelf : shelves_) {
    if (!shelf.newest.has_value() || shelf.newest->step != whole.step())
      return false;  // not of this incarnation's rounds
  }
  for (Shelf& shelf : shelves_) {
    Empty(shelf, shelf.whole);
    shelf.whole.swap(shelf.newest);
  }
  whole_ = whole;
  return true;
}

std::optional<v1::KeptCopies> PeerCopies::Told() const {
  MutexLock lock(mu_);
  if (!whole_.has_value()) return std::nullopt;
  v1::KeptCopies told;
  told.set_job(spec_.name);
  told.set_epoch(epoch_.value());
  told.set_rank(own_.value());
  told.set_hosts(hosts_);
  told.set_mesh(spec_.mesh.ToString());
  told.set_step(whole_->step());
  told.set_digest(whole_->digest());
  told.set_secret(secret_);
  return told;
}

}  // namespace shardmesh
