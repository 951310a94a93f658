#include "tests/testing/steady_training.h"

#include <poll.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "tests/testing/training.h"

namespace shardmesh::testing {
namespace {
constexpr absl::Duration kLong = absl::Seconds(60);
}  // namespace

absl::StatusOr<std::unique_ptr<SteadyTraining>> SteadyTraining::Start(Client& client, const JobSpec& spec) {
  std::unique_ptr<SteadyTraining> training(new SteadyTraining());
  ASSIGN_OR_RETURN(training->job_, client.CreateJob(spec));
  RETURN_IF_ERROR(Initialize(*training->job_));
  RETURN_IF_ERROR(training->Open());
  training->commits_.WatchGaps();
  for (int i = 0; i < 2; ++i) {
    training->threads_[i] = std::thread([t = training.get(), i] { t->statuses_[i] = t->Train(i); });
  }
  return training;
}

absl::Status SteadyTraining::Open() {
  if (job_->spec().pulled()) {
    for (auto& puller : pullers_) {
      ASSIGN_OR_RETURN(puller, job_->AttachPulling());
      RETURN_IF_ERROR(puller->AwaitWeights(kLong));
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(sessions_[0], job_->Attach({Slot(0)}));
  ASSIGN_OR_RETURN(sessions_[1], job_->Connect({Slot(1)}));
  for (auto& session : sessions_) RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return absl::OkStatus();
}

absl::Status SteadyTraining::AwaitBeyond(int64_t step) const {
  const absl::Time deadline = MonotonicNow() + kLong;
  while (committed() <= step && MonotonicNow() < deadline && !failed_.load()) poll(nullptr, 0, 1);
  if (failed_.load()) return absl::AbortedError("a trainer ended");
  return committed() > step ? absl::OkStatus() : absl::DeadlineExceededError(absl::StrCat("no step after ", step));
}

absl::StatusOr<int64_t> SteadyTraining::End() {
  last_.store(std::min(last_.load(), committed() + 20));
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  for (const absl::Status& status : statuses_) RETURN_IF_ERROR(status);
  return last_.load();
}

int64_t SteadyTraining::KnownTo(int trainer) const {
  return job_->spec().pulled() ? pullers_[trainer]->committed_step().value()
                               : sessions_[trainer]->committed_step().value();
}

absl::Status SteadyTraining::Step(int trainer) {
  const int64_t step = KnownTo(trainer) + 1;
  if (job_->spec().pulled()) return PullTo(*pullers_[trainer], step, kLong);
  RETURN_IF_ERROR(TrainTo(*sessions_[trainer], step, kLong));
  if (KnownTo(trainer) == step) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("step ", KnownTo(trainer), " came after ", step - 1));
}

absl::Status SteadyTraining::Train(int trainer) {
  while (KnownTo(trainer) < last_.load()) {
    if (const absl::Status stepped = Step(trainer); !stepped.ok()) {
      failed_.store(true);
      return stepped;
    }
    commits_.See(KnownTo(trainer));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh::testing
