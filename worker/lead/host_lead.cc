#include "worker/lead/host_lead.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/futex.h"
#include "worker/lead/host_slots.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(100);  // without news a round is entered this often
// Where nobody can tell on which host the next news will be, rounds are entered less and less often.
constexpr absl::Duration kFirstQuiet = absl::Milliseconds(1), kMostQuiet = absl::Milliseconds(50);

}  // namespace

HostLead::HostLead(StepProtocol& protocol, HostMemory& memory, const JobSpec& job, const Plan& plan, HostGroups groups,
                   HostLeadOptions options, Trace* trace)
    : protocol_(protocol),
      job_(job),
      plan_(plan),
      options_(std::move(options)),
      trace_(trace),
      pieces_of_(job, plan, protocol.local(), memory, /*maxima=*/false),
      results_of_(job, plan, protocol.local(), memory, /*maxima=*/true),
      rounds_(std::move(groups.rounds)),
      words_(protocol.local().num_hosts),
      before_(words_),
      said_(words_.size() * HostWordsBytes(job)),
      said_before_(said_),
      moved_(job.num_slots),
      pieces_(std::move(groups.pieces)),
      results_(std::move(groups.results)) {
  for (const HostWords& words : words_) views_.push_back(&words);
  for (const HostWords& words : before_) before_views_.push_back(&words);
  thread_ = std::thread([this] { Loop(); });
}

HostLead::~HostLead() {
  stop_.store(true);
  FutexBump(protocol_.doorbell());
  EndGroups();
  thread_.join();
}

void HostLead::Loop() {
  while (!stop_.load()) {
    const uint32_t seen = protocol_.doorbell().load(std::memory_order_acquire);
    if (options_.rung) options_.rung();
    LookAtMembers();
    if (!Round()) break;
    AfterRound();
    if (const absl::Duration wait = NextWait(); wait > absl::ZeroDuration())
      AwaitChange(protocol_.doorbell(), seen, options_.spin, wait);
  }
  protocol_.publications().Keep(reserved_);  // of a step that is not decided
  EndGroups();
  if (options_.rung) options_.rung();
  if (options_.progress) options_.progress();
}

// So that no other lead waits for this one.
void HostLead::EndGroups() {
  const absl::Status health = protocol_.Health();
  const std::string reason =
      health.ok() ? absl::StrCat("rank ", protocol_.local().first(), " closed the job") : std::string(health.message());
  rounds_->Abort(reason);
  pieces_.queue.group().Abort(reason);
  results_.queue.group().Abort(reason);
}

bool HostLead::Round() {
  const int host = protocol_.local().host;
  std::swap(words_, before_);
  for (size_t h = 0; h < words_.size(); ++h) views_[h] = &words_[h], before_views_[h] = &before_[h];
  words_[host] = ReadHostWords(protocol_, job_, plan_);
  words_[host].part = PartDone() ? part_ : part_ - 1;
  words_[host].publish = reserved_;
  const int64_t bytes = HostWordsBytes(job_);
  std::swap(said_, said_before_);
  PackHostWords(words_[host], said_.data() + host * bytes);
  const absl::Status met =
      rounds_->AllGather(said_.data() + host * bytes, said_.data(), bytes, options_.round_timeout);
  if (!met.ok()) {
    Fail(met);
    return false;
  }
  for (size_t h = 0; h < words_.size(); ++h) UnpackHostWords(said_.data() + h * bytes, job_, words_[h]);
  if (TakeAbort()) return false;
  MirrorSlots(protocol_, views_, host, job_.num_slots);
  TakeSettings();
  if (phase_ == Phase::kCollect) SettleSlots(protocol_, before_views_, views_, host, job_.num_slots);
  return true;
}

// Ranks in messages of the groups are the job's.
void HostLead::Fail(const absl::Status& status) {
  if (!protocol_.Health().ok() || stop_.load()) return;
  const int self = protocol_.local().first();
  const int named = NamedRank(status.message(), self);
  spdlog::error("event=hosts_failed job={} rank={} error=\"{}\"", job_.name, self, status.ToString());
  const bool known = named >= 0 && named < plan_.num_ranks();
  protocol_.Abort(known ? AbortReason::kUnreachable : AbortReason::kInternal, known ? named : self, Rank(self));
}

bool HostLead::TakeAbort() {
  for (const HostWords& words : words_) {
    if (words.abort == 0) continue;
    protocol_.Abort(ReasonOf(words.abort), AboutOf(words.abort), Rank(ReporterOf(words.abort)), DeviceOf(words.abort));
    return true;
  }
  return false;
}

void HostLead::TakeSettings() {
  const Step open(words_[0].committed + 1);
  if (open.value() < 1 || phase_ != Phase::kCollect) return;
  if (const int first = HostOfRates(views_); first >= 0 && first != protocol_.local().host) {
    protocol_.TakeSettings(open, words_[first].learning_rates, words_[first].loss_scale);
  }
}

bool HostLead::PartDone() {
  if (phase_ == Phase::kPrepare) return true;
  const bool pieces = IsIdle(pieces_), results = IsIdle(results_);
  return !executing_ && pieces && results;
}

bool HostLead::IsIdle(Lane& lane) {
  if (!lane.moving) return true;
  const absl::Status moved = lane.moved.Wait(absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(moved)) return false;
  lane.moving = false;
  if (!moved.ok()) Fail(moved);
  return moved.ok();
}

void HostLead::Submit(Lane& lane, std::function<absl::Status(ExchangeGroup&)> work) {
  lane.moving = true;
  lane.moved = lane.queue.Submit([this, work = std::move(work)](Group& group) {
    const absl::Status status = work(static_cast<ExchangeGroup&>(group));
    FutexBump(protocol_.doorbell());
    return status;
  });
}

void HostLead::AfterRound() {
  if (phase_ == Phase::kCollect) {
    const Agreed agreed = AgreedBy(views_, job_, plan_);
    if (agreed.initial_id != 0 || agreed.slots_complete) {
      Prepare(agreed);
    } else {
      MoveEarly();
      if (!agreed.digest_wanted || words_[0].committed == kNoStep) return;
      agreed_ = agreed;
      Run();
    }
    return;
  }
  if (!std::all_of(words_.begin(), words_.end(), [&](const HostWords& words) { return words.part == part_; })) return;
  if (phase_ == Phase::kPrepare) {
    EndPrepare();
    Run();
  } else {
    Commit();
  }
}

void HostLead::Prepare(const Agreed& agreed) {
  phase_ = Phase::kPrepare;
  ++part_;
  agreed_ = agreed;
  reserved_ = protocol_.publications().Reserve(words_[0].committed + 1);
  if (!agreed.slots_complete) return;
  Submit(pieces_,
         [this, words = words_, begin = moved_](ExchangeGroup& group) { return MovePieces(group, words, begin); });
  std::fill(moved_.begin(), moved_.end(), 0);
}

// All leads see by the same words that nothing is under way anywhere.
void HostLead::MoveEarly() {
  const auto idle = [&](const HostWords& words) { return words.part == part_; };
  if (!std::all_of(words_.begin(), words_.end(), idle)) return;
  const SlotSet settled = SettledSlots(views_, job_, plan_);
  std::vector<int> buckets(job_.num_slots, -1);
  bool any = false;
  for (int s = 0; s < job_.num_slots; ++s) {
    if (!settled[s] || moved_[s] == static_cast<int>(plan_.buckets().size())) continue;
    buckets[s] = moved_[s]++;
    any = true;
  }
  if (!any) return;
  Submit(pieces_,
         [this, words = words_, buckets](ExchangeGroup& group) { return MoveOneBucket(group, words, buckets); });
}

// A version is published on all hosts or on none.
void HostLead::EndPrepare() {
  const bool all = std::all_of(words_.begin(), words_.end(),
                               [&](const HostWords& words) { return words.publish == words_[0].publish; });
  agreed_.publish = all ? reserved_ : -1;
  const int64_t step = words_[0].committed + 1;
  for (int s = 0; s < job_.num_slots && step > 0; ++s) {
    page().slots[s].declared.store(step);
    for (int p = 0; p < plan_.num_shards(); ++p) page().pieces[s][p].store(step);
  }
}

void HostLead::Run() {
  phase_ = Phase::kRun;
  ++part_;
  executing_ = true;
  run_since_ = MonotonicNanos();
  if (!protocol_.DecideBy(agreed_)) {
    if (protocol_.Health().ok()) Fail(absl::InternalError("what all hosts agreed on cannot be decided"));
    return;
  }
  const Command& command = protocol_.command();
  if (command.kind != CommandKind::kDigest) {  // digests are in the words
    Submit(results_, [this](ExchangeGroup& group) { return MoveResults(group); });
  }
  const bool writes = command.kind == CommandKind::kInit || command.kind == CommandKind::kStep;
  if (!writes) return;
  if (command.publish < 0) protocol_.publications().Keep(reserved_);
  reserved_ = -1;
}

void HostLead::LookAtMembers() {
  if (!executing_ || !protocol_.Health().ok()) return;
  if (!IsIdle(pieces_)) run_since_ = MonotonicNanos();  // they have a limit of their own
  if (protocol_.AllDone()) {
    executing_ = false;
  } else if (MonotonicNanos() - run_since_ > absl::ToInt64Nanoseconds(options_.step_timeout)) {
    const std::vector<int> late = protocol_.NotDone();
    if (!late.empty()) protocol_.Abort(AbortReason::kLate, late.front(), Rank(protocol_.local().first()));
  }
}

void HostLead::Commit() {
  if (protocol_.command().kind == CommandKind::kDigest) {
    const HostRanks& ranks = protocol_.local();
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      page().members[r].digest.store(words_[r / ranks.per_host].digests[r % ranks.per_host]);
    }
  }
  protocol_.Commit();
  phase_ = Phase::kCollect;
  if (options_.rung) options_.rung();
  if (options_.progress) options_.progress();
  if (protocol_.MoreFollows()) Run();
}

absl::Duration HostLead::NextWait() {
  if (!protocol_.Health().ok()) return absl::ZeroDuration();
  if (phase_ != Phase::kCollect) {
    LookAtMembers();
    return PartDone() ? absl::ZeroDuration() : kSlice;
  }
  if (AnyAsks(views_, job_.num_slots)) return kFirstQuiet;
  if (!PartDone()) return kSlice;  // pieces that cross early: the bell rings behind them, and the next may go
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
  if (here) return kSlice;                                  // this host's trainers ring
  if (elsewhere && !anywhere) return absl::ZeroDuration();  // another host enters when its trainers ring
  quiet_ = said_ != said_before_ ? kFirstQuiet : std::min(2 * quiet_, kMostQuiet);
  return quiet_;
}

absl::Status HostLead::MoveOneBucket(ExchangeGroup& group, const std::vector<HostWords>& words,
                                     const std::vector<int>& buckets) {
  std::vector<const HostWords*> views;
  for (const HostWords& host : words) views.push_back(&host);
  const auto transfers = pieces_of_.Pieces(views, buckets);
  if (transfers.empty()) return absl::OkStatus();
  const ScopedSpan span(trace_, "pieces", words[0].committed + 1, *std::max_element(buckets.begin(), buckets.end()));
  return Exchange(group, transfers, gradient_bytes_in_);
}

// And counts what has come.
absl::Status HostLead::Exchange(ExchangeGroup& group, absl::Span<const PeerTransfer> transfers,
                                std::atomic<int64_t>& in) {
  RETURN_IF_ERROR(group.Exchange(transfers, options_.step_timeout));
  for (const PeerTransfer& transfer : transfers) {
    if (transfer.to == group.rank()) in.fetch_add(transfer.bytes, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

absl::Status HostLead::MovePieces(ExchangeGroup& group, const std::vector<HostWords>& words,
                                  const std::vector<int>& begin) {
  std::vector<int> buckets(begin.size());
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    for (size_t s = 0; s < begin.size(); ++s) buckets[s] = begin[s] <= b ? b : -1;
    RETURN_IF_ERROR(MoveOneBucket(group, words, buckets));
    protocol_.GradientsHere(Step(words[0].committed + 1), b + 1);
  }
  return absl::OkStatus();
}

absl::Status HostLead::AwaitMembers(uint64_t seq, int buckets) {
  while (true) {
    const uint32_t word = protocol_.doorbell().load(std::memory_order_acquire);
    if (protocol_.AllBucketsDone(seq, buckets)) return absl::OkStatus();
    RETURN_IF_ERROR(protocol_.Health());
    if (stop_.load()) return absl::CancelledError("the job was closed");
    AwaitChange(protocol_.doorbell(), word, options_.spin, kSlice);
  }
}

absl::Status HostLead::MoveResults(ExchangeGroup& group) {
  const Command command = protocol_.command();
  const uint64_t seq = protocol_.decided();
  const int all = static_cast<int>(plan_.buckets().size());
  if (command.kind == CommandKind::kStep && command.apply == 0) return absl::OkStatus();
  if (command.kind == CommandKind::kNorm) {
    RETURN_IF_ERROR(AwaitMembers(seq, all));
    const auto squares = results_of_.Squares();
    return squares.empty() ? absl::OkStatus() : group.Exchange(squares, options_.step_timeout);
  }
  RETURN_IF_ERROR(MoveWeights(group, command, seq));
  if (command.kind == CommandKind::kGather || plan_.num_maxima() == 0) return absl::OkStatus();
  RETURN_IF_ERROR(AwaitMembers(seq, all));
  RETURN_IF_ERROR(group.Exchange(results_of_.Maxima(), options_.step_timeout));
  results_of_.TakeMaxima();
  return absl::OkStatus();
}

// Of the buckets whose weights the command writes into windows, each when this host's members are done with it.
absl::Status HostLead::MoveWeights(ExchangeGroup& group, const Command& command, uint64_t seq) {
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    const Bucket& bucket = plan_.buckets()[b];
    if (bucket.coded() != (command.kind == CommandKind::kGather) || (bucket.frozen && command.first == 0)) continue;
    const auto transfers = results_of_.Weights(b);
    if (transfers.empty()) continue;
    RETURN_IF_ERROR(AwaitMembers(seq, b + 1));
    const ScopedSpan span(trace_, "weights", command.step, b);
    RETURN_IF_ERROR(Exchange(group, transfers, weight_bytes_in_));
    for (int i = 0; i < job_.publications; ++i) {
      if (bucket.frozen || i == command.publish) results_of_.CopyWeights(b, i);
    }
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
