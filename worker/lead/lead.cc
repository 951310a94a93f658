#include "worker/lead/lead.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "local/memory/futex.h"
#include "worker/control/group_table.h"
#include "worker/control/residency.h"
#include "worker/step/gradient_norm.h"

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

// Fills in what a step computes with. False: a learning rate that no step can have.
bool WriteScalars(const StepProtocol& protocol, const Command& command, const Facts& facts) {
  const GroupTable groups(protocol.control(), protocol.plan());
  for (int g = 0; g < protocol.job().num_groups(); ++g) {
    OptimizerHyper hyper = protocol.job().group(g);
    hyper.lr = facts.learning_rates[g];
    auto scalars = ComputeStepScalars(hyper, command.step);  // validated when it was claimed
    if (!scalars.ok()) return false;
    groups.scalars(command.groups)[g] = *scalars;
    groups.rates(command.groups)[g] = hyper.lr;
  }
  return true;
}

void CommitStep(StepProtocol& protocol, const Command& command) {
  ControlBlock& control = *protocol.control();
  const bool restored = control.restored_step_plus_one.load(std::memory_order_acquire) == command.step + 1;
  if (!restored) protocol.outcomes().Record(command);  // else it came with the shards
  if (command.publish >= 0) protocol.publications().Show(command.publish, command.step);
  for (int s = 0; s < protocol.job().num_slots; ++s) control.elsewhere[s].gradient_shards.store(0);
  control.committed_step_plus_one.store(command.step + 1, std::memory_order_release);
  Reach(FaultPoint::kStepCommitted);
  if (command.publish >= 0) protocol.publications().Notify();
}

// What is committed but for a step: the answer to a ticket, or a part of the open step.
void CommitPart(StepProtocol& protocol, const Command& command) {
  ControlBlock& control = *protocol.control();
  const ResidencyTable buckets(&control, protocol.plan());
  switch (command.kind) {
    case CommandKind::kDigest:
      return protocol.tickets().SummarizeDigest();
    case CommandKind::kNorm:
      control.norm.store(GradientNorm(protocol.job(), protocol.plan(), SquareSums(&control)),
                         std::memory_order_release);
      return control.norm_step.store(command.step, std::memory_order_release);
    case CommandKind::kPublish:
      protocol.publications().Show(command.publish, command.step);
      protocol.publications().Notify();
      return protocol.tickets().AnswerPublish(static_cast<uint64_t>(command.nonfinite), command.step);
    case CommandKind::kGatherBucket:
      if (buckets.bucket(command.bucket).lent.load() == 0) buckets.bucket(command.bucket).held.store(kBucketHeld);
      return;
    case CommandKind::kReduceBucket:
      return buckets.bucket(command.bucket).reduced.store(command.step, std::memory_order_release);
    case CommandKind::kMerge:
      return PulledSlots(&control, protocol.job(), protocol.plan(), protocol.committed_step().value() + 1)
          .Merged({command.first_slot, command.num_slots}, command.partial);
    default:  // a version (MakesVersion)
      return;
  }
}

// Whether it makes, or begins to make, a version of the weights.
bool MakesVersion(CommandKind kind) {
  return kind == CommandKind::kInit || kind == CommandKind::kRestore || kind == CommandKind::kStep ||
         kind == CommandKind::kQuantize;
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
  if (transport_.MayRunAhead(command_)) transport_.BringGradients(command_);
  transport_.SendResults(command_);
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
  const std::optional<Command> next = shardmesh::Decide(facts_, job_, plan_);
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
  if (!Issue(protocol_, command_, facts_)) {
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
  CommitNewest(protocol_);
  static_cast<Committed&>(facts_) = ReadCommitted(*protocol_.control());
  const bool more = !transport_.alone() && MoreFollows(facts_, job_, plan_);
  transport_.AfterCommit(more);
  phase_ = Phase::kCollect;
  if (options_.mail != nullptr) options_.mail->Poll();
  if (options_.progress) options_.progress();
  if (!more || resumed_) return;
  command_ = *shardmesh::Decide(facts_, job_, plan_);
  Run();
}

bool Lead::Issue(StepProtocol& protocol, const Command& command, const Facts& facts) {
  return protocol.control()->abort.load() == 0 && Decide(protocol, command, facts);
}

bool Lead::Decide(StepProtocol& protocol, const Command& command, const Facts& facts) {
  ControlBlock& control = *protocol.control();
  if (command.kind == CommandKind::kStep && !WriteScalars(protocol, command, facts)) return false;
  control.commands[(protocol.decided() + 1) % 2] = command;
  const bool first = command.first != 0 && command.kind != CommandKind::kQuantize;
  if (first || (command.kind == CommandKind::kStep && command.apply != 0)) {
    std::atomic<uint32_t>* const maxima = Maxima(&control, protocol.plan());
    const ScalePlan& scales = protocol.plan().scales();
    const int64_t count = first ? scales.num_maxima : scales.num_stepped_maxima;
    for (int64_t i = 0; i < count; ++i) maxima[i].store(0, std::memory_order_relaxed);
  }
  Reach(FaultPoint::kCommandWritten);
  control.decided.fetch_add(1, std::memory_order_release);
  Reach(FaultPoint::kDecided);
  FutexBump(control.decision);
  return true;
}

void Lead::CommitNewest(StepProtocol& protocol) {
  ControlBlock& control = *protocol.control();
  const Command& command = protocol.command();
  if (MakesVersion(command.kind)) {
    if (command.kind == CommandKind::kStep && command.apply) control.parity.store(1 - command.parity);
    Reach(FaultPoint::kParityTurned);
    // In a repeated commit the step may count already: peers read its outcome.
    const bool whole = !QuantizeFollows(ReadCommitted(control), protocol.plan());
    if (whole && protocol.committed_step().value() < command.step) CommitStep(protocol, command);
  } else {
    CommitPart(protocol, command);
  }
  control.committed.store(protocol.decided(), std::memory_order_release);
  Reach(FaultPoint::kCommitted);
  FutexBump(control.finished);
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
