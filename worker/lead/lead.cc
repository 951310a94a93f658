#include "worker/lead/lead.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {

// Beyond half of the time that members have: no wait of a lead for news is as long.
constexpr int64_t kAwayNanos = 1'000'000'000;

// Whether all hosts get ready for it before it is issued.
bool IsPrepared(CommandKind kind) {
  return kind == CommandKind::kInit || kind == CommandKind::kRestore || kind == CommandKind::kStep ||
         kind == CommandKind::kNorm || kind == CommandKind::kReduceBucket || kind == CommandKind::kPublish ||
         kind == CommandKind::kMerge;
}

}  // namespace

Lead::Lead(StepProtocol& protocol, StepPass& pass, const JobSpec& job, const Plan& plan, LeadTransport& transport,
           LeadOptions options)
    : protocol_(protocol), pass_(pass), job_(job), plan_(plan), transport_(transport), options_(std::move(options)) {
  if (protocol_.decided() == protocol_.committed()) return;
  command_ = protocol_.command();
  phase_ = Phase::kRun;
  part_ = 1;
  executing_ = resumed_ = true;
  run_since_ = MonotonicNanos();
}

bool Lead::Advance() {
  if (options_.mail != nullptr) options_.mail->Poll();
  LookAtMembers();
  if (phase_ == Phase::kCollect) {
    protocol_.buckets().DropUnused([this](int bucket) { GaveBack(pass_.GiveBackWeights(bucket)); });
  }
  if (!transport_.Exchange(
          {PartDone() ? part_ : part_ - 1, phase_ == Phase::kCollect ? nullptr : &command_, reserved_})) {
    return false;
  }
  if (phase_ == Phase::kCollect) {
    Collect();
  } else if (PartDone() && transport_.AllDone(part_)) {
    phase_ == Phase::kPrepare ? EndPrepare() : Commit();
  }
  return true;
}

void Lead::Collect() {
  transport_.ReadFacts(facts_);
  resumed_ = false;
  const std::optional<Command> next = Decide(facts_, job_, plan_);
  if (!next.has_value()) return transport_.BringEarly(part_);
  command_ = *next;
  if (command_.kind == CommandKind::kPublish && protocol_.publications().Find(Step(command_.step)).has_value()) {
    return AnswerPublish(command_.step);
  }
  if (IsPrepared(command_.kind)) return Prepare();
  transport_.BringEarly(part_);
  Run();
}

void Lead::Prepare() {
  phase_ = Phase::kPrepare;
  ++part_;
  // With other hosts, for the step that follows the norm at once, too.
  const bool norm = command_.kind == CommandKind::kNorm && !transport_.alone();
  const Publishes publishes = norm ? Publishes::kItsVersion : PublishesOf(command_);
  if (publishes == Publishes::kItsVersion) {
    reserved_ = protocol_.publications().Reserve(command_.first != 0 ? 0 : command_.step);
  } else if (publishes == Publishes::kForSure) {
    reserved_ = protocol_.publications().ReserveAny();
  }
  transport_.BringGradients(command_);
  if (transport_.alone()) EndPrepare();
}

// A version is published on all hosts or on none.
void Lead::EndPrepare() {
  publish_ = transport_.CommonPublication(reserved_);
  if (command_.kind == CommandKind::kPublish && publish_ < 0) {
    protocol_.publications().Keep(std::exchange(reserved_, -1));
    phase_ = Phase::kCollect;
    return AnswerPublish(-1);
  }
  transport_.Ready(command_);
  Run();
}

void Lead::Run() {
  phase_ = Phase::kRun;
  ++part_;
  executing_ = true;
  run_since_ = MonotonicNanos();
  const bool takes = PublishesOf(command_) != Publishes::kNothing;
  if (command_.kind != CommandKind::kQuantize) command_.publish = takes ? publish_ : -1;
  transport_.BeforeIssue(command_);
  if (!protocol_.commands().Issue(command_, facts_, command_.publish)) {
    return Fail("what was agreed on cannot be decided");
  }
  transport_.SendResults(command_);
  if (!takes) return;
  if (command_.publish < 0) protocol_.publications().Keep(reserved_);
  reserved_ = -1;
}

// A lead that was away for long, in a pass of its own or stopped, sees members late that it did not look at: they get
// the time once more.
void Lead::LookAtMembers() {
  if (!executing_ || protocol_.control()->abort.load() != 0) return;
  if (protocol_.commands().AllDone()) {
    executing_ = false;
    return;
  }
  const int64_t now = MonotonicNanos(), timeout = absl::ToInt64Nanoseconds(options_.step_timeout);
  const bool was_away = now - std::exchange(looked_, now) > timeout / 2 + kAwayNanos;
  if (was_away || !transport_.HasGradients()) run_since_ = now;  // gradients on their way have a limit of their own
  if (now - run_since_ <= timeout) return;
  const std::vector<int> late = protocol_.commands().NotDone();
  if (!late.empty()) {
    protocol_.members().Abort(AbortReason::kLate, late.front(), Rank(protocol_.local().first()));
  }
}

bool Lead::PartDone() {
  if (phase_ == Phase::kPrepare && transport_.MayRunAhead(command_)) return true;
  const bool idle = transport_.IsIdle();
  return !executing_ && idle;
}

void Lead::Commit() {
  transport_.BeforeCommit(command_);
  GaveBack(pass_.GiveBackGradients(command_));
  protocol_.commands().Commit();
  static_cast<Committed&>(facts_) = ReadCommitted(*protocol_.control());
  const bool more = !transport_.alone() && MoreFollows(facts_, job_, plan_);
  transport_.AfterCommit(more);
  phase_ = Phase::kCollect;
  if (options_.mail != nullptr) options_.mail->Poll();
  if (options_.progress) options_.progress();
  if (!more || resumed_) return;
  command_ = *Decide(facts_, job_, plan_);
  Run();
}

void Lead::AnswerPublish(int64_t step) {
  protocol_.tickets().AnswerPublish(facts_.publish_ticket, step);
  if (options_.progress) options_.progress();
}

absl::Duration Lead::Patience() {
  if (protocol_.control()->abort.load() != 0) return absl::ZeroDuration();
  if (phase_ == Phase::kCollect) return transport_.PatienceToCollect();
  LookAtMembers();
  return PartDone() ? absl::ZeroDuration() : transport_.PatienceToRun();
}

void Lead::End() {
  protocol_.publications().Keep(std::exchange(reserved_, -1));  // of a step that is not decided
  if (options_.mail != nullptr) options_.mail->Poll();
  if (options_.progress) options_.progress();
}

// Memory that cannot be given back breaks what bucket residency promises.
void Lead::GaveBack(const absl::Status& status) {
  if (!status.ok()) Fail(status.message());
}

void Lead::Fail(absl::string_view why) {
  if (protocol_.control()->abort.load() != 0) return;
  const int self = protocol_.local().first();
  spdlog::error("event=lead_failed job={} rank={} error=\"{}\"", job_.name, self, std::string(why));
  protocol_.members().Abort(AbortReason::kInternal, self, Rank(self));
}

}  // namespace shardmesh
