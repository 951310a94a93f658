// Copies that members of a job keep of each other's shards (JobSpec::copies): what workers say of theirs, and which a
// job can go back to.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/secret.h"
#include "core/mesh/reform.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh {
namespace {

constexpr int64_t kMaxRanks = 1 << 16;  // of a job: a worker may say anything

// Epoch, step and digest of copies; of the older ones of an epoch that the job has left, none counts.
using Key = std::tuple<int64_t, int64_t, uint64_t>;

bool Counts(const Job& job, const KeptCopies& kept) {
  const JobRecord& record = job.record;
  if (!SameSecret(kept.secret, record.secret) || kept.epoch > record.epoch) return false;
  if (std::make_pair(kept.epoch, kept.step) <= std::make_pair(job.copies.passed_epoch, job.copies.passed_step)) {
    return false;
  }
  const CheckpointRecord& back = record.gone_back.checkpoint;
  const bool left = back.is_set() && kept.epoch < record.gone_back.epoch;
  return !left || (back.copied_at == kept.epoch && back.step == kept.step);
}

// Whether the ranks that keep something have each shard between them, so many times.
bool AreWhole(const CopiesPlace& copies, size_t times) {
  const absl::StatusOr<MeshSpec> mesh = ParseMeshSpec(copies.mesh);
  if (!mesh.ok() || copies.hosts < 2 || mesh->NumRanks() > kMaxRanks || mesh->NumRanks() % copies.hosts != 0) {
    return false;
  }
  std::set<int32_t> there;
  for (const auto& [worker, rank] : copies.holders) there.insert(rank);
  std::set<int64_t> shards;
  for (int64_t rank = 0; rank < mesh->NumRanks(); ++rank) {
    const auto keeper = static_cast<int32_t>(CopyKeeper(rank, mesh->NumRanks(), copies.hosts));
    if (there.count(static_cast<int32_t>(rank)) + there.count(keeper) >= times) shards.insert(ShardOf(*mesh, rank));
  }
  return static_cast<int64_t>(shards.size()) == mesh->NumRanks(DimRole::kShard);
}

}  // namespace

void Coordinator::TakeCopies(const std::string& name, int64_t incarnation, absl::string_view secret,
                             const std::vector<KeptCopies>& kept) {
  const Worker* const there = FindWorker(name);
  if (!CheckSecretOf(there, incarnation, secret, "heartbeat").ok()) return;
  if (!CheckIncarnation(there, name, incarnation).ok()) return;
  for (const Place& place : PlacesOf(there->record.identity)) {  // what it does not name it keeps no more
    const auto named = [&](const KeptCopies& copies) { return copies.job == place.job->record.name; };
    if (place.job->copies.by_worker.count(name) == 0 || std::any_of(kept.begin(), kept.end(), named)) continue;
    state_.jobs.at(place.job->record.name).copies.by_worker.erase(name);
  }
  for (const KeptCopies& copies : kept) {
    const auto job = state_.jobs.find(copies.job);
    if (job != state_.jobs.end() && job->second.defined->spec().copies > 1) {
      job->second.copies.by_worker[name] = {incarnation, copies};
    }
  }
}

// A step is whole when all members of the epoch have it, and each has it until it is told of a later one: a worker whose
// newest report is of an older step has it, too. If that is not so any more, its members cannot read it, and have told
// by then which is. A peer that says that another is gone may have lost its link alone, so that one counts until it is
// silent. Members ask it after the others.
CopiesPlace Coordinator::CopiesOf(const Job& job, const CheckpointRecord& checkpoint, absl::Time now,
                                  CopyHolders holders) const {
  CopiesPlace place;
  place.checkpoint = checkpoint;
  std::vector<std::pair<WorkerIdentity, int32_t>> doubted;
  for (const auto& [name, said] : job.copies.by_worker) {
    const KeptCopies& kept = said.kept;
    const auto worker = state_.workers.find(name);
    if (kept.epoch != checkpoint.copied_at || kept.step > checkpoint.step) continue;
    if (worker == state_.workers.end() || worker->second.record.identity.incarnation != said.incarnation) continue;
    if (worker->second.record.state != WorkerState::kAlive || IsSilent(worker->second, now)) continue;
    if (worker->second.doubted && holders == CopyHolders::kCertain) continue;
    if (!SameSecret(kept.secret, job.record.secret)) continue;
    place.mesh = kept.mesh;
    place.hosts = kept.hosts;
    (worker->second.doubted ? doubted : place.holders).emplace_back(worker->second.record.identity, kept.rank);
  }
  place.holders.insert(place.holders.end(), doubted.begin(), doubted.end());
  place.whole = AreWhole(place, 1);
  return place;
}

std::optional<CopiesPlace> Coordinator::FindCopies(const Job& job, absl::Time now, CopyHolders holders,
                                                   size_t times) const {
  std::set<Key> said;
  for (const auto& [name, told] : job.copies.by_worker) {
    if (Counts(job, told.kept)) said.insert({told.kept.epoch, told.kept.step, told.kept.digest});
  }
  for (auto key = said.rbegin(); key != said.rend(); ++key) {
    const auto& [epoch, step, digest] = *key;
    CopiesPlace place = CopiesOf(job, {"", step, digest, epoch}, now, holders);
    if (AreWhole(place, times)) return place;
  }
  return std::nullopt;
}

}  // namespace shardmesh
