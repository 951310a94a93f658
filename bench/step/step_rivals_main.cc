// bench/step_rivals: the whole optimizer step of a data-parallel job on one host, from every rank's gradients to the
// new weights: the engine against what torch's DDP and FSDP2 do, in the same run.
//
//   bazel run -c opt //bench:step_rivals -- --quick --python ~/rivals/bin/python
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/rival.h"
#include "bench/step/step_rivals_job.h"
#include "core/base/status.h"
#include "kernels/cpu/processor.h"

namespace shardmesh::bench {
namespace {

constexpr int kSteps = 2;           // of a measurement: rotating storage walks up and down in turns
constexpr double kRounding = 3e-8;  // two units in the last place of the largest weights, a little over 1/8
constexpr char kChecked[] = "fp32 + fp32, checked";

struct Flags : CommonFlags {
  std::vector<int> ranks = {2, 4};
  int mebi_elements = 64;
  bool processor_time = false;
  std::string python;
};

struct Against {
  const char* command;  // in step_rivals.py
  const char* name;
  double goal;  // at equal formats
};
constexpr Against kRivals[] = {{"ddp", "torch all-reduce + fused AdamW (DDP)", 5},
                               {"fsdp2", "torch RS + fused AdamW + AG (FSDP2)", 10}};

// The first is the rivals'.
constexpr std::pair<WeightFormat, StateFormat> kFormats[] = {{WeightFormat::kFp32, StateFormat::kFp32},
                                                             {WeightFormat::kBf16Sr, StateFormat::kFp32},
                                                             {WeightFormat::kBf16Sr, StateFormat::kDyn8}};

// One number of ranks.
class StepRivalsBench {
 public:
  StepRivalsBench(const Flags& flags, int ranks, Report& report) : flags_(flags), ranks_(ranks), report_(report) {}

  absl::Status Run() {
    for (const auto& [weights, states] : kFormats) {
      ASSIGN_OR_RETURN(std::unique_ptr<RivalsJob> job,
                       RivalsJob::Start(ranks_, int64_t{flags_.mebi_elements} << 20, weights, states));
      jobs_.push_back(std::move(job));
    }
    const absl::Status started = StartRival();  // it takes the weights as they are before the first step
    if (!started.ok()) missing_ = absl::StrCat(started.message(), "; to have it: pip install torch numpy");
    RETURN_IF_ERROR(Annotate(Verify(), "verifying"));
    RETURN_IF_ERROR(Measure());
    AddReport();
    return absl::OkStatus();
  }

 private:
  absl::Status StartRival() {
    const RivalsJob& job = *jobs_[0];
    ASSIGN_OR_RETURN(rival_, Rival::Start(flags_.python, {"bench/step/step_rivals.py", "gloo", absl::StrCat(ranks_),
                                                          flags_.processor_time ? "processor" : "elapsed",
                                                          job.WeightsFile(), absl::StrCat(job.bytes()), job.Places()}));
    absl::StatusOr<std::string> version = rival_->Ask("version");
    if (!version.ok()) rival_.reset();
    if (version.ok()) version_ = *std::move(version);
    return version.status();
  }

  // The rivals' first step is compared with our first, too; the second begins with states that are not zero.
  absl::Status Verify() {
    for (const auto& job : jobs_) RETURN_IF_ERROR(job->VerifyStep());
    double most = 0;
    for (const Against& against : kRivals) {
      if (rival_ == nullptr) continue;
      ASSIGN_OR_RETURN(const double difference, rival_->AskSeconds(absl::StrCat("check ", against.command)));
      if (!(difference <= kRounding))
        return absl::InternalError(absl::StrCat(against.name, ": weights differ from ours by ", difference));
      most = std::max(most, difference);
    }
    if (rival_ != nullptr)
      report_.Note(NameOf(absl::StrFormat("%s: weights differ from ours by %.1e at most.", version_, most)));
    for (const auto& job : jobs_) RETURN_IF_ERROR(job->VerifyStep());
    return absl::OkStatus();
  }

  // Elapsed, or the processor time of all ranks; of one of `count`.
  std::function<absl::StatusOr<double>()> Ours(RivalsJob& job, int count,
                                               std::function<absl::StatusOr<double>()> work) const {
    return [this, &job, count, work = std::move(work)]() -> absl::StatusOr<double> {
      const double before = job.ProcessorSeconds();
      double passed = 0;
      for (int i = 0; i < count; ++i) {
        ASSIGN_OR_RETURN(const double seconds, work());
        passed += seconds;
      }
      return (flags_.processor_time ? job.ProcessorSeconds() - before : passed) / count;
    };
  }

  // Ours between theirs, so that neither has a quieter time of a round.
  absl::Status Measure() {
    RivalsJob& first = *jobs_[0];
    rounds_.Add("update", Ours(first, 1, [&first] { return first.Run(RivalsJob::kUpdate); }));
    for (size_t i = 0; i < jobs_.size(); ++i) {
      rounds_.Add(jobs_[i]->Formats(), Ours(*jobs_[i], kSteps, [&job = *jobs_[i]] { return job.TakeStep(); }));
      if (rival_ != nullptr && i < std::size(kRivals)) {
        rounds_.Add(kRivals[i].name, [this, question = absl::StrCat("time ", kRivals[i].command)] {
          return rival_->AskSeconds(question);
        });
      }
    }
    rounds_.Add(kChecked, Ours(first, kSteps, [&first]() -> absl::StatusOr<double> {
                  ASSIGN_OR_RETURN(const double checked, first.Run(RivalsJob::kCheckFinite));
                  ASSIGN_OR_RETURN(const double step, first.TakeStep());
                  return checked + step;
                }));
    return rounds_.Measure(1, flags_.rounds);
  }

  void AddAgainst(const std::string& ours, bool equal_formats) {
    for (const Against& against : kRivals) {
      const std::string name = NameOf(absl::StrCat(ours, " / ", against.name, ", ms"));
      const Goal goal = equal_formats ? Goal::AtLeast(against.goal) : Goal();
      if (rival_ == nullptr) {
        report_.Add({name, 0, 0, {}, goal, missing_});
      } else {
        report_.Add(Compare(name, rounds_.seconds(ours), rounds_.seconds(against.name), 1e3, goal));
      }
    }
  }

  void AddReport() {
    for (const auto& job : jobs_) AddAgainst(job->Formats(), job == jobs_[0]);
    AddAgainst(kChecked, false);
    const auto& fp32 = rounds_.seconds(jobs_[0]->Formats());
    const auto& bf16 = rounds_.seconds(jobs_[1]->Formats());
    const auto& dyn8 = rounds_.seconds(jobs_[2]->Formats());
    report_.Add(CompareCost(NameOf("bf16_sr + fp32, times fp32 + fp32, ms"), bf16, fp32, 1e3));
    report_.Add(CompareCost(NameOf("dyn8 states, times fp32 ones (bf16_sr), ms"), dyn8, bf16, 1e3, Goal::AtMost(2)));
    std::vector<double> bound = rounds_.seconds("update");
    const double updated = 2.0 * ranks_ * static_cast<double>(jobs_[0]->bytes());
    for (double& seconds : bound) seconds *= jobs_[0]->MovedBytes() / updated;
    report_.Add(CompareCost(NameOf("fp32 + fp32, times its memory bound, ms"), fp32, bound, 1e3));
  }

  std::string NameOf(absl::string_view what) const { return absl::StrCat(ranks_, " ranks: ", what); }

  const Flags& flags_;
  const int ranks_;
  Report& report_;
  std::vector<std::unique_ptr<RivalsJob>> jobs_;  // as kFormats
  std::unique_ptr<Rival> rival_;                  // null: it is not there, because
  std::string missing_, version_;
  Rounds rounds_;
};

absl::Status RunAll(const Flags& flags) {
  Report report(absl::StrCat("bench/step_rivals: ", flags.mebi_elements,
                             " Mi elements, fp32 gradients, AdamW, a process of one thread for each rank"));
  report.Note(absl::StrCat(
      "Verified first: ours is, bit for bit, what the kernels' reference makes of weights and states, in two steps. ",
      flags.rounds, " rounds. Kernel: ", BestImplementation(), ". Machine at the start: ", MachineNow(), "."));
  for (const int ranks : flags.ranks) RETURN_IF_ERROR(StepRivalsBench(flags, ranks, report).Run());
  report.Note(
      "Ours: declaration to commit, a slot for each rank; weights in the window that all trainers map. Checked: with "
      "the\n"
      "check of every gradient that attached trainers' clients make before it. torch: fp32 throughout, each rank's "
      "weights\n"
      "(FSDP2: after gathering) in its own memory. Bound: the bytes that have to move, at the speed of an update in "
      "place\n"
      "in the same round.");
  report.Note(absl::StrCat("Machine at the end: ", MachineNow(), "."));
  if (flags.processor_time) report.Note("Times are processor time of all ranks; waiting is not in them.");
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/step_rivals: the whole optimizer step of a data-parallel job on one host, from every rank's gradients to "
      "the\n"
      "new weights: ours against torch's all-reduce and AdamW (as DDP) and reduce-scatter, AdamW and all-gather (as\n"
      "FSDP2), in turns inside one run. Checks first that ours gives the reference's bits, and torch the same weights\n"
      "within rounding."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 Mi elements: about a minute on two cores", flags);
  app.add_option("--ranks", flags.ranks, "numbers of ranks to measure with")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 4));
  app.add_option("--elements", flags.mebi_elements, "Mi elements of the model, a multiple of 16")
      ->capture_default_str()
      ->check(CLI::Range(16, 1024));
  app.add_flag("--processor-time", flags.processor_time,
               "processor time of all ranks instead of elapsed time, for a machine that others use");
  app.add_option("--python", flags.python, "a Python with torch; unset: that of tools/parity_env.sh");
  app.footer(
      "Examples:\n"
      "  python3 -m venv rivals && rivals/bin/pip install torch numpy\n"
      "  bazel run -c opt //bench:step_rivals -- --quick --python $PWD/rivals/bin/python\n"
      "  bazel run -c opt //bench:step_rivals -- --ranks 2 --json $PWD/step_rivals.json");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.mebi_elements = 16;
  if (flags.mebi_elements % 16 != 0) {
    std::fprintf(stderr, "bench/step_rivals: --elements %d is no multiple of 16\n", flags.mebi_elements);
    return 1;
  }
  return shardmesh::bench::ExitStatus("step_rivals", shardmesh::bench::RunAll(flags));
}
