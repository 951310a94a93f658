#include "bench/imbalance/imbalance_job.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "core/base/sync.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr double kHeadStart = 0.003;       // seconds: what starting the threads may take
constexpr double kForwardShare = 1.0 / 3;  // of a sample's time; backward is twice as long
constexpr double kNanosPerSecond = 1e9;

// On the clock of MonotonicSeconds.
void SleepUntil(double seconds) {
  timespec until;
  until.tv_sec = static_cast<time_t>(seconds);
  until.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * kNanosPerSecond);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) continue;
}

double SecondsFor(int64_t tokens, double speed) { return CostOf(tokens) / speed * kSecondsPerCost; }

std::vector<int64_t> NumbersOf(const Parts& microbatches, const Minibatch& minibatch) {
  std::vector<int64_t> numbers;
  for (const std::vector<int>& samples : microbatches) {
    for (const int s : samples) numbers.push_back(minibatch.first_sample + s);
  }
  return numbers;
}

int64_t TokensOf(const Parts& microbatches, const Minibatch& minibatch) {
  int64_t tokens = 0;
  for (const std::vector<int>& samples : microbatches) {
    for (const int s : samples) tokens += minibatch.lengths[s];
  }
  return tokens;
}

}  // namespace

struct ImbalanceJob::RankRun {
  int rank = 0;
  double start = 0, end = 0, busy = 0;  // seconds
  int64_t peak = 0;
  absl::Status status;
};

// Where ranks wait for each other. Thread-safe.
class ImbalanceJob::LayerMeeting {
 public:
  explicit LayerMeeting(int ranks) : ranks_(ranks) {}

  // Waits for all ranks; the latest of what they said.
  double Meet(double deadline) {
    MutexLock lock(mu_);
    const int64_t mine = meetings_;
    latest_ = std::max(latest_, deadline);
    if (++here_ == ranks_) {
      here_ = 0;
      met_at_ = latest_;  // the next meeting, which changes it, needs everybody who waits in this one
      ++meetings_;
      all_here_.SignalAll();
    }
    while (meetings_ == mine) all_here_.WaitFor(mu_, kPatience);
    return met_at_;
  }

 private:
  const int ranks_;
  Mutex mu_;
  CondVar all_here_;
  int here_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t meetings_ ABSL_GUARDED_BY(mu_) = 0;
  double latest_ ABSL_GUARDED_BY(mu_) = 0, met_at_ ABSL_GUARDED_BY(mu_) = 0;
};

absl::StatusOr<std::unique_ptr<ImbalanceJob>> ImbalanceJob::Start(Client& client, const std::string& name, int ranks,
                                                                  int samples) {
  std::unique_ptr<ImbalanceJob> made(new ImbalanceJob(client, ranks, samples));
  ASSIGN_OR_RETURN(made->assigned_job_, made->CreateJob(name + "-assigned", false));
  ASSIGN_OR_RETURN(made->pulled_job_, made->CreateJob(name + "-pulled", true));
  RETURN_IF_ERROR(made->Attach());
  made->assigned_replay_ = std::make_unique<Replay>(made->assigned_job_->spec());
  made->pulled_replay_ = std::make_unique<Replay>(made->pulled_job_->spec());
  return made;
}

ImbalanceJob::~ImbalanceJob() {
  assigned_.clear();
  pulling_.clear();
  for (const std::shared_ptr<Job>& job : {assigned_job_, pulled_job_}) {
    if (job == nullptr) continue;
    v1::DeleteJobRequest request;
    request.set_job(job->spec().name);
    client_.coordinator().DeleteJob(request, kPatience).status().IgnoreError();
  }
}

absl::StatusOr<std::shared_ptr<Job>> ImbalanceJob::CreateJob(const std::string& name, bool pulled) const {
  JobSpec spec;
  spec.name = name;
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(absl::StrCat("fsdp=", kWorkers)));
  spec.parameters.push_back({kModelTensor, {kModelElements}, WeightFormat::kFp32});
  spec.gradient_format = Format::kFp32;
  spec.token_weights = true;
  spec.num_slots = pulled ? samples_ : ranks_;
  if (pulled) {
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = ranks_;
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client_.CreateJob(spec));
  RETURN_IF_ERROR(job->Initialize({{kModelTensor, InitialWeights()}}, kPatience));
  return job;
}

absl::Status ImbalanceJob::Attach() {
  for (int r = 0; r < ranks_; ++r) {
    ASSIGN_OR_RETURN(std::unique_ptr<Session> assigned, assigned_job_->Attach({Slot(r)}));
    RETURN_IF_ERROR(assigned->AwaitWeights(kPatience));
    ASSIGN_OR_RETURN(const TensorView gradient, assigned->gradient(Slot(r), kModelTensor));
    gradients_.push_back(static_cast<float*>(gradient.data));
    assigned_.push_back(std::move(assigned));
    ASSIGN_OR_RETURN(std::unique_ptr<PullingSession> pulling, pulled_job_->AttachPulling());
    RETURN_IF_ERROR(pulling->AwaitWeights(kPatience));
    pulling_.push_back(std::move(pulling));
  }
  return absl::OkStatus();
}

absl::StatusOr<Outcome> ImbalanceJob::Run(Arm arm, const Minibatch& minibatch) {
  if (arm == Arm::kPulling) return RunPulling(PullOrder(minibatch.lengths), minibatch);
  if (arm == Arm::kCollectives) return RunPlanned(PlanMicro(minibatch.lengths, ranks_), true, minibatch);
  std::vector<Parts> plan;
  for (const std::vector<int>& samples : PlanMini(minibatch.lengths, ranks_)) {
    Parts& of_rank = plan.emplace_back();
    for (const int s : samples) of_rank.push_back({s});
  }
  return RunPlanned(plan, false, minibatch);
}

// work(run) in a thread for each rank, all from the same time on.
template <typename Work>
absl::StatusOr<Outcome> ImbalanceJob::RunRanks(const Work& work) {
  std::vector<RankRun> runs(ranks_);
  std::vector<std::thread> threads;
  const double start = MonotonicSeconds() + kHeadStart;
  for (int r = 0; r < ranks_; ++r) {
    RankRun& run = runs[r];
    run.rank = r;
    run.start = start;
    threads.emplace_back([&work, &run] {
      SleepUntil(run.start);
      run.status = work(run);
      run.end = MonotonicSeconds();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Outcome outcome;
  for (const RankRun& run : runs) {
    RETURN_IF_ERROR(Annotate(run.status, absl::StrCat("rank ", run.rank)));
    outcome.seconds = std::max(outcome.seconds, run.end - start);
    outcome.peak = std::max(outcome.peak, run.peak);
  }
  for (const RankRun& run : runs) outcome.idle.push_back(1 - run.busy / outcome.seconds);
  return outcome;
}

absl::StatusOr<Outcome> ImbalanceJob::RunPlanned(const std::vector<Parts>& plan, bool meets,
                                                 const Minibatch& minibatch) {
  LayerMeeting meeting(ranks_);
  absl::StatusOr<Outcome> outcome = RunRanks(
      [&](RankRun& run) { return ComputePlanned(plan[run.rank], minibatch, meets ? &meeting : nullptr, run); });
  RETURN_IF_ERROR(outcome.status());
  std::vector<std::vector<int64_t>> slots;
  for (const Parts& of_rank : plan) slots.push_back(NumbersOf(of_rank, minibatch));
  int64_t tokens = 0;
  for (const int64_t length : minibatch.lengths) tokens += length;
  assigned_replay_->Step(slots, tokens);
  return outcome;
}

// Deadlines follow from deadlines: waking up late adds nothing.
absl::Status ImbalanceJob::ComputePlanned(const Parts& microbatches, const Minibatch& minibatch, LayerMeeting* meeting,
                                          RankRun& run) {
  float* const gradient = gradients_[run.rank];
  bool first = true;
  double at = run.start;
  for (const std::vector<int>& samples : microbatches) {
    double seconds = 0;
    for (const int s : samples) {
      AddGradient(minibatch.first_sample + s, first, gradient);
      first = false;
      seconds += SecondsFor(minibatch.lengths[s], minibatch.speeds[run.rank]);
    }
    run.busy += seconds;
    for (int layer = 0; meeting != nullptr && layer < 2 * kLayers; ++layer) {
      const double share = (layer < kLayers ? kForwardShare : 1 - kForwardShare) / kLayers;
      SleepUntil(at += seconds * share);
      at = meeting->Meet(at);
    }
    if (meeting == nullptr) SleepUntil(at += seconds);
  }
  if (first) std::fill_n(gradient, kModelElements, 0.0f);
  StepOptions options;
  options.tokens = {TokensOf(microbatches, minibatch)};
  options.timeout = kPatience;
  return assigned_[run.rank]->Step(options).status();
}

absl::StatusOr<Outcome> ImbalanceJob::RunPulling(const std::vector<int>& order, const Minibatch& minibatch) {
  absl::StatusOr<Outcome> outcome = RunRanks([&](RankRun& run) { return ComputePulled(order, minibatch, run); });
  RETURN_IF_ERROR(outcome.status());
  std::vector<std::vector<int64_t>> slots;
  int64_t tokens = 0;
  for (const int s : order) {
    slots.push_back({minibatch.first_sample + s});
    tokens += minibatch.lengths[s];
  }
  pulled_replay_->Step(slots, tokens);
  return outcome;
}

// A sample's time begins when its slot was given; what a call takes counts, waking up late does not.
absl::Status ImbalanceJob::ComputePulled(const std::vector<int>& order, const Minibatch& minibatch, RankRun& run) {
  PullingSession& session = *pulling_[run.rank];
  double at = run.start, late = MonotonicSeconds() - at;
  ASSIGN_OR_RETURN(PullingSession::Work work, session.Take(kPatience));
  while (work.slot.has_value()) {
    at = MonotonicSeconds() - late;
    const int sample = order[work.slot->value()];
    const double seconds = SecondsFor(minibatch.lengths[sample], minibatch.speeds[run.rank]);
    ASSIGN_OR_RETURN(const TensorView view, session.gradient(kModelTensor));
    AddGradient(minibatch.first_sample + sample, true, static_cast<float*>(view.data));
    SleepUntil(at += seconds);
    late = MonotonicSeconds() - at;
    run.busy += seconds;
    FinishOptions options;
    options.tokens = minibatch.lengths[sample];
    options.timeout = kPatience;
    ASSIGN_OR_RETURN(PullingSession::Next next, session.FinishAndTake(options));
    if (next.result != SlotResult::kAccepted)
      return absl::InternalError(absl::StrCat("slot of sample ", sample, " came twice"));
    work = std::move(next.work);
  }
  run.peak = work.committed.peak_gradients();
  return absl::OkStatus();
}

absl::Status ImbalanceJob::Verify() {
  for (const auto& [job, replay] :
       {std::make_pair(assigned_job_, assigned_replay_.get()), std::make_pair(pulled_job_, pulled_replay_.get())}) {
    ASSIGN_OR_RETURN(const Version version, job->Pull({VersionChoice::kAtLeast, Step(replay->step())}, kPatience));
    ASSIGN_OR_RETURN(const ConstTensorView weights, version.parameter(kModelTensor));
    if (version.step() == Step(replay->step()) &&
        std::memcmp(weights.data, replay->weights().data(), kModelElements * sizeof(float)) == 0)
      continue;
    return absl::InternalError(absl::StrCat("verifying: the weights of job ", job->spec().name, " after ",
                                            version.step().value(),
                                            " steps are not what the reference makes of the same samples"));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
