#include "client/cli/top/top_view.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "client/cli/base/connection.h"
#include "core/job/job.h"

namespace shardmesh {
namespace {

using WorkerJob = v1::GetStatusReply::Job;
using Instants = std::map<int64_t, uint64_t>;  // by step, nanoseconds of one host's clock

// A step that a slot declared and that was committed.
struct Idle {
  double seconds = 0;           // from the declaration to the commit
  std::optional<double> share;  // of the step's period
};
using IdleTimes = std::vector<std::map<int64_t, Idle>>;  // by slot, by step

double Seconds(uint64_t begin, uint64_t end) { return end <= begin ? 0 : static_cast<double>(end - begin) * 1e-9; }

bool IsWait(const v1::TraceSpan& span) { return span.name() == "wait for members" || span.name() == "wait for lead"; }

// Of a step, or for one: not of the initial weights, or a digest that somebody asked for.
bool IsStepWork(const v1::TraceSpan& span) {
  return span.name() == "step" || span.name() == "norm" || span.name() == "quantize" ||
         span.name() == "reduce_bucket" || span.name() == "gather_bucket" || span.name() == "merge";
}

bool IsCommandOrWait(const v1::TraceSpan& span) {
  return IsStepWork(span) || IsWait(span) || span.name() == "init" || span.name() == "restore" ||
         span.name() == "digest" || span.name() == "publish";
}

std::optional<double> Median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  absl::c_sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

const WorkerJob* StatusOf(const WorkerAnswer& answer, const std::string& job) {
  if (!answer.status.ok()) return nullptr;
  const auto found = absl::c_find_if(answer.status->jobs(), [&](const WorkerJob& j) { return j.name() == job; });
  return found == answer.status->jobs().end() ? nullptr : &*found;
}

int64_t NewestEpoch(const JobAnswers& answers) {
  int64_t epoch = answers.job.epoch();
  for (const WorkerAnswer& answer : answers.workers) {
    const WorkerJob* const job = StatusOf(answer, answers.job.spec().name());
    if (job != nullptr) epoch = std::max<int64_t>(epoch, job->epoch());
  }
  return epoch;
}

// Those that told of this epoch, by rank.
std::vector<const WorkerAnswer*> AnswersOf(const JobAnswers& answers, int64_t epoch) {
  std::vector<const WorkerAnswer*> list;
  for (const WorkerAnswer& answer : answers.workers) {
    const WorkerJob* const job = StatusOf(answer, answers.job.spec().name());
    if (job != nullptr && job->epoch() == epoch) list.push_back(&answer);
  }
  absl::c_stable_sort(list,
                      [](const WorkerAnswer* a, const WorkerAnswer* b) { return a->member.rank() < b->member.rank(); });
  return list;
}

// When the steps up to `committed` were committed, as this worker saw it.
Instants CommitsOf(const v1::GetTraceReply& trace, int64_t committed) {
  Instants commands, commits;
  for (const v1::TraceSpan& span : trace.spans()) {
    const bool counts = span.name() == "step" || (span.name() == "quantize" && commands.count(span.step()) > 0);
    if (counts && span.step() <= committed) commands[span.step()] = span.end_nanos();
  }
  for (const v1::TraceSpan& span : trace.spans()) {
    const auto command = commands.find(span.step());
    if (!IsWait(span) || command == commands.end() || span.begin_nanos() < command->second) continue;
    commits.emplace(span.step(), span.end_nanos());  // a later wait of the step is that of a digest
  }
  return commits;
}

std::optional<double> PeriodOf(const Instants& commits, int64_t step) {
  const auto commit = commits.find(step);
  if (commit == commits.end() || commit == commits.begin()) return std::nullopt;
  const auto before = std::prev(commit);
  if (before->first != step - 1 || commit->second <= before->second) return std::nullopt;
  return Seconds(before->second, commit->second);
}

void SetPeriods(const Instants& commits, JobView& view) {
  std::vector<double> periods;
  for (const auto& [step, commit] : commits) {
    if (const std::optional<double> period = PeriodOf(commits, step)) periods.push_back(*period);
  }
  view.periods = static_cast<int64_t>(periods.size());
  view.median_period = Median(periods);
  if (!periods.empty()) view.longest_period = *absl::c_max_element(periods);
}

void SetPause(const v1::GetTraceReply& trace, const Instants& commits, JobView& view) {
  if (commits.size() < 2) return;
  std::vector<const v1::TraceSpan*> spans;
  for (const v1::TraceSpan& span : trace.spans()) {
    if (IsCommandOrWait(span)) spans.push_back(&span);
  }
  absl::c_stable_sort(
      spans, [](const v1::TraceSpan* a, const v1::TraceSpan* b) { return a->begin_nanos() < b->begin_nanos(); });
  const uint64_t last = commits.rbegin()->second;
  uint64_t free_since = commits.begin()->second;
  view.longest_pause = 0;
  for (const v1::TraceSpan* span : spans) {
    if (span->begin_nanos() >= last) break;
    const double pause = Seconds(free_since, span->begin_nanos());
    if (pause > *view.longest_pause) {
      view.longest_pause = pause;
      view.pause_before_step = span->step();
    }
    free_since = std::max<uint64_t>(free_since, span->end_nanos());
  }
}

void SetShares(const v1::GetTraceReply& trace, WorkerView& worker) {
  uint64_t first = std::numeric_limits<uint64_t>::max(), last = 0;
  double busy = 0, waiting = 0;
  for (const v1::TraceSpan& span : trace.spans()) {
    first = std::min<uint64_t>(first, span.begin_nanos());
    last = std::max<uint64_t>(last, span.end_nanos());
    const double seconds = Seconds(span.begin_nanos(), span.end_nanos());
    if (IsStepWork(span)) busy += seconds;
    if (IsWait(span)) waiting += seconds;
  }
  const double observed = Seconds(first, last);
  if (observed <= 0) return;
  worker.busy = std::min(1.0, busy / observed);
  worker.waiting = std::min(1.0, waiting / observed);
}

WorkerView ViewOfWorker(const WorkerAnswer& answer, const std::string& job) {
  WorkerView view;
  view.name = answer.member.worker();
  view.rank = answer.member.rank();
  view.pid = answer.member.pid();
  view.answered = answer.status.ok();
  if (!view.answered) {
    view.error = answer.status.status().ToString();
    return view;
  }
  view.device = answer.status->device();
  const WorkerJob* const state = StatusOf(answer, job);
  if (state == nullptr) {
    view.error = "it does not hold the job";
    return view;
  }
  view.epoch = state->epoch();
  view.error = state->error();
  view.transport = state->transport();
  view.restarts = std::max(state->restarts(), 0);
  if (state->last_pause_nanos() > 0) view.last_pause = static_cast<double>(state->last_pause_nanos()) * 1e-9;
  if (answer.trace.ok()) {
    SetShares(*answer.trace, view);
  } else if (view.error.empty()) {
    view.error = answer.trace.status().ToString();
  }
  return view;
}

// Notes what the slots declared, by one worker's trace; `commits`: of its host.
void AddDeclared(const v1::GetTraceReply& trace, const Instants& commits, std::vector<SlotView>& slots,
                 IdleTimes& idle) {
  for (const v1::TraceSpan& span : trace.spans()) {
    const int slot = span.item();
    // A bucket is not yet the step.
    if (span.name() != "declared" || span.bucket() >= 0 || slot < 0 || slot >= static_cast<int>(slots.size())) continue;
    slots[slot].last_step = std::max<int64_t>(slots[slot].last_step, span.step());
    const auto commit = commits.find(span.step());
    if (commit == commits.end()) continue;
    Idle now;
    now.seconds = Seconds(span.begin_nanos(), commit->second);
    if (const std::optional<double> period = PeriodOf(commits, span.step())) {
      now.share = std::min(1.0, now.seconds / *period);
    }
    Idle& known = idle[slot].try_emplace(span.step(), now).first->second;
    if (known.seconds < now.seconds) known = now;  // of several declarations the first one counts
  }
}

// How often each slot was the last to declare, of the steps of which every slot's declaration is known. Slots of one
// trainer declare at the same instant; where all did, nobody waited.
std::vector<int64_t> TimesLast(const IdleTimes& idle) {
  std::vector<int64_t> times(idle.size(), 0);
  if (idle.empty()) return times;
  for (const auto& entry : idle[0]) {
    const int64_t step = entry.first;
    double least = std::numeric_limits<double>::max(), most = 0;
    bool all = true;
    for (const auto& of_slot : idle) {
      const auto found = of_slot.find(step);
      all = all && found != of_slot.end();
      if (!all) break;
      least = std::min(least, found->second.seconds);
      most = std::max(most, found->second.seconds);
    }
    if (!all || least == most) continue;
    for (size_t slot = 0; slot < idle.size(); ++slot) times[slot] += idle[slot].at(step).seconds == least;
  }
  return times;
}

// Marks the slots that lack the step after `committed`, if there are some that do not. True: it marked one.
bool MarkPending(int64_t committed, std::vector<SlotView>& slots) {
  const auto declared = [&](const SlotView& slot) { return slot.last_step > committed; };
  if (!absl::c_any_of(slots, declared) || absl::c_all_of(slots, declared)) return false;
  for (SlotView& slot : slots) slot.waited_for = !declared(slot);
  return true;
}

// Of slots that were the last equally often, the one with the least idle share.
void MarkLast(const std::vector<int64_t>& times, std::vector<SlotView>& slots) {
  std::pair<int64_t, double> best = {0, 0};
  for (const SlotView& slot : slots) best = std::max(best, {times[slot.slot], -slot.idle.value_or(1)});
  for (SlotView& slot : slots) {
    slot.waited_for = best.first > 0 && best == std::pair(times[slot.slot], -slot.idle.value_or(1));
  }
}

// `stalled`: nothing was committed since the view before. `complete`: every worker's trace is there.
void SetSlots(const std::vector<const WorkerAnswer*>& workers, bool stalled, bool complete, JobView& view) {
  IdleTimes idle(view.slots.size());
  std::map<std::string, Instants> commits;  // by host, as its first worker saw them
  for (const WorkerAnswer* worker : workers) {
    if (!worker->trace.ok()) continue;
    const std::string& host = worker->member.host_id();
    if (commits.count(host) == 0) {
      commits[host] = CommitsOf(*worker->trace, StatusOf(*worker, view.name)->committed_step());
    }
    AddDeclared(*worker->trace, commits[host], view.slots, idle);
  }
  for (SlotView& slot : view.slots) {
    std::vector<double> shares;
    for (const auto& [step, times] : idle[slot.slot]) {
      if (times.share.has_value()) shares.push_back(*times.share);
    }
    slot.idle = Median(std::move(shares));
  }
  const std::vector<int64_t> times = TimesLast(idle);
  const bool judged = absl::c_any_of(times, [](int64_t t) { return t > 0; });
  if (complete && (stalled || !judged) && MarkPending(view.committed_step, view.slots)) return;
  MarkLast(times, view.slots);
}

// As the lead says; of who has a seat by another process than before nothing is known yet.
void SetTrainers(const std::vector<const WorkerAnswer*>& workers, const JobView* before, JobView& view) {
  if (workers.empty()) return;
  const double elapsed =
      view.steps_per_second.has_value() ? Seconds(before->answered_nanos, view.answered_nanos) : 0;  // the same epoch
  for (const WorkerJob::Trainer& from : StatusOf(*workers.front(), view.name)->trainers()) {
    TrainerView trainer{from.seat(), from.pid(), from.slots_finished(), static_cast<double>(from.idle_nanos()) * 1e-9};
    for (const TrainerView& last : before == nullptr ? std::vector<TrainerView>() : before->trainers) {
      if (elapsed <= 0 || last.seat != trainer.seat || last.pid != trainer.pid) continue;
      trainer.idle = std::clamp((trainer.idle_seconds - last.idle_seconds) / elapsed, 0.0, 1.0);
    }
    view.trainers.push_back(trainer);
  }
}

std::string NoteOf(const v1::JobDescription& job) {
  if (job.state() == v1::JOB_STATE_FAILED) return job.error();
  const bool waits = job.state() == v1::JOB_STATE_WAITING || job.state() == v1::JOB_STATE_PREPARING;
  return waits ? "waiting for " + WaitsFor(job) : "";
}

void SetCommitted(const std::vector<const WorkerAnswer*>& workers, const JobView* before, JobView& view) {
  if (workers.empty()) return;
  view.committed_step = StatusOf(*workers.front(), view.name)->committed_step();
  view.answered_nanos = workers.front()->answered_nanos;
  if (before == nullptr || before->epoch != view.epoch || before->answered_nanos == 0) return;
  const int64_t steps = view.committed_step - before->committed_step;
  const int64_t nanos = view.answered_nanos - before->answered_nanos;
  if (steps >= 0 && nanos > 0) view.steps_per_second = static_cast<double>(steps) / (static_cast<double>(nanos) * 1e-9);
}

}  // namespace

JobView ViewOf(const JobAnswers& answers, const JobView* before) {
  const v1::JobDescription& job = answers.job;
  JobView view;
  view.name = job.spec().name();
  view.state = JobStateName(job.state());
  view.note = NoteOf(job);
  view.epoch = NewestEpoch(answers);
  view.committed_step = job.committed_step();
  for (const WorkerAnswer& answer : answers.workers) view.workers.push_back(ViewOfWorker(answer, view.name));
  const bool pulled = job.spec().slot_mode() == v1::SLOT_MODE_PULLED;
  const int slots = pulled ? 0 : std::clamp(job.spec().slots(), 0, kMaxSlots);
  for (int slot = 0; slot < slots; ++slot) view.slots.push_back({slot});

  const std::vector<const WorkerAnswer*> current = AnswersOf(answers, view.epoch);
  SetCommitted(current, before, view);
  SetTrainers(current, before, view);
  const auto traced = [](const WorkerAnswer* answer) { return answer->trace.ok(); };
  if (const auto first = absl::c_find_if(current, traced); first != current.end()) {
    const Instants commits = CommitsOf(*(*first)->trace, StatusOf(**first, view.name)->committed_step());
    SetPeriods(commits, view);
    SetPause(*(*first)->trace, commits, view);
  }
  const bool complete = current.size() == answers.workers.size() && absl::c_all_of(current, traced);
  SetSlots(current, view.steps_per_second == 0.0, complete, view);
  return view;
}

}  // namespace shardmesh
