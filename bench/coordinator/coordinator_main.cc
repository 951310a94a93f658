// bench/coordinator: what the coordinator takes for fleets of 64 to 16,384 ranks on hosts of 8: its state machine in
// this process with the SQLite store, and the same behind gRPC in a process of its own.
//
//   bazel run -c opt //bench:coordinator -- --quick
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/coordinator/fleet.h"
#include "bench/coordinator/served_fleet.h"
#include "bench/harness/flags.h"
#include "bench/harness/folder.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "core/job/job.h"
#include "rpc/base/main_support.h"

namespace shardmesh::bench {
namespace {

constexpr double kBeatLimit = 0.050;          // seconds of a core for one heartbeat of each: 10 % at one per 0.5 s
constexpr double kReadyLimit = 10;            // seconds from the creation of a job to READY
constexpr double kMetadataLimit = 64 * 1024;  // bytes of a rank's assignment
constexpr int kGoalRanks = 16'384;
constexpr int kServedCalls = 16'384;          // heartbeats at least that a figure through gRPC is of
constexpr int kServedAssignments = 64;        // taken through gRPC; the rest is reckoned

struct Flags : CommonFlags {
  std::vector<int> ranks = {64, 1024, 4096, 16'384};
  bool served = true, small_jobs = true;
  double most_seconds = 60;
  std::string folder;
  // Of the process that serves.
  int serve = 0, serve_jobs = 0;
  std::string state;
};

class CoordinatorBench {
 public:
  explicit CoordinatorBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    RETURN_IF_ERROR(PrepareProcess({"error"}));  // a descriptor for each host
    for (const int ranks : flags_.ranks) {
      const bool goals = ranks == kGoalRanks;
      RETURN_IF_ERROR(Annotate(Measure(ranks, ranks, goals), absl::StrCat(ranks, " ranks")));
      if (flags_.small_jobs && ranks > kMaxHostRanks && ranks % kMaxHostRanks == 0) {
        RETURN_IF_ERROR(Annotate(Measure(ranks, kMaxHostRanks, false), absl::StrCat(ranks, " ranks in jobs of 64")));
      }
      if (flags_.served) RETURN_IF_ERROR(Annotate(MeasureServed(ranks), absl::StrCat(ranks, " ranks through gRPC")));
    }
    report_.Note(
        "Verified in every run: each worker has its assignment with itself at its rank, each job is READY at the step\n"
        "that rank 0 reported, and heartbeats with steps write nothing to the state file between two ticks.");
    report_.Note(absl::StrFormat(
        "ms: of processor time, unless the row says elapsed. In process: Coordinator's own calls, one thread,\n"
        "SQLite (synchronous=FULL). gRPC: processor time of the serving process, %d connections; READY without the\n"
        "assignments, which are reckoned from %d ranks. A job of more than %d ranks passes by the table of support\n"
        "(JobDefinition::CreateUnrefused). Phases over %g s are reckoned from the calls made until then.\n"
        "%d rounds. Machine: %s.",
        4, kServedAssignments, kMaxHostRanks, flags_.most_seconds, flags_.rounds, MachineNow()));
    return report_.Publish(flags_.json);
  }

 private:
  struct Samples {
    std::vector<double> joins, joins_elapsed, waited_joins, create, assign, ready, all, all_elapsed;
    std::vector<double> beats, tick, describe, lost;
    double assignment_bytes = 0, ready_writes = 0;
    int fewest_calls = INT32_MAX, late_joins = 0;
    void Note(const Cost& cost) { fewest_calls = std::min(fewest_calls, cost.calls); }
  };

  FleetOptions OptionsOf(int ranks, int ranks_per_job) {
    return {ranks, ranks_per_job, absl::StrCat(folder_->path(), "/state", ++states_, ".db"), flags_.most_seconds};
  }

  // From the making of the jobs to READY, and what goes on then.
  absl::Status Live(int ranks, int ranks_per_job, Samples& samples) {
    ASSIGN_OR_RETURN(const auto fleet, Fleet::Make(OptionsOf(ranks, ranks_per_job)));
    ASSIGN_OR_RETURN(const Cost joined, fleet->Join());
    ASSIGN_OR_RETURN(const Cost created, fleet->CreateJobs());
    ASSIGN_OR_RETURN(const Cost assigned, fleet->TakeAssignments());
    const int64_t before = fleet->writes();
    ASSIGN_OR_RETURN(const Cost ready, fleet->ReportReady());
    samples.ready_writes = static_cast<double>(fleet->writes() - before);
    const Cost all = created + assigned + ready;
    samples.joins.push_back(joined.processor);
    samples.joins_elapsed.push_back(joined.elapsed);
    samples.create.push_back(created.processor);
    samples.assign.push_back(assigned.processor);
    samples.ready.push_back(ready.processor);
    samples.all.push_back(all.processor);
    samples.all_elapsed.push_back(all.elapsed);
    samples.assignment_bytes = static_cast<double>(fleet->assignment_bytes());
    samples.Note(all);
    return LiveOn(*fleet, samples);
  }

  absl::Status LiveOn(Fleet& fleet, Samples& samples) {
    const int rounds = samples.beats.empty() ? flags_.rounds : 1;
    for (int round = 0; round < rounds; ++round) {
      const int64_t before = fleet.writes();
      ASSIGN_OR_RETURN(const Cost beats, fleet.Beat());
      if (const int64_t wrote = fleet.writes() - before; wrote > 0) {
        return absl::InternalError(absl::StrCat("a round of heartbeats wrote ", wrote, " batches to the state file"));
      }
      ASSIGN_OR_RETURN(const Cost tick, fleet.Tick());
      samples.beats.push_back(beats.processor);
      samples.tick.push_back(tick.processor);
      ASSIGN_OR_RETURN(const Cost describe, fleet.Describe());
      samples.describe.push_back(describe.processor);
      samples.Note(beats);
    }
    ASSIGN_OR_RETURN(const Cost lost, fleet.LoseAll());
    samples.lost.push_back(lost.processor);
    return absl::OkStatus();
  }

  // The workers come while the jobs wait for them.
  absl::Status JoinLate(int ranks, int ranks_per_job, Samples& samples) {
    ASSIGN_OR_RETURN(const auto fleet, Fleet::Make(OptionsOf(ranks, ranks_per_job)));
    RETURN_IF_ERROR(fleet->CreateJobs().status());
    ASSIGN_OR_RETURN(const Cost joined, fleet->Join(flags_.most_seconds));
    samples.waited_joins.push_back(joined.processor);
    samples.late_joins = joined.calls;
    return absl::OkStatus();
  }

  absl::Status Measure(int ranks, int ranks_per_job, bool goals) {
    ASSIGN_OR_RETURN(folder_, Folder::Make(flags_.folder));
    Samples samples;
    for (int life = 0; life < (flags_.quick ? 1 : 3); ++life) {
      RETURN_IF_ERROR(Live(ranks, ranks_per_job, samples));
      if (life == 0) RETURN_IF_ERROR(JoinLate(ranks, ranks_per_job, samples));
    }
    Publish(ranks, ranks_per_job, goals, samples);
    return absl::OkStatus();
  }

  void Publish(int ranks, int ranks_per_job, bool goals, const Samples& samples) {
    const std::string jobs = ranks == ranks_per_job ? "" : absl::StrCat(" in jobs of ", ranks_per_job);
    const auto reckoned = [&](int calls) { return calls < ranks ? absl::StrCat(" (from ", calls, " ranks)") : ""; };
    const std::string of = absl::StrCat(ranks, " ranks", jobs, reckoned(samples.fewest_calls), ": ");
    Add(of + "heartbeats of all, times 10 % of a core, ms", samples.beats, kBeatLimit, goals);
    Add(of + "create to READY, times 10 s, ms", samples.all, kReadyLimit, goals);
    Add(of + "create to READY, elapsed, times 10 s, ms", samples.all_elapsed, kReadyLimit, goals);
    Add(of + "assignment of a rank, times 64 KiB, bytes", {samples.assignment_bytes}, kMetadataLimit, goals);
    Add(of + "create, ms", samples.create);
    Add(of + "first heartbeats (assignments), ms", samples.assign);
    Add(of + "READY of all, ms", samples.ready);
    Add(of + "batches written for READY of all", {samples.ready_writes});
    Add(of + "joins, ms", samples.joins);
    Add(of + "joins, elapsed, ms", samples.joins_elapsed);
    Add(absl::StrCat(ranks, " ranks", jobs, reckoned(samples.late_joins), ": joins while the jobs wait, ms"),
        samples.waited_joins);
    Add(of + "tick after a step, ms", samples.tick);
    Add(of + "description of a job, ms", samples.describe);
    Add(of + "tick that finds all workers silent, ms", samples.lost);
  }

  absl::Status MeasureServed(int ranks) {
    ASSIGN_OR_RETURN(folder_, Folder::Make(flags_.folder));
    ASSIGN_OR_RETURN(const auto fleet, ServedFleet::Start(OptionsOf(ranks, ranks)));
    ASSIGN_OR_RETURN(const Cost assigned, fleet->TakeAssignments(kServedAssignments));
    ASSIGN_OR_RETURN(const Cost ready, fleet->ReportReady());
    std::vector<double> beats;
    for (int round = 0; round < flags_.rounds; ++round) {
      ASSIGN_OR_RETURN(const Cost cost, fleet->Beat(std::max(1, kServedCalls / ranks)));
      beats.push_back(cost.processor);
    }
    std::vector<double> by_host, without_skips;
    for (int round = 0; round <= flags_.rounds && ranks % kRanksPerHost == 0; ++round) {
      const int rounds = std::max(1, kServedCalls / ranks);
      ASSIGN_OR_RETURN(const Cost every, fleet->BeatByHost(rounds, /*skips=*/false));
      ASSIGN_OR_RETURN(const Cost cost, fleet->BeatByHost(rounds, /*skips=*/true));
      if (round == 0) continue;  // it opens connections
      without_skips.push_back(every.processor);
      by_host.push_back(cost.processor);
    }
    const std::string of = absl::StrCat(ranks, " ranks, gRPC: ");
    if (!by_host.empty()) {
      Add(of + "heartbeats of all, as nodes send them: with nothing new, a message for two, times 10 % of a core, ms",
          by_host, kBeatLimit, ranks == kGoalRanks);
      Add(of + "heartbeats of all, a message from each host for each, times 10 % of a core, ms", without_skips,
          kBeatLimit);
    }
    Add(of + "heartbeats of all, a call of each worker, times 10 % of a core, ms", beats, kBeatLimit);
    Add(of + "first heartbeats (assignments), ms", {assigned.processor});
    Add(of + "READY of all, ms", {ready.processor});
    Add(of + "READY of all, elapsed, ms", {ready.elapsed});
    Add(of + "reply with an assignment, bytes", {static_cast<double>(fleet->assignment_bytes())});
    return absl::OkStatus();
  }

  // A figure and its limit, both in seconds or neither; 0: it has none, and the ratio says nothing.
  void Add(const std::string& name, const std::vector<double>& values, double limit = 0, bool goal = false) {
    const std::vector<double> limits(values.size(), limit > 0 ? limit : 1);
    report_.Add(
        CompareCost(name, values, limits, absl::EndsWith(name, " ms") ? 1e3 : 1, goal ? Goal::AtMost(1) : Goal()));
  }

  const Flags flags_;
  std::unique_ptr<Folder> folder_;
  int states_ = 0;
  Report report_{"bench/coordinator: the coordinator's own work by the size of the fleet, hosts of 8 ranks"};
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/coordinator: what the coordinator takes for fleets of 64 to 16,384 ranks: heartbeats, a job from its\n"
      "creation to READY, assignments, joins and ticks; in this process with SQLite, and through gRPC. Checks what\n"
      "every call returns."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "64 and 1,024 ranks, one life of each job", flags);
  app.add_option("--ranks", flags.ranks, "sizes of the fleet; of multiples of 64 also jobs of 64")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--most-seconds", flags.most_seconds, "of one phase; then the rest is reckoned")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 3600.0));
  app.add_option("--folder", flags.folder, "where the state files go; unset: the folder for temporary files");
  app.add_flag("--served,!--no-served", flags.served, "through gRPC, too");
  app.add_flag("--small-jobs,!--no-small-jobs", flags.small_jobs, "in jobs of 64 ranks, too");
  app.add_option("--serve", flags.serve)->group("");
  app.add_option("--serve-jobs", flags.serve_jobs)->group("");
  app.add_option("--state", flags.state)->group("");
  app.footer("Example:\n  bazel run -c opt //bench:coordinator -- --json $PWD/coordinator.json      minutes");
  CLI11_PARSE(app, argc, argv);
  using shardmesh::bench::ExitStatus;
  if (flags.serve > 0) {
    return ExitStatus("coordinator", shardmesh::bench::ServeFleet({flags.serve, flags.serve_jobs, flags.state}));
  }
  if (flags.quick && app.count("--ranks") == 0) flags.ranks = {64, 1024};
  return ExitStatus("coordinator", shardmesh::bench::CoordinatorBench(flags).Run());
}
