// bench/device_pass: a step of a worker on a GPU, from the decision to its result: gate, kernels, arrival;
// and the same by the device's clock, from behind the gate to before the arrival, without the host's part of it. Against the speed of a copy of device memory, and against torch's fused AdamW with the copies that put its weights
// into a window and a publication. tools/gpu_bundle packs it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/rival.h"
#include "bench/optimizer/device_copies.h"
#include "bench/optimizer/device_cuda.h"
#include "bench/optimizer/device_pass_job.h"
#include "core/base/status.h"
#include "kernels/cuda/fused_pass_kernels.h"
#include "local/memory/futex.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kWidth = 4096;  // of the matrices that the job is made of
constexpr double kShareGoal = 0.85;
constexpr uint64_t kSeed = 7;

struct Flags : CommonFlags {
  double elements = 1e9;
  int slots = 1;
  std::string python;
};

JobSpec JobOf(double elements, int slots, int64_t width) {
  JobSpec job;
  job.name = "device-pass";
  job.mesh = *ParseMeshSpec("fsdp=1");
  job.num_slots = slots;
  job.gradient_format = Format::kBf16;
  job.seed = kSeed;
  const auto matrices = std::max<int64_t>(1, static_cast<int64_t>(elements / static_cast<double>(width * width)));
  for (int64_t i = 0; i < matrices; ++i) {
    job.parameters.push_back({absl::StrCat("layers.", i, ".w"), {width, width}, WeightFormat::kBf16Sr});
  }
  return job;
}

// The worker's kernels, and how long the device was at those between a command's gate and its arrival.
class TimedKernels : public PassKernels {
 public:
  const char* Gate(const PassGate& gate, void* stream) const override {
    const char* const error = ours_.Gate(gate, stream);
    return error != nullptr ? error : timer_.Start(stream);
  }
  const char* Step(const PassArgs& args, const OptimizerContext* warp, void* stream) const override {
    return ours_.Step(args, warp, stream);
  }
  const char* Squares(const PassArgs& args, void* stream) const override { return ours_.Squares(args, stream); }
  const char* Arrival(const PassArrival& arrival, void* stream) const override {
    const char* const error = timer_.Mark(stream);
    return error != nullptr ? error : ours_.Arrival(arrival, stream);
  }
  const char* Digests(const StretchDigests& args, void* stream) const override { return ours_.Digests(args, stream); }
  const char* Copies(const StretchCopies& args, void* stream) const override { return ours_.Copies(args, stream); }
  // Of the last command.
  absl::StatusOr<double> Seconds() const {
    double seconds = 0;
    RETURN_IF_ERROR(DeviceStatus(timer_.Seconds(&seconds)));
    return seconds;
  }

 private:
  const PassKernels& ours_ = *BuiltPassKernels();  // WorkerDevice::Open found them
  mutable DeviceTimer timer_;
};

class DevicePassBench {
 public:
  explicit DevicePassBench(const Flags& flags) : flags_(flags), report_("bench/device_pass: a worker's step") {}
  absl::Status Run();

 private:
  absl::Status Verify();
  absl::Status AddRival();
  absl::StatusOr<double> StepInTurn();
  void AddRows();

  const Flags flags_;
  WorkerDevice device_;
  std::unique_ptr<TimedKernels> kernels_;
  double seconds_of_kernels_ = 0;  // of the last turn's last step
  std::unique_ptr<DevicePassJob> job_;
  JobSpec spec_;
  DeviceCopies copies_;
  std::unique_ptr<Rival> rival_;
  bool has_rival_ = false;
  Rounds rounds_;
  Report report_;
};

// Three steps of a smaller job of the same formats, of odd width, have the bits of processors.
absl::Status DevicePassBench::Verify() {
  const JobSpec spec = JobOf(3e6, flags_.slots, 1001);
  ASSIGN_OR_RETURN(auto ours, DevicePassJob::Create(spec, &device_));
  ASSIGN_OR_RETURN(auto theirs, DevicePassJob::Create(spec, nullptr, 4));
  for (DevicePassJob* job : {ours.get(), theirs.get()}) {
    RETURN_IF_ERROR(job->Begin(kSeed));
    for (int step = 0; step < 3; ++step) RETURN_IF_ERROR(job->Step());
  }
  ASSIGN_OR_RETURN(const uint64_t digest, ours->Digest());
  ASSIGN_OR_RETURN(const uint64_t expected, theirs->Digest());
  ASSIGN_OR_RETURN(const uint64_t window, ours->WindowDigest());
  ASSIGN_OR_RETURN(const uint64_t expected_window, theirs->WindowDigest());
  if (digest != expected || window != expected_window) {
    return absl::InternalError("after 3 steps the device's shard or window has not the bits of the processors' pass");
  }
  report_.Note(
      "Verified first: after 3 steps of 3 million elements, shard and window have the bits of the processors' pass.");
  return absl::OkStatus();
}

// torch's fused AdamW in fp32 of the same tensors.
absl::Status DevicePassBench::AddRival() {
  ASSIGN_OR_RETURN(rival_,
                   Rival::Start(flags_.python, {"bench/optimizer/optimizer_rivals.py", "1", "elapsed", "cuda"}));
  ASSIGN_OR_RETURN(const std::string versions, rival_->Ask("versions"));
  std::string tensors = "tensors ";
  for (size_t i = 0; i < spec_.parameters.size(); ++i) absl::StrAppend(&tensors, i > 0 ? "," : "", kWidth, "x", kWidth);
  RETURN_IF_ERROR(rival_->Ask(tensors).status());
  RETURN_IF_ERROR(rival_->Ask("make torch_fused").status());
  rounds_.Add("torch", [this] { return rival_->AskSeconds("step torch_fused"); });
  report_.Note(absl::StrCat("Rival: ", versions, "."));
  has_rival_ = true;
  return absl::OkStatus();
}

void DevicePassBench::AddRows() {
  const double moved = static_cast<double>(job_->MovedBytes());
  const double window = 2.0 * static_cast<double>(spec_.parameters.size() * kWidth * kWidth);  // bf16
  const std::vector<double> bound = DeviceCopies::SecondsToMove(moved, rounds_);
  // Into a window and a publication, each read and written.
  const std::vector<double> copies = DeviceCopies::SecondsToMove(2 * 2 * window, rounds_);
  const std::vector<double>& ours = rounds_.seconds("ours");
  report_.Add(Compare("a step, share of a copy's speed, ms", ours, bound, 1e3, Goal::AtLeast(kShareGoal)));
  const std::vector<double>& kernels = rounds_.seconds("kernels");
  report_.Add(Compare("its kernels, share of a copy's speed, ms", kernels, bound, 1e3));
  const double host = SpreadOf(ours).median - SpreadOf(kernels).median;
  report_.Note(
      absl::StrFormat("%.3g GB a step, %.0f GB/s; %.0f us of the step are the host's, the gate's and the "
                      "arrival's.",
                      moved * 1e-9, moved * 1e-9 / SpreadOf(ours).median, 1e6 * host));
  report_.Note(DeviceCopies::Describe(rounds_));
  if (!has_rival_) return;
  std::vector<double> theirs = rounds_.seconds("torch");
  for (size_t i = 0; i < theirs.size(); ++i) theirs[i] += copies[i];
  report_.Add(Compare("a step / torch AdamW fused in fp32, and its copies, ms", ours, theirs, 1e3));
}

absl::StatusOr<double> DevicePassBench::StepInTurn() {
  const int64_t begin = MonotonicNanos();
  for (int i = 0; i < kStepsInARow; ++i) RETURN_IF_ERROR(job_->Step());
  const int64_t end = MonotonicNanos();
  ASSIGN_OR_RETURN(seconds_of_kernels_, kernels_->Seconds());
  return 1e-9 * static_cast<double>(end - begin) / kStepsInARow;
}

absl::Status DevicePassBench::Run() {
  ASSIGN_OR_RETURN(device_, WorkerDevice::Open(0));
  kernels_ = std::make_unique<TimedKernels>();
  device_.kernels = kernels_.get();
  report_.Note(
      absl::StrCat("ms: of the worker's clock, from the decision to the result. bf16_sr weights, fp32 states, ",
                   flags_.slots, " slots of bf16 gradients. ", DescribeDevice(), "; ", MachineNow(), "."));
  RETURN_IF_ERROR(Verify());
  spec_ = JobOf(flags_.quick ? 1.3e8 : flags_.elements, flags_.slots, kWidth);
  ASSIGN_OR_RETURN(job_, DevicePassJob::Create(spec_, &device_));
  RETURN_IF_ERROR(job_->Begin(kSeed));
  rounds_.Add("ours", [this] { return StepInTurn(); });
  rounds_.Add("kernels", [this]() -> absl::StatusOr<double> { return seconds_of_kernels_; });
  RETURN_IF_ERROR(copies_.AddTo(rounds_));
  if (const absl::Status status = AddRival(); !status.ok()) {
    report_.Note(absl::StrCat("No rival: ", status.message(), "."));
  }
  RETURN_IF_ERROR(rounds_.Measure(1, flags_.rounds));
  AddRows();
  return report_.Publish(flags_.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/device_pass: a step of a worker on a GPU (sum of the slots' gradients, AdamW, weights into the window and "
      "a\n"
      "publication) against the speed of a copy of device memory, and torch's fused AdamW with the same copies.\n"
      "Compares the bits with the pass on processors first."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "130 million elements", flags);
  app.add_option("--elements", flags.elements, "about so many in all; 28 bytes of device memory each, 44 with torch")
      ->capture_default_str()
      ->check(CLI::Range(1e7, 4e9));
  app.add_option("--slots", flags.slots, "of gradients")->capture_default_str()->check(CLI::Range(1, 16));
  app.add_option("--python", flags.python, "a Python with torch (CUDA); without one the rival is left out");
  app.footer(
      "Examples:\n"
      "  tools/gpu_bundle                                  packs this program for a machine with a GPU\n"
      "  shardmesh-gpu/run --full device_pass              there: the whole size");
  CLI11_PARSE(app, argc, argv);
  return shardmesh::bench::ExitStatus("device_pass", shardmesh::bench::DevicePassBench(flags).Run());
}
