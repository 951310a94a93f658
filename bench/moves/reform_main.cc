// bench/reform: how long a job is away that lost a worker for good: from kill -9 until a trainer is attached again, on
// the mesh that is left, against the time that its bytes take to be copied.
//
//   bazel run -c opt //bench:reform -- --quick
#include <CLI/CLI.hpp>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/memory_speed.h"
#include "bench/harness/process.h"
#include "bench/harness/service.h"
#include "bench/harness/step_context.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh::bench {
namespace {

constexpr double kLimit = 2;  // seconds beyond the bytes' own time
constexpr absl::Duration kPatience = absl::Seconds(120);
constexpr int kWorkers = 4, kKilled = 1;
constexpr char kMesh[] = "ddp=2,fsdp=2", kTensor[] = "weight";
constexpr int64_t kCopyBytes = int64_t{64} << 20;

struct Flags : CommonFlags {
  int64_t elements = int64_t{32} << 20;
};

class ReformBench {
 public:
  explicit ReformBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    for (int round = 0; round < flags_.rounds; ++round) RETURN_IF_ERROR(Round());
    Report report(absl::StrFormat("bench/reform: a job of %d elements on %s, whose worker of rank %d is killed",
                                  flags_.elements, kMesh, kKilled));
    report.Add(CompareCost("away, beyond the bytes' own time, against 2 s", beyond_,
                           std::vector<double>(beyond_.size(), kLimit), 1, Goal::AtMost(1)));
    report.Add(CompareCost("away, against the bytes' own time, s", away_, copy_, 1));
    report.Note(absl::StrFormat(
        "Verified in each round: the digest of weights and states is that of before, on mesh %s, and the next step is\n"
        "done. Away: from kill -9 to an attached trainer that has the weights. The bytes' own time: a copy, by one\n"
        "thread, of all that the new epoch's members have to write, %.0f MiB: shards, window and publication.\n"
        "fp32 weights, two dyn8 states. A service for each round, %d rounds. Machine: %s.",
        mesh_, static_cast<double>(bytes_) / (1 << 20), flags_.rounds, MachineNow()));
    return report.Publish(flags_.json);
  }

 private:
  JobSpec Spec() const {
    JobSpec spec;
    spec.name = "bench-reform";
    spec.mesh = ParseMeshSpec(kMesh).value();
    spec.gradient_format = Format::kBf16;
    spec.parameters.push_back({kTensor, {flags_.elements}, WeightFormat::kFp32, "", StateFormat::kDyn8});
    return spec;
  }

  absl::StatusOr<std::unique_ptr<Session>> Attach(Job& job) const {
    ASSIGN_OR_RETURN(std::unique_ptr<Session> session, job.Attach({Slot(0)}));
    RETURN_IF_ERROR(session->AwaitWeights(kPatience));
    return session;
  }

  absl::Status Round() {
    ASSIGN_OR_RETURN(const std::unique_ptr<Folder> folder, Folder::Make());
    ASSIGN_OR_RETURN(
        const std::unique_ptr<Service> service,
        Service::Start(folder->path(), "127.0.0.1:0", Process::kEveryCore, absl::ZeroDuration(), kWorkers));
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, service->client().CreateJob(Spec()));
    std::vector<float> weights(flags_.elements);
    for (int64_t i = 0; i < flags_.elements; ++i) weights[i] = StartWeight(static_cast<uint32_t>(i));
    RETURN_IF_ERROR(job->Initialize({{kTensor, weights}}, kPatience));
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> before, Attach(*job));
    RETURN_IF_ERROR(before->Step().status());
    ASSIGN_OR_RETURN(const v1::DigestReply there, job->Digest(kPatience));

    const double begin = MonotonicSeconds();
    service->KillWorker(kKilled);
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> next, service->client().Reopen(*job));
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> after, Attach(*next));
    away_.push_back(MonotonicSeconds() - begin);

    ASSIGN_OR_RETURN(const v1::DigestReply here, next->Digest(kPatience));
    if (here.digest() != there.digest() || here.step() != there.step()) {
      return absl::InternalError("verifying: the job that re-formed has other bits");
    }
    RETURN_IF_ERROR(after->Step().status());
    mesh_ = next->spec().mesh.ToString();
    RETURN_IF_ERROR(CountBytes(*next));
    copy_.push_back(SecondsOf([&] {
      for (int64_t done = 0; done < bytes_; done += kCopyBytes) StreamingCopy(to_.data(), from_.data(), kCopyBytes);
    }));
    beyond_.push_back(std::max(away_.back() - copy_.back(), 0.0));
    return absl::OkStatus();
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

  const Flags flags_;
  std::vector<char> from_ = std::vector<char>(kCopyBytes, 1), to_ = std::vector<char>(kCopyBytes, 2);
  std::vector<double> away_, copy_, beyond_;
  int64_t bytes_ = 0;
  std::string mesh_;
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/reform: how long a job is away that lost one of its four workers for good: from kill -9 until a trainer "
      "is\n"
      "attached again, against the time that its bytes take to be copied."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "3 rounds of 4 Mi elements", flags);
  app.add_option("--elements", flags.elements, "parameters of the model")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 32));
  app.footer("Example:\n  bazel run -c opt //bench:reform -- --json $PWD/reform.json      a minute");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) {
    flags.elements = int64_t{4} << 20;
    flags.rounds = 3;
  }
  return shardmesh::bench::ExitStatus("reform", shardmesh::bench::ReformBench(flags).Run());
}
