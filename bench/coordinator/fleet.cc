#include "bench/coordinator/fleet.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "core/job/job.h"
#include "server/service/coordinator_messages.h"
#include "server/store/store.h"

namespace shardmesh::bench {
namespace {

constexpr int kChunk = 64;                           // calls between two looks at the clock
constexpr absl::Duration kTimeout = absl::Hours(1);  // a fleet that one process speaks for may be late
constexpr WorkerTraits kTraits = {/*spans_hosts=*/true, /*has_device=*/false, /*retained=*/true};

// Counts what another store is given.
class CountingStore final : public Store {
 public:
  CountingStore(std::unique_ptr<Store> store, std::shared_ptr<int64_t> writes)
      : store_(std::move(store)), writes_(std::move(writes)) {}
  absl::Status Write(const StoreBatch& batch) override {
    ++*writes_;
    return store_->Write(batch);
  }
  absl::StatusOr<StoreContents> Load() override { return store_->Load(); }
  absl::StatusOr<std::string> Check() override { return store_->Check(); }

 private:
  const std::unique_ptr<Store> store_;
  const std::shared_ptr<int64_t> writes_;
};

// Every rank once, neighbours far apart, so that the first of them stand for all; rank 0, which moves the steps, first.
int StrideOver(int ranks) {
  int stride = ranks * 618 / 1000 + 1;
  while (std::gcd(stride, ranks) != 1) ++stride;
  return stride;
}

}  // namespace

Cost operator+(const Cost& a, const Cost& b) {
  return {a.elapsed + b.elapsed, a.processor + b.processor, std::min(a.calls, b.calls)};
}

WorkerIdentity FleetWorker(int number) {
  const int host = number / kRanksPerHost;
  WorkerIdentity worker;
  worker.name = absl::StrFormat("node%05d-worker%d", host, number % kRanksPerHost);
  worker.incarnation = 1'700'000'000'000'000'000 + number;
  worker.address =
      absl::StrFormat("10.%d.%d.%d:%d", host / 62500, host / 250 % 250, host % 250 + 1, 50051 + number % kRanksPerHost);
  worker.host_id = absl::StrFormat("%08x-54c1-4f2e-9a6d-0242ac120002/net:[4026531840]", host);
  worker.local_socket = absl::StrCat("/run/shardmesh/", worker.name, ".sock");
  worker.pid = 1000 + number;
  return worker;
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> FleetJob(int number, int ranks) {
  JobSpec spec;
  spec.name = absl::StrCat("job", number);
  spec.mesh.dims = {{"fsdp", ranks, DimRole::kShard}};
  spec.parameters = {{"embedding.weight", {50'257, 768}, WeightFormat::kBf16Sr, ""},
                     {"norm.weight", {768}, WeightFormat::kFp32, ""}};
  if (ranks > kMaxHostRanks) return JobDefinition::CreateUnrefused(std::move(spec));
  return DefineJob(std::move(spec), {}, {});
}

absl::StatusOr<std::unique_ptr<Fleet>> Fleet::Make(const FleetOptions& options) {
  std::unique_ptr<Fleet> fleet(new Fleet(options));
  std::unique_ptr<Store> store = NewMemoryStore();
  if (!options.state.empty()) {
    ASSIGN_OR_RETURN(store, NewSqliteStore(options.state));
  }
  CoordinatorOptions coordinator;
  coordinator.max_workers = options.ranks;
  coordinator.heartbeat_timeout = kTimeout;
  ASSIGN_OR_RETURN(
      fleet->coordinator_,
      Coordinator::Create(coordinator, std::make_unique<CountingStore>(std::move(store), fleet->writes_), fleet->now_));
  for (int i = 0; i < options.ranks; ++i) fleet->workers_.push_back(FleetWorker(i));
  for (int i = 0; i < fleet->num_jobs(); ++i) {
    ASSIGN_OR_RETURN(auto job, FleetJob(i, options.ranks_per_job));
    fleet->jobs_.push_back(std::move(job));
  }
  fleet->reports_.resize(options.ranks);
  return fleet;
}

absl::StatusOr<Cost> Fleet::ForRanks(double most_seconds, const std::function<absl::Status(int)>& call,
                                     const std::function<absl::Status()>& check) {
  const int ranks = options_.ranks, stride = StrideOver(ranks);
  Cost cost;
  int64_t at = 0;
  while (cost.calls < ranks && cost.elapsed < most_seconds) {
    const double start = MonotonicSeconds(), processor = ProcessorSeconds();
    for (int i = 0; i < kChunk && cost.calls < ranks; ++i, ++cost.calls, at = (at + stride) % ranks) {
      RETURN_IF_ERROR(call(static_cast<int>(at)));
    }
    cost.elapsed += MonotonicSeconds() - start;
    cost.processor += ProcessorSeconds() - processor;
    RETURN_IF_ERROR(check());
    coordinator_->TakeEvents();
  }
  const double scale = static_cast<double>(ranks) / cost.calls;
  return Cost{cost.elapsed * scale, cost.processor * scale, cost.calls};
}

absl::StatusOr<Cost> Fleet::Join(double most_seconds) {
  return ForRanks(
      most_seconds, [this](int i) { return coordinator_->Join(workers_[i], now_, kTraits); },
      [] { return absl::OkStatus(); });
}

absl::StatusOr<Cost> Fleet::CreateJobs() {
  const double start = MonotonicSeconds(), processor = ProcessorSeconds();
  for (int i = 0; i < num_jobs(); ++i) RETURN_IF_ERROR(coordinator_->CreateJob(jobs_[i], now_, i + 1).status());
  return Cost{MonotonicSeconds() - start, ProcessorSeconds() - processor, options_.ranks};
}

absl::Status Fleet::Check(int worker, const std::vector<Assignment>& told) {
  const std::string& name = workers_[worker].name;
  if (told.size() != 1) return absl::InternalError(absl::StrCat(name, " has ", told.size(), " assignments, not one"));
  const Assignment& assignment = told[0];
  const auto size = static_cast<int>(assignment.peers.size());
  if (size != options_.ranks_per_job || assignment.rank < 0 || assignment.rank >= size ||
      !(assignment.peers[assignment.rank] == workers_[worker])) {
    return absl::InternalError(
        absl::StrCat(name, " is told to be rank ", assignment.rank, " of ", size, " peers, which has another worker"));
  }
  return absl::OkStatus();
}

absl::Status Fleet::CheckJobs(bool ready) const {
  for (const auto& job : jobs_) {
    ASSIGN_OR_RETURN(const JobView view, coordinator_->DescribeJob(job->spec().name, now_));
    const bool good = view.state == (ready ? JobState::kReady : JobState::kPreparing);
    if (good && (!ready || view.committed_step == step_ - 1)) continue;
    return absl::InternalError(absl::StrCat("job ", job->spec().name, " is ", JobStateName(view.state), " at step ",
                                            view.committed_step, ", where ", step_ - 1, " was reported"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Cost> Fleet::TakeAssignments() {
  std::vector<std::pair<int, std::vector<Assignment>>> chunk;
  const auto call = [&](int i) -> absl::Status {
    ASSIGN_OR_RETURN(auto told, coordinator_->Heartbeat(workers_[i].name, workers_[i].incarnation, {}, now_, kTraits));
    chunk.emplace_back(i, std::move(told));
    return absl::OkStatus();
  };
  const auto check = [&]() -> absl::Status {
    for (const auto& [worker, told] : chunk) {
      RETURN_IF_ERROR(Check(worker, told));
      MemberReport report;
      report.job = told[0].definition->spec().name;
      report.epoch = told[0].epoch;
      report.rank = told[0].rank;
      report.plan_hash = told[0].definition->plan().hash();
      reports_[worker] = {report};
    }
    assignment_bytes_ = static_cast<int64_t>(ToProto(chunk[0].second[0], /*known=*/false).ByteSizeLong());
    chunk.clear();
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(CheckJobs(/*ready=*/false));
  return ForRanks(options_.most_seconds, call, check);
}

absl::StatusOr<Cost> Fleet::ReportReady() {
  for (auto& reports : reports_) {
    if (!reports.empty()) reports[0].state = MemberReport::State::kReady;
  }
  const auto call = [&](int i) {
    return coordinator_->Heartbeat(workers_[i].name, workers_[i].incarnation, reports_[i], now_, kTraits).status();
  };
  ASSIGN_OR_RETURN(const Cost cost, ForRanks(options_.most_seconds, call, [] { return absl::OkStatus(); }));
  ready_ = cost.calls == options_.ranks &&
           std::none_of(reports_.begin(), reports_.end(), [](const auto& reports) { return reports.empty(); });
  if (ready_) RETURN_IF_ERROR(CheckJobs(/*ready=*/true));
  return cost;
}

absl::StatusOr<Cost> Fleet::Beat() {
  for (auto& reports : reports_) {
    if (!reports.empty()) reports[0].committed_step = step_;
    if (!reports.empty() && !ready_) reports[0].state = MemberReport::State::kPreparing;
  }
  ++step_;
  std::vector<std::pair<int, int>> chunk;  // workers, and how many assignments they hold
  const auto call = [&](int i) -> absl::Status {
    ASSIGN_OR_RETURN(const auto told,
                     coordinator_->Heartbeat(workers_[i].name, workers_[i].incarnation, reports_[i], now_, kTraits));
    chunk.emplace_back(i, told.size());
    return absl::OkStatus();
  };
  const auto check = [&]() -> absl::Status {
    for (const auto& [worker, held] : chunk) {
      if (held != 1) return absl::InternalError(absl::StrCat(workers_[worker].name, " holds ", held, " jobs"));
    }
    chunk.clear();
    return absl::OkStatus();
  };
  return ForRanks(options_.most_seconds, call, check);
}

absl::StatusOr<Cost> Fleet::Tick() {
  const double start = MonotonicSeconds(), processor = ProcessorSeconds();
  RETURN_IF_ERROR(coordinator_->Tick(now_));
  return Cost{MonotonicSeconds() - start, ProcessorSeconds() - processor, options_.ranks};
}

absl::StatusOr<Cost> Fleet::LoseAll() {
  for (int i = 0; i < 2; ++i) {  // a longer pause between ticks would be the coordinator's own
    now_ += kTimeout * 2 / 5;
    RETURN_IF_ERROR(Tick().status());
  }
  now_ += kTimeout * 2 / 5;
  ASSIGN_OR_RETURN(const Cost cost, Tick());
  for (const JobView& view : coordinator_->ListJobs(now_)) {
    const bool lost = view.state == JobState::kFailed || view.state == JobState::kWaiting;
    const bool alive = std::any_of(view.members.begin(), view.members.end(), [](const auto& m) { return m.alive; });
    if (!lost || alive) return absl::InternalError("a job goes on without any worker");
  }
  return cost;
}

absl::StatusOr<Cost> Fleet::Describe() {
  const double start = MonotonicSeconds(), processor = ProcessorSeconds();
  ASSIGN_OR_RETURN(const JobView view, coordinator_->DescribeJob(jobs_[0]->spec().name, now_));
  const v1::JobDescription told = ToProto(view, /*with_parameters=*/true);
  const Cost cost{MonotonicSeconds() - start, ProcessorSeconds() - processor, options_.ranks};
  if (told.members_size() == options_.ranks_per_job) return cost;
  return absl::InternalError(
      absl::StrCat("a job of ", options_.ranks_per_job, " ranks is described with ", told.members_size()));
}

}  // namespace shardmesh::bench
