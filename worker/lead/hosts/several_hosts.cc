#include "worker/lead/hosts/several_hosts.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/control/residency.h"
#include "worker/lead/hosts/host_slots.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(100);  // without news a round is entered this often
// Where nobody can tell on which host the next news will be, rounds are entered less and less often.
constexpr absl::Duration kFirstQuiet = absl::Milliseconds(1), kMostQuiet = absl::Milliseconds(50);
// A trainer of any host may wait for a bucket, or a slot that is pulled, at any time.
constexpr absl::Duration kBucketSlice = absl::Milliseconds(2);

// Whether a trainer of any host is attached, or has a seat.
bool AnyTrainer(absl::Span<const HostWords* const> hosts, int num_writers) {
  for (const HostWords* const words : hosts) {
    for (int s = 0; s < num_writers; ++s) {
      if (words->slots[s].holder != 0) return true;
    }
  }
  return false;
}

}  // namespace

SeveralHosts::SeveralHosts(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job,
                           const Plan& plan, HostGroups groups, SeveralHostsOptions options, HostTraffic& traffic,
                           Trace* trace)
    : traffic_(traffic),
      protocol_(protocol),
      memory_(memory),
      pass_(pass),
      job_(job),
      plan_(plan),
      options_(options),
      trace_(trace),
      gradients_of_(job, plan, protocol.local(), memory, /*maxima=*/false),
      results_of_(job, plan, protocol.local(), memory, /*maxima=*/true),
      rounds_(std::move(groups.rounds)),
      words_(protocol.local().num_hosts),
      before_(words_),
      said_(words_.size() * HostWordsBytes(job)),
      said_before_(said_),
      moved_(job.num_slots),
      seats_(protocol, job, plan),
      takers_(plan.bucketed() ? plan.buckets().size() : 0),
      last_met_(MonotonicNow()),
      gradients_(std::move(groups.gradients)),
      results_(std::move(groups.results)) {
  for (const HostWords& words : words_) views_.push_back(&words);
  for (const HostWords& words : before_) before_views_.push_back(&words);
}

void SeveralHosts::Leave(absl::string_view reason) {
  left_.store(true);
  rounds_->Abort(std::string(reason));
  gradients_.queue.group().Abort(std::string(reason));
  results_.queue.group().Abort(std::string(reason));
}

bool SeveralHosts::Exchange(const LeadState& mine) {
  if (!broken_.ok()) return false;
  const int host = protocol_.local().host;
  std::swap(words_, before_);
  for (size_t h = 0; h < words_.size(); ++h) views_[h] = &words_[h], before_views_[h] = &before_[h];
  words_[host] = ReadHostWords(protocol_, job_, plan_);
  words_[host].part = mine.part;
  words_[host].publish = mine.publication;
  if (plan_.pulled()) seats_.Read(words_[host]);
  const std::vector<HostBucket> buckets = std::move(words_[host].buckets);
  if (!Met(GatherWords()) || TakeAbort() || !CheckEach(CheckWords)) return false;
  if (plan_.bucketed() && (!Met(GatherBuckets(buckets)) || !CheckEach(CheckBuckets))) return false;
  int liar = 0;
  if (const absl::Status together = CheckTogether(views_, job_, liar); !together.ok()) return Refuse(liar, together);
  if (TakeEnd()) return false;
  MirrorSlots(protocol_, views_, host, job_.num_writers());
  MirrorBuckets(protocol_, views_, host, plan_);
  TakeSettings(mine.command);
  if (plan_.pulled()) seats_.TakeIn(views_);
  if (mine.command == nullptr) {
    SettleSlots(protocol_, before_views_, views_, host, job_.num_writers());
    for (int s = 0; s < job_.num_slots && plan_.bucketed(); ++s) {
      if (HostGiven(before_views_, views_, s) >= 0) ForgetBuckets(s);
    }
  }
  return true;
}

// What was just taken back with the slot.
void SeveralHosts::ForgetBuckets(int slot) {
  for (HostWords& words : words_) {
    const auto of_slot = [slot](const HostBucket& bucket) { return bucket.slot == slot; };
    words.buckets.erase(std::remove_if(words.buckets.begin(), words.buckets.end(), of_slot), words.buckets.end());
  }
}

absl::Status SeveralHosts::GatherWords() {
  const int host = protocol_.local().host;
  const int64_t bytes = HostWordsBytes(job_);
  std::swap(said_, said_before_);
  PackHostWords(words_[host], said_.data() + host * bytes);
  RETURN_IF_ERROR(rounds_->AllGather(said_.data() + host * bytes, said_.data(), bytes, options_.round_timeout));
  last_met_ = MonotonicNow();
  for (size_t h = 0; h < words_.size(); ++h) UnpackHostWords(said_.data() + h * bytes, job_, words_[h]);
  return absl::OkStatus();
}

// Of words that were checked, so all hosts send as much, and know it.
absl::Status SeveralHosts::GatherBuckets(const std::vector<HostBucket>& mine) {
  const int host = protocol_.local().host;
  int most = 0;
  for (const HostWords& words : words_) most = std::max(most, words.num_buckets);
  said_buckets_.assign(words_.size() * most, HostBucket());
  std::copy_n(mine.begin(), std::min<size_t>(mine.size(), most), said_buckets_.begin() + host * most);
  if (most > 0) {
    RETURN_IF_ERROR(rounds_->AllGather(&said_buckets_[host * most], said_buckets_.data(),
                                       most * static_cast<int64_t>(sizeof(HostBucket)), options_.round_timeout));
  }
  for (size_t h = 0; h < words_.size(); ++h) {
    const auto begin = said_buckets_.begin() + h * most;
    words_[h].buckets.assign(begin, begin + words_[h].num_buckets);
  }
  return absl::OkStatus();
}

bool SeveralHosts::Met(const absl::Status& status) {
  if (!status.ok()) Broke(status);
  return status.ok();
}

bool SeveralHosts::CheckEach(absl::Status (*check)(const HostWords&, const JobSpec&, const Plan&)) {
  for (size_t h = 0; h < words_.size(); ++h) {
    if (const absl::Status status = check(words_[h], job_, plan_); !status.ok()) {
      return Refuse(static_cast<int>(h), status);
    }
  }
  return true;
}

bool SeveralHosts::Refuse(int host, const absl::Status& status) {
  const int rank = host * protocol_.local().per_host;
  spdlog::error("event=bad_facts job={} rank={} host={} error=\"{}\"", job_.name, protocol_.local().first(), host,
                std::string(status.message()));
  protocol_.members().AbortFor(AbortReason::kBadFacts, rank, status.message());
  return false;
}

// Ranks in messages of the groups are the job's.
void SeveralHosts::Fail(const absl::Status& status) {
  if (!protocol_.members().Health().ok() || left_.load()) return;
  const int self = protocol_.local().first();
  if (absl::IsAborted(status) && absl::StrContains(status.message(), kEndsEpoch)) {
    return protocol_.members().Abort(AbortReason::kReformed, self, Rank(self));
  }
  const int named = NamedRank(status.message(), self);
  spdlog::error("event=hosts_failed job={} rank={} error=\"{}\"", job_.name, self, status.ToString());
  const bool known = named >= 0 && named < plan_.num_ranks();
  // Another lead that ends the groups says of whom it waited in vain.
  const bool given_up = !known && absl::IsAborted(status) && NamedRank(status.message(), /*self=*/-1) == self;
  protocol_.members().Abort(known || given_up ? AbortReason::kUnreachable : AbortReason::kInternal,
                            known ? named : self, Rank(self));
}

// Not where one is late: it had its time.
bool SeveralHosts::MayMeetAgain(const absl::Status& status) const {
  if (!options_.meet_again) return false;
  if (absl::IsAborted(status) && absl::StrContains(status.message(), kMeetsAgain)) return true;
  if (!IsGone(status)) return false;
  const int self = protocol_.local().first(), named = NamedRank(status.message(), self);
  if (named < 0 || named >= plan_.num_ranks()) return false;
  return words_[protocol_.local().HostOf(Rank(named))].comes_back != 0;
}

void SeveralHosts::Broke(const absl::Status& status) {
  if (!broken_.ok() || left_.load() || !protocol_.members().Health().ok()) return;
  if (!MayMeetAgain(status)) return Fail(status);
  broken_ = status;
  FutexBump(protocol_.notifier());
}

bool SeveralHosts::TakeAbort() {
  for (const HostWords& words : words_) {
    if (words.abort == 0) continue;
    protocol_.members().Abort(ReasonOf(words.abort), AboutOf(words.abort), Rank(ReporterOf(words.abort)),
                              DeviceOf(words.abort));
    return true;
  }
  return false;
}

// All leads see the same words.
bool SeveralHosts::TakeEnd() {
  const auto ends = [](const HostWords& words) { return words.ends != 0; };
  const auto open = [](const HostWords& words) { return words.open != 0; };
  if (std::none_of(words_.begin(), words_.end(), ends) || std::any_of(words_.begin(), words_.end(), open)) return false;
  const int self = protocol_.local().first();
  protocol_.members().Abort(AbortReason::kReformed, self, Rank(self));
  return true;
}

void SeveralHosts::TakeSettings(const Command* running) {
  const Step open(words_[0].committed + 1);
  const bool merges = running != nullptr && running->kind == CommandKind::kMerge;  // slots are finished meanwhile
  if (open.value() < 1 || (running != nullptr && !merges)) return;
  if (const int first = HostOfRates(views_); first >= 0 && first != protocol_.local().host) {
    protocol_.declarations().TakeSettings(open, words_[first].learning_rates, words_[first].loss_scale);
  }
}

bool SeveralHosts::AllDone(uint64_t part) const {
  return std::all_of(words_.begin(), words_.end(), [&](const HostWords& words) { return words.part == part; });
}

int SeveralHosts::CommonPublication(int mine) const {
  const bool all = std::all_of(words_.begin(), words_.end(),
                               [&](const HostWords& words) { return words.publish == words_[0].publish; });
  return all ? mine : -1;
}

void SeveralHosts::ReadFacts(Facts& facts) const {
  ControlBlock& control = *protocol_.control();
  facts = MergeFacts(views_, ReadCommitted(control), job_, plan_, control);
  facts.digest_ticket = control.digest_wanted.load();  // each host answers its own
  facts.publish_ticket = control.publish_wanted.load();
}

bool SeveralHosts::IsIdle() {
  const bool gradients = IsIdle(gradients_), results = IsIdle(results_);
  return gradients && results;
}

void SeveralHosts::BeforeCommit(const Command& command) {
  if (command.kind != CommandKind::kDigest) return;
  const HostRanks& ranks = protocol_.local();
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    control().members[r].digest.store(words_[r / ranks.per_host].digests[r % ranks.per_host]);
  }
}

void SeveralHosts::AfterCommit(bool more) {
  if (!more && plan_.bucketed()) ReturnLent();
}

absl::Duration SeveralHosts::PatienceToRun() const { return plan_.pulled() ? kBucketSlice : kSlice; }

absl::Duration SeveralHosts::PatienceToCollect() {
  if (AnyAsks(views_, job_.num_writers())) return kFirstQuiet;
  if (!IsIdle())
    return kSlice;  // gradient shards that cross early: the notifier wakes this behind them, and the next may go
  const int64_t open = words_[0].committed + 1;
  bool here = false, elsewhere = false, anywhere = open < 1;
  for (int s = 0; s < job_.num_slots; ++s) {
    bool declared = false, held = false;
    for (const HostWords& words : words_) {
      declared = declared || words.slots[s].declared == open;
      held = held || words.slots[s].holder != 0;
    }
    if (declared) continue;
    const bool mine = words_[protocol_.local().host].slots[s].holder != 0;
    (mine ? here : held ? elsewhere : anywhere) = true;
  }
  if ((plan_.bucketed() || plan_.pulled()) && open > 0 && AnyTrainer(views_, job_.num_writers())) return kBucketSlice;
  if (here) return kSlice;                                  // this host's trainers wake this lead
  if (elsewhere && !anywhere) return absl::ZeroDuration();  // another host enters when its trainers wake it
  quiet_ = said_ != said_before_ ? kFirstQuiet : std::min(2 * quiet_, kMostQuiet);
  return quiet_;
}

}  // namespace shardmesh
