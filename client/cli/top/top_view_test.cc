#include "client/cli/top/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMilli = 1'000'000;

// Times are milliseconds.
void AddSpan(v1::GetTraceReply& trace, const char* name, int64_t step, uint64_t begin, uint64_t end, int item = -1,
             int bucket = -1) {
  v1::TraceSpan& span = *trace.add_spans();
  span.set_name(name);
  span.set_step(step);
  span.set_bucket(bucket);
  span.set_item(item);
  span.set_begin_nanos(begin * kMilli);
  span.set_end_nanos(end * kMilli);
}

void Declare(WorkerAnswer& worker, int slot, int64_t step, uint64_t at, int bucket = -1) {
  AddSpan(*worker.trace, "declared", step, at, at, slot, bucket);
}

// A step command of 6 ms and a wait of 2 ms behind it, which ends with the commit.
void Commit(WorkerAnswer& worker, int64_t step, uint64_t at) {
  AddSpan(*worker.trace, "step", step, at - 8, at - 2);
  AddSpan(*worker.trace, "wait for members", step, at - 2, at);
  worker.status->mutable_jobs(0)->set_committed_step(step);
}

JobAnswers JobOf(int workers, int slots, int64_t epoch = 1) {
  JobAnswers answers;
  answers.job.mutable_spec()->set_name("tiny");
  answers.job.mutable_spec()->set_slots(slots);
  answers.job.set_state(v1::JOB_STATE_READY);
  answers.job.set_epoch(epoch);
  for (int rank = 0; rank < workers; ++rank) {
    WorkerAnswer& worker = answers.workers.emplace_back();
    worker.member.set_rank(rank);
    worker.member.set_worker(absl::StrCat("w", rank));
    worker.member.set_host_id("here");
    worker.member.set_pid(100 + rank);
    worker.status = v1::GetStatusReply();
    worker.status->set_device("cpu");
    v1::GetStatusReply::Job& job = *worker.status->add_jobs();
    job.set_name("tiny");
    job.set_epoch(epoch);
    job.set_rank(rank);
    worker.trace = v1::GetTraceReply();
    worker.answered_nanos = 5'000 * kMilli;
  }
  return answers;
}

// Three steps, committed at 100, 120 and 160 ms; slot 0 declares early, slot 1, at another worker, late.
JobAnswers ThreeSteps() {
  JobAnswers answers = JobOf(2, 2);
  WorkerAnswer &lead = answers.workers[0], &other = answers.workers[1];
  for (const auto& [step, at] : {std::pair(int64_t{1}, uint64_t{100}), {2, 120}, {3, 160}}) {
    Declare(lead, 0, step, at - 15);
    Declare(other, 1, step, at - 10);
    Commit(lead, step, at);
    Commit(other, step, at);
  }
  return answers;
}

TEST(TopViewTest, PeriodsAndPause_OfTheFirstWorker) {
  const JobView view = ViewOf(ThreeSteps(), nullptr);
  EXPECT_EQ(view.name, "tiny");
  EXPECT_EQ(view.state, "ready");
  EXPECT_EQ(view.epoch, 1);
  EXPECT_EQ(view.committed_step, 3);
  EXPECT_EQ(view.periods, 2);
  EXPECT_DOUBLE_EQ(view.median_period.value(), 0.030);
  EXPECT_DOUBLE_EQ(view.longest_period.value(), 0.040);
  EXPECT_DOUBLE_EQ(view.longest_pause.value(), 0.032);  // from 120 to 152, where the third step's command began
  EXPECT_EQ(view.pause_before_step, 3);
  EXPECT_FALSE(view.steps_per_second.has_value()) << "there was no refresh before";
}

TEST(TopViewTest, RestartsAndTheirLastPause_AsEachWorkerSaysOfItself) {
  JobAnswers answers = JobOf(4, 1);
  v1::GetStatusReply::Job& twice = *answers.workers[1].status->mutable_jobs(0);
  twice.set_restarts(2);
  twice.set_last_pause_nanos(120 * kMilli);
  answers.workers[2].status->mutable_jobs(0)->set_restarts(-1);  // makes no sense, and neither does the pause
  answers.workers[2].status->mutable_jobs(0)->set_last_pause_nanos(-5);
  answers.workers[3].status = absl::UnavailableError("gone");
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_EQ(view.workers[0].restarts, 0);
  EXPECT_FALSE(view.workers[0].last_pause.has_value());
  EXPECT_EQ(view.workers[1].restarts, 2);
  EXPECT_DOUBLE_EQ(view.workers[1].last_pause.value(), 0.120);
  EXPECT_EQ(view.workers[2].restarts, 0);
  EXPECT_FALSE(view.workers[2].last_pause.has_value());
  EXPECT_FALSE(view.workers[3].restarts.has_value());
}

TEST(TopViewTest, Pause_EndsAtAnyCommand) {
  JobAnswers answers = ThreeSteps();
  AddSpan(*answers.workers[0].trace, "gather_bucket", 2, 121, 140, -1, 0);  // within the longest gap
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_DOUBLE_EQ(view.longest_pause.value(), 0.012);  // before step 2, or (the same) after that command
}

TEST(TopViewTest, Commit_WhereWeightsAreQuantized_IsBehindQuantize) {
  JobAnswers answers = JobOf(1, 1);
  WorkerAnswer& lead = answers.workers[0];
  for (const int64_t step : {1, 2}) {
    const uint64_t at = 100 * step;
    Declare(lead, 0, step, at - 50);
    AddSpan(*lead.trace, "step", step, at - 10, at - 8);
    AddSpan(*lead.trace, "wait for members", step, at - 8, at - 6);
    AddSpan(*lead.trace, "quantize", step, at - 6, at - 1);
    AddSpan(*lead.trace, "wait for members", step, at - 1, at);
    AddSpan(*lead.trace, "digest", step, at + 2, at + 3);
    AddSpan(*lead.trace, "wait for members", step, at + 3, at + 5);
  }
  lead.status->mutable_jobs(0)->set_committed_step(2);
  EXPECT_DOUBLE_EQ(ViewOf(answers, nullptr).slots[0].idle.value(), 0.5);
  lead.status->mutable_jobs(0)->set_committed_step(1);  // it is not known to be committed: a trace is never the first
  EXPECT_EQ(ViewOf(answers, nullptr).periods, 0);
}

TEST(TopViewTest, Worker_SharesOfTheTimeInItsTrace) {
  JobAnswers answers = JobOf(1, 1);
  v1::GetTraceReply& trace = *answers.workers[0].trace;
  AddSpan(trace, "init", 0, 1000, 1100);  // neither
  AddSpan(trace, "norm", 1, 1200, 1220);
  AddSpan(trace, "wait for members", 1, 1220, 1225);
  AddSpan(trace, "range", 1, 1230, 1260, 0, 0);  // within the step
  AddSpan(trace, "step", 1, 1230, 1260);
  AddSpan(trace, "quantize", 1, 1300, 1310);
  AddSpan(trace, "reduce_bucket", 1, 1310, 1320);
  AddSpan(trace, "gather_bucket", 1, 1320, 1330);
  AddSpan(trace, "wait for lead", 1, 1330, 1350);
  AddSpan(trace, "gradients", 1, 1900, 2000);  // of another thread
  const WorkerView worker = ViewOf(answers, nullptr).workers.at(0);
  EXPECT_EQ(worker.name, "w0");
  EXPECT_EQ(worker.pid, 100);
  EXPECT_EQ(worker.device, "cpu");
  EXPECT_EQ(worker.epoch, 1);
  EXPECT_TRUE(worker.answered);
  EXPECT_EQ(worker.error, "");
  EXPECT_DOUBLE_EQ(worker.busy.value(), 0.080);
  EXPECT_DOUBLE_EQ(worker.waiting.value(), 0.025);
}

TEST(TopViewTest, Merges_AreWork_AndNoPause) {
  JobAnswers answers = JobOf(1, 1);
  WorkerAnswer& lead = answers.workers[0];
  Declare(lead, 0, 1, 80);
  Commit(lead, 1, 100);
  AddSpan(*lead.trace, "merge", 2, 100, 300);
  AddSpan(*lead.trace, "publish", 1, 300, 400);  // somebody asked for it
  Declare(lead, 0, 2, 850);
  Commit(lead, 2, 900);
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_DOUBLE_EQ(view.workers.at(0).busy.value(), 212.0 / 820);  // two steps and the merge, since the first span
  EXPECT_DOUBLE_EQ(view.longest_pause.value(), 0.492);             // before the second step
}

TEST(TopViewTest, Slots_IdleShareIsTheMedian_TheLastOneIsWaitedFor) {
  const JobView view = ViewOf(ThreeSteps(), nullptr);
  ASSERT_EQ(view.slots.size(), 2u);
  EXPECT_EQ(view.slots[0].last_step, 3);
  EXPECT_DOUBLE_EQ(view.slots[0].idle.value(), (15.0 / 20 + 15.0 / 40) / 2);  // of the first step no period is known
  EXPECT_DOUBLE_EQ(view.slots[1].idle.value(), (10.0 / 20 + 10.0 / 40) / 2);
  EXPECT_FALSE(view.slots[0].waited_for);
  EXPECT_TRUE(view.slots[1].waited_for);
}

TEST(TopViewTest, Slots_RepeatedDeclaration_TheFirstCounts) {
  JobAnswers answers = ThreeSteps();
  Declare(answers.workers[1], 0, 2, 119);
  Declare(answers.workers[1], 0, 3, 159);
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_DOUBLE_EQ(view.slots[0].idle.value(), (15.0 / 20 + 15.0 / 40) / 2);
  EXPECT_FALSE(view.slots[0].waited_for);
}

TEST(TopViewTest, Slots_OfOneTrainer_WaitForNobody) {
  JobAnswers answers = JobOf(1, 2);
  for (const int64_t step : {1, 2, 3}) {
    for (const int slot : {0, 1}) Declare(answers.workers[0], slot, step, 100 * step - 50);
    Commit(answers.workers[0], step, 100 * step);
  }
  for (const SlotView& slot : ViewOf(answers, nullptr).slots) {
    EXPECT_DOUBLE_EQ(slot.idle.value(), 0.5);
    EXPECT_FALSE(slot.waited_for) << slot.slot;
  }
}

TEST(TopViewTest, Slots_BucketsAndOtherNumbers_AreNotDeclaredSteps) {
  JobAnswers answers = JobOf(1, 2);
  Declare(answers.workers[0], 0, 1, 10, /*bucket=*/3);
  Declare(answers.workers[0], 2, 1, 10);
  Declare(answers.workers[0], -1, 1, 10);
  const JobView view = ViewOf(answers, nullptr);
  ASSERT_EQ(view.slots.size(), 2u);
  for (const SlotView& slot : view.slots) EXPECT_EQ(slot.last_step, -1);
}

TEST(TopViewTest, Slots_NeverDeclared_IsWaitedForBeforeTheFirstStep) {
  JobAnswers answers = JobOf(1, 3);
  Declare(answers.workers[0], 1, 1, 10);
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_EQ(view.slots[0].last_step, -1);
  EXPECT_EQ(view.slots[1].last_step, 1);
  EXPECT_FALSE(view.slots[0].idle.has_value());
  EXPECT_TRUE(view.slots[0].waited_for);
  EXPECT_FALSE(view.slots[1].waited_for);
  EXPECT_TRUE(view.slots[2].waited_for);
}

TEST(TopViewTest, Slots_StepThatIsLate_WaitsForThoseItLacks) {
  JobAnswers answers = ThreeSteps();
  const JobView before = ViewOf(answers, nullptr);
  for (WorkerAnswer& worker : answers.workers) worker.answered_nanos += 1'000 * kMilli;
  Declare(answers.workers[1], 1, 4, 170);  // the one that was last before is the first now
  const JobView view = ViewOf(answers, &before);
  EXPECT_EQ(view.steps_per_second, 0.0);
  EXPECT_TRUE(view.slots[0].waited_for);
  EXPECT_FALSE(view.slots[1].waited_for);
  EXPECT_TRUE(ViewOf(answers, nullptr).slots[1].waited_for) << "without a view before, it may come at any moment";
  answers.workers[0].trace = absl::UnavailableError("gone");  // maybe slot 0 declared there
  EXPECT_FALSE(ViewOf(answers, &before).slots[0].waited_for);
}

TEST(TopViewTest, StepsPerSecond_BetweenTwoRefreshesOfAnEpoch) {
  JobAnswers answers = ThreeSteps();
  JobView before = ViewOf(answers, nullptr);
  for (WorkerAnswer& worker : answers.workers) {
    worker.answered_nanos += 2'000 * kMilli;
    Commit(worker, 8, 400);
  }
  EXPECT_DOUBLE_EQ(ViewOf(answers, &before).steps_per_second.value(), 2.5);
  before.committed_step = 9;
  EXPECT_FALSE(ViewOf(answers, &before).steps_per_second.has_value()) << "steps do not go back";
  before.committed_step = 3;
  before.answered_nanos = answers.workers[0].answered_nanos;
  EXPECT_FALSE(ViewOf(answers, &before).steps_per_second.has_value()) << "no time has passed";
}

// Clocks of another epoch or host have nothing to do with those of this one.
TEST(TopViewTest, NewEpoch_NothingIsTakenFromTheOldOne) {
  const JobView before = ViewOf(ThreeSteps(), nullptr);
  JobAnswers answers = ThreeSteps();
  answers.workers[0].status->mutable_jobs(0)->set_epoch(2);  // the coordinator's list is older
  answers.workers[0].answered_nanos += 1'000 * kMilli;
  answers.workers[0].trace = v1::GetTraceReply();
  for (const int64_t step : {4, 5}) {
    Declare(answers.workers[0], 0, step, 10 * step - 9);  // the clock begins again
    Commit(answers.workers[0], step, 10 * step);
  }
  Declare(answers.workers[1], 1, 5, 49);  // of the old epoch
  const JobView view = ViewOf(answers, &before);
  EXPECT_EQ(view.epoch, 2);
  EXPECT_EQ(view.committed_step, 5);
  EXPECT_FALSE(view.steps_per_second.has_value());
  EXPECT_DOUBLE_EQ(view.median_period.value(), 0.010);
  EXPECT_DOUBLE_EQ(view.slots[0].idle.value(), 0.9);
  EXPECT_EQ(view.slots[1].last_step, -1);
  EXPECT_EQ(view.workers[0].epoch, 2);
  EXPECT_EQ(view.workers[1].epoch, 1);
}

TEST(TopViewTest, OtherHost_ItsDeclarationsGoWithItsOwnCommits) {
  JobAnswers answers = ThreeSteps();
  WorkerAnswer& other = answers.workers[1];
  other.member.set_host_id("there");
  for (v1::TraceSpan& span : *other.trace->mutable_spans()) {
    span.set_begin_nanos(span.begin_nanos() + 9'000'000 * kMilli);
    span.set_end_nanos(span.end_nanos() + 9'000'000 * kMilli);
    if (span.name() == "wait for members") span.set_name("wait for lead");
  }
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_NEAR(view.slots[1].idle.value(), (10.0 / 20 + 10.0 / 40) / 2, 1e-9);
  EXPECT_TRUE(view.slots[1].waited_for);
  EXPECT_DOUBLE_EQ(view.longest_period.value(), 0.040);
}

TEST(TopViewTest, SilentWorker_TheOthersAreShown) {
  JobAnswers answers = ThreeSteps();
  answers.workers[0].status = absl::UnavailableError("worker w0 is gone");
  answers.workers[0].trace = absl::UnknownError("not asked");
  answers.workers[1].status->mutable_jobs(0)->set_error("worker w0 died");
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_FALSE(view.workers[0].answered);
  EXPECT_THAT(view.workers[0].error, HasSubstr("worker w0 is gone"));
  EXPECT_FALSE(view.workers[0].epoch.has_value());
  EXPECT_FALSE(view.workers[0].busy.has_value());
  EXPECT_EQ(view.workers[1].error, "worker w0 died");
  EXPECT_EQ(view.committed_step, 3) << "as the first that answered has it";
  EXPECT_DOUBLE_EQ(view.longest_period.value(), 0.040);
  EXPECT_EQ(view.slots[0].last_step, -1) << "it declared at the silent one";
  EXPECT_TRUE(view.slots[1].idle.has_value());
  EXPECT_FALSE(view.slots[0].waited_for || view.slots[1].waited_for) << "of slot 0 nothing is known";
}

TEST(TopViewTest, NobodyAnswered_WhatTheCoordinatorSays) {
  JobAnswers answers = JobOf(1, 1);
  answers.job.set_committed_step(7);
  answers.job.set_state(v1::JOB_STATE_FAILED);
  answers.job.set_error("worker w0 died");
  answers.workers[0].status = absl::UnavailableError("gone");
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_EQ(view.committed_step, 7);
  EXPECT_EQ(view.state, "failed");
  EXPECT_EQ(view.note, "worker w0 died");
  EXPECT_FALSE(view.median_period.has_value());
  EXPECT_FALSE(ViewOf(answers, &view).steps_per_second.has_value());
}

TEST(TopViewTest, WorkerWithoutTheJob_IsSaid) {
  JobAnswers answers = JobOf(2, 1);
  answers.workers[1].status->clear_jobs();
  const WorkerView worker = ViewOf(answers, nullptr).workers.at(1);
  EXPECT_TRUE(worker.answered);
  EXPECT_FALSE(worker.epoch.has_value());
  EXPECT_THAT(worker.error, HasSubstr("does not hold the job"));
}

TEST(TopViewTest, EmptyTraces_WaitingJob_NothingIsKnown) {
  const JobView idle = ViewOf(JobOf(1, 1), nullptr);
  EXPECT_EQ(idle.periods, 0);
  EXPECT_FALSE(idle.median_period.has_value() || idle.longest_period.has_value() || idle.longest_pause.has_value());
  EXPECT_FALSE(idle.workers[0].busy.has_value());
  EXPECT_FALSE(idle.slots[0].idle.has_value() || idle.slots[0].waited_for);

  JobAnswers answers = JobOf(0, 1, /*epoch=*/0);
  answers.job.set_state(v1::JOB_STATE_WAITING);
  answers.job.set_waiting_for("2 live workers");
  answers.job.set_committed_step(-1);
  const JobView waiting = ViewOf(answers, nullptr);
  EXPECT_EQ(waiting.note, "waiting for 2 live workers");
  EXPECT_EQ(waiting.committed_step, -1);
  EXPECT_TRUE(waiting.workers.empty());
}

TEST(TopViewTest, OneStep_HasNoPeriodYet) {
  JobAnswers answers = JobOf(1, 1);
  AddSpan(*answers.workers[0].trace, "init", 0, 1, 2);
  AddSpan(*answers.workers[0].trace, "wait for members", 0, 2, 3);
  Declare(answers.workers[0], 0, 1, 50);
  Commit(answers.workers[0], 1, 100);
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_FALSE(view.median_period.has_value() || view.longest_pause.has_value() || view.slots[0].idle.has_value());
  EXPECT_EQ(view.slots[0].last_step, 1);
}

// What a broken peer may send: spans that end before they begin, slots and steps that are none.
TEST(TopViewTest, Nonsense_StaysInBounds) {
  JobAnswers answers = ThreeSteps();
  answers.job.mutable_spec()->set_slots(2'000'000'000);
  v1::GetTraceReply& trace = *answers.workers[0].trace;
  AddSpan(trace, "step", 4, 900, 100);
  AddSpan(trace, "wait for members", 3, UINT64_MAX / kMilli, 0);
  AddSpan(trace, "step", INT64_MIN, 0, UINT64_MAX / kMilli);
  Declare(answers.workers[0], INT32_MAX, INT64_MAX, 1);
  Declare(answers.workers[0], 0, 3, 0);
  const JobView view = ViewOf(answers, nullptr);
  EXPECT_LE(view.slots.size(), 1000u);
  EXPECT_LE(view.slots[0].idle.value(), 1.0);
  EXPECT_LE(view.workers[0].busy.value(), 1.0);
  EXPECT_GE(view.longest_pause.value(), 0.0);
}

v1::GetStatusReply::Job::Trainer& AddTrainer(WorkerAnswer& worker, int seat, int64_t pid, double idle) {
  v1::GetStatusReply::Job::Trainer& trainer = *worker.status->mutable_jobs(0)->add_trainers();
  trainer.set_seat(seat);
  trainer.set_pid(pid);
  trainer.set_slots_finished(10 * pid);
  trainer.set_idle_nanos(static_cast<int64_t>(idle * 1e9));
  return trainer;
}

TEST(TopViewTest, TrainersThatPull_AreIdleForAPartOfTheTimeSinceTheViewBefore) {
  JobAnswers answers = JobOf(1, 4);
  answers.job.mutable_spec()->set_slot_mode(v1::SLOT_MODE_PULLED);
  answers.workers[0].answered_nanos = 1'000'000'000;
  AddTrainer(answers.workers[0], 0, 7, 5);
  AddTrainer(answers.workers[0], 1, 8, 5);
  const JobView first = ViewOf(answers, nullptr);
  EXPECT_TRUE(first.slots.empty());
  ASSERT_EQ(first.trainers.size(), 2u);
  EXPECT_FALSE(first.trainers[0].idle.has_value());

  answers.workers[0].answered_nanos = 3'000'000'000;
  answers.workers[0].status->mutable_jobs(0)->clear_trainers();
  AddTrainer(answers.workers[0], 0, 7, 5.5);
  AddTrainer(answers.workers[0], 1, 9, 6);  // another process
  const JobView second = ViewOf(answers, &first);
  ASSERT_EQ(second.trainers.size(), 2u);
  EXPECT_EQ(second.trainers[0].slots_finished, 70);
  EXPECT_DOUBLE_EQ(second.trainers[0].idle.value_or(-1), 0.25);
  EXPECT_FALSE(second.trainers[1].idle.has_value());
}

}  // namespace
}  // namespace shardmesh
