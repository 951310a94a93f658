// bench/step: the engine's fused step against the same step in three passes, 4 worker processes over one shared memory.
//
//   bazel run -c opt //bench:step -- --quick --json step.json
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/memory_speed.h"
#include "bench/harness/worker_team.h"
#include "bench/step/step_engine.h"
#include "bench/step/step_job.h"
#include "bench/step/three_passes.h"
#include "core/base/status.h"
#include "kernels/cpu/processor.h"
#include "worker/pass/pass.h"
#include "worker/step/step_protocol.h"

namespace shardmesh::bench {
namespace {

struct Flags : CommonFlags {
  int64_t mebi_elements = 64;
  bool processor_time = false;
};

constexpr int kCheckEvery = 64;

enum Task { kReady, kCopy, kUpdate, kThreePasses, kCheckGather, kRotating, kChecked, kInPlace };

// Words that the parent sets for the tasks of the workers; mapped as shared.
struct Shared {
  std::atomic<int64_t> three_passes_step;
  std::atomic<int64_t> extra_step;  // of kRotating, kChecked and kInPlace
};

// A pass with check_every, over storage that another pass steps without telling it: what it finds means nothing.
struct CheckedPass {
  CheckedPass(StepJob& job, int rank)
      : spec(Checked(job.spec)),
        pass(spec, job.plan, job.plan.PlaceOf(Rank(rank)), job.host, job.shards[rank], /*threads=*/1) {}
  static JobSpec Checked(JobSpec spec) {
    spec.check_every = kCheckEvery;
    return spec;
  }
  const JobSpec spec;
  Pass pass;
};

// One worker process: the engine as in shardmesh-worker, and the tasks of the rivals.
WorkerTeam::Work SetUpWorker(StepJob& job, ThreePasses& passes, Shared& shared, WorkerTeam::Member& member) {
  const int rank = member.rank();
  auto engine = std::make_shared<StepEngine>(job, rank);
  Pass* const pass = engine->pass.get();
  const auto checked = std::make_shared<CheckedPass>(job, rank);
  char* const copy = ThreePasses::NewPrivateCopy(job);
  const int64_t bytes = job.plan.window_bytes();
  const auto extra = [&job, &shared](int64_t parity) {
    Command command;
    command.kind = CommandKind::kStep;
    command.divide_scale = 1.0f / static_cast<float>(job.spec.num_slots);
    command.step = shared.extra_step.load();
    command.groups = static_cast<int32_t>((job.host.control()->decided.load() + 1) % 2);
    const GroupTable groups(job.host.control(), job.plan);
    groups.scalars(command.groups)[0] = ComputeStepScalars(job.spec.optimizer, command.step).value();
    command.apply = 1;
    command.parity = static_cast<int32_t>(parity);
    return command;
  };
  return [=, &job, &passes, &shared, &member](int task) {
    const int32_t parity = job.host.control()->parity.load();
    switch (task) {
      case kReady:
        return engine->staged && copy != nullptr;
      case kCopy:
        StreamingCopy(copy, job.host.slot(rank).data(), bytes);
        return true;
      case kUpdate:
        UpdateInPlace(copy, bytes, 0);
        return true;
      case kThreePasses:
        passes.Step(member, shared.three_passes_step.load(), copy);
        return true;
      case kCheckGather:
        return passes.Gathered(copy);
      case kRotating:
      case kChecked: {  // there and back, so that the engine finds its data where it left it
        Pass& of_task = task == kChecked ? checked->pass : *pass;
        const uint64_t seq = (uint64_t{1} << 40) + 2 * shared.extra_step.load();
        of_task.Execute(extra(parity), seq, nullptr);
        of_task.Execute(extra(1 - parity), seq + 1, nullptr);
        job.host.control()->members[rank].damage.store(0);  // what the checked one found (CheckedPass)
        return true;
      }
      case kInPlace:
        StepInPlace(job, rank, extra(parity));
        StepInPlace(job, rank, extra(parity));
        return true;
    }
    return false;
  };
}

class StepBench {
 public:
  explicit StepBench(const Flags& flags) : flags_(flags) {}
  absl::Status Run();

 private:
  absl::Status SetUp();
  absl::Status Verify();
  absl::Status Measure();
  void AddReport(Report& report) const;
  absl::StatusOr<double> EngineStep();
  absl::StatusOr<double> UnpublishedSteps();  // kStepPublishEvery - 1 of them: as many up as down
  absl::StatusOr<double> ThreePassesStep();
  absl::StatusOr<double> Extra(Task task);  // two passes
  void Add(const char* name, int passes, std::function<absl::StatusOr<double>()> measure);
  std::vector<double> Bound(int64_t bytes) const;

  const Flags flags_;
  std::unique_ptr<Memory> memory_ = NewProcessMemory();
  std::unique_ptr<StepJob> job_;
  std::unique_ptr<ThreePasses> passes_;
  std::unique_ptr<Segment> shared_memory_;
  Shared* shared_ = nullptr;
  std::unique_ptr<WorkerTeam> team_;
  std::unique_ptr<StepProtocol> protocol_;
  int64_t next_step_ = 1, next_three_ = 1, next_extra_ = 1;
  Rounds rounds_;
};

absl::Status StepBench::SetUp() {
  ASSIGN_OR_RETURN(job_, StepJob::Create(*memory_, flags_.mebi_elements << 20));
  ASSIGN_OR_RETURN(passes_, ThreePasses::Create(*job_));
  ASSIGN_OR_RETURN(Segment shared, Segment::Create("bench-words", kPageBytes, 0));
  shared_memory_ = std::make_unique<Segment>(std::move(shared));
  shared_ = reinterpret_cast<Shared*>(shared_memory_->data());
  ASSIGN_OR_RETURN(team_, WorkerTeam::Start(kRanks, [this](WorkerTeam::Member& member) {
                     return SetUpWorker(*job_, *passes_, *shared_, member);
                   }));
  protocol_ = NewStepProtocol(*job_);
  RETURN_IF_ERROR(team_->Run(kReady).status());
  RETURN_IF_ERROR(protocol_->outcomes().AwaitCommit(Step(0), absl::Seconds(60)).status());
  passes_->Initialize();
  return absl::OkStatus();
}

absl::StatusOr<double> StepBench::EngineStep() { return DeclareAndAwait(*protocol_, *job_, Step(next_step_++)); }

absl::StatusOr<double> StepBench::UnpublishedSteps() {
  double seconds = 0;
  for (int i = 1; i < kStepPublishEvery; ++i) {
    ASSIGN_OR_RETURN(const double step, EngineStep());
    seconds += step;
  }
  return seconds;
}

absl::StatusOr<double> StepBench::ThreePassesStep() {
  shared_->three_passes_step.store(next_three_++);
  return team_->Run(kThreePasses);
}

absl::StatusOr<double> StepBench::Extra(Task task) {
  shared_->extra_step.store(next_extra_++);
  return team_->Run(task);
}

// Bit for bit: the window, every rank's states, each private copy, and the newest publication.
absl::Status StepBench::Verify() {
  for (int step = 1; step <= kStepPublishEvery; ++step) {
    RETURN_IF_ERROR(EngineStep().status());
    RETURN_IF_ERROR(ThreePassesStep().status());
    RETURN_IF_ERROR(passes_->CompareWithJob(job_->host.control()->parity.load()));
    RETURN_IF_ERROR(team_->Run(kCheckGather).status());
  }
  const std::optional<int> buffer = protocol_->publications().Pin(Step(kStepPublishEvery));
  if (!buffer.has_value()) return absl::InternalError(absl::StrCat("step ", kStepPublishEvery, " was not published"));
  const bool same =
      std::memcmp(job_->host.publication(*buffer).data(), job_->host.window().data(), job_->plan.window_bytes()) == 0;
  protocol_->publications().Unpin(*buffer);
  return same ? absl::OkStatus() : absl::InternalError("the publication differs from the window");
}

// `measure` does `passes` of them. With --processor-time a contestant's seconds are not those that passed but those
// that the workers' processes used, as if spread evenly over the cores.
void StepBench::Add(const char* name, int passes, std::function<absl::StatusOr<double>()> measure) {
  rounds_.Add(name, [this, passes, measure = std::move(measure)]() -> absl::StatusOr<double> {
    const double before = team_->ProcessorSeconds();
    ASSIGN_OR_RETURN(const double passed, measure());
    const double used = (team_->ProcessorSeconds() - before) / std::min<double>(kRanks, sysconf(_SC_NPROCESSORS_ONLN));
    return (flags_.processor_time ? used : passed) / passes;
  });
}

absl::Status StepBench::Measure() {
  Add("copy", 1, [this] { return team_->Run(kCopy); });
  Add("engine", kStepPublishEvery - 1, [this] { return UnpublishedSteps(); });
  Add("engine, published", 1, [this] { return EngineStep(); });
  Add("three passes", 1, [this] { return ThreePassesStep(); });
  Add("update", 1, [this] { return team_->Run(kUpdate); });
  Add("rotating", 2, [this] { return Extra(kRotating); });
  Add("checked", 2, [this] { return Extra(kChecked); });
  Add("in place", 2, [this] { return Extra(kInPlace); });
  return rounds_.Measure(2, flags_.rounds);
}

// Seconds that `bytes` take at the faster of the two ways to move memory, by round.
std::vector<double> StepBench::Bound(int64_t bytes) const {
  const double moved = 2.0 * kRanks * static_cast<double>(job_->plan.window_bytes());
  std::vector<double> bound;
  for (int i = 0; i < flags_.rounds; ++i) {
    bound.push_back(static_cast<double>(bytes) * std::min(rounds_.seconds("copy")[i], rounds_.seconds("update")[i]) /
                    moved);
  }
  return bound;
}

void StepBench::AddReport(Report& report) const {
  const auto& engine = rounds_.seconds("engine");
  const auto& published = rounds_.seconds("engine, published");
  const auto& three = rounds_.seconds("three passes");
  report.Add(Compare("step / three passes, ms", engine, three, 1e3, Goal::AtLeast(2)));
  report.Add(Compare("published step / three passes, ms", published, three, 1e3));
  report.Add(
      CompareCost("step, times its memory bound, ms", engine, Bound(job_->FusedBytes(false)), 1e3, Goal::AtMost(1.1)));
  report.Add(CompareCost("published step, times its memory bound, ms", published, Bound(job_->FusedBytes(true)), 1e3));
  report.Add(CompareCost("rotating pass, times a pass in place, ms", rounds_.seconds("rotating"),
                         rounds_.seconds("in place"), 1e3, Goal::AtMost(1.03)));
  report.Add(CompareCost(absl::StrCat("pass with check_every ", kCheckEvery, ", times one without, ms"),
                         rounds_.seconds("checked"), rounds_.seconds("rotating"), 1e3));
  report.Add(CompareCost("step, times its pass alone, ms", engine, rounds_.seconds("rotating"), 1e3));
  const double moved = 2e-9 * kRanks * static_cast<double>(job_->plan.window_bytes());
  report.Note("Verified bit-equal first: weights in the window, each private copy, the publication, m and v.");
  report.Note(absl::StrFormat(
      "Step: declaration to commit through the engine (decision point, rotating storage, barrier, commit). Three "
      "passes:\n"
      "reduce to fp32, barrier, step in place, barrier, each of %d processes copies all weights to its private memory.",
      kRanks));
  report.Note(absl::StrFormat(
      "Bound: %.0f bytes an element (%.0f published) at the faster of a streaming copy (%.1f GB/s) and an update in "
      "place\n"
      "(%.1f GB/s), measured in the same rounds. Kernel: %s. %d rounds. Machine: %s.",
      static_cast<double>(job_->FusedBytes(false)) / job_->plan.total_elements(),
      static_cast<double>(job_->FusedBytes(true)) / job_->plan.total_elements(),
      moved / SpreadOf(rounds_.seconds("copy")).median, moved / SpreadOf(rounds_.seconds("update")).median,
      BestImplementation(), flags_.rounds, MachineNow()));
  if (flags_.processor_time)
    report.Note("Times are processor time of the workers, divided by the cores; waiting is not in them.");
}

absl::Status StepBench::Run() {
  RETURN_IF_ERROR(SetUp());
  RETURN_IF_ERROR(Annotate(Verify(), "verifying"));
  RETURN_IF_ERROR(Measure());
  Report report(absl::StrCat("bench/step: ", flags_.mebi_elements, " Mi elements, ", kRanks, " worker processes, ",
                             kStepSlots, " slots bf16, weights bf16_sr, states fp32"));
  AddReport(report);
  return report.Publish(flags_.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/step: one training step of 4 worker processes on this host: the engine's fused pass against the same step "
      "in\n"
      "three passes, in turns inside one run. Checks first that both give the same bits."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 Mi elements: under a minute on two cores", flags);
  app.add_option("--elements", flags.mebi_elements, "Mi elements of the model, a multiple of 16")
      ->capture_default_str()
      ->check(CLI::Range(16, 1024));
  app.add_flag("--processor-time", flags.processor_time,
               "processor time of the workers instead of elapsed time, for a machine that others use");
  app.footer(
      "Examples:\n"
      "  bazel run -c opt //bench:step                         full size, about 4 GiB of memory\n"
      "  bazel run -c opt //bench:step -- --quick --json $PWD/step.json");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.mebi_elements = 16;
  if (flags.mebi_elements % 16 != 0) {
    std::fprintf(stderr, "bench/step: --elements %ld is no multiple of 16\n", static_cast<long>(flags.mebi_elements));
    return 1;
  }
  return shardmesh::bench::ExitStatus("step", shardmesh::bench::StepBench(flags).Run());
}
