// bench/step_latency: what a step of a small model takes beyond its arithmetic: an attached trainer and one worker, a
// core each, through Session::Step.
//
//   bazel run -c opt //bench:step_latency -- --quick
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"
#include "bench/harness/step_context.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "kernels/cpu/processor.h"

namespace shardmesh::bench {
namespace {

constexpr int kTrainerCore = 0, kWorkerCore = 1;
constexpr double kSleepingLimit = 200e-6, kSpinningLimit = 30e-6;  // seconds
constexpr absl::Duration kSpin = absl::Milliseconds(3);  // longer than a step, shorter than a round of the others
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr char kTensor[] = "weight";

struct Flags : CommonFlags {
  int64_t elements = 100'000;
  int steps = 1000;
};

// Another process, on the worker's core, that answers each message of a socket like that of attached trainers with the
// same message. REQUIRES: the calling process has one thread.
class Echo {
 public:
  Echo() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      PinTo(kWorkerCore);
      char byte;
      while (recv(ends[1], &byte, 1, 0) == 1 && send(ends[1], &byte, 1, MSG_NOSIGNAL) == 1) continue;
      _exit(0);
    }
    close(ends[1]);
    socket_ = ends[0];
  }
  ~Echo() {
    close(socket_);  // it ends
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  absl::Status RoundTrip() const {
    char byte = 0;
    if (send(socket_, &byte, 1, MSG_NOSIGNAL) == 1 && recv(socket_, &byte, 1, 0) == 1) return absl::OkStatus();
    return absl::InternalError("the process that echoes is gone");
  }

 private:
  int socket_ = -1;
  pid_t pid_ = -1;
};

// The same steps in this process: the kernel alone.
class Twin {
 public:
  Twin(const std::vector<float>& weights, const std::vector<float>& gradient, const JobSpec& job)
      : job_(job), gradient_(gradient), weights_(weights), m_(weights.size()), v_(m_), window_(m_), publication_(m_) {}

  void Step() {
    OptimizerContext context = AdamWContext({}, ++step_);
    context.hyper = job_.optimizer;
    context.scalars = ComputeStepScalars(job_.optimizer, step_).value();
    context.seed = job_.seed;
    const void* gradient = gradient_.data();
    OptimizerRun run;
    run.gradients = &gradient;
    run.num_slots = 1;
    run.weights_in = run.weights_out = {weights_.data(), nullptr};
    run.states_in[0] = run.states_out[0] = {m_.data(), nullptr};
    run.states_in[1] = run.states_out[1] = {v_.data(), nullptr};
    run.copies[0] = window_.data();
    run.copies[1] = publication_.data();
    run.num_copies = 2;
    run.num_elements = static_cast<int64_t>(weights_.size());
    kernel_(context, run);
  }
  const std::vector<float>& weights() const { return weights_; }
  int64_t step() const { return step_; }

 private:
  const OptimizerStepFn kernel_ = BestOptimizerStep();
  const JobSpec& job_;
  const std::vector<float>& gradient_;
  std::vector<float> weights_, m_, v_, window_, publication_;
  int64_t step_ = 0;
};

// A service with a job of one parameter, its trainer, and what the job must learn.
class Side {
 public:
  absl::Status SetUp(int64_t elements, absl::Duration spin) {
    ASSIGN_OR_RETURN(folder_, Folder::Make());
    ASSIGN_OR_RETURN(service_, Service::Start(folder_->path(), "127.0.0.1:0", kWorkerCore, spin));
    JobSpec spec;
    spec.name = "bench-step-latency";
    ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec("fsdp=1"));
    spec.gradient_format = Format::kFp32;
    spec.parameters.push_back({kTensor, {elements}, WeightFormat::kFp32, ""});
    ASSIGN_OR_RETURN(job_, service_->client().CreateJob(spec));
    std::vector<float> weights;
    for (int64_t i = 0; i < elements; ++i) {
      weights.push_back(StartWeight(static_cast<uint32_t>(i)));
      gradient_.push_back(StartGradient(static_cast<uint32_t>(i)));
    }
    twin_ = std::make_unique<Twin>(weights, gradient_, job_->spec());
    RETURN_IF_ERROR(job_->Initialize({{kTensor, weights}}, kPatience));
    ASSIGN_OR_RETURN(session_, job_->Attach({Slot(0)}));
    RETURN_IF_ERROR(session_->AwaitWeights(kPatience));
    ASSIGN_OR_RETURN(const TensorView gradient, session_->gradient(Slot(0), kTensor));
    std::memcpy(gradient.data, gradient_.data(), gradient_.size() * sizeof(float));
    return absl::OkStatus();
  }

  absl::Status Step() { return session_->Step().status(); }
  absl::Status Kernel() {
    twin_->Step();
    return absl::OkStatus();
  }

  // Bit for bit, after as many calls of Step as of Kernel.
  absl::Status Verify() const {
    ASSIGN_OR_RETURN(const ConstTensorView window, session_->parameter(kTensor));
    if (session_->committed_step() == shardmesh::Step(twin_->step()) &&
        std::memcmp(window.data, twin_->weights().data(), gradient_.size() * sizeof(float)) == 0)
      return absl::OkStatus();
    return absl::InternalError(absl::StrCat("verifying: the weights of step ", twin_->step(),
                                            " are not what the kernel makes of the same gradients"));
  }
  int64_t step() const { return twin_->step(); }

 private:
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Service> service_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  std::vector<float> gradient_;
  std::unique_ptr<Twin> twin_;
};

class LatencyBench {
 public:
  explicit LatencyBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    PinTo(kTrainerCore);
    RETURN_IF_ERROR(sleeping_.SetUp(flags_.elements, absl::ZeroDuration()));
    RETURN_IF_ERROR(spinning_.SetUp(flags_.elements, kSpin));
    for (Side* side : {&sleeping_, &spinning_}) {
      RETURN_IF_ERROR(side->Step());
      RETURN_IF_ERROR(side->Kernel());
      RETURN_IF_ERROR(side->Verify());
    }
    RETURN_IF_ERROR(Measure());
    RETURN_IF_ERROR(sleeping_.Verify());
    RETURN_IF_ERROR(spinning_.Verify());
    return Publish();
  }

 private:
  // The median of a round's calls.
  void Add(const char* name, std::function<absl::Status()> call) {
    rounds_.Add(name, [this, call = std::move(call)]() -> absl::StatusOr<double> {
      std::vector<double> seconds;
      for (int i = 0; i < flags_.steps; ++i) {
        const double start = MonotonicSeconds();
        RETURN_IF_ERROR(call());
        seconds.push_back(MonotonicSeconds() - start);
      }
      return SpreadOf(std::move(seconds)).median;
    });
  }

  absl::Status Measure() {
    Add("round trip", [this] { return echo_.RoundTrip(); });
    Add("sleeping", [this] { return sleeping_.Step(); });
    Add("sleeping kernel", [this] { return sleeping_.Kernel(); });
    Add("spinning", [this] { return spinning_.Step(); });
    Add("spinning kernel", [this] { return spinning_.Kernel(); });
    return rounds_.Measure(1, flags_.rounds);
  }

  std::vector<double> BeyondKernel(const std::string& side) const {
    std::vector<double> beyond = rounds_.seconds(side);
    for (int i = 0; i < flags_.rounds; ++i) beyond[i] -= rounds_.seconds(side + " kernel")[i];
    return beyond;
  }

  absl::Status Publish() const {
    Report report(absl::StrCat("bench/step_latency: ", flags_.elements,
                               " fp32 parameters, one attached trainer, one worker, a core each"));
    const auto limit = [this](double seconds) { return std::vector<double>(flags_.rounds, seconds); };
    report.Add(CompareCost("step beyond its kernel, sleeping, times its limit of 200 us, us", BeyondKernel("sleeping"),
                           limit(kSleepingLimit), 1e6, Goal::AtMost(1)));
    report.Add(CompareCost("step beyond its kernel, spinning, times its limit of 30 us, us", BeyondKernel("spinning"),
                           limit(kSpinningLimit), 1e6, Goal::AtMost(1)));
    for (const std::string side : {"sleeping", "spinning"}) {
      report.Add(CompareCost(absl::StrCat("step, ", side, ", times its kernel, us"), rounds_.seconds(side),
                             rounds_.seconds(side + " kernel"), 1e6));
    }
    report.Add(CompareCost("step beyond its kernel, sleeping, times a round trip over a socket, us",
                           BeyondKernel("sleeping"), rounds_.seconds("round trip"), 1e6));
    report.Note(absl::StrFormat(
        "Verified first and at the end (step %d), bit by bit: the weights are what the kernel makes in one process.",
        sleeping_.step()));
    report.Note(absl::StrFormat(
        "A round's figure is the median of %d calls. Step: Session::Step, with the client's check of the gradients.\n"
        "Kernel: the same step in the trainer's process, in cache. Spinning: worker and client poll for %s before\n"
        "they sleep; a service of its own. %d rounds. Kernel: %s. Machine: %s.",
        flags_.steps, absl::FormatDuration(kSpin), flags_.rounds, BestImplementation(), MachineNow()));
    return report.Publish(flags_.json);
  }

  const Flags flags_;
  Echo echo_;  // forks, so before anything that has threads
  Side sleeping_, spinning_;
  Rounds rounds_;
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/step_latency: what a step of a small model takes beyond its arithmetic: an attached trainer and one "
      "worker\n"
      "process, a core each, step after step through the C++ client; the kernel alone in turns inside the same run."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "200 steps a round", flags);
  app.add_option("--elements", flags.elements, "parameters of the model")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--steps", flags.steps, "steps of a round")->capture_default_str()->check(CLI::Range(1, 1000000));
  app.footer("Example:\n  bazel run -c opt //bench:step_latency -- --json $PWD/step_latency.json      seconds");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.steps = 200;
  return shardmesh::bench::ExitStatus("step_latency", shardmesh::bench::LatencyBench(flags).Run());
}
