#include "bench/versions/counting_job.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(100);

absl::StatusOr<JobSpec> SpecOf(int64_t elements, int publications) {
  JobSpec spec;
  spec.name = CountingJob::kName;
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec("fsdp=1"));
  spec.parameters = {{"w", {elements}}};
  spec.gradient_format = Format::kFp32;
  spec.optimizer = OptimizerHyper::Defaults(OptimizerKind::kSgd);
  spec.optimizer.lr = 1;
  spec.optimizer.momentum = 0;
  spec.publications = publications;
  return spec;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CountingJob>> CountingJob::Start(Client client, int64_t mebibytes, int publications) {
  const int64_t elements = mebibytes * (int64_t{1} << 20) / static_cast<int64_t>(sizeof(float));
  std::unique_ptr<CountingJob> job(new CountingJob(std::move(client)));
  ASSIGN_OR_RETURN(const JobSpec spec, SpecOf(elements, publications));
  ASSIGN_OR_RETURN(job->job_, job->client_.CreateJob(spec));
  RETURN_IF_ERROR(job->job_->Initialize({{"w", std::vector<float>(elements, 0)}}, kPatience));
  ASSIGN_OR_RETURN(job->session_, job->job_->Attach({Slot(0)}));
  RETURN_IF_ERROR(job->session_->AwaitWeights(kPatience));
  ASSIGN_OR_RETURN(const TensorView gradient, job->session_->gradient(Slot(0), "w"));
  std::fill_n(static_cast<float*>(gradient.data), elements, -1.0f);
  return job;
}

CountingJob::~CountingJob() {
  session_.reset();
  if (job_ == nullptr) return;
  v1::DeleteJobRequest request;
  request.set_job(kName);
  client_.coordinator().DeleteJob(request, kPatience).status().IgnoreError();
}

int64_t CountingJob::version_bytes() const { return job_->plan().window_bytes(); }

absl::StatusOr<double> CountingJob::Step() {
  const double begin = MonotonicSeconds();
  RETURN_IF_ERROR(session_->Step().status());
  return MonotonicSeconds() - begin;
}

absl::StatusOr<int64_t> CountingJob::ResidentPublications() {
  ASSIGN_OR_RETURN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kPatience));
  for (const auto& job : status.jobs()) {
    if (job.name() == kName) return job.publication_resident_bytes();
  }
  return absl::InternalError("the worker does not say what its job holds");
}

absl::Status CheckWhole(const ConstTensorView& view, shardmesh::Step step) {
  const auto* const values = static_cast<const float*>(view.data);
  const auto expected = static_cast<float>(step.value());
  const bool whole = std::all_of(values, values + view.num_elements, [&](float value) { return value == expected; });
  if (whole) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("verifying: version ", step.value(), " is not whole"));
}

}  // namespace shardmesh::bench
