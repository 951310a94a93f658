// bench/reshard: how long training pauses when its job goes to another mesh, 2 -> 4 -> 3 workers, against the time that
// its bytes take to be copied.
//
//   bazel run -c opt //bench:reshard -- --quick
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/memory_speed.h"
#include "bench/harness/model_shapes.h"
#include "bench/harness/process.h"
#include "bench/harness/service.h"
#include "bench/harness/step_context.h"
#include "client/cpp/checkpoint/reshard.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh::bench {
namespace {

constexpr double kLimit = 0.2;  // seconds beyond the bytes' own time
constexpr absl::Duration kPatience = absl::Seconds(120);
constexpr int kWorkers = 4, kStepsBetween = 4, kLearning = 2;
constexpr int64_t kCopyBytes = int64_t{64} << 20;
constexpr char kReference[] = "bench-reshard-reference", kJob[] = "bench-reshard";
const std::vector<std::string> kMeshes = {"fsdp=2", "fsdp=4", "fsdp=3"};

struct Flags : CommonFlags {
  std::string weights = "bf16_sr";
  bool small = false;
};

// One trainer that steps on and on, wherever the job goes, and notes when.
class Trainer {
 public:
  Trainer(Client& client, std::shared_ptr<Job> job) : client_(client), job_(std::move(job)) {}
  ~Trainer() { Stop().IgnoreError(); }

  // The first steps have gradients, all later ones zeros: new windows need not be written.
  absl::Status Learn() {
    RETURN_IF_ERROR(Attach());
    for (int step = 0; step <= kLearning; ++step) {
      for (const ParameterSpec& parameter : job_->spec().parameters) {
        ASSIGN_OR_RETURN(const TensorView view, session_->gradient(Slot(0), parameter.name));
        auto* const values = static_cast<uint16_t*>(view.data);
        for (int64_t i = 0; i < view.num_elements; ++i) {
          values[i] = step == kLearning ? 0 : FloatToBf16Rne(StartWeight(static_cast<uint32_t>(i + step)));
        }
      }
      RETURN_IF_ERROR(Step());
    }
    return absl::OkStatus();
  }
  void Start() {
    thread_ = std::thread([this] {
      while (!stop_.load() && status_.ok()) status_ = StepOrMove();
    });
  }
  absl::Status Stop() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  void AwaitSteps(int64_t more) const {
    const int64_t until = steps_.load() + more;
    while (steps_.load() < until && !stop_.load()) absl::SleepFor(absl::Milliseconds(1));
  }
  absl::Status StepTo(int64_t steps) {
    while (steps_.load() < steps) RETURN_IF_ERROR(Step());
    return absl::OkStatus();
  }

  int64_t steps() const { return steps_.load(); }
  Job& job() const { return *job_; }
  // After Stop: seconds of a step; from the last commit before each move to the first after it, less that; and until
  // the trainer was attached again.
  double StepSeconds() const { return SpreadOf(step_seconds_).median; }
  std::vector<double> Pauses() const {
    std::vector<double> pauses;
    for (const double away : commit_to_commit_) pauses.push_back(std::max(away - StepSeconds(), 0.0));
    return pauses;
  }
  const std::vector<double>& away() const { return away_; }

 private:
  absl::Status Attach() {
    ASSIGN_OR_RETURN(session_, job_->Attach({Slot(0)}));
    return session_->AwaitWeights(kPatience);
  }
  absl::Status Step() {
    RETURN_IF_ERROR(session_->Step().status());
    const double now = MonotonicSeconds();
    if (moved_) {
      commit_to_commit_.push_back(now - last_commit_);
    } else if (steps_.load() > kLearning + 1) {
      step_seconds_.push_back(now - last_commit_);
    }
    moved_ = false;
    last_commit_ = now;
    steps_.fetch_add(1);
    return absl::OkStatus();
  }
  absl::Status StepOrMove() {
    const absl::Status stepped = Step();
    if (!absl::IsUnavailable(stepped)) return stepped;
    session_.reset();
    ASSIGN_OR_RETURN(job_, client_.Reopen(*job_));
    RETURN_IF_ERROR(Attach());
    away_.push_back(MonotonicSeconds() - last_commit_);
    // The step that was under way may have been decided.
    ASSIGN_OR_RETURN(const v1::DigestReply at, job_->Digest(kPatience));
    steps_.store(at.step());
    moved_ = true;
    return absl::OkStatus();
  }

  Client& client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> steps_{0};
  absl::Status status_;
  double last_commit_ = 0;
  bool moved_ = false;
  std::vector<double> step_seconds_, commit_to_commit_, away_;
};

class ReshardBench {
 public:
  explicit ReshardBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    for (int round = 0; round < flags_.rounds; ++round) RETURN_IF_ERROR(Round());
    Report report(absl::StrFormat("bench/reshard: training pauses when its job of %d elements moves", NumElements()));
    for (size_t move = 0; move < moves_.size(); ++move) {
      const Move& m = moves_[move];
      const std::string way = absl::StrCat(kMeshes[move], " -> ", kMeshes[move + 1]);
      const std::vector<double> limits(m.beyond.size(), kLimit);
      report.Add(CompareCost(way + ": pause beyond the bytes' own time, against 200 ms", m.beyond, limits, 1e3,
                             Goal::AtMost(1)));
      report.Add(CompareCost(way + ": pause, against the bytes' own time, ms", m.pause, m.copy, 1e3));
      report.Add(CompareCost(way + ": until a trainer is attached again, against the same, ms", m.away, m.copy, 1e3));
      report.Add(CompareCost(way + ": the whole of it, against a step, ms", m.whole, m.step, 1e3));
    }
    report.Note(absl::StrFormat(
        "Verified in each round: the digest of weights and states is that of a job that took as many steps on one "
        "worker.\n"
        "Pause: from the last commit before the move to the first one after it, less a step. The bytes' own time: a "
        "copy,\n"
        "by one thread, of all that the new epoch's members have to write: shards, window and publication (%.0f MiB).\n"
        "The whole: from asking until the job is READY there; meanwhile it trains on, but for the pause.\n"
        "%s weights, two dyn8 states, one slot. %d rounds. Machine: %s.",
        static_cast<double>(bytes_) / (1 << 20), flags_.weights, flags_.rounds, MachineNow()));
    return report.Publish(flags_.json);
  }

 private:
  struct Move {
    std::vector<double> pause, away, copy, beyond, whole, step;
  };

  int64_t NumElements() const {
    int64_t elements = 0;
    for (const ParameterSpec& parameter : Spec(kJob, "fsdp=1").parameters) elements += parameter.NumElements();
    return elements;
  }
  JobSpec Spec(const std::string& name, const std::string& mesh) const {
    JobSpec spec;
    spec.name = name;
    spec.mesh = ParseMeshSpec(mesh).value();
    spec.gradient_format = Format::kBf16;
    const WeightFormat weights = ParseWeightFormat(flags_.weights).value();
    for (const NamedShape& tensor : Gpt2_124M().parameters) {
      std::vector<int64_t> shape = tensor.shape;
      if (flags_.small) shape[0] = std::max<int64_t>(1, shape[0] / 16);
      spec.parameters.push_back({tensor.name, shape, weights, "", StateFormat::kDyn8});
    }
    return spec;
  }

  absl::StatusOr<std::unique_ptr<Trainer>> Begin(Client& client, const std::string& name, const std::string& mesh) {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(Spec(name, mesh)));
    std::map<std::string, std::vector<float>> weights;
    for (const ParameterSpec& parameter : job->spec().parameters) {
      std::vector<float>& values = weights[parameter.name];
      values.resize(parameter.NumElements());
      for (size_t i = 0; i < values.size(); ++i) values[i] = StartWeight(static_cast<uint32_t>(i));
    }
    RETURN_IF_ERROR(job->Initialize(weights, kPatience));
    auto trainer = std::make_unique<Trainer>(client, job);
    RETURN_IF_ERROR(trainer->Learn());
    return trainer;
  }

  absl::Status Round() {
    ASSIGN_OR_RETURN(const std::unique_ptr<Folder> folder, Folder::Make());
    ASSIGN_OR_RETURN(
        const std::unique_ptr<Service> service,
        Service::Start(folder->path(), "127.0.0.1:0", Process::kEveryCore, absl::ZeroDuration(), kWorkers));
    Client& client = service->client();
    ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer, Begin(client, kJob, kMeshes[0]));
    trainer->Start();
    std::vector<double> whole;
    for (size_t move = 0; move < moves_.size(); ++move) {
      trainer->AwaitSteps(kStepsBetween);
      const double begin = MonotonicSeconds();
      RETURN_IF_ERROR(ReshardJob(client, kJob, ParseMeshSpec(kMeshes[move + 1]).value()).status());
      whole.push_back(MonotonicSeconds() - begin);
      trainer->AwaitSteps(kStepsBetween);
      ASSIGN_OR_RETURN(const std::shared_ptr<Job> now, client.OpenJob(kJob));
      RETURN_IF_ERROR(CountBytes(*now));
      moves_[move].copy.push_back(CopySeconds());
    }
    RETURN_IF_ERROR(trainer->Stop());
    if (trainer->away().size() != moves_.size() || trainer->Pauses().size() != moves_.size()) {
      return absl::InternalError(absl::StrCat("the trainer saw ", trainer->away().size(), " moves"));
    }
    for (size_t move = 0; move < moves_.size(); ++move) {
      Move& m = moves_[move];
      m.pause.push_back(trainer->Pauses()[move]);
      m.away.push_back(trainer->away()[move]);
      m.beyond.push_back(std::max(m.pause.back() - m.copy.back(), 0.0));
      m.whole.push_back(whole[move]);
      m.step.push_back(trainer->StepSeconds());
    }
    return Verify(client, *trainer);
  }

  absl::Status Verify(Client& client, Trainer& trainer) {
    ASSIGN_OR_RETURN(const v1::DigestReply there, trainer.job().Digest(kPatience));
    v1::DeleteJobRequest done;
    done.set_job(kJob);
    RETURN_IF_ERROR(client.coordinator().DeleteJob(done, kPatience).status());
    ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> reference, Begin(client, kReference, "fsdp=1"));
    RETURN_IF_ERROR(reference->StepTo(there.step()));
    ASSIGN_OR_RETURN(const v1::DigestReply here, reference->job().Digest(kPatience));
    if (here.digest() == there.digest() && here.step() == there.step()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("verifying: at step ", there.step(), " the job that moved has other bits"));
  }

  // That the members of the new epoch wrote.
  absl::Status CountBytes(const Job& job) {
    bytes_ = 2 * job.plan().window_bytes();
    for (int rank = 0; rank < job.plan().num_ranks(); ++rank) {
      ASSIGN_OR_RETURN(const v1::GetStatusReply status, job.worker(Rank(rank)).GetStatus(kPatience));
      for (const v1::GetStatusReply::Job& held : status.jobs()) bytes_ += held.shard_bytes();
    }
    return absl::OkStatus();
  }
  double CopySeconds() {
    return SecondsOf([&] {
      for (int64_t done = 0; done < bytes_; done += kCopyBytes) StreamingCopy(to_.data(), from_.data(), kCopyBytes);
    });
  }

  const Flags flags_;
  std::vector<char> from_ = std::vector<char>(kCopyBytes, 1), to_ = std::vector<char>(kCopyBytes, 2);
  std::vector<Move> moves_ = std::vector<Move>(kMeshes.size() - 1);
  int64_t bytes_ = 0;
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/reshard: how long training pauses when its job goes to another mesh, 2 -> 4 -> 3 workers, against the "
      "time\n"
      "that its bytes take to be copied."};
  shardmesh::bench::Flags flags;
  flags.rounds = 5;
  shardmesh::bench::AddCommonFlags(app, "2 rounds of a sixteenth of the model", flags);
  app.add_option("--weights", flags.weights, "their storage format")->capture_default_str();
  app.footer("Example:\n  bazel run -c opt //bench:reshard -- --json $PWD/reshard.json      some minutes");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) {
    flags.small = true;
    flags.rounds = 2;
  }
  return shardmesh::bench::ExitStatus("reshard", shardmesh::bench::ReshardBench(flags).Run());
}
