#include "bench/bulk/bulk_job.h"

#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "kernels/optimizer_step.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kTensorElements = int64_t{4} << 20;
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status Same(const char* what, const void* a, const void* b, int64_t num_bytes) {
  if (std::memcmp(a, b, num_bytes) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " differ from what they must be"));
}

std::string NameOf(int64_t tensor) { return absl::StrCat("layers.", tensor, ".weight"); }

}  // namespace

absl::StatusOr<std::unique_ptr<BulkJob>> BulkJob::Start(const std::string& folder, const std::string& worker_listen,
                                                        int64_t num_bytes, int server_core) {
  std::unique_ptr<BulkJob> bulk(new BulkJob);
  ASSIGN_OR_RETURN(bulk->service_, Service::Start(folder, worker_listen, server_core));
  RETURN_IF_ERROR(bulk->CreateJob(num_bytes));
  return bulk;
}

absl::Status BulkJob::CreateJob(int64_t num_bytes) {
  const int64_t num_elements = num_bytes / static_cast<int64_t>(sizeof(float));
  JobSpec spec;
  spec.name = "bench-bulk";
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec("fsdp=1"));
  spec.gradient_format = Format::kFp32;
  std::map<std::string, std::vector<float>> values;
  for (int64_t i = 0; i < num_elements / kTensorElements; ++i) {
    spec.parameters.push_back({NameOf(i), {kTensorElements}, WeightFormat::kFp32, ""});
    std::vector<float>& value = values[NameOf(i)];
    for (int64_t e = 0; e < kTensorElements; ++e)
      value.push_back(static_cast<float>((e * 7919 + i) % 65521) * 0x1p-20f);
    initial_.insert(initial_.end(), value.begin(), value.end());
  }
  for (int64_t i = 0; i < num_elements; ++i)
    gradient_.push_back(static_cast<float>((i * 104729) % 65521 - 32760) * 0x1p-24f);
  destination_.assign(num_bytes, 1);
  ASSIGN_OR_RETURN(job_, service_->client().CreateJob(spec));
  if (job_->plan().version_bytes() != num_bytes)
    return absl::InternalError("the plan has padding; choose another size");
  return job_->Initialize(values, kPatience);
}

// One slot, so the sum is the gradient itself.
std::vector<float> BulkJob::ExpectedAfterOneStep() const {
  std::vector<float> weights = initial_, m(initial_.size(), 0.0f), v(initial_.size(), 0.0f);
  OptimizerContext context;
  context.hyper = job_->spec().optimizer;
  context.scalars = ComputeStepScalars(context.hyper, 1).value();
  const void* gradient = gradient_.data();
  OptimizerRun run;
  run.gradients = &gradient;
  run.num_slots = 1;
  run.weights_in = run.weights_out = {weights.data(), nullptr};
  run.states_in[0] = run.states_out[0] = {m.data(), nullptr};
  run.states_in[1] = run.states_out[1] = {v.data(), nullptr};
  run.num_elements = static_cast<int64_t>(weights.size());
  OptimizerStepReference(context, run);
  return weights;
}

absl::Status BulkJob::Verify() {
  v1::PullRequest wait;
  wait.set_job(job_->spec().name);
  wait.set_at_least(0);
  RETURN_IF_ERROR(job_->worker(Rank(0))
                      .Pull(
                          wait, [](const auto&) { return absl::OkStatus(); },
                          [](absl::string_view) { return absl::OkStatus(); }, kPatience)
                      .status());
  RETURN_IF_ERROR(Pull().status());
  RETURN_IF_ERROR(Same("the initial weights", destination_.data(), initial_.data(), num_bytes()));
  RETURN_IF_ERROR(Push().status());
  RETURN_IF_ERROR(StepOnce());
  RETURN_IF_ERROR(Pull().status());
  const std::vector<float> expected = ExpectedAfterOneStep();
  RETURN_IF_ERROR(Same("the weights after a step", destination_.data(), expected.data(), num_bytes()));
  RETURN_IF_ERROR(Attach());
  const absl::Status same = Same("the weights in the window", window_, expected.data(), num_bytes());
  Detach();
  return same;
}

absl::StatusOr<double> BulkJob::Pull() {
  v1::PullRequest request;
  request.set_job(job_->spec().name);
  request.set_latest(true);
  char* to = destination_.data();
  const double start = MonotonicSeconds();
  RETURN_IF_ERROR(job_->worker(Rank(0))
                      .Pull(
                          request, [](const auto&) { return absl::OkStatus(); },
                          [&](absl::string_view bytes) {
                            std::memcpy(to, bytes.data(), bytes.size());
                            to += bytes.size();
                            return absl::OkStatus();
                          },
                          kPatience)
                      .status());
  return MonotonicSeconds() - start;
}

absl::StatusOr<double> BulkJob::Push() {
  v1::PushHeader header;
  header.set_job(job_->spec().name);
  header.set_epoch(job_->epoch().value());
  header.set_content(v1::PushHeader::CONTENT_GRADIENT);
  header.set_step(next_step_);
  const absl::string_view bytes(reinterpret_cast<const char*>(gradient_.data()), num_bytes());
  const double start = MonotonicSeconds();
  ASSIGN_OR_RETURN(const v1::PushReply reply, job_->worker(Rank(0)).Push(header, {bytes}, kPatience));
  const double seconds = MonotonicSeconds() - start;
  if (reply.applied())
    return absl::InternalError(absl::StrCat("step ", next_step_, " was applied before it was pushed"));
  return seconds;
}

absl::Status BulkJob::StepOnce() {
  v1::StepRequest request;
  request.set_job(job_->spec().name);
  request.set_epoch(job_->epoch().value());
  request.add_slots(0);
  request.set_step(next_step_++);
  return job_->worker(Rank(0)).Step(request, kPatience).status();
}

absl::Status BulkJob::Attach() {
  ASSIGN_OR_RETURN(session_, job_->Attach({Slot(0)}));
  ASSIGN_OR_RETURN(const ConstTensorView first, session_->parameter(NameOf(0)));
  window_ = static_cast<const char*>(first.data);
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
