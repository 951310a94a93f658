#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/folder.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/checkpoint/model.h"
#include "core/base/status.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

constexpr size_t kNamed = 8;  // tensors in a message

std::string Quoted(const std::string& name) { return QuotedName(name); }

absl::Status RefuseOthers(const std::vector<std::string>& others) {
  std::vector<std::string> first(others.begin(), others.begin() + std::min(others.size(), kNamed));
  return absl::InvalidArgumentError(absl::StrCat(
      others.size(), " tensors are neither F32, BF16 nor F16, and so no parameters: ", absl::StrJoin(first, ", "),
      others.size() > kNamed ? ", ..." : "", "; leave them out (--skip-others), or cast them"));
}

WeightFormat WeightsOf(const ModelTensor& tensor, const ImportOptions& options) {
  if (options.weights.has_value()) return *options.weights;
  return tensor.dtype == "BF16" ? WeightFormat::kBf16Sr : WeightFormat::kFp32;
}

// That a tensor that is in the files, too, has the values of the one that it is tied to.
absl::Status CheckSameValues(const ModelFiles& model, const ModelTensor& tied, const ModelTensor& owner) {
  ASSIGN_OR_RETURN(const std::vector<float> ours, model.ReadFloats(tied));
  ASSIGN_OR_RETURN(const std::vector<float> theirs, model.ReadFloats(owner));
  const bool same =
      tied.shape == owner.shape && std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(),
                                              [](float a, float b) { return FloatBits(a) == FloatBits(b); });
  if (same) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(Quoted(tied.name), " is said to be tied to ", Quoted(owner.name),
                                                 ", but has another shape or other values"));
}

absl::Status AddOwned(const ModelFiles& model, const ImportOptions& options, AliasTable& names, ImportPlan& plan) {
  for (const ModelTensor& tensor : model.tensors()) {
    if (options.ties.count(tensor.name) > 0) continue;
    if (options.buffers.count(tensor.name) > 0) {
      plan.buffers.push_back(tensor.name);
      continue;
    }
    if (!IsFloatDtype(tensor.dtype)) {
      plan.skipped.push_back(tensor.name);
      continue;
    }
    ParameterSpec parameter;
    ASSIGN_OR_RETURN(parameter.name, names.Add(tensor.name));
    if (parameter.name != tensor.name) parameter.given = tensor.name;
    parameter.shape = tensor.shape;
    parameter.format = WeightsOf(tensor, options);
    parameter.states = options.states;
    plan.spec.parameters.push_back(std::move(parameter));
    plan.sources.push_back(tensor.name);
  }
  return absl::OkStatus();
}

absl::Status AddTied(const ModelFiles& model, const ImportOptions& options, AliasTable& names, ImportPlan& plan) {
  for (const auto& [name, owner_name] : options.ties) {
    const ModelTensor* const owner = model.Find(owner_name);
    const auto source = std::find(plan.sources.begin(), plan.sources.end(), owner_name);
    if (owner == nullptr || source == plan.sources.end()) {
      return absl::InvalidArgumentError(absl::StrCat(Quoted(name), " is said to be tied to ", Quoted(owner_name),
                                                     ", which the model has not, or not as a parameter of its own"));
    }
    const ModelTensor* const there = model.Find(name);
    if (there != nullptr) RETURN_IF_ERROR(CheckSameValues(model, *there, *owner));
    ParameterSpec parameter = plan.spec.parameters[source - plan.sources.begin()];
    parameter.tied_to = parameter.name;
    ASSIGN_OR_RETURN(parameter.name, names.Add(name, owner_name));
    parameter.given = parameter.name == name ? "" : name;
    if (parameter.name == parameter.tied_to) continue;  // one module under two wrappers
    plan.spec.parameters.push_back(std::move(parameter));
    plan.sources.emplace_back();
  }
  return absl::OkStatus();
}

// The weights of all parameters that own them.
absl::StatusOr<std::map<std::string, std::vector<float>>> ReadWeights(const ModelFiles& model, const ImportPlan& plan,
                                                                      const OnModelProgress& progress) {
  std::map<std::string, std::vector<float>> weights;
  int64_t done = 0;
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    if (plan.sources[i].empty()) continue;
    const ModelTensor& tensor = *model.Find(plan.sources[i]);
    ASSIGN_OR_RETURN(weights[plan.spec.parameters[i].name], model.ReadFloats(tensor));
    done += tensor.bytes;
    if (progress) progress(done, model.num_bytes());
  }
  return weights;
}

// Of the checkpoint whose files a model is; none of another model.
std::set<std::string> BuffersIn(const std::string& folder) {
  std::set<std::string> names;
  const absl::StatusOr<OpenedCheckpoint> opened = OpenCheckpoint(folder);
  if (!opened.ok() || opened->path != folder) return names;
  for (const Manifest::Buffer& buffer : opened->manifest.buffers) names.insert(buffer.entry.name);
  return names;
}

absl::Status AlreadyThere(const std::string& name) {
  return absl::AlreadyExistsError(
      absl::StrCat("there is a job ", name, "; give the new one another name, or delete that one"));
}

absl::Status CheckIsNew(Client& client, const std::string& name) {
  v1::DescribeJobRequest request;
  request.set_job(name);
  const absl::Status found = client.coordinator().DescribeJob(request, absl::Seconds(10)).status();
  if (absl::IsNotFound(found)) return absl::OkStatus();
  RETURN_IF_ERROR(found);
  return AlreadyThere(name);
}

}  // namespace

absl::StatusOr<ImportPlan> PlanImport(const ModelFiles& model, const ImportOptions& options) {
  ImportPlan plan;
  plan.spec = options.job;
  plan.spec.parameters.clear();
  AliasTable names(options.rules);
  RETURN_IF_ERROR(AddOwned(model, options, names, plan));
  if (!plan.skipped.empty() && !options.skip_others) return RefuseOthers(plan.skipped);
  RETURN_IF_ERROR(AddTied(model, options, names, plan));
  return plan;
}

absl::StatusOr<ImportedModel> ImportModel(Client& client, const std::string& path, const ImportOptions& given) {
  ASSIGN_OR_RETURN(const ModelFiles model, ModelFiles::Open(path));
  ImportOptions options = given;
  options.buffers.merge(BuffersIn(model.folder()));
  ASSIGN_OR_RETURN(const ImportPlan plan, PlanImport(model, options));
  RETURN_IF_ERROR(CheckIsNew(client, plan.spec.name));
  ASSIGN_OR_RETURN(const auto weights, ReadWeights(model, plan, options.progress));
  v1::CreateJobRequest create;
  *create.mutable_spec() = ToProto(plan.spec);
  ASSIGN_OR_RETURN(const v1::CreateJobReply created, client.Create(std::move(create)));
  if (!created.created()) return AlreadyThere(plan.spec.name);  // somebody made the same one in the meantime
  const auto fill = [&]() -> absl::StatusOr<std::shared_ptr<Job>> {
    ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.OpenJob(plan.spec.name));
    if (job->uid() != created.job().uid()) return AlreadyThere(plan.spec.name);
    RETURN_IF_ERROR(job->Initialize(weights, options.timeout));
    RETURN_IF_ERROR(AwaitCommittedStep(*job, Rank(0), options.timeout).status());
    return job;
  };
  absl::StatusOr<std::shared_ptr<Job>> job = fill();
  if (!job.ok()) {
    client.DeleteJob(plan.spec.name, created.job().uid()).IgnoreError();
    return job.status();
  }
  std::vector<std::string> left_out = plan.buffers;
  left_out.insert(left_out.end(), plan.skipped.begin(), plan.skipped.end());
  return ImportedModel{*std::move(job), std::move(left_out)};
}

}  // namespace shardmesh
