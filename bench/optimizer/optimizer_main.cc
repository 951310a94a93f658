// bench/optimizer: one optimizer step in the formats of core/format/numeric_formats.h, against the memory bound and
// against the optimizers of torch, torchao, bitsandbytes and DeepSpeed in the same run.
//
//   bazel run -c opt //bench:optimizer -- --quick --python ~/rivals/bin/python
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/memory_speed.h"
#include "bench/harness/model_shapes.h"
#include "bench/harness/rival.h"
#include "bench/harness/thread_team.h"
#include "bench/optimizer/optimizer_checks.h"
#include "bench/optimizer/optimizer_job.h"
#include "bench/optimizer/table_step.h"
#include "core/base/status.h"
#include "kernels/cpu/processor.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kUpdateBytes = 512 << 20;  // of the bound: far beyond any cache
constexpr double kBytesGoal = 5.13;          // a parameter, bf16+8sr with fp8x32
constexpr WeightFormat kWeightFormats[] = {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Sr,
                                           WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr};
constexpr StateFormat kStateFormats[] = {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8,
                                         StateFormat::kDyn4, StateFormat::kFp8,    StateFormat::kFp8x32};

constexpr StepFormats kFp32 = {WeightFormat::kFp32, StateFormat::kFp32, Format::kFp32};
constexpr StepFormats Bf16Sr(StateFormat states) { return {WeightFormat::kBf16Sr, states, Format::kBf16}; }
constexpr StepFormats kBf16SrFp32 = Bf16Sr(StateFormat::kFp32);
constexpr StepFormats kNearest = {WeightFormat::kBf16, StateFormat::kFp32, Format::kBf16};
constexpr StepFormats kDyn8Fp32 = {WeightFormat::kFp32, StateFormat::kDyn8, Format::kFp32};

// A row against another package; `rival` is its name in optimizer_rivals.py.
struct Against {
  const char* rival;
  const char* name;
  StepFormats ours;
  double goal, goal_of_one_thread;  // 0: none
};
const std::vector<Against> kFullPrecision = {
    {"torch_fused", "torch AdamW fused, fp32", kFp32, 0.98, 0.98},
    {"torch_fused", "torch AdamW fused, fp32", kBf16SrFp32, 1.15, 0},
    {"deepspeed", "DeepSpeedCPUAdam, fp32", kFp32, 0.98, 0.98},
    {"deepspeed", "DeepSpeedCPUAdam, fp32", kBf16SrFp32, 1.15, 0},
};
const std::vector<Against> kLowPrecision = {
    {"deepspeed_bf16", "DeepSpeedCPUAdam, bf16, fp32 states", kBf16SrFp32, 4, 4},
    {"torchao_bf16", "torchao _AdamW, bf16 SR, bf16 states", kBf16SrFp32, 15, 15},
    {"torchao_8bit", "torchao AdamW8bit, bf16 SR", Bf16Sr(StateFormat::kDyn8), 25, 25},
    {"torchao_4bit", "torchao AdamW4bit, bf16 SR", Bf16Sr(StateFormat::kDyn4), 20, 20},
    {"torchao_fp8", "torchao AdamWFp8, bf16 SR", Bf16Sr(StateFormat::kFp8), 12, 12},
    {"bitsandbytes_8bit", "bitsandbytes AdamW8bit, bf16", Bf16Sr(StateFormat::kDyn8), 15, 15},
};

struct Flags : CommonFlags {
  bool processor_time = false;
  std::vector<int> threads = {1, 2};
  std::string python;
};

// What is stepped, and which rows it gets.
struct Model {
  std::string name;
  std::vector<NamedShape> parameters;
  bool own = true, full_precision = true, low_precision = true;

  std::vector<int64_t> Sizes() const;
  std::string Shapes() const;  // "50257x768,768"
};

std::vector<int64_t> Model::Sizes() const {
  std::vector<int64_t> sizes;
  for (const NamedShape& parameter : parameters) sizes.push_back(ModelShapes{"", {parameter}}.NumElements());
  return sizes;
}

std::string Model::Shapes() const {
  return absl::StrJoin(parameters, ",", [](std::string* out, const NamedShape& parameter) {
    absl::StrAppend(out, absl::StrJoin(parameter.shape, "x"));
  });
}

// Quick: low precision, which is bound by arithmetic, on a small tensor; torchao compiles a list for minutes.
std::vector<Model> Models(bool quick) {
  const ModelShapes gpt2 = Gpt2_124M();
  if (!quick) return {{"64 Mi elements", {{"flat", {64 << 20}}}}, {"GPT-2-124M", gpt2.parameters}};
  const auto layers = gpt2.parameters.begin() + 2;  // after the embeddings; 12 tensors each
  return {{"8 Mi elements", {{"flat", {8 << 20}}}, true, true, false},
          {"2 layers of GPT-2", {layers, layers + 24}, false, true, false},
          {"2 Mi elements", {{"flat", {2 << 20}}}, false, false, true}};
}

using Jobs = std::map<std::string, std::unique_ptr<OptimizerJob>>;

class OptimizerBench {
 public:
  explicit OptimizerBench(const Flags& flags) : flags_(flags), report_("bench/optimizer: one AdamW step") {}
  absl::Status Run();

 private:
  absl::Status Verify();
  absl::Status MeasureBytes();
  absl::Status StartRivals(int threads);
  absl::Status AddJob(const std::string& name, const Model& model, const StepFormats& formats, OptimizerStepFn step,
                      Jobs& jobs, Rounds& rounds);
  absl::Status MeasureOwn(const Model& model, int threads);
  absl::Status MeasureAgainst(const Model& model, int threads, const std::vector<Against>& rows, int rounds);
  absl::StatusOr<std::set<std::string>> MakeRivals(const Model& model, const std::vector<Against>& rows);
  void AddOwn(const Model& model, int threads, const Rounds& rounds);
  void AddAgainst(const Model& model, int threads, const Against& row, const Rounds& rounds);

  const Flags flags_;
  double (*const clock_)() = flags_.processor_time ? ProcessorSeconds : MonotonicSeconds;
  std::unique_ptr<ThreadTeam> team_;
  std::unique_ptr<Rival> rivals_;  // null: there is no Python with torch
  Report report_;
};

std::string NameOf(const Model& model, int threads, absl::string_view what) {
  return absl::StrCat(model.name, ", ", threads, threads == 1 ? " thread: " : " threads: ", what);
}

double NanosecondsAnElement(const Model& model) {
  int64_t elements = 0;
  for (const int64_t size : model.Sizes()) elements += size;
  return 1e9 / static_cast<double>(elements);
}

// Adds a contestant that steps a new job; the step that touches it first is not measured.
absl::Status OptimizerBench::AddJob(const std::string& name, const Model& model, const StepFormats& formats,
                                    OptimizerStepFn step, Jobs& jobs, Rounds& rounds) {
  ASSIGN_OR_RETURN(jobs[name], OptimizerJob::Create(model.Sizes(), formats, *team_, step));
  OptimizerJob* job = jobs[name].get();
  job->Step();
  rounds.Add(name, [this, job] { return SecondsOf([job] { job->Step(); }, clock_); });
  return absl::OkStatus();
}

absl::Status OptimizerBench::Verify() {
  for (const WeightFormat weights : kWeightFormats) {
    for (const StateFormat states : kStateFormats) {
      for (const Format gradients : {Format::kFp32, Format::kBf16}) {
        RETURN_IF_ERROR(CheckAgainstReference({weights, states, gradients}));
      }
    }
  }
  report_.Note(SimdSupported() ? "Verified first: SIMD on 2 threads has the reference's bits in every format."
                               : "This processor has no AVX2: the reference is measured.");
  return SimdSupported() ? CheckTableStep() : absl::OkStatus();
}

absl::Status OptimizerBench::MeasureBytes() {
  ThreadTeam team(1);
  std::string table = absl::StrFormat("Bytes a parameter, weights and two states, as they lie in memory\n%-10s", "");
  for (const StateFormat states : kStateFormats) absl::StrAppendFormat(&table, "%9s", StateFormatName(states));
  for (const WeightFormat weights : kWeightFormats) {
    absl::StrAppendFormat(&table, "\n%-10s", WeightFormatName(weights));
    for (const StateFormat states : kStateFormats) {
      ASSIGN_OR_RETURN(const auto job, OptimizerJob::Create({1 << 16}, {weights, states, Format::kBf16}, team));
      absl::StrAppendFormat(&table, "%9.3f", job->StoredBytes());
      if (weights != WeightFormat::kBf16Plus8Sr || states != StateFormat::kFp8x32) continue;
      report_.Add(CompareCost("bytes a parameter, bf16+8sr + fp8x32, times their limit", {job->StoredBytes()},
                              {kBytesGoal}, 1, Goal::AtMost(1)));
    }
  }
  report_.Note(table);
  return absl::OkStatus();
}

absl::Status OptimizerBench::StartRivals(int threads) {
  rivals_ = nullptr;  // one at a time
  absl::StatusOr<std::unique_ptr<Rival>> rivals = Rival::Start(
      flags_.python,
      {"bench/optimizer/optimizer_rivals.py", absl::StrCat(threads), flags_.processor_time ? "processor" : "elapsed"});
  const absl::StatusOr<std::string> versions = rivals.ok() ? (*rivals)->Ask("versions") : rivals.status();
  if (!versions.ok()) {
    report_.Note(absl::StrCat("No rivals (threads: ", threads, "): ", versions.status().message(), "."));
    return absl::OkStatus();
  }
  rivals_ = *std::move(rivals);
  ASSIGN_OR_RETURN(const double difference, CheckAgainstTorch(*rivals_));
  report_.Note(absl::StrFormat("Rivals (threads: %d): %s. Our fp32 weights differ from torch's by %.1e at most.",
                               threads, *versions, difference));
  return absl::OkStatus();
}

absl::Status OptimizerBench::MeasureOwn(const Model& model, int threads) {
  ASSIGN_OR_RETURN(const Mapping updated, Mapping::Create(kUpdateBytes, 0));
  const double moved = kBf16SrFp32.MovedBytes() * 1e9 / NanosecondsAnElement(model);  // bytes a step
  Jobs jobs;
  Rounds rounds;
  rounds.Add("bound", [&] {
    const int64_t share = kUpdateBytes / threads / 64 * 64;
    const auto update = [&] { team_->Run([&](int rank) { UpdateInPlace(updated.data() + rank * share, share, 1); }); };
    return SecondsOf(update, clock_) * moved / static_cast<double>(2 * share * threads);
  });
  const auto add = [&](const char* name, const StepFormats& formats, OptimizerStepFn step = BestOptimizerStep()) {
    return AddJob(name, model, formats, step, jobs, rounds);
  };
  RETURN_IF_ERROR(add("fp32", kBf16SrFp32));
  RETURN_IF_ERROR(add("nearest", kNearest));
  RETURN_IF_ERROR(add("dyn8", Bf16Sr(StateFormat::kDyn8)));
  RETURN_IF_ERROR(add("fp8x32", Bf16Sr(StateFormat::kFp8x32)));
  RETURN_IF_ERROR(add("dyn8, fp32 weights", kDyn8Fp32));
  if (SimdSupported()) RETURN_IF_ERROR(add("table", kDyn8Fp32, TableStep));
  RETURN_IF_ERROR(rounds.Measure(1, flags_.rounds));
  AddOwn(model, threads, rounds);
  report_.Note(NameOf(model, threads,
                      absl::StrFormat("the update in place moved %.1f GB/s; machine: %s",
                                      moved / SpreadOf(rounds.seconds("bound")).median * 1e-9, MachineNow())));
  return absl::OkStatus();
}

void OptimizerBench::AddOwn(const Model& model, int threads, const Rounds& rounds) {
  const double scale = NanosecondsAnElement(model);
  const auto cost = [&](const char* what, const char* ours, const char* other, double goal) {
    report_.Add(CompareCost(NameOf(model, threads, what), rounds.seconds(ours), rounds.seconds(other), scale,
                            Goal::AtMost(goal)));
  };
  report_.Add(Compare(NameOf(model, threads, "bf16_sr + fp32, share of the update in place's speed, ns"),
                      rounds.seconds("fp32"), rounds.seconds("bound"), scale, Goal::AtLeast(threads == 1 ? 0.8 : 0.9)));
  cost("draws: bf16_sr, times bf16, ns", "fp32", "nearest", 1.25);
  cost("dyn8 states, times fp32 ones, ns", "dyn8", "fp32", 2);
  cost("fp8x32 states, times fp32 ones, ns", "fp8x32", "fp32", 1.5);
  if (SimdSupported()) {
    report_.Add(Compare(NameOf(model, threads, "fp32 + dyn8 / table and binary search, ns"),
                        rounds.seconds("dyn8, fp32 weights"), rounds.seconds("table"), scale, Goal::AtLeast(20)));
  }
}

// Those that could be made; of the others a note says why not.
absl::StatusOr<std::set<std::string>> OptimizerBench::MakeRivals(const Model& model, const std::vector<Against>& rows) {
  std::set<std::string> made, failed;
  RETURN_IF_ERROR(rivals_->Ask(absl::StrCat("tensors ", model.Shapes())).status());
  for (const Against& row : rows) {
    if (made.count(row.rival) + failed.count(row.rival) > 0) continue;
    const absl::Status status = rivals_->Ask(absl::StrCat("make ", row.rival)).status();
    if (status.ok()) {
      made.insert(row.rival);
    } else if (absl::IsInternal(status)) {
      failed.insert(row.rival);
      report_.Note(absl::StrCat("Left out on ", model.name, ": ", row.name, ": ", status.message()));
    } else {
      return status;
    }
  }
  return made;
}

absl::Status OptimizerBench::MeasureAgainst(const Model& model, int threads, const std::vector<Against>& rows,
                                            int num_rounds) {
  if (rivals_ == nullptr) return absl::OkStatus();
  const absl::StatusOr<std::set<std::string>> answer = MakeRivals(model, rows);
  if (!answer.ok()) {  // its process ended or hangs: what was measured before is kept
    report_.Note(absl::StrCat("No rivals from ", model.name, " on: ", answer.status().message()));
    rivals_ = nullptr;
    return absl::OkStatus();
  }
  const std::set<std::string>& made = *answer;
  Jobs jobs;
  Rounds rounds;
  std::set<std::string> added;
  for (const Against& row : rows) {
    if (made.count(row.rival) == 0) continue;
    const std::string ours = row.ours.ToString();
    if (jobs.count(ours) == 0) {
      RETURN_IF_ERROR(AddJob(ours, model, row.ours, BestOptimizerStep(), jobs, rounds));
    }
    if (added.insert(row.rival).second) {
      rounds.Add(row.rival, [this, &row] { return rivals_->AskSeconds(absl::StrCat("step ", row.rival)); });
    }
  }
  RETURN_IF_ERROR(rounds.Measure(0, num_rounds));
  for (const Against& row : rows) {
    if (made.count(row.rival) > 0) AddAgainst(model, threads, row, rounds);
  }
  report_.Note(
      NameOf(model, threads, absl::StrCat("after its rivals, ", num_rounds, " rounds; machine: ", MachineNow())));
  return absl::OkStatus();
}

void OptimizerBench::AddAgainst(const Model& model, int threads, const Against& row, const Rounds& rounds) {
  const std::string ours = row.ours.ToString();
  const double goal = threads == 1 ? row.goal_of_one_thread : row.goal;
  report_.Add(Compare(NameOf(model, threads, absl::StrCat(ours, " / ", row.name, ", ns")), rounds.seconds(ours),
                      rounds.seconds(row.rival), NanosecondsAnElement(model), goal > 0 ? Goal::AtLeast(goal) : Goal()));
}

absl::Status OptimizerBench::Run() {
  report_.Note(absl::StrCat("ns: an element, ", flags_.processor_time ? "processor time of all threads. " : "elapsed. ",
                            flags_.rounds, " rounds. Machine at the start: ", MachineNow(), "."));
  RETURN_IF_ERROR(Annotate(Verify(), "verifying"));
  RETURN_IF_ERROR(MeasureBytes());
  for (const int threads : flags_.threads) {
    team_ = std::make_unique<ThreadTeam>(threads);
    RETURN_IF_ERROR(StartRivals(threads));
    for (const Model& model : Models(flags_.quick)) {
      if (model.own) RETURN_IF_ERROR(MeasureOwn(model, threads));
      if (model.full_precision) RETURN_IF_ERROR(MeasureAgainst(model, threads, kFullPrecision, flags_.rounds));
      if (model.low_precision) {
        RETURN_IF_ERROR(MeasureAgainst(model, threads, kLowPrecision, flags_.quick ? 3 : flags_.rounds));
      }
    }
  }
  return report_.Publish(flags_.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/optimizer: one AdamW step over a flat tensor and over a model's list of tensors, against the memory "
      "bound\n"
      "and, in turns inside one run, the optimizers of torch, torchao, bitsandbytes and DeepSpeed. Checks first that\n"
      "SIMD has the reference's bits and that fp32 AdamW agrees with torch's."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "smaller tensors: a minute on two cores, once the rivals were compiled", flags);
  app.add_flag("--processor-time", flags.processor_time, "processor time instead of elapsed time: for a busy machine");
  app.add_option("--threads", flags.threads, "numbers of threads to measure on")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--python", flags.python, "a Python with torch and other rivals; unset: that of tools/parity_env.sh");
  app.footer(
      "Rivals that are not installed are left out. What they compile when first used (minutes) they keep.\n"
      "Examples:\n"
      "  python3 -m venv rivals && rivals/bin/pip install torch torchao bitsandbytes ninja wheel setuptools\n"
      "  DS_BUILD_OPS=0 rivals/bin/pip install --no-build-isolation deepspeed\n"
      "  bazel run -c opt //bench:optimizer -- --quick --python $PWD/rivals/bin/python\n"
      "  bazel run -c opt //bench:optimizer -- --threads 2 --json $PWD/optimizer.json");
  CLI11_PARSE(app, argc, argv);
  return shardmesh::bench::ExitStatus("optimizer", shardmesh::bench::OptimizerBench(flags).Run());
}
