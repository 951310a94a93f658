#include "tests/testing/steady_training.h"

#include <poll.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/status.h"
#include "tests/testing/training.h"

namespace shardmesh::testing {
namespace {
constexpr absl::Duration kLong = absl::Seconds(60);
}  // namespace

absl::StatusOr<std::unique_ptr<SteadyTraining>> SteadyTraining::Start(Client& client, const JobSpec& spec) {
  std::unique_ptr<SteadyTraining> training(new SteadyTraining());
  ASSIGN_OR_RETURN(training->job_, client.CreateJob(spec));
  RETURN_IF_ERROR(Initialize(*training->job_));
  ASSIGN_OR_RETURN(training->sessions_[0], training->job_->Attach({Slot(0)}));
  ASSIGN_OR_RETURN(training->sessions_[1], training->job_->Connect({Slot(1)}));
  for (auto& session : training->sessions_) RETURN_IF_ERROR(session->AwaitWeights(kLong));
  training->WatchGaps();
  for (int i = 0; i < 2; ++i) {
    training->threads_[i] = std::thread([t = training.get(), i] { t->statuses_[i] = t->Train(*t->sessions_[i]); });
  }
  return training;
}

absl::Status SteadyTraining::AwaitBeyond(int64_t step) const {
  const absl::Time deadline = absl::Now() + kLong;
  while (committed() <= step && absl::Now() < deadline && !failed_.load()) poll(nullptr, 0, 1);
  if (failed_.load()) return absl::AbortedError("a trainer ended");
  return committed() > step ? absl::OkStatus() : absl::DeadlineExceededError(absl::StrCat("no step after ", step));
}

void SteadyTraining::WatchGaps() {
  MutexLock lock(mu_);
  if (committed() == 0) newest_ = absl::Now();
  longest_ = {newest_, absl::ZeroDuration()};
}

SteadyTraining::Gap SteadyTraining::LongestGap() const {
  MutexLock lock(mu_);
  return longest_;
}

absl::StatusOr<int64_t> SteadyTraining::End() {
  last_.store(std::min(last_.load(), committed() + 20));
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  for (const absl::Status& status : statuses_) RETURN_IF_ERROR(status);
  return last_.load();
}

absl::Status SteadyTraining::Train(Session& session) {
  while (session.committed_step().value() < last_.load()) {
    const int64_t step = session.committed_step().value() + 1;
    absl::Status trained = TrainTo(session, step, kLong);
    if (trained.ok() && session.committed_step().value() != step) {
      trained = absl::InternalError(absl::StrCat("step ", session.committed_step().value(), " came after ", step - 1));
    }
    if (!trained.ok()) {
      failed_.store(true);
      return trained;
    }
    Committed(step);
  }
  return absl::OkStatus();
}

void SteadyTraining::Committed(int64_t step) {
  MutexLock lock(mu_);
  if (step <= committed()) return;  // the other trainer saw it first
  const absl::Time now = absl::Now();
  if (now - newest_ > longest_.length) longest_ = {newest_, now - newest_};
  newest_ = now;
  committed_.store(step);
}

}  // namespace shardmesh::testing
