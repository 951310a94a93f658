// bench/imbalance: what waiting costs where samples have unequal lengths and ranks unequal speeds: pulled slots, and
// assigned ones, against a collective in every layer, over the same samples in turns inside one run.
//
//   bazel run -c opt //bench:imbalance -- --quick --json imbalance.json
#include <sys/prctl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"
#include "bench/imbalance/imbalance_job.h"
#include "bench/imbalance/imbalance_plan.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr int kNumArms = 3;
constexpr double kSpeedSpread = 0.15;
constexpr int64_t kEqualLength = 32'768;                        // tokens
constexpr double kUsualGradients = 2.5, kMostGradients = 3.25;  // alive for each rank, with pulled slots
constexpr const char* kArmNames[kNumArms] = {"collectives", "assigned", "pulling"};

struct Flags : CommonFlags {
  int minibatches = 6;
  uint64_t seed = 1;
};

struct Scenario {
  const char* name;
  int ranks;
  int samples;  // of a minibatch, for each rank
  bool skewed;  // speeds
  bool equal_lengths;
  bool control;  // nothing to gain; half as many minibatches
  Goal against_collectives, of_ideal;
  bool in_quick;
};

const Scenario kScenarios[] = {
    {"4 ranks, skewed speeds", 4, 8, true, false, false, Goal::AtLeast(1.2), Goal::AtLeast(0.97), true},
    {"4 ranks, equal speeds", 4, 8, false, false, false, {}, {}, false},
    {"control: minibatch 1, equal lengths", 4, 1, false, true, true, Goal::AtLeast(0.98), {}, true},
    {"control: 1 rank", 1, 8, false, false, true, Goal::AtLeast(0.98), {}, true}};

// One scenario's figures. Seconds are of all minibatches of a round.
class ImbalanceBench {
 public:
  ImbalanceBench(const Flags& flags, const Scenario& scenario, Report& report)
      : flags_(flags),
        scenario_(scenario),
        report_(report),
        minibatches_(scenario.control ? (flags.minibatches + 1) / 2 : flags.minibatches) {}

  absl::Status Run(Client& client) {
    const std::string name = absl::StrCat("bench-imbalance-", &scenario_ - kScenarios);
    ASSIGN_OR_RETURN(job_, ImbalanceJob::Start(client, name, scenario_.ranks, scenario_.ranks * scenario_.samples));
    RETURN_IF_ERROR(RunRound(-1, 2));
    RETURN_IF_ERROR(job_->Verify());
    for (int round = 0; round < flags_.rounds; ++round) RETURN_IF_ERROR(RunRound(round, minibatches_));
    RETURN_IF_ERROR(job_->Verify());
    AddRows();
    AddNotes();
    return absl::OkStatus();
  }

 private:
  struct Figures {
    std::vector<double> seconds, computed;  // by round
    std::vector<std::vector<double>> idle;  // by minibatch, then from the slowest rank to the fastest
  };

  uint64_t SeedOf(int round, int minibatch) const {
    return ((flags_.seed * 1000 + static_cast<uint64_t>(&scenario_ - kScenarios)) * 100'000 +
            static_cast<uint64_t>(round + 1)) *
               1000 +
           static_cast<uint64_t>(minibatch + 1);
  }

  // A negative round's figures are not kept.
  absl::Status RunRound(int round, int minibatches) {
    Minibatch minibatch;
    minibatch.speeds = RankSpeeds(scenario_.ranks, scenario_.skewed ? kSpeedSpread : 0, SeedOf(round, -1));
    const int samples = scenario_.ranks * scenario_.samples;
    double sum[kNumArms] = {}, computed[kNumArms] = {}, ideal = 0;
    for (int m = 0; m < minibatches; ++m) {
      minibatch.first_sample = next_sample_;
      next_sample_ += samples;
      minibatch.lengths = scenario_.equal_lengths ? std::vector<int64_t>(samples, kEqualLength)
                                                  : SampleLengths(samples, SeedOf(round, m));
      for (int i = 0; i < kNumArms; ++i) {
        const int arm = (i + m) % kNumArms;  // none has the same neighbours always
        ASSIGN_OR_RETURN(const Outcome outcome, job_->Run(Arm(arm), minibatch));
        sum[arm] += outcome.seconds;
        if (round >= 0) Keep(arm, outcome, minibatch.speeds);
      }
      Compute(minibatch, computed, ideal);
    }
    if (round < 0) return absl::OkStatus();
    ideal_.push_back(ideal);
    for (int arm = 0; arm < kNumArms; ++arm) {
      arms_[arm].seconds.push_back(sum[arm]);
      arms_[arm].computed.push_back(computed[arm]);
    }
    return absl::OkStatus();
  }

  void Compute(const Minibatch& minibatch, double* computed, double& ideal) const {
    const std::vector<double> costs = CostsOf(minibatch.lengths);
    const std::vector<double>& speeds = minibatch.speeds;
    const std::vector<int64_t>& lengths = minibatch.lengths;
    computed[0] += TimeOfMicro(PlanMicro(lengths, scenario_.ranks), costs, speeds) * kSecondsPerCost;
    computed[1] += TimeOfMini(PlanMini(lengths, scenario_.ranks), costs, speeds) * kSecondsPerCost;
    computed[2] += TimeOfPulling(PullOrder(lengths), costs, speeds) * kSecondsPerCost;
    ideal += TimeOfIdeal(costs, speeds) * kSecondsPerCost;
  }

  void Keep(int arm, const Outcome& outcome, const std::vector<double>& speeds) {
    std::vector<int> order(speeds.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return speeds[a] < speeds[b]; });
    std::vector<double>& idle = arms_[arm].idle.emplace_back();
    for (const int rank : order) idle.push_back(outcome.idle[rank]);
    if (Arm(arm) == Arm::kPulling && outcome.peak > 0) {
      alive_.push_back(static_cast<double>(outcome.peak) / scenario_.ranks);
    }
  }

  void AddRows() {
    const double scale = 1e3 / minibatches_;
    const auto& collectives = arms_[0].seconds;
    report_.Add(Compare(NameOf("pulling against collectives, ms"), arms_[2].seconds, collectives, scale,
                        scenario_.against_collectives));
    report_.Add(Compare(NameOf("assigned against collectives, ms"), arms_[1].seconds, collectives, scale));
    report_.Add(Compare(NameOf("pulling against the ideal, ms"), arms_[2].seconds, ideal_, scale, scenario_.of_ideal));
    if (scenario_.of_ideal.kind != Goal::kNone) AddAlive();
  }

  // Gradients alive for each rank, minibatch by minibatch, against what the service should need.
  void AddAlive() {
    const std::string median = NameOf("gradients alive for each rank, times 2.5");
    const std::string most = NameOf("gradients alive for each rank, the most, times 3.25");
    if (alive_.empty()) {
      for (const std::string& name : {median, most}) {
        report_.Add({name, 0, 0, {}, Goal::AtMost(1), "no step of pulled slots was made"});
      }
      return;
    }
    report_.Add(CompareCost(median, alive_, std::vector<double>(alive_.size(), kUsualGradients), 1, Goal::AtMost(1)));
    report_.Add(
        CompareCost(most, {*std::max_element(alive_.begin(), alive_.end())}, {kMostGradients}, 1, Goal::AtMost(1)));
  }

  // What is left when nothing but samples takes time, and how much of the time ranks did not compute.
  void AddNotes() {
    std::string note =
        absl::StrCat(scenario_.name, absl::StrFormat("\n  %-12s %9s  %-22s %s", "", "computed", "collectives over it",
                                                     "idle, from the slowest rank to the fastest"));
    for (int arm = 0; arm < kNumArms; ++arm) {
      const Row row = Compare("", arms_[arm].computed, arms_[0].computed, 1e3 / minibatches_);
      absl::StrAppendFormat(&note, "\n  %-12s %6.1f ms  %4.2f (%4.2f - %4.2f)    ", kArmNames[arm], row.ours,
                            row.ratio.median, row.ratio.min, row.ratio.max);
      for (int r = 0; r < scenario_.ranks; ++r) {
        std::vector<double> idle;
        for (const std::vector<double>& of_minibatch : arms_[arm].idle) idle.push_back(of_minibatch[r]);
        absl::StrAppendFormat(&note, " %5.1f %%", 100 * SpreadOf(std::move(idle)).median);
      }
    }
    absl::StrAppendFormat(&note, "\n  %-12s %6.1f ms", "ideal", SpreadOf(ideal_).median * 1e3 / minibatches_);
    report_.Note(std::move(note));
  }

  std::string NameOf(absl::string_view what) const { return absl::StrCat(scenario_.name, ": ", what); }

  const Flags& flags_;
  const Scenario& scenario_;
  Report& report_;
  const int minibatches_;  // of a round
  std::unique_ptr<ImbalanceJob> job_;
  std::array<Figures, kNumArms> arms_;
  std::vector<double> ideal_, alive_;
  int64_t next_sample_ = 0;
};

absl::Status RunAll(const Flags& flags) {
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // of this thread and those that it starts: sleeps end when they should
  Report report(absl::StrFormat("bench/imbalance: %d Ki fp32 parameters, AdamW, %d workers, seed %d",
                                kModelElements / 1024, kWorkers, flags.seed));
  report.Note(absl::StrFormat("%d rounds of %d minibatches. Machine at the start: %s.", flags.rounds, flags.minibatches,
                              MachineNow()));
  ASSIGN_OR_RETURN(const std::unique_ptr<Folder> folder, Folder::Make());
  ASSIGN_OR_RETURN(const std::unique_ptr<Service> service,
                   Service::Start(folder->path(), "127.0.0.1:0", Process::kEveryCore, absl::ZeroDuration(), kWorkers));
  for (const Scenario& scenario : kScenarios) {
    if (flags.quick && !scenario.in_quick) continue;
    RETURN_IF_ERROR(Annotate(ImbalanceBench(flags, scenario, report).Run(service->client()), scenario.name));
  }
  report.Note(
      "Verified in each scenario, first and at the end: after all steps the weights of both jobs are, bit for bit, "
      "what\n"
      "the reference makes of the same samples in one process. Computing is sleeping; gradients and steps are real.\n"
      "Computed: what the plans would take if only samples took time. Ideal: all work at all ranks' speed, or the "
      "longest\n"
      "sample at the highest. Collectives and assigned ranks take their steps through the same job.");
  report.Note(absl::StrCat("Machine at the end: ", MachineNow(), "."));
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/imbalance: what waiting costs where samples have unequal lengths and ranks unequal speeds: slots that "
      "are\n"
      "pulled, and assigned ones, against ranks that meet in every layer, over the same samples in turns inside one\n"
      "run. Computing is sleeping; gradients and steps are real, and verified first."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "7 rounds of 2 minibatches, without equal speeds: under a minute", flags);
  app.add_option("--minibatches", flags.minibatches, "of a round")->capture_default_str()->check(CLI::Range(1, 900));
  app.add_option("--seed", flags.seed, "of lengths and speeds")->capture_default_str()->check(CLI::Range(0, 1000000));
  app.footer("Example:\n  bazel run -c opt //bench:imbalance -- --json $PWD/imbalance.json      minutes");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.minibatches = 2;
  if (flags.quick && app.count("--rounds") == 0) flags.rounds = 7;
  return shardmesh::bench::ExitStatus("imbalance", shardmesh::bench::RunAll(flags));
}
