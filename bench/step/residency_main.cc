// bench/residency: a training iteration with full and with bucket residency, in turns: one attached trainer reads all
// weights and writes all gradients, bucket by bucket, and steps; and what the host holds meanwhile.
//
//   bazel run -c opt //bench:residency -- --quick --json residency.json
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "core/format/format.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int64_t kTensorElements = int64_t{1} << 20;

struct Flags : CommonFlags {
  int mebi_elements = 64;
  int slots = 2;
};

// What the kernel holds of a job's windows, at most of what was seen in an iteration.
struct Held {
  int64_t window = 0, slots = 0, sums = 0;
};

class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Start(Client& client, const Flags& flags, Residency residency) {
    JobSpec spec;
    spec.name = residency == Residency::kFull ? "full" : "bucket";
    ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec("fsdp=1"));
    spec.num_slots = flags.slots;
    spec.residency = residency;
    spec.bucket_elements = 4 * kTensorElements;
    for (int i = 0; i < flags.mebi_elements; ++i) {
      spec.parameters.push_back({absl::StrCat("layers.", i, ".weight"), {kTensorElements}, WeightFormat::kBf16Sr});
    }
    auto training = std::unique_ptr<Training>(new Training);
    ASSIGN_OR_RETURN(training->job_, client.CreateJob(spec));
    std::map<std::string, std::vector<float>> weights;
    for (const ParameterSpec& p : spec.parameters) weights[p.name].assign(kTensorElements, 0.5f);
    RETURN_IF_ERROR(training->job_->Initialize(weights, kPatience));
    std::vector<Slot> slots;
    for (int s = 0; s < flags.slots; ++s) slots.push_back(Slot(s));
    ASSIGN_OR_RETURN(training->session_, training->job_->Attach(slots));
    RETURN_IF_ERROR(training->session_->AwaitWeights(kPatience));
    training->source_.assign(kTensorElements, FloatToBf16Rne(0.001f));
    return training;
  }

  // Seconds of a whole iteration. `look`: notes what is held after each bucket.
  absl::StatusOr<double> Iterate(bool look = false) {
    const double start = MonotonicSeconds();
    const int buckets = static_cast<int>(job_->plan().buckets().size());
    for (int b = 0; b < buckets; ++b) {  // forward
      if (b + 1 < buckets) RETURN_IF_ERROR(session_->Prefetch(b + 1));
      RETURN_IF_ERROR(session_->Acquire(b, kPatience));
      RETURN_IF_ERROR(ReadWeights(b));
      if (look) RETURN_IF_ERROR(Look());
      RETURN_IF_ERROR(session_->Release(b));
    }
    for (int b = buckets - 1; b >= 0; --b) {  // backward
      RETURN_IF_ERROR(WriteGradients(b));
      if (look) RETURN_IF_ERROR(Look());
      RETURN_IF_ERROR(session_->DeclareBucket(b, kPatience));
    }
    const double step = MonotonicSeconds();
    RETURN_IF_ERROR(session_->Step().status());
    step_seconds_ = MonotonicSeconds() - step;
    return MonotonicSeconds() - start;
  }

  double step_seconds() const { return step_seconds_; }
  const Held& held() const { return held_; }
  absl::StatusOr<uint64_t> Digest() const {
    ASSIGN_OR_RETURN(const v1::DigestReply reply, job_->Digest(kPatience));
    return reply.digest();
  }

 private:
  Training() = default;

  absl::Status ReadWeights(int bucket) {
    for (const ParameterSpec& p : job_->spec().parameters) {
      if (*session_->bucket(p.name) != bucket) continue;
      ASSIGN_OR_RETURN(const ConstTensorView view, session_->parameter(p.name));
      const auto* words = static_cast<const uint64_t*>(view.data);
      read_ += std::accumulate(words, words + view.data_bytes() / 8, uint64_t{0});
    }
    return absl::OkStatus();
  }

  absl::Status WriteGradients(int bucket) {
    for (const ParameterSpec& p : job_->spec().parameters) {
      if (*session_->bucket(p.name) != bucket) continue;
      for (Slot slot : session_->slots()) {
        ASSIGN_OR_RETURN(const TensorView view, session_->gradient(slot, p.name));
        std::memcpy(view.data, source_.data(), source_.size() * sizeof(source_[0]));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Look() {
    ASSIGN_OR_RETURN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kPatience));
    for (const v1::GetStatusReply::Job& job : status.jobs()) {
      if (job.name() != job_->spec().name) continue;
      held_.window = std::max(held_.window, job.window_resident_bytes());
      held_.slots = std::max(held_.slots, job.slot_resident_bytes());
      held_.sums = job.sum_bytes();
    }
    return absl::OkStatus();
  }

  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  std::vector<uint16_t> source_;
  uint64_t read_ = 0;  // so that the reading is done
  double step_seconds_ = 0;
  Held held_;
};

absl::Status Run(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Folder> folder, Folder::Make());
  ASSIGN_OR_RETURN(const std::unique_ptr<Service> service, Service::Start(folder->path(), "127.0.0.1:0", 0));
  PinTo(1);
  ASSIGN_OR_RETURN(const auto full, Training::Start(service->client(), flags, Residency::kFull));
  ASSIGN_OR_RETURN(const auto bucket, Training::Start(service->client(), flags, Residency::kBucket));
  for (int i = 0; i < 2; ++i) {  // two steps: up and down
    RETURN_IF_ERROR(full->Iterate(true).status());
    RETURN_IF_ERROR(bucket->Iterate(true).status());
  }
  ASSIGN_OR_RETURN(const uint64_t expected, full->Digest());
  ASSIGN_OR_RETURN(const uint64_t digest, bucket->Digest());
  if (digest != expected) return absl::InternalError("the two residencies did not learn the same");
  Rounds rounds;
  rounds.Add("full", [&] { return full->Iterate(); });
  rounds.Add("full step", [&]() -> absl::StatusOr<double> { return full->step_seconds(); });
  rounds.Add("bucket", [&] { return bucket->Iterate(); });
  rounds.Add("bucket step", [&]() -> absl::StatusOr<double> { return bucket->step_seconds(); });
  RETURN_IF_ERROR(rounds.Measure(1, flags.rounds));
  Report report(absl::StrCat("bench/residency: ", flags.mebi_elements, " Mi elements in buckets of 4 Mi, ", flags.slots,
                             " slots bf16, weights bf16_sr, states fp32, one worker and one trainer"));
  report.Add(CompareCost("iteration, bucket times full, ms", rounds.seconds("bucket"), rounds.seconds("full"), 1e3));
  report.Add(CompareCost("Step alone, bucket times full, ms", rounds.seconds("bucket step"),
                         rounds.seconds("full step"), 1e3));
  const auto memory = [&](const char* name, int64_t ours, int64_t rival) {
    report.Add(CompareCost(name, {static_cast<double>(ours)}, {static_cast<double>(rival)}, 1.0 / (1 << 20)));
  };
  memory("window held, bucket against full, MiB", bucket->held().window, full->held().window);
  memory("slots held, bucket against full, MiB", bucket->held().slots, full->held().slots);
  memory("slots and sums, bucket against full, MiB", bucket->held().slots + bucket->held().sums, full->held().slots);
  report.Note("Verified first: after two iterations both have the same digest of weights and states.");
  report.Note(
      absl::StrFormat("Iteration: every weight read, every gradient written and checked, the step. %d rounds. %s.",
                      flags.rounds, MachineNow()));
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/residency: a training iteration with full and with bucket residency, in turns inside one run, and the\n"
      "memory of both. Checks first that both give the same bits."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 Mi elements", flags);
  app.add_option("--elements", flags.mebi_elements, "Mi elements of the model")
      ->capture_default_str()
      ->check(CLI::Range(4, 1024));
  app.add_option("--slots", flags.slots, "gradient slots, all of the one trainer")
      ->capture_default_str()
      ->check(CLI::Range(1, 16));
  app.footer("Examples:\n  bazel run -c opt //bench:residency -- --elements 64 --slots 4");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.mebi_elements = 16;
  return shardmesh::bench::ExitStatus("residency", shardmesh::bench::Run(flags));
}
