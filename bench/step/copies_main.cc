// bench/copies: what copies=2 costs a job on two hosts: its step, the processors of its workers, and their memory,
// beside the same job without copies, in turns.
//
//   bazel run -c opt //bench:copies -- --quick
#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/process.h"
#include "bench/harness/service.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60), kLook = absl::Milliseconds(5);
constexpr int kHosts = 2;
constexpr int64_t kTensorElements = int64_t{1} << 20;
constexpr double kStepLimit = 1.05, kShards = 4;  // goals: times the step without copies; shards more in memory

struct Flags : CommonFlags {
  int mebi_elements = 32;
  int steps = 20;        // of a round
  double rest_ms = 100;  // between steps
};

JobSpec SpecOf(const Flags& flags, int copies) {
  JobSpec spec;
  spec.name = "bench-copies";
  spec.mesh = ParseMeshSpec(absl::StrCat("fsdp=", kHosts)).value();
  spec.gradient_format = Format::kBf16;
  spec.copies = copies;
  for (int i = 0; i < flags.mebi_elements; ++i) {
    spec.parameters.push_back({absl::StrCat("layers.", i), {kTensorElements}, WeightFormat::kBf16Sr});
  }
  return spec;
}

// One job of its own coordinator and workers, and its trainer.
class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Start(const Flags& flags, int copies) {
    std::unique_ptr<Training> training(new Training(flags));
    ASSIGN_OR_RETURN(training->folder_, Folder::Make());
    ASSIGN_OR_RETURN(training->service_, Service::Start(training->folder_->path(), "127.0.0.1:0", Process::kEveryCore,
                                                        absl::ZeroDuration(), kHosts, kHosts));
    ASSIGN_OR_RETURN(training->job_, training->service_->client().CreateJob(SpecOf(flags, copies)));
    RETURN_IF_ERROR(training->Initialize());
    return training;
  }

  // A round of steps, each after a rest; the seconds in the calls of Step.
  absl::StatusOr<double> Steps(double rest_ms) {
    double seconds = 0;
    for (int i = 0; i < flags_.steps; ++i) {
      absl::SleepFor(absl::Milliseconds(rest_ms));
      const double begin = MonotonicSeconds();
      RETURN_IF_ERROR(session_->Step().status());
      seconds += MonotonicSeconds() - begin;
    }
    return seconds;
  }

  double WorkerSeconds() const {
    double seconds = 0;
    for (int i = 0; i < kHosts; ++i) seconds += service_->WorkerSeconds(i);
    return seconds;
  }
  // Of the worker that had the most.
  double PeakBytes() const {
    double most = 0;
    for (int i = 0; i < kHosts; ++i) most = std::max(most, service_->WorkerPeakBytes(i));
    return most;
  }
  // That one worker holds.
  absl::StatusOr<double> ShardBytes() {
    ASSIGN_OR_RETURN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kPatience));
    double bytes = 0;
    for (const v1::GetStatusReply::Job& held : status.jobs()) bytes += static_cast<double>(held.shard_bytes());
    return bytes;
  }
  absl::StatusOr<v1::DigestReply> Digest() { return job_->Digest(kPatience); }
  // The step of which each shard is on two hosts now.
  absl::StatusOr<v1::StoredCheckpoint> Copied() {
    v1::DescribeJobRequest request;
    request.set_job(job_->spec().name);
    ASSIGN_OR_RETURN(const v1::JobDescription job, service_->client().coordinator().DescribeJob(request, kPatience));
    return job.copied();
  }
  int64_t step() const { return session_->committed_step().value(); }

 private:
  explicit Training(const Flags& flags) : flags_(flags) {}

  absl::Status Initialize() {
    std::vector<float> weights(kTensorElements);
    for (int64_t i = 0; i < kTensorElements; ++i) weights[i] = static_cast<float>((i * 7919) % 65521) * 0x1p-20f;
    std::map<std::string, std::vector<float>> all;
    for (const ParameterSpec& parameter : job_->spec().parameters) all[parameter.name] = weights;
    RETURN_IF_ERROR(job_->Initialize(all, kPatience));
    ASSIGN_OR_RETURN(session_, job_->Attach({Slot(0)}));
    RETURN_IF_ERROR(session_->AwaitWeights(kPatience));
    for (const ParameterSpec& parameter : job_->spec().parameters) {
      ASSIGN_OR_RETURN(const TensorView view, session_->gradient(Slot(0), parameter.name));
      auto* const to = static_cast<uint16_t*>(view.data);
      for (int64_t e = 0; e < kTensorElements; ++e) {  // of either sign, of a few hundredths
        to[e] = static_cast<uint16_t>(0x3c00 + (e * 7 + e / 977) % 128 + (e & 1) * 0x8000);
      }
    }
    return absl::OkStatus();
  }

  const Flags flags_;
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Service> service_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
};

class CopiesBench {
 public:
  explicit CopiesBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    ASSIGN_OR_RETURN(without_, Training::Start(flags_, 1));
    ASSIGN_OR_RETURN(with_, Training::Start(flags_, 2));
    RETURN_IF_ERROR(Verify());
    Report report(
        absl::StrFormat("bench/copies: a job on two hosts, with copies=2 against without; %d Mi elements, bf16_sr "
                        "weights, mesh fsdp=%d",
                        flags_.mebi_elements, kHosts));
    RETURN_IF_ERROR(AddStepRows(absl::StrFormat("%g ms after the last one", flags_.rest_ms), flags_.rest_ms,
                                Goal::AtMost(kStepLimit), report));
    RETURN_IF_ERROR(AddStepRows("at once", 0, Goal(), report));
    RETURN_IF_ERROR(Verify());
    RETURN_IF_ERROR(AddMemoryRow(report));
    const Spread behind = SpreadOf(behind_);
    report.Note(absl::StrFormat(
        "The step of which each shard was on two hosts was %.0f steps old in the median (%.0f to %.0f).", behind.median,
        behind.min, behind.max));
    report.Note(
        "Verified before and after: both jobs have one digest, and that of the copies is the same. The rest between\n"
        "steps stands for a model's own work, but leaves the cores idle. Hosts are groups of processes here, and what\n"
        "crosses between them has the speed of memory.");
    report.Note(absl::StrFormat("%d rounds of %d steps. Machine: %s.", flags_.rounds, flags_.steps, MachineNow()));
    return report.Publish(flags_.json);
  }

 private:
  // Both are at the same step.
  absl::Status Verify() {
    ASSIGN_OR_RETURN(const v1::DigestReply with, with_->Digest());
    ASSIGN_OR_RETURN(const v1::DigestReply without, without_->Digest());
    if (with.digest() != without.digest() || with.step() != without.step()) {
      return absl::InternalError(
          absl::StrCat("verifying: the job with copies has other bits than the one without at step ", with.step(),
                       " and ", without.step()));
    }
    for (const absl::Time until = MonotonicNow() + kPatience; MonotonicNow() < until; absl::SleepFor(kLook)) {
      ASSIGN_OR_RETURN(const v1::StoredCheckpoint copied, with_->Copied());
      if (copied.step() < with.step() || copied.copied_at() == 0) continue;
      if (copied.digest() == with.digest()) return absl::OkStatus();
      return absl::InternalError("verifying: the copies have other bits than the job");
    }
    return absl::DeadlineExceededError(absl::StrCat("verifying: step ", with.step(), " did not get to two hosts"));
  }

  absl::Status AddStepRows(const std::string& when, double rest_ms, Goal goal, Report& report) {
    std::vector<double> processor_with, processor_without;
    const auto measure = [rest_ms](Training& training, std::vector<double>& processor) -> absl::StatusOr<double> {
      const double before = training.WorkerSeconds();
      ASSIGN_OR_RETURN(const double seconds, training.Steps(rest_ms));
      processor.push_back(training.WorkerSeconds() - before);
      return seconds;
    };
    Rounds rounds;
    rounds.Add("with", [&]() -> absl::StatusOr<double> {
      ASSIGN_OR_RETURN(const double seconds, measure(*with_, processor_with));
      ASSIGN_OR_RETURN(const v1::StoredCheckpoint copied, with_->Copied());
      if (rest_ms > 0) behind_.push_back(static_cast<double>(with_->step() - copied.step()));
      return seconds;
    });
    rounds.Add("without", [&] { return measure(*without_, processor_without); });
    RETURN_IF_ERROR(rounds.Measure(1, flags_.rounds));
    processor_with.erase(processor_with.begin());  // the warm-up's
    processor_without.erase(processor_without.begin());
    const double to_ms = 1e3 / flags_.steps;
    report.Add(CompareCost(absl::StrCat("a step ", when, ", ms"), rounds.seconds("with"), rounds.seconds("without"),
                           to_ms, goal));
    report.Add(CompareCost(absl::StrCat("processor time of both workers for it, ms"), processor_with, processor_without,
                           to_ms));
    return absl::OkStatus();
  }

  absl::Status AddMemoryRow(Report& report) {
    ASSIGN_OR_RETURN(const double shard, with_->ShardBytes());
    const double more = with_->PeakBytes() - without_->PeakBytes();
    report.Add(CompareCost("memory of a worker at most, beyond that without copies, against four shards, MiB", {more},
                           {kShards * shard}, 1.0 / (1 << 20), Goal::AtMost(1)));
    return absl::OkStatus();
  }

  const Flags flags_;
  std::unique_ptr<Training> with_, without_;
  std::vector<double> behind_;  // steps
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/copies: what copies=2 costs a job on two hosts: its step, the processors of its workers and their "
      "memory,\n"
      "beside the same job without copies, in turns. Checks the digests of both and of the copies, before and after."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "3 rounds of 8 Mi elements", flags);
  app.add_option("--mebi-elements", flags.mebi_elements, "Mi elements of the model, an even number")
      ->capture_default_str()
      ->check(CLI::Range(2, 1024));
  app.add_option("--steps", flags.steps, "of a round")->capture_default_str()->check(CLI::Range(1, 10000));
  app.add_option("--rest", flags.rest_ms, "between steps, in ms: the model's own work")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 10000.0));
  app.footer("Example:\n  bazel run -c opt //bench:copies -- --json $PWD/copies.json      two minutes");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) {
    flags.mebi_elements = 8;
    flags.rounds = 3;
  }
  return shardmesh::bench::ExitStatus("copies", shardmesh::bench::CopiesBench(flags).Run());
}
