#include "worker/lead/host_lead.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/control/residency.h"
#include "worker/lead/host_slots.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(100);  // without news a round is entered this often
// Where nobody can tell on which host the next news will be, rounds are entered less and less often.
constexpr absl::Duration kFirstQuiet = absl::Milliseconds(1), kMostQuiet = absl::Milliseconds(50);
// A trainer of any host may wait for a bucket, or a slot that is pulled, at any time.
constexpr absl::Duration kBucketSlice = absl::Milliseconds(2);

bool IsPrepared(CommandKind kind) {
  return kind == CommandKind::kInit || kind == CommandKind::kRestore || kind == CommandKind::kStep ||
         kind == CommandKind::kNorm || kind == CommandKind::kReduceBucket || kind == CommandKind::kPublish ||
         kind == CommandKind::kMerge;
}

// Whether all that it sums is to lie here before it runs; members wait for the gradient shards of a step bucket by
// bucket.
bool SumsFirst(CommandKind kind) { return kind == CommandKind::kReduceBucket || kind == CommandKind::kMerge; }

}  // namespace

HostLead::HostLead(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job, const Plan& plan,
                   HostGroups groups, HostLeadOptions options, Trace* trace)
    : protocol_(protocol),
      memory_(memory),
      pass_(pass),
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
      seats_(protocol, job, plan),
      takers_(plan.bucketed() ? plan.buckets().size() : 0),
      gradients_(std::move(groups.gradients)),
      results_(std::move(groups.results)) {
  for (const HostWords& words : words_) views_.push_back(&words);
  for (const HostWords& words : before_) before_views_.push_back(&words);
  thread_ = std::thread([this] { Loop(); });
}

HostLead::~HostLead() {
  stop_.store(true);
  FutexBump(protocol_.notifier());
  EndGroups();
  thread_.join();
}

void HostLead::Loop() {
  while (!stop_.load()) {
    const uint32_t seen = protocol_.notifier().load(std::memory_order_acquire);
    if (options_.mail != nullptr) options_.mail->Poll();
    LookAtMembers();
    if (!Round()) break;
    AfterRound();
    if (const absl::Duration wait = NextWait(); wait > absl::ZeroDuration())
      AwaitChange(protocol_.notifier(), seen, options_.spin, wait);
  }
  protocol_.publications().Keep(reserved_);  // of a step that is not decided
  EndGroups();
  if (options_.mail != nullptr) options_.mail->Poll();
  if (options_.progress) options_.progress();
}

// So that no other lead waits for this one.
void HostLead::EndGroups() {
  const absl::Status health = protocol_.members().Health();
  const std::string reason =
      health.ok() ? absl::StrCat("rank ", protocol_.local().first(), " closed the job") : std::string(health.message());
  rounds_->Abort(reason);
  gradients_.queue.group().Abort(reason);
  results_.queue.group().Abort(reason);
}

bool HostLead::Round() {
  const int host = protocol_.local().host;
  std::swap(words_, before_);
  for (size_t h = 0; h < words_.size(); ++h) views_[h] = &words_[h], before_views_[h] = &before_[h];
  if (phase_ == Phase::kCollect) {
    protocol_.buckets().DropUnused([this](int bucket) { GaveBack(pass_.GiveBackWeights(bucket)); });
  }
  words_[host] = ReadHostWords(protocol_, job_, plan_);
  words_[host].part = PartDone() ? part_ : part_ - 1;
  words_[host].publish = reserved_;
  if (plan_.pulled()) seats_.Read(words_[host]);
  const std::vector<HostBucket> buckets = std::move(words_[host].buckets);
  if (!Met(GatherWords()) || TakeAbort() || !CheckEach(CheckWords)) return false;
  if (plan_.bucketed() && (!Met(GatherBuckets(buckets)) || !CheckEach(CheckBuckets))) return false;
  int liar = 0;
  if (const absl::Status together = CheckTogether(views_, job_, liar); !together.ok()) return Refuse(liar, together);
  MirrorSlots(protocol_, views_, host, job_.num_writers());
  MirrorBuckets(protocol_, views_, host, plan_);
  TakeSettings();
  if (plan_.pulled()) seats_.TakeIn(views_);
  if (phase_ == Phase::kCollect) {
    SettleSlots(protocol_, before_views_, views_, host, job_.num_writers());
    for (int s = 0; s < job_.num_slots && plan_.bucketed(); ++s) {
      if (HostGiven(before_views_, views_, s) >= 0) ForgetBuckets(s);
    }
  }
  return true;
}

// What was just taken back with the slot.
void HostLead::ForgetBuckets(int slot) {
  for (HostWords& words : words_) {
    const auto of_slot = [slot](const HostBucket& bucket) { return bucket.slot == slot; };
    words.buckets.erase(std::remove_if(words.buckets.begin(), words.buckets.end(), of_slot), words.buckets.end());
  }
}

absl::Status HostLead::GatherWords() {
  const int host = protocol_.local().host;
  const int64_t bytes = HostWordsBytes(job_);
  std::swap(said_, said_before_);
  PackHostWords(words_[host], said_.data() + host * bytes);
  RETURN_IF_ERROR(rounds_->AllGather(said_.data() + host * bytes, said_.data(), bytes, options_.round_timeout));
  for (size_t h = 0; h < words_.size(); ++h) UnpackHostWords(said_.data() + h * bytes, job_, words_[h]);
  return absl::OkStatus();
}

// Of words that were checked, so all hosts send as much, and know it.
absl::Status HostLead::GatherBuckets(const std::vector<HostBucket>& mine) {
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

bool HostLead::Met(const absl::Status& status) {
  if (!status.ok()) Fail(status);
  return status.ok();
}

bool HostLead::CheckEach(absl::Status (*check)(const HostWords&, const JobSpec&, const Plan&)) {
  for (size_t h = 0; h < words_.size(); ++h) {
    if (const absl::Status status = check(words_[h], job_, plan_); !status.ok()) {
      return Refuse(static_cast<int>(h), status);
    }
  }
  return true;
}

bool HostLead::Refuse(int host, const absl::Status& status) {
  const int rank = host * protocol_.local().per_host;
  spdlog::error("event=bad_facts job={} rank={} host={} error=\"{}\"", job_.name, protocol_.local().first(), host,
                std::string(status.message()));
  protocol_.members().AbortFor(AbortReason::kBadFacts, rank, status.message());
  return false;
}

// Ranks in messages of the groups are the job's.
void HostLead::Fail(const absl::Status& status) {
  if (!protocol_.members().Health().ok() || stop_.load()) return;
  const int self = protocol_.local().first();
  const int named = NamedRank(status.message(), self);
  spdlog::error("event=hosts_failed job={} rank={} error=\"{}\"", job_.name, self, status.ToString());
  const bool known = named >= 0 && named < plan_.num_ranks();
  protocol_.members().Abort(known ? AbortReason::kUnreachable : AbortReason::kInternal, known ? named : self,
                            Rank(self));
}

bool HostLead::TakeAbort() {
  for (const HostWords& words : words_) {
    if (words.abort == 0) continue;
    protocol_.members().Abort(ReasonOf(words.abort), AboutOf(words.abort), Rank(ReporterOf(words.abort)),
                              DeviceOf(words.abort));
    return true;
  }
  return false;
}

void HostLead::TakeSettings() {
  const Step open(words_[0].committed + 1);
  const bool merges = phase_ != Phase::kCollect && command_.kind == CommandKind::kMerge;  // slots are finished meanwhile
  if (open.value() < 1 || (phase_ != Phase::kCollect && !merges)) return;
  if (const int first = HostOfRates(views_); first >= 0 && first != protocol_.local().host) {
    protocol_.declarations().TakeSettings(open, words_[first].learning_rates, words_[first].loss_scale);
  }
}

bool HostLead::PartDone() {
  if (phase_ == Phase::kPrepare && !SumsFirst(command_.kind)) return true;
  const bool gradients = IsIdle(gradients_), results = IsIdle(results_);
  return !executing_ && gradients && results;
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
    FutexBump(protocol_.notifier());
    return status;
  });
}

void HostLead::AfterRound() {
  if (phase_ == Phase::kCollect) return Collect();
  if (!std::all_of(words_.begin(), words_.end(), [&](const HostWords& words) { return words.part == part_; })) return;
  if (phase_ == Phase::kPrepare) {
    EndPrepare();
  } else {
    Commit();
  }
}

void HostLead::Collect() {
  facts_ = MergeFacts(views_, ReadCommitted(control()), job_, plan_, control());
  facts_.digest_ticket = control().digest_wanted.load();  // each host answers its own
  facts_.publish_ticket = control().publish_wanted.load();
  const std::optional<Command> next = Decide(facts_, job_, plan_);
  if (!next.has_value()) return MoveEarly();
  command_ = *next;
  if (command_.kind == CommandKind::kPublish && protocol_.publications().Find(Step(command_.step)).has_value()) {
    protocol_.tickets().AnswerPublish(facts_.publish_ticket, command_.step);
    if (options_.progress) options_.progress();
  } else if (IsPrepared(command_.kind)) {
    Prepare();
  } else {
    MoveEarly();
    Run();
  }
}

void HostLead::Prepare() {
  phase_ = Phase::kPrepare;
  ++part_;
  const bool norm = command_.kind == CommandKind::kNorm;  // the step's version follows
  const Publishes publishes = norm ? Publishes::kItsVersion : PublishesOf(command_);
  if (publishes == Publishes::kItsVersion) {
    reserved_ = protocol_.publications().Reserve(command_.first != 0 ? 0 : command_.step);
  } else if (publishes == Publishes::kForSure) {
    reserved_ = protocol_.publications().ReserveAny();
  }
  if (command_.kind == CommandKind::kReduceBucket) {
    Submit(gradients_, [this, words = words_, buckets = std::vector<int>(job_.num_slots, command_.bucket)](
                           ExchangeGroup& group) { return MoveOneBucket(group, words, buckets); });
  } else if (command_.kind == CommandKind::kMerge) {
    Submit(gradients_,
           [this, windows = seats_.WindowsOf(command_)](ExchangeGroup& group) { return MoveWindows(group, windows); });
  } else if (plan_.bucketed() || plan_.pulled()) {
    protocol_.commands().GradientsHere(Step(command_.step), static_cast<int>(plan_.buckets().size()));  // as sums
  } else if (norm || command_.kind == CommandKind::kStep) {
    Submit(gradients_,
           [this, words = words_, begin = moved_](ExchangeGroup& group) { return MovePieces(group, words, begin); });
    std::fill(moved_.begin(), moved_.end(), 0);
  }
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
  Submit(gradients_,
         [this, words = words_, buckets](ExchangeGroup& group) { return MoveOneBucket(group, words, buckets); });
}

// A version is published on all hosts or on none.
void HostLead::EndPrepare() {
  const bool all = std::all_of(words_.begin(), words_.end(),
                               [&](const HostWords& words) { return words.publish == words_[0].publish; });
  publish_ = all ? reserved_ : -1;
  if (command_.kind == CommandKind::kPublish && publish_ < 0) {
    protocol_.publications().Keep(std::exchange(reserved_, -1));
    protocol_.tickets().AnswerPublish(facts_.publish_ticket, -1);
    phase_ = Phase::kCollect;
    if (options_.progress) options_.progress();
    return;
  }
  const bool steps = command_.kind == CommandKind::kNorm || command_.kind == CommandKind::kStep;
  for (int s = 0; s < job_.num_slots && steps && !plan_.pulled(); ++s) {
    control().slots[s].declared.store(command_.step);
    for (int p = 0; p < plan_.num_shards() && !plan_.bucketed(); ++p)
      control().gradient_shards[s][p].store(command_.step);
  }
  Run();
}

void HostLead::Run() {
  phase_ = Phase::kRun;
  ++part_;
  executing_ = true;
  run_since_ = MonotonicNanos();
  const bool takes = PublishesOf(command_) != Publishes::kNothing;
  if (command_.kind != CommandKind::kQuantize) command_.publish = takes ? publish_ : -1;
  if (plan_.bucketed()) LendBuckets();
  if (!protocol_.commands().Issue(command_, facts_, command_.publish)) {
    if (protocol_.members().Health().ok()) Fail(absl::InternalError("what all hosts agreed on cannot be decided"));
    return;
  }
  if (command_.kind != CommandKind::kDigest) {  // digests are in the words
    Submit(results_, [this](ExchangeGroup& group) { return MoveResults(group); });
  }
  if (!takes) return;
  if (command_.publish < 0) protocol_.publications().Keep(reserved_);
  reserved_ = -1;
}

// All leads see the same words, of hosts whose windows stay as they are until the commit.
void HostLead::LendBuckets() {
  const bool fill = command_.kind == CommandKind::kGatherBucket;
  const bool steps = PublishesOf(command_) == Publishes::kItsVersion || command_.kind == CommandKind::kQuantize;
  if (!fill && !steps) return;
  const ResidencyTable table(&control(), plan_);
  for (int b = 0; b < static_cast<int>(takers_.size()); ++b) {
    const HostSet held = HostsWith(views_, b, HostBucket::kHeld);
    takers_[b] = held;
    if (fill) takers_[b] = b == command_.bucket ? HostsWith(views_, b, HostBucket::kUsed) & ~held : 0;
    const bool in_window = (fill || command_.publish < 0) && takers_[b] != 0;
    table.bucket(b).lent.store(in_window && !IsHere(takers_[b]) && !IsHere(held) ? 1 : 0);
  }
}

void HostLead::ReturnLent() {
  const ResidencyTable table(&control(), plan_);
  for (int b = 0; b < static_cast<int>(takers_.size()); ++b) {
    if (table.bucket(b).lent.exchange(0) != 0) GaveBack(pass_.GiveBackWeights(b));
  }
}

// Memory that cannot be given back breaks what bucket residency promises.
void HostLead::GaveBack(const absl::Status& status) {
  if (!status.ok()) Fail(status);
}

void HostLead::LookAtMembers() {
  if (!executing_ || !protocol_.members().Health().ok()) return;
  if (!IsIdle(gradients_)) run_since_ = MonotonicNanos();  // they have a limit of their own
  if (protocol_.commands().AllDone()) {
    executing_ = false;
  } else if (MonotonicNanos() - run_since_ > absl::ToInt64Nanoseconds(options_.step_timeout)) {
    const std::vector<int> late = protocol_.commands().NotDone();
    if (!late.empty()) protocol_.members().Abort(AbortReason::kLate, late.front(), Rank(protocol_.local().first()));
  }
}

void HostLead::Commit() {
  if (protocol_.command().kind == CommandKind::kDigest) {
    const HostRanks& ranks = protocol_.local();
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      control().members[r].digest.store(words_[r / ranks.per_host].digests[r % ranks.per_host]);
    }
  }
  GaveBack(pass_.GiveBackGradients(command_));
  protocol_.commands().Commit();
  static_cast<Committed&>(facts_) = ReadCommitted(control());
  const bool more = MoreFollows(facts_, job_, plan_);
  if (!more && plan_.bucketed()) ReturnLent();
  phase_ = Phase::kCollect;
  if (options_.mail != nullptr) options_.mail->Poll();
  if (options_.progress) options_.progress();
  if (!more) return;
  command_ = *Decide(facts_, job_, plan_);
  Run();
}

absl::Duration HostLead::NextWait() {
  if (!protocol_.members().Health().ok()) return absl::ZeroDuration();
  if (phase_ != Phase::kCollect) {
    LookAtMembers();
    return PartDone() ? absl::ZeroDuration() : plan_.pulled() ? kBucketSlice : kSlice;
  }
  if (AnyAsks(views_, job_.num_writers())) return kFirstQuiet;
  if (!PartDone())
    return kSlice;  // gradient shards that cross early: the notifier rings behind them, and the next may go
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
  if ((plan_.bucketed() || plan_.pulled()) && open > 0) return kBucketSlice;
  if (here) return kSlice;                                  // this host's trainers ring
  if (elsewhere && !anywhere) return absl::ZeroDuration();  // another host enters when its trainers ring
  quiet_ = said_ != said_before_ ? kFirstQuiet : std::min(2 * quiet_, kMostQuiet);
  return quiet_;
}

}  // namespace shardmesh
