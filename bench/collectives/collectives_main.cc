// bench/collectives: reduce-scatter and all-gather of ranks on one host through shared memory, against torch's gloo and
// Open MPI in the same run.
//
//   bazel run -c opt //bench:collectives -- --quick --python ~/rivals/bin/python
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/collectives/collectives_job.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/rival.h"
#include "core/base/status.h"
#include "kernels/cpu/processor.h"

namespace shardmesh::bench {
namespace {

constexpr int kLatencyRanks = 2, kRivalCalls = 200;
constexpr double kRounding = 1e-6;  // of sums of up to 64 numbers below 1

// Where rivals come from, as --help says in full.
constexpr std::pair<const char*, const char*> kPackages[] = {
    {"gloo", "pip install torch numpy"},
    {"mpi", "apt-get install openmpi-bin libopenmpi-dev; pip install numpy mpi4py"}};

struct Flags : CommonFlags {
  std::vector<int> ranks = {2, 4};
  int mebibytes = 64;
  bool processor_time = false;
  std::string python;
};

// A rival's collective: of which package, its name in collectives_rivals.py, and what ours is to be against it.
struct Against {
  const char* package;
  const char* command;
  const char* name;
  double shared, private_copies;  // goals
};
constexpr Against kRivals[] = {
    {"gloo", "reduce_gather", "gloo RS + AG", 12, 6},
    {"gloo", "all_reduce", "gloo all-reduce", 7, 3},
    {"gloo", "buckets", "gloo all-reduce in 25 MiB buckets", 7, 3},
    {"mpi", "all_reduce", "Open MPI all-reduce", 10, 4},
};

// Ways of ours: where slots and result are.
struct Way {
  CollectivesJob::Task task;
  const char* name;
  double passes;          // over all ranks' vectors: bytes that it moves at least, reads and writes
  double Against::*goal;  // null: none
};

// Reading every slot and writing one result; then each rank's reading of the result and writing of its copy.
double ReducedVectors(int ranks) { return ranks + 1; }
double CopiedVectors(int ranks) { return 2 * ranks; }

std::vector<Way> Ways(int ranks) {
  const double reduced = ReducedVectors(ranks), all = reduced + CopiedVectors(ranks);
  return {{CollectivesJob::kShared, "shared result", reduced, &Against::shared},
          {CollectivesJob::kPrivate, "private copies", all, &Against::private_copies},
          {CollectivesJob::kStaged, "inputs private, too", all, nullptr}};
}

// One number of ranks.
class CollectivesBench {
 public:
  CollectivesBench(const Flags& flags, int ranks, Report& report) : flags_(flags), ranks_(ranks), report_(report) {}
  absl::Status Run();

 private:
  absl::Status Verify();
  void StartRivals();
  absl::Status CheckRival(const std::string& package);
  absl::StatusOr<double> Ours(CollectivesJob::Task task);
  absl::Status MeasureBulk();
  absl::Status MeasureLatency();
  void AddBulk(const Rounds& rounds);
  std::string NameOf(absl::string_view what) const { return absl::StrCat(ranks_, " ranks: ", what); }

  const Flags& flags_;
  const int ranks_;
  Report& report_;
  std::unique_ptr<CollectivesJob> job_;
  std::map<std::string, std::unique_ptr<Rival>> rivals_;  // by package; those that are there
  std::map<std::string, std::string> missing_;            // why the others are not
};

// Leaves the shared result in place, for the rivals' to be compared with.
absl::Status CollectivesBench::Verify() {
  const std::pair<CollectivesJob::Task, CollectivesJob::Task> checks[] = {
      {CollectivesJob::kShared, CollectivesJob::kCheckShared},
      {CollectivesJob::kPrivate, CollectivesJob::kCheckPrivate},
      {CollectivesJob::kStaged, CollectivesJob::kCheckPrivate}};
  for (const auto& [task, check] : checks) {
    RETURN_IF_ERROR(job_->Run(task).status());
    RETURN_IF_ERROR(job_->Run(check).status());
  }
  return absl::OkStatus();
}

absl::Status CollectivesBench::CheckRival(const std::string& package) {
  ASSIGN_OR_RETURN(std::unique_ptr<Rival> rival,
                   Rival::Start(flags_.python, {"bench/collectives/collectives_rivals.py", package,
                                                absl::StrCat(ranks_), flags_.processor_time ? "processor" : "elapsed",
                                                job_->MemoryPath(), absl::StrCat(job_->bytes()), job_->Places()}));
  ASSIGN_OR_RETURN(const std::string version, rival->Ask("version"));
  double most = 0;
  for (const Against& against : kRivals) {
    if (against.package != package) continue;
    ASSIGN_OR_RETURN(const double difference, rival->AskSeconds(absl::StrCat("check ", against.command)));
    most = std::max(most, difference);
    if (!(difference <= kRounding)) {
      return absl::InternalError(absl::StrCat(against.name, " differs from ours by ", difference));
    }
  }
  report_.Note(NameOf(absl::StrFormat("%s differs from our sums by %.1e at most.", version, most)));
  rivals_[package] = std::move(rival);
  return absl::OkStatus();
}

void CollectivesBench::StartRivals() {
  for (const auto& [package, how_to_get] : kPackages) {
    const absl::Status status = CheckRival(package);
    if (!status.ok()) missing_[package] = absl::StrCat(status.message(), "; to have it: ", how_to_get);
  }
}

// Elapsed, or the processor time of all ranks.
absl::StatusOr<double> CollectivesBench::Ours(CollectivesJob::Task task) {
  const double before = job_->ProcessorSeconds();
  ASSIGN_OR_RETURN(const double passed, job_->Run(task));
  return flags_.processor_time ? job_->ProcessorSeconds() - before : passed;
}

absl::Status CollectivesBench::MeasureBulk() {
  Rounds rounds;
  const auto add_rival = [&](const Against& against) {
    const auto rival = rivals_.find(against.package);
    if (rival == rivals_.end()) return;
    rounds.Add(against.name, [&rival = *rival->second, question = absl::StrCat("time ", against.command)] {
      return rival.AskSeconds(question);
    });
  };
  // Ours between theirs, so that neither has a quieter time of a round.
  const std::vector<Way> ways = Ways(ranks_);
  rounds.Add("copy", [this] { return Ours(CollectivesJob::kCopy); });
  for (size_t i = 0; i < std::max(ways.size(), std::size(kRivals)); ++i) {
    if (i < ways.size()) rounds.Add(ways[i].name, [this, task = ways[i].task] { return Ours(task); });
    if (i < std::size(kRivals)) add_rival(kRivals[i]);
  }
  RETURN_IF_ERROR(rounds.Measure(2, flags_.rounds));
  AddBulk(rounds);
  return absl::OkStatus();
}

void CollectivesBench::AddBulk(const Rounds& rounds) {
  const std::vector<double>& copy = rounds.seconds("copy");
  for (const Way& way : Ways(ranks_)) {
    for (const Against& against : kRivals) {
      const std::string name = NameOf(absl::StrCat(way.name, " / ", against.name, ", ms"));
      const Goal goal = way.goal != nullptr ? Goal::AtLeast(against.*way.goal) : Goal();
      if (const auto missing = missing_.find(against.package); missing != missing_.end()) {
        report_.Add({name, 0, 0, {}, goal, missing->second});
      } else {
        report_.Add(Compare(name, rounds.seconds(way.name), rounds.seconds(against.name), 1e3, goal));
      }
    }
    std::vector<double> bound = copy;
    for (double& seconds : bound) seconds *= way.passes / CopiedVectors(ranks_);
    report_.Add(
        CompareCost(NameOf(absl::StrCat(way.name, ", times its bound, ms")), rounds.seconds(way.name), bound, 1e3));
  }
  const double moved = CopiedVectors(ranks_) * static_cast<double>(job_->bytes());
  report_.Note(NameOf(absl::StrFormat("streaming copies of all ranks at once move %.1f GB/s; machine: %s.",
                                      moved / SpreadOf(copy).median * 1e-9, MachineNow())));
}

absl::Status CollectivesBench::MeasureLatency() {
  struct Latency {
    CollectivesJob::Task task;
    const char* name;
    const char* rival;  // its command
  };
  constexpr Latency kLatencies[] = {
      {CollectivesJob::kSpinningBarrier, "barrier, spinning / gloo barrier, us", "barrier"},
      {CollectivesJob::kSleepingBarrier, "barrier, sleeping / gloo barrier, us", "barrier"},
      {CollectivesJob::kSpinningGather, "all-gather of 64 bytes, spinning / gloo, us", "small_gather"},
      {CollectivesJob::kSleepingGather, "all-gather of 64 bytes, sleeping / gloo, us", "small_gather"}};
  Rounds rounds;
  for (const Latency& latency : kLatencies) {
    rounds.Add(latency.name, [this, &latency]() -> absl::StatusOr<double> {
      ASSIGN_OR_RETURN(const double seconds, Ours(latency.task));
      return seconds / CollectivesJob::kCalls;
    });
  }
  const bool gloo = rivals_.count("gloo") > 0;
  for (const char* command : {"barrier", "small_gather"}) {
    if (!gloo) continue;
    rounds.Add(command, [this, command] {
      return rivals_["gloo"]->AskSeconds(absl::StrCat("time ", command, " ", kRivalCalls));
    });
  }
  RETURN_IF_ERROR(rounds.Measure(1, flags_.rounds));
  for (const Latency& latency : kLatencies) {
    if (gloo) {
      report_.Add(Compare(NameOf(latency.name), rounds.seconds(latency.name), rounds.seconds(latency.rival), 1e6));
    } else {
      report_.Add({NameOf(latency.name), 0, 0, {}, {}, missing_["gloo"]});
    }
  }
  return absl::OkStatus();
}

absl::Status CollectivesBench::Run() {
  const int64_t unit = int64_t{64} * ranks_, elements = (int64_t{flags_.mebibytes} << 20) / 4 / unit * unit;
  ASSIGN_OR_RETURN(job_, CollectivesJob::Create(ranks_, elements));
  RETURN_IF_ERROR(Annotate(Verify(), "verifying"));
  StartRivals();
  RETURN_IF_ERROR(MeasureBulk());
  return ranks_ == kLatencyRanks ? MeasureLatency() : absl::OkStatus();
}

absl::Status RunAll(const Flags& flags) {
  Report report(
      absl::StrCat("bench/collectives: ", flags.mebibytes, " MiB of fp32 per rank, a process of one thread each"));
  report.Note(absl::StrCat("Verified first: our results are the tree sum bit by bit. ", flags.rounds,
                           " rounds. Kernel: ", BestImplementation(), ". Machine at the start: ", MachineNow(), "."));
  for (const int ranks : flags.ranks) RETURN_IF_ERROR(CollectivesBench(flags, ranks, report).Run());
  report.Note(
      "Ours: reduce-scatter, then all-gather. Shared result: one for all, in the shared heap. Private copies: one in "
      "each\n"
      "rank's own memory. Slots lie in the heaps; with inputs private, too, they go through staging.\n"
      "Bound: the bytes that have to move, at the speed of the streaming copies of the same round.");
  if (flags.processor_time) report.Note("Times are processor time of all ranks: spinning is in them, waiting is not.");
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/collectives: reduce-scatter and all-gather of ranks on one host through shared memory, against torch's "
      "gloo\n"
      "and Open MPI, in turns inside one run. Checks first that our results are the tree sum bit by bit, and that "
      "theirs\n"
      "are within rounding of it."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 MiB per rank: under a minute on two cores", flags);
  app.add_option("--ranks", flags.ranks, "numbers of ranks to measure with")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--mebibytes", flags.mebibytes, "MiB of a rank's vector")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_flag("--processor-time", flags.processor_time,
               "processor time of all ranks instead of elapsed time, for a machine that others use");
  app.add_option("--python", flags.python, "a Python with the rivals; unset: that of tools/parity_env.sh");
  app.footer(
      "Rivals: gloo is part of torch; Open MPI is reached through mpi4py. Of one that is not there the rows say so.\n"
      "Examples:\n"
      "  apt-get install openmpi-bin libopenmpi-dev\n"
      "  python3 -m venv rivals && rivals/bin/pip install torch numpy mpi4py\n"
      "  bazel run -c opt //bench:collectives -- --quick --python $PWD/rivals/bin/python\n"
      "  bazel run -c opt //bench:collectives -- --ranks 2 --json $PWD/collectives.json      about 3 GiB of memory");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.mebibytes = 16;
  return shardmesh::bench::ExitStatus("collectives", shardmesh::bench::RunAll(flags));
}
