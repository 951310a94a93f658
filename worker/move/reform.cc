#include "worker/move/reform.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kRetry = absl::Milliseconds(5);
constexpr double kSlowBytesPerSecond = 20e6;
constexpr absl::Duration kCall = absl::Seconds(30);  // and the time of its bytes

// Takes one transfer into the shard.
class Receiver {
 public:
  Receiver(const ShardStorage& storage, int64_t step, absl::Span<const ReshardPiece> pieces,
           const std::atomic<bool>& cancelled)
      : step_(step), cancelled_(cancelled), bytes_(storage, /*parity=*/0, ReshardBytes::Side::kTo, pieces) {}

  TransferSink Sink() {
    return {[this](const v1::TransferHeader& header) { return Begin(header); },
            [this](absl::string_view data) { return Take(data); }};
  }
  int64_t num_bytes() const { return bytes_.num_bytes(); }
  // The digest.
  absl::StatusOr<uint64_t> End(const v1::TransferHeader& header) {
    if (bytes_.digest() == header.digest()) return header.digest();
    return absl::DataLossError("the digest of what came is not that of what was sent; have both memories checked");
  }

 private:
  absl::Status Begin(const v1::TransferHeader& header) const {
    if (header.step() == step_ && header.total_bytes() == bytes_.num_bytes()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("it has ", header.total_bytes(), " bytes of step ", header.step(),
                                                      "; expected ", bytes_.num_bytes(), " of step ", step_));
  }
  absl::Status Take(absl::string_view data) {
    if (cancelled_.load()) return absl::CancelledError("the job is assigned anew");
    while (!data.empty()) {
      const absl::Span<char> to = bytes_.Next(static_cast<int64_t>(data.size()));
      if (to.empty()) return absl::DataLossError("it sent more than it announced");
      std::memcpy(to.data(), data.data(), to.size());
      data.remove_prefix(to.size());
    }
    return absl::OkStatus();
  }

  const int64_t step_;
  const std::atomic<bool>& cancelled_;
  ReshardBytes bytes_;
};

const v1::Peer& PeerAt(const v1::Assignment& assignment, int source) {
  if (source < assignment.peers_size()) return assignment.peers(source);
  return assignment.from().departing(source - assignment.peers_size());
}

}  // namespace

absl::StatusOr<uint64_t> FetchPieces(const FetchCall& transfer, const v1::Peer& peer,
                                     const v1::TransferRequest& request, const ShardStorage& storage, int64_t step,
                                     absl::Span<const ReshardPiece> pieces, const std::atomic<bool>& cancelled) {
  Receiver receiver(storage, step, pieces, cancelled);
  ASSIGN_OR_RETURN(const v1::TransferHeader last,
                   transfer(peer, request, receiver.Sink(), kCall + TransferTime(receiver.num_bytes())));
  return receiver.End(last);
}

namespace {

// Asks until the source has finished its last step, or is given up.
absl::Status Fetch(const Restoration& restoration, JobShard& shard, int source, int64_t step,
                   absl::Span<const ReshardPiece> pieces) {
  const v1::Assignment& assignment = restoration.assignment;
  const v1::Peer& peer = PeerAt(assignment, source);
  const bool leaves = source >= assignment.peers_size();
  const std::string who = absl::StrCat("what worker ", peer.worker(), " (", leaves ? "was " : "", "rank ", peer.rank(),
                                       ", pid ", peer.pid(), ") held");
  if (restoration.transfer == nullptr) return absl::UnavailableError(absl::StrCat(who, ": no way to ask for it"));
  v1::TransferRequest request;
  request.set_job(assignment.spec().name());
  request.set_epoch(assignment.from().epoch());
  request.set_mesh(shard.spec().mesh.ToString());
  request.set_rank(assignment.rank());
  request.set_secret(assignment.secret());
  const absl::Time deadline = MonotonicNow() + restoration.timeout;
  while (true) {
    const absl::Status last =
        FetchPieces(restoration.transfer, peer, request, shard.memory().storage(), step, pieces, restoration.cancelled)
            .status();
    if (last.ok()) return absl::OkStatus();
    if (restoration.cancelled.load()) return absl::CancelledError("the job is assigned anew");
    if (!absl::IsUnavailable(last)) return Annotate(last, who);
    RETURN_IF_ERROR(shard.Health());
    if (MonotonicNow() >= deadline) {
      if (!leaves) shard.protocol().members().Abort(AbortReason::kGone, source, shard.rank());
      return Annotate(last, who);
    }
    absl::SleepFor(kRetry);
  }
}

}  // namespace

absl::StatusOr<Plan> PlanOn(JobSpec spec, const std::string& mesh) {
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(mesh));
  if (spec.mesh.NumRanks() > kMaxHostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh ", mesh, " has ", spec.mesh.NumRanks(), " ranks; at most ", kMaxHostRanks));
  }
  return Plan::Create(spec);
}

absl::Duration TransferTime(int64_t bytes) { return absl::Seconds(static_cast<double>(bytes) / kSlowBytesPerSecond); }

namespace {

int ParityOf(const JobShard& held) {
  const std::optional<Ending> ending = held.epoch_end().ending();
  return ending.has_value() ? ending->parity : 0;
}

int64_t StepOf(const JobShard& held) {
  const std::optional<Ending> ending = held.epoch_end().ending();
  return ending.has_value() ? ending->step : kNoStep;
}

// The shard of a member of now, without memory.
absl::StatusOr<ShardStorage> WantedBy(const v1::TransferRequest& request, const JobSpec& spec) {
  ASSIGN_OR_RETURN(const Plan plan, PlanOn(spec, request.mesh()));
  if (request.rank() < 0 || request.rank() >= plan.num_ranks()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " is not of mesh ", request.mesh(), ": 0 to ", plan.num_ranks() - 1));
  }
  return ShardStorage::Cut(plan, plan.PlaceOf(Rank(request.rank())).shard, StorageCut());
}

}  // namespace

const v1::Peer* OriginHolders::Find(const v1::Assignment& assignment, int was) {
  const v1::Origin& from = assignment.from();
  for (int rank = 0; rank < std::min(from.was_size(), assignment.peers_size()); ++rank) {
    if (from.was(rank) == was) return &assignment.peers(rank);
  }
  for (const v1::Peer& departing : from.departing()) {
    if (departing.rank() == was) return &departing;
  }
  return nullptr;
}

TransferSource::Held TransferSource::HeldBy(const std::shared_ptr<JobShard>& shard) {
  return {shard, shard->memory().storage(), ParityOf(*shard), StepOf(*shard)};
}

TransferSource::TransferSource(Held held, std::optional<ShardStorage> wanted)
    : held_(std::move(held)),
      wanted_(std::move(wanted)),
      pieces_(wanted_.has_value() && held_.step != kNoStep ? PiecesOf(held_.storage, *wanted_)
                                                           : std::vector<ReshardPiece>()),
      bytes_(held_.storage, held_.parity, ReshardBytes::Side::kFrom, pieces_),
      left_(bytes_.num_bytes()) {}

// The hosts may not have agreed yet: then the header has no outcomes.
absl::StatusOr<std::unique_ptr<TransferSource>> TransferSource::OpenEnding(std::shared_ptr<JobShard> held) {
  ASSIGN_OR_RETURN(std::string progress, held->epoch_end().progress());
  std::unique_ptr<TransferSource> source(new TransferSource(HeldBy(held), std::nullopt));
  source->ending_.set_progress(std::move(progress));
  if (const std::optional<Ending> ending = held->epoch_end().ending(); ending.has_value()) {
    source->ending_.set_step(ending->step);
    source->ending_.set_outcomes(PackBequest(BequestOf(*held->protocol().control(), *ending)));
  }
  return source;
}

absl::StatusOr<std::unique_ptr<TransferSource>> TransferSource::Open(std::shared_ptr<JobShard> held,
                                                                     const v1::TransferRequest& request) {
  if (request.ending()) return OpenEnding(std::move(held));
  if (!held->epoch_end().ending().has_value()) {
    return absl::UnavailableError(
        absl::StrCat("epoch ", request.epoch(), " of job ", request.job(), " has not ended here yet; ask again"));
  }
  ASSIGN_OR_RETURN(ShardStorage wanted, WantedBy(request, held->spec()));
  return std::unique_ptr<TransferSource>(new TransferSource(HeldBy(held), std::move(wanted)));
}

absl::StatusOr<std::unique_ptr<TransferSource>> TransferSource::Open(std::shared_ptr<const PeerCopies> copies,
                                                                     const v1::TransferRequest& request) {
  const Rank rank(request.kept().rank());
  const std::optional<PeerCopies::Copy> copy = copies->Find(rank, request.kept().step());
  if (!copy.has_value()) {
    const std::string none = absl::StrCat("no copy of rank ", rank.value(), " of step ", request.kept().step(),
                                          " of epoch ", request.epoch(), " is here");
    const std::optional<int64_t> newest = copies->NewestStep(rank);
    if (newest.value_or(kNoStep) <= request.kept().step()) return absl::UnavailableError(absl::StrCat(none, " yet"));
    return absl::AbortedError(absl::StrCat(none, ", and none will come: the newest is of step ", *newest));
  }
  ASSIGN_OR_RETURN(ShardStorage wanted, WantedBy(request, copies->spec()));
  Held held{copy->snapshot, copy->snapshot->storage(), copy->parity, copy->step};
  return std::unique_ptr<TransferSource>(new TransferSource(std::move(held), std::move(wanted)));
}

v1::TransferHeader TransferSource::Begin() const {
  if (!ending_.progress().empty()) return ending_;
  v1::TransferHeader header;
  header.set_step(held_.step);
  header.set_total_bytes(bytes_.num_bytes());
  return header;
}

void TransferSource::Read(char* to, int64_t room) {
  for (room = std::min(room, left_); room > 0;) {
    const absl::Span<char> from = bytes_.Next(room);
    const auto bytes = static_cast<int64_t>(from.size());
    std::memcpy(to, from.data(), from.size());
    to += bytes;
    room -= bytes;
    left_ -= bytes;
  }
}

v1::TransferHeader TransferSource::End() {
  v1::TransferHeader header = Begin();
  header.set_digest(bytes_.digest());
  return header;
}

namespace {

// Asks until the answer is complete.
absl::StatusOr<v1::TransferHeader> AskEnding(const EndingCall& call, const v1::Peer& peer, bool agreed) {
  const std::string who = absl::StrCat("how worker ", peer.worker(), " (pid ", peer.pid(), ") ended epoch ",
                                       call.assignment.from().epoch());
  if (call.transfer == nullptr) return absl::UnavailableError(absl::StrCat(who, ": no way to ask for it"));
  v1::TransferRequest request;
  request.set_job(call.assignment.spec().name());
  request.set_epoch(call.assignment.from().epoch());
  request.set_secret(call.assignment.secret());
  request.set_ending(true);
  const TransferSink sink = {
      [](const v1::TransferHeader&) { return absl::OkStatus(); },
      [](absl::string_view) { return absl::DataLossError("data follow, and none were asked for"); }};
  const absl::Time deadline = MonotonicNow() + call.timeout;
  while (true) {
    const absl::StatusOr<v1::TransferHeader> told = call.transfer(peer, request, sink, kCall);
    if (call.cancelled.load()) return absl::CancelledError("the job is assigned anew");
    if (told.ok() && (!agreed || !told->outcomes().empty())) return told;
    if (!told.ok() && !absl::IsUnavailable(told.status())) return Annotate(told.status(), who);
    if (MonotonicNow() >= deadline) {
      return told.ok() ? absl::UnavailableError(absl::StrCat(who, ": its hosts have not agreed on the last step"))
                       : Annotate(told.status(), who);
    }
    absl::SleepFor(kRetry);
  }
}

}  // namespace

absl::StatusOr<std::string> AskProgress(const EndingCall& call, const v1::Peer& peer) {
  ASSIGN_OR_RETURN(v1::TransferHeader told, AskEnding(call, peer, /*agreed=*/false));
  return std::move(*told.mutable_progress());
}

absl::StatusOr<Bequest> AskBequest(const EndingCall& call, const v1::Peer& peer) {
  ASSIGN_OR_RETURN(const v1::TransferHeader told, AskEnding(call, peer, /*agreed=*/true));
  return UnpackBequest(told.outcomes());
}

absl::Status RestoreShard(const Restoration& restoration, JobShard& shard) {
  const auto stop = [&] { return restoration.cancelled.load() || !shard.Health().ok(); };
  const absl::Status begun = AwaitRestoreBegun(*shard.protocol().control(), stop, restoration.timeout);
  if (!begun.ok()) return shard.Health().ok() ? begun : shard.Health();
  const int64_t step = shard.protocol().control()->restored_step_plus_one.load() - 1;
  if (step == kNoStep) return absl::OkStatus();
  const absl::Time begin = MonotonicNow();
  const v1::Origin& from = restoration.assignment.from();
  const OriginHolders holders(from);
  ASSIGN_OR_RETURN(const Plan before, PlanOn(shard.spec(), from.mesh()));
  const int rank = shard.rank().value();
  int64_t here = 0, moved = 0;
  for (int s = 0; s < before.num_shards(); ++s) {
    const int source = SourceOf(before, holders.holders(), s, rank);
    ASSIGN_OR_RETURN(const ShardStorage cut, ShardStorage::Cut(before, s, StorageCut(), &restoration.cancelled));
    const std::vector<ReshardPiece> pieces = PiecesOf(cut, shard.memory().storage());
    if (pieces.empty()) continue;
    const int64_t bytes = ReshardBytes(shard.memory().storage(), 0, ReshardBytes::Side::kTo, pieces).num_bytes();
    if (source == rank && restoration.held != nullptr) {
      CopyPieces(restoration.held->memory().storage(), restoration.held->epoch_end().ending()->parity,
                 shard.memory().storage(), 0, pieces);
      here += bytes;
    } else if (source >= 0 && source != rank) {
      RETURN_IF_ERROR(Fetch(restoration, shard, source, step, pieces));
      moved += bytes;
    } else {
      return absl::FailedPreconditionError(absl::StrCat("no member holds shard ", s, " of epoch ", from.epoch()));
    }
  }
  spdlog::info(
      "event=shard_restored job={} epoch={} from_epoch={} rank={} step={} bytes_here={} bytes_moved={} took={}",
      shard.spec().name, shard.epoch().value(), from.epoch(), rank, step, here, moved,
      absl::FormatDuration(MonotonicNow() - begin));
  Reach(FaultPoint::kShardMoved);
  TellRestored(*shard.protocol().control(), shard.rank(), shard.protocol().notifier());
  return absl::OkStatus();
}

}  // namespace shardmesh
