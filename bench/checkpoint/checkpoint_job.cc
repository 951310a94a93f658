#include "bench/checkpoint/checkpoint_job.h"

#include <atomic>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/harness/harness.h"
#include "bench/harness/step_formats.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(100);

absl::StatusOr<JobSpec> SpecOf(const ModelShapes& model, StateFormat states, int workers) {
  JobSpec spec;
  spec.name = absl::StrCat("bench-", StateFormatName(states));
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(absl::StrCat("fsdp=", workers)));
  spec.num_slots = workers;
  spec.gradient_format = Format::kFp32;
  for (const NamedShape& parameter : model.parameters) {
    spec.parameters.push_back({parameter.name, parameter.shape, WeightFormat::kFp32, "", states});
  }
  return spec;
}

absl::Status Initialize(Job& job) {
  std::map<std::string, std::vector<float>> weights;
  uint32_t element = 0;
  for (const ParameterSpec& parameter : job.spec().parameters) {
    std::vector<float>& values = weights[parameter.name];
    values.resize(parameter.NumElements());
    for (float& value : values) value = StartWeight(element++);
  }
  return job.Initialize(weights, kPatience);
}

absl::Status GiveGradients(Session& session) {
  for (const Slot slot : session.slots()) {
    uint32_t element = 0;
    for (const ParameterSpec& parameter : session.job().spec().parameters) {
      ASSIGN_OR_RETURN(const TensorView view, session.gradient(slot, parameter.name));
      for (int64_t i = 0; i < view.num_elements; ++i) static_cast<float*>(view.data)[i] = StartGradient(element++);
    }
  }
  return absl::OkStatus();
}

absl::Status DeleteJob(Service& service, const std::string& name) {
  v1::DeleteJobRequest request;
  request.set_job(name);
  return service.client().coordinator().DeleteJob(request, kPatience).status();
}

}  // namespace

absl::Status CheckpointJob::Delete() {
  session_.reset();
  return DeleteJob(service_, job_->spec().name);
}

absl::StatusOr<std::unique_ptr<CheckpointJob>> CheckpointJob::Start(Service& service, const ModelShapes& model,
                                                                    StateFormat states, int workers) {
  std::unique_ptr<CheckpointJob> job(new CheckpointJob(service));
  ASSIGN_OR_RETURN(const JobSpec spec, SpecOf(model, states, workers));
  ASSIGN_OR_RETURN(job->job_, service.client().CreateJob(spec));
  RETURN_IF_ERROR(Initialize(*job->job_));
  std::vector<Slot> slots;
  for (int slot = 0; slot < workers; ++slot) slots.push_back(Slot(slot));
  ASSIGN_OR_RETURN(job->session_, job->job_->Attach(slots));
  RETURN_IF_ERROR(job->session_->AwaitWeights(kPatience));
  RETURN_IF_ERROR(GiveGradients(*job->session_));
  for (int step = 0; step < 2; ++step) RETURN_IF_ERROR(job->session_->Step().status());
  return job;
}

absl::StatusOr<double> CheckpointJob::Save(const std::string& root) {
  const double begin = MonotonicSeconds();
  ASSIGN_OR_RETURN(saved_, SaveCheckpoint(*job_, root));
  const double seconds = MonotonicSeconds() - begin;
  ASSIGN_OR_RETURN(const v1::DigestReply digest, job_->Digest(kPatience));
  if (digest.digest() == saved_.digest) return seconds;
  return absl::InternalError("verifying: what was saved has another digest than the job");
}

absl::StatusOr<CheckpointJob::LoadTimes> CheckpointJob::Load(int workers) {
  JobSpec spec = job_->spec();
  spec.name += "-again";
  RestoreOptions options{spec.name, absl::StrCat("fsdp=", workers)};
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(options.mesh));
  const double begin = MonotonicSeconds();
  RETURN_IF_ERROR(service_.client().CreateJob(spec).status());
  const double made = MonotonicSeconds();
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, RestoreCheckpoint(service_.client(), saved_.path, options));
  const double end = MonotonicSeconds();
  ASSIGN_OR_RETURN(const v1::DigestReply digest, job->Digest(kPatience));
  if (digest.digest() != saved_.digest || digest.step() != saved_.step) {
    return absl::InternalError("verifying: what was loaded has another digest, or step, than what was saved");
  }
  RETURN_IF_ERROR(DeleteJob(service_, spec.name));
  return LoadTimes{end - made, end - begin};
}

absl::StatusOr<double> CheckpointJob::Iteration(absl::Duration computing) {
  const double begin = MonotonicSeconds();
  if (computing > absl::ZeroDuration()) absl::SleepFor(computing);
  RETURN_IF_ERROR(session_->Step().status());
  return MonotonicSeconds() - begin;
}

absl::StatusOr<CheckpointJob::Iterations> CheckpointJob::Iterate(const std::string& root, int count,
                                                                 absl::Duration computing) {
  std::vector<double> with, without;
  const auto iterate_alone = [&]() -> absl::Status {
    for (int i = 0; i < count; ++i) {
      ASSIGN_OR_RETURN(const double seconds, Iteration(computing));
      without.push_back(seconds);
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(iterate_alone());
  std::atomic<bool> saving{true};
  absl::StatusOr<SavedCheckpoint> saved;
  std::thread saver([&] {
    saved = SaveCheckpoint(*job_, root);
    saving.store(false);
  });
  absl::Status status;
  while (status.ok() && saving.load()) {
    const absl::StatusOr<double> seconds = Iteration(computing);
    if (seconds.ok()) with.push_back(*seconds);
    status = seconds.status();
  }
  saver.join();
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(saved.status());
  RETURN_IF_ERROR(iterate_alone());
  return Iterations{SpreadOf(with).median, SpreadOf(without).median, SpreadOf(with).max};
}

}  // namespace shardmesh::bench
