#include "tests/testing/training/steady_training.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "tests/testing/training/training.h"

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

absl::Status SteadyTraining::CompareRead(int64_t version, std::string read) {
  MutexLock lock(mu_);
  const auto [other, first] = read_.emplace(version, std::move(read));
  if (first) return absl::OkStatus();
  const bool same = other->second == read;
  read_.erase(other);
  return same ? absl::OkStatus() : absl::DataLossError(absl::StrCat("version ", version, " was read as two others"));
}

absl::Status SteadyTraining::StepByBucket(Session& session) {
  const int buckets = static_cast<int>(session.job().plan().buckets().size());
  const int64_t version = session.committed_step().value();
  std::string read;
  for (int b = 0; b < buckets; ++b) {
    if (b + 1 < buckets) RETURN_IF_ERROR(session.Prefetch(b + 1));
    RETURN_IF_ERROR(session.Acquire(b, kLong));
    for (const ParameterSpec& p : session.job().spec().parameters) {
      ASSIGN_OR_RETURN(const int bucket, session.bucket(p.name));
      if (bucket != b) continue;
      ASSIGN_OR_RETURN(const ConstTensorView view, session.parameter(p.name));
      absl::StrAppend(&read, absl::string_view(static_cast<const char*>(view.data), view.data_bytes()));
    }
    RETURN_IF_ERROR(session.Release(b));
  }
  RETURN_IF_ERROR(CompareRead(version, std::move(read)));
  for (int b = buckets - 1; b >= 0; --b) {
    if (session.job().plan().buckets()[b].frozen) continue;
    RETURN_IF_ERROR(WriteBucketGradients(session, shardmesh::Step(version + 1), b));
    RETURN_IF_ERROR(session.DeclareBucket(b, kLong));
  }
  StepOptions options;
  options.learning_rates = LearningRates(session.job().spec(), version + 1);
  options.timeout = kLong;
  return session.Step(options).status();
}

absl::Status SteadyTraining::Step(int trainer) {
  const int64_t step = KnownTo(trainer) + 1;
  if (job_->spec().pulled()) return PullTo(*pullers_[trainer], step, kLong);
  const bool by_bucket = job_->spec().residency == Residency::kBucket;
  RETURN_IF_ERROR(by_bucket ? StepByBucket(*sessions_[trainer]) : TrainTo(*sessions_[trainer], step, kLong));
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
