#include "worker/move/kept_copies.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/give_way.h"
#include "core/base/status.h"
#include "core/mesh/reform.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(100);
constexpr absl::Duration kRetry = absl::Milliseconds(5);
constexpr int kNice = 10;                                     // rounds come to an end beside steps, too
constexpr absl::Duration kAskAgain = absl::Milliseconds(50);  // each time may take a new connection

v1::TransferRequest RequestFor(const v1::Assignment& assignment, int64_t epoch, const std::string& mesh, int rank,
                               int kept_rank, int64_t step) {
  v1::TransferRequest request;
  request.set_job(assignment.spec().name());
  request.set_epoch(epoch);
  request.set_mesh(mesh);
  request.set_rank(rank);
  request.set_secret(assignment.secret());
  request.mutable_kept()->set_rank(kept_rank);
  request.mutable_kept()->set_step(step);
  return request;
}

// The copy of another member that is kept here: asks until that one has made its own. Aborted: that is of a later step,
// as two digests came between, so the round can only begin again.
absl::StatusOr<uint64_t> TakeOther(const CopyCall& call, int64_t step) {
  PeerCopies& copies = call.copies;
  const int other = copies.other().value();
  ASSIGN_OR_RETURN(std::shared_ptr<Snapshot> room, copies.Room(copies.other()));
  const std::vector<ReshardPiece> pieces = PiecesOf(room->storage(), room->storage());
  const v1::TransferRequest request =
      RequestFor(call.assignment, copies.epoch().value(), copies.spec().mesh.ToString(), other, other, step);
  v1::FileProgress progress;
  progress.set_step(step);
  while (true) {
    RETURN_IF_ERROR(call.report(progress));
    const absl::StatusOr<uint64_t> digest = FetchPieces(call.transfer, call.assignment.peers(other), request,
                                                        room->storage(), step, pieces, call.cancelled);
    if (digest.ok()) {
      copies.Put(copies.other(), {step, 0, std::move(room)});
      return digest;
    }
    if (call.cancelled.load()) return absl::CancelledError("the caller is gone");
    if (!absl::IsUnavailable(digest.status())) return digest;
    RETURN_IF_ERROR(call.shard.Health());
    absl::SleepFor(kRetry);
  }
}

}  // namespace

absl::Status CopyShards(const CopyCall& call) {
  JobShard& shard = call.shard;
  if (shard.protocol().committed_step().value() == kNoStep) {
    return absl::FailedPreconditionError(absl::StrCat("job ", shard.spec().name, " has no initial weights yet"));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Snapshot> room, call.copies.Room(call.copies.own()));
  SnapshotPort& port = shard.run().snapshots;
  RETURN_IF_ERROR(port.Ask(room));
  std::optional<SnapshotPort::Copied> copied;
  {
    const absl::Cleanup take_away = [&] { port.TakeAway(); };
    v1::FileProgress ready;
    ready.set_step(kNoStep);
    while (!copied.has_value()) {
      RETURN_IF_ERROR(call.report(ready));
      copied = port.Await(kSlice);
      if (call.cancelled.load()) return absl::CancelledError("the caller is gone");
      RETURN_IF_ERROR(shard.Health());
    }
  }
  call.copies.Put(call.copies.own(), {copied->step, copied->parity, std::move(room)});
  GiveWay(kNice);
  ASSIGN_OR_RETURN(const uint64_t digest, TakeOther(call, copied->step));
  v1::FileProgress done;
  done.set_step(copied->step);
  done.set_bytes_total(1);
  done.set_bytes_done(1);
  done.set_digest(digest);
  return call.report(done);
}

namespace {

// Takes what a shard of the older epoch has of this one.
class KeptReader {
 public:
  explicit KeptReader(const LoadCall& call) : call_(call), storage_(call.shard.memory().storage()) {}

  // The digest of the whole shard.
  absl::StatusOr<uint64_t> Read() {
    ASSIGN_OR_RETURN(const Plan before, PlanOn(call_.shard.spec(), back().mesh()));
    if (back().hosts() < 1 || before.num_ranks() % back().hosts() != 0) {
      return absl::InvalidArgumentError(absl::StrCat(before.num_ranks(), " ranks were on ", back().hosts(), " hosts"));
    }
    uint64_t digest = 0;
    for (int s = 0; s < before.num_shards(); ++s) {
      ASSIGN_OR_RETURN(const ShardStorage cut, ShardStorage::Cut(before, s, StorageCut(), &call_.cancelled));
      const std::vector<ReshardPiece> pieces = PiecesOf(cut, storage_);
      if (pieces.empty()) continue;
      ASSIGN_OR_RETURN(const uint64_t part, ReadOf(before, s, pieces));
      digest += part;
    }
    return digest;
  }

 private:
  const v1::Back& back() const { return call_.assignment.back(); }
  int64_t step() const { return back().checkpoint().step(); }

  // A link may be cut for a while, and a holder that is gone is soon known to the coordinator, which then cancels this.
  absl::StatusOr<uint64_t> ReadOf(const Plan& before, int s, const std::vector<ReshardPiece>& pieces) {
    for (int replica = 0; call_.kept != nullptr && replica < before.num_replicas(); ++replica) {
      const std::optional<PeerCopies::Copy> here = call_.kept->Find(before.RankOf({s, replica}), step());
      if (here.has_value()) return CopyHere(*here, pieces);
    }
    const absl::Time deadline = MonotonicNow() + call_.patience;
    while (true) {
      const absl::StatusOr<uint64_t> digest = AskHolders(before, s, pieces);
      if (digest.ok()) return digest;
      if (call_.cancelled.load()) return absl::CancelledError("the job is assigned anew");
      RETURN_IF_ERROR(call_.shard.Health());
      if (!absl::IsUnavailable(digest.status()) || MonotonicNow() >= deadline) {
        return absl::UnavailableError(absl::StrCat("shard ", s, " of ", before.num_shards(), " as it was after step ",
                                                   step(), ": ", digest.status().message()));
      }
      absl::SleepFor(kAskAgain);
    }
  }

  // Asks each holder once, in their order: those that may be gone are the last. Unavailable: one was not reached. Else
  // the error of the last one.
  absl::StatusOr<uint64_t> AskHolders(const Plan& before, int s, const std::vector<ReshardPiece>& pieces) {
    absl::Status error = absl::NotFoundError("no worker that is there keeps it");
    for (const v1::Peer& holder : back().holders()) {
      for (int replica = 0; replica < before.num_replicas(); ++replica) {
        const int rank = before.RankOf({s, replica}).value();
        const int64_t keeper = CopyKeeper(rank, before.num_ranks(), back().hosts());
        if (holder.rank() != rank && holder.rank() != keeper) continue;
        const v1::TransferRequest request =
            RequestFor(call_.assignment, back().checkpoint().copied_at(), call_.shard.spec().mesh.ToString(),
                       call_.assignment.rank(), rank, step());
        const absl::StatusOr<uint64_t> digest =
            FetchPieces(call_.transfer, holder, request, storage_, step(), pieces, call_.cancelled);
        if (digest.ok() || call_.cancelled.load()) return digest;
        if (!absl::IsUnavailable(error)) {
          error =
              Annotate(digest.status(), absl::StrCat("worker ", holder.worker(), " (was rank ", holder.rank(), ")"));
        }
        if (absl::IsUnavailable(digest.status())) break;  // as it would be for another replica
      }
    }
    return error;
  }

  uint64_t CopyHere(const PeerCopies::Copy& copy, const std::vector<ReshardPiece>& pieces) const {
    CopyPieces(copy.snapshot->storage(), copy.parity, storage_, 0, pieces);
    ReshardBytes bytes(storage_, 0, ReshardBytes::Side::kTo, pieces);
    while (!bytes.Next(bytes.num_bytes()).empty()) {
    }
    return bytes.digest();
  }

  const LoadCall& call_;
  const ShardStorage& storage_;
};

}  // namespace

absl::StatusOr<uint64_t> LoadKept(const LoadCall& call, uint64_t load_id) {
  if (call.transfer == nullptr) return absl::UnavailableError("no way to ask for copies");
  uint64_t digest = 0;
  const Step step(call.assignment.back().checkpoint().step());
  RETURN_IF_ERROR(call.shard.run().engine.Load(load_id, step, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(digest, KeptReader(call).Read());
    return absl::OkStatus();
  }));
  return digest;
}

}  // namespace shardmesh
