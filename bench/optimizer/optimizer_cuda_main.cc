// bench/optimizer_cuda: one AdamW step on a GPU, in the formats of core/format/numeric_formats.h, against the speed of
// a copy of device memory and against the optimizers of torch and torchao in the same run. tools/gpu_bundle packs it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/model_shapes.h"
#include "bench/harness/rival.h"
#include "bench/optimizer/device_copies.h"
#include "bench/optimizer/device_cuda.h"
#include "bench/optimizer/optimizer_cuda_job.h"
#include "core/base/status.h"
#include "kernels/cuda/cuda_available.h"

namespace shardmesh::bench {
namespace {

constexpr int kSamples = 200;  // tiles that are compared with the reference
constexpr double kShareGoal = 0.90;

constexpr StepFormats kFp32 = {WeightFormat::kFp32, StateFormat::kFp32, Format::kFp32};
constexpr StepFormats kBf16Sr = {WeightFormat::kBf16Sr, StateFormat::kFp32, Format::kBf16};
constexpr StepFormats kSplitFp8x32 = {WeightFormat::kBf16Plus8Sr, StateFormat::kFp8x32, Format::kBf16};
constexpr StepFormats kBf16SrFp8x32 = {WeightFormat::kBf16Sr, StateFormat::kFp8x32, Format::kBf16};
constexpr StepFormats kOurs[] = {kFp32, kBf16Sr, kSplitFp8x32, kBf16SrFp8x32};

// A row against another package; `rival` is its name in optimizer_rivals.py.
struct Against {
  const char* rival;
  const char* name;
  StepFormats ours;
};
const Against kRivals[] = {
    {"torch_fused", "torch AdamW fused, fp32", kFp32},
    {"torch_fused", "torch AdamW fused, fp32", kBf16Sr},
    {"torchao_bf16", "torchao _AdamW, bf16 SR, bf16 states", kBf16Sr},
    {"torchao_fp8", "torchao AdamWFp8, bf16 SR", kBf16SrFp8x32},
};

struct Flags : CommonFlags {
  double elements = 1e9;
  std::string python;
};

class OptimizerCudaBench {
 public:
  explicit OptimizerCudaBench(const Flags& flags) : flags_(flags), report_("bench/optimizer_cuda: one AdamW step") {}
  absl::Status Run();

 private:
  void MakeModel();
  absl::Status MakeJobs();
  void AddRivals();
  absl::Status MakeRivals();
  void AddRows();

  const Flags flags_;
  DeviceCopies copies_;
  std::vector<NamedShape> parameters_;
  std::vector<int64_t> sizes_;
  int64_t num_elements_ = 0;
  std::map<std::string, std::unique_ptr<OptimizerCudaJob>> jobs_;
  std::unique_ptr<Rival> rivals_;
  std::map<std::string, bool> made_;
  Rounds rounds_;
  Report report_;
};

// As many of GPT-2's layers and embeddings as are needed, one model after the other.
void OptimizerCudaBench::MakeModel() {
  const double wanted = flags_.quick ? 1.24e8 : flags_.elements;
  while (static_cast<double>(num_elements_) < 0.99 * wanted) {
    for (const NamedShape& parameter : Gpt2_124M().parameters) {
      parameters_.push_back(parameter);
      sizes_.push_back(ModelShapes{"", {parameter}}.NumElements());
      num_elements_ += sizes_.back();
      if (static_cast<double>(num_elements_) >= wanted) break;
    }
  }
  report_.Note(absl::StrFormat("%d tensors of GPT-2 (124M), one after the other: %.3g elements.", sizes_.size(),
                               static_cast<double>(num_elements_)));
}

absl::Status OptimizerCudaBench::MakeJobs() {
  for (const StepFormats& formats : kOurs) {
    ASSIGN_OR_RETURN(auto job, OptimizerCudaJob::Create(sizes_, formats));
    for (int step = 0; step < 3; ++step) RETURN_IF_ERROR(job->Step());
    RETURN_IF_ERROR(Annotate(job->Verify(kSamples), "verifying"));
    OptimizerCudaJob* raw = job.get();
    rounds_.Add(formats.ToString(),
                [this, raw] { return copies_.SecondsOnDevice([raw] { return raw->Step(); }, kStepsInARow); });
    jobs_[formats.ToString()] = std::move(job);
  }
  report_.Note(
      absl::StrCat("Verified first: ", kSamples, " tiles of each job have the reference's bits after 3 steps."));
  return absl::OkStatus();
}

// Starts them and makes those that can be made; of the others a note says why not.
absl::Status OptimizerCudaBench::MakeRivals() {
  ASSIGN_OR_RETURN(rivals_,
                   Rival::Start(flags_.python, {"bench/optimizer/optimizer_rivals.py", "1", "elapsed", "cuda"}));
  ASSIGN_OR_RETURN(const std::string versions, rivals_->Ask("versions"));
  report_.Note(absl::StrCat("Rivals: ", versions, "."));
  const auto shape = [](std::string* out, const NamedShape& p) { absl::StrAppend(out, absl::StrJoin(p.shape, "x")); };
  RETURN_IF_ERROR(rivals_->Ask(absl::StrCat("tensors ", absl::StrJoin(parameters_, ",", shape))).status());
  for (const Against& row : kRivals) {
    if (made_.count(row.rival) > 0) continue;
    const absl::Status status = rivals_->Ask(absl::StrCat("make ", row.rival)).status();
    made_[row.rival] = status.ok();
    if (!status.ok() && !absl::IsInternal(status)) return status;
    if (!status.ok()) report_.Note(absl::StrCat("Left out: ", row.name, ": ", status.message()));
  }
  return absl::OkStatus();
}

void OptimizerCudaBench::AddRivals() {
  const absl::Status status = MakeRivals();
  if (!status.ok()) {
    report_.Note(absl::StrCat("No rivals: ", status.message(), "."));
    made_.clear();
  }
  for (const auto& [rival, made] : made_) {
    if (!made) continue;
    rounds_.Add(rival, [this, name = rival] { return rivals_->AskSeconds(absl::StrCat("step ", name)); });
  }
}

void OptimizerCudaBench::AddRows() {
  for (const StepFormats& formats : kOurs) {
    const double moved = formats.MovedBytes() * static_cast<double>(num_elements_);
    const std::vector<double> bound = DeviceCopies::SecondsToMove(moved, rounds_);
    const std::vector<double>& ours = rounds_.seconds(formats.ToString());
    report_.Add(Compare(absl::StrCat(formats.ToString(), ", share of a copy's speed, ms"), ours, bound, 1e3,
                        Goal::AtLeast(kShareGoal)));
    report_.Note(absl::StrFormat("%s: %.4g bytes an element, %.0f GB/s.", formats.ToString(), formats.MovedBytes(),
                                 moved * 1e-9 / SpreadOf(ours).median));
  }
  for (const Against& row : kRivals) {
    if (!made_[row.rival]) continue;
    const std::string ours = row.ours.ToString();
    report_.Add(
        Compare(absl::StrCat(ours, " / ", row.name, ", ms"), rounds_.seconds(ours), rounds_.seconds(row.rival), 1e3));
  }
  report_.Note(DeviceCopies::Describe(rounds_));
}

absl::Status OptimizerCudaBench::Run() {
  RETURN_IF_ERROR(CudaAvailable());
  report_.Note(absl::StrCat("ms: a step of all tensors, on the device's clock, ", kStepsInARow, " in a row. ",
                            flags_.rounds, " rounds. ", DescribeDevice(), "; ", MachineNow(), "."));
  MakeModel();
  RETURN_IF_ERROR(copies_.AddTo(rounds_));
  RETURN_IF_ERROR(MakeJobs());
  AddRivals();
  RETURN_IF_ERROR(rounds_.Measure(1, flags_.rounds));
  AddRows();
  return report_.Publish(flags_.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/optimizer_cuda: one AdamW step of a list of tensors on a GPU, as one launch, against the speed of a copy "
      "of\n"
      "device memory and, in turns inside one run, the optimizers of torch and torchao. Compares a sample of tiles "
      "with\n"
      "the reference first."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "124 million elements", flags);
  app.add_option("--elements", flags.elements, "about so many in all; 50 bytes of device memory each, 90 with rivals")
      ->capture_default_str()
      ->check(CLI::Range(1e6, 4e9));
  app.add_option("--python", flags.python, "a Python with torch (CUDA) and torchao; without one rivals are left out");
  app.footer(
      "Examples:\n"
      "  tools/gpu_bundle                                  packs this program for a machine with a GPU\n"
      "  shardmesh-gpu/run --full optimizer_cuda           there: the whole size\n"
      "  bench/optimizer_cuda --quick --python $(which python3) --json rows.json");
  CLI11_PARSE(app, argc, argv);
  return shardmesh::bench::ExitStatus("optimizer_cuda", shardmesh::bench::OptimizerCudaBench(flags).Run());
}
