#include "server/jobs/job_definition.h"

#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "proto/convert.h"
#include "server/jobs/near_miss.h"

namespace shardmesh {
namespace {

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 200)), "\""); }

// A parameter that has an original name keeps it, as of a checkpoint.
void Rename(std::string canonical, ParameterSpec& p) {
  if (p.given.empty() && p.name != canonical) p.given = std::move(p.name);
  p.name = std::move(canonical);
  if (p.given == p.name) p.given.clear();
}

// Replaces every name by its canonical one. Owners first: a tie may stand before its owner.
absl::Status CanonicalizeNames(const NameRules& rules, std::vector<ParameterSpec>& parameters) {
  AliasTable table(rules);
  std::map<std::string, const ParameterSpec*> owners;  // by canonical name
  for (ParameterSpec& p : parameters) {
    if (!p.tied_to.empty()) continue;
    ASSIGN_OR_RETURN(std::string canonical, table.Add(p.name));
    Rename(std::move(canonical), p);
    owners.emplace(p.name, &p);
  }
  for (ParameterSpec& p : parameters) {
    if (p.tied_to.empty()) continue;
    absl::StatusOr<std::string> canonical = table.Add(p.name, p.tied_to);
    if (absl::IsNotFound(canonical.status())) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", Quoted(p.name), " is tied to ", Quoted(p.tied_to),
                                                     ", which is no parameter with its own storage"));
    }
    if (!canonical.ok()) return canonical.status();
    ASSIGN_OR_RETURN(p.tied_to, table.CanonicalOf(p.tied_to));
    // Another way to write the owner's own name is no parameter of its own, and is left out below.
    if (*canonical == p.tied_to) RETURN_IF_ERROR(CheckTie(p, *owners.at(p.tied_to)));
    Rename(*std::move(canonical), p);
  }
  std::vector<ParameterSpec> kept;
  kept.reserve(parameters.size());
  for (ParameterSpec& p : parameters) {
    if (p.tied_to.empty() || p.name != p.tied_to) kept.push_back(std::move(p));
  }
  parameters = std::move(kept);
  return absl::OkStatus();
}

JobDefinition::Refusals RefusalsOf(const JobSpec& spec, const Plan& plan) {
  JobDefinition::Refusals refusals;
  for (const bool device : {false, true}) {
    for (const int hosts : {1, 2}) {  // 2: any number of them
      const Topology topology{hosts, plan.num_ranks(), device};
      refusals[static_cast<int>(topology.kind())] = std::string(CheckSupported(spec, plan, topology).message());
    }
  }
  return refusals;
}

}  // namespace

JobDefinition::JobDefinition(JobSpec spec, Plan plan, Refusals refusals)
    : spec_(std::move(spec)), plan_(std::move(plan)), proto_(ToProto(spec_)), refusals_(std::move(refusals)) {
  for (size_t i = 0; i < spec_.parameters.size(); ++i) index_of_.emplace(spec_.parameters[i].name, static_cast<int>(i));
  for (const ParameterSpec& p : spec_.parameters)
    storage_of_.push_back(IndexOf(p.tied_to.empty() ? p.name : p.tied_to));
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> JobDefinition::Create(JobSpec spec) {
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  Refusals refusals = RefusalsOf(spec, plan);
  return std::shared_ptr<const JobDefinition>(
      new JobDefinition(std::move(spec), std::move(plan), std::move(refusals)));
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> JobDefinition::CreateUnrefused(JobSpec spec) {
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  return std::shared_ptr<const JobDefinition>(new JobDefinition(std::move(spec), std::move(plan), {}));
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> JobDefinition::Parse(const std::string& bytes) {
  v1::JobSpec proto;
  if (!proto.ParseFromString(bytes)) return absl::DataLossError("the stored bytes are no JobSpec");
  absl::StatusOr<JobSpec> spec = JobSpecFromProto(proto);
  if (!spec.ok()) return absl::DataLossError(spec.status().message());
  auto definition = Create(*std::move(spec));
  if (!definition.ok()) return absl::DataLossError(definition.status().message());
  return definition;
}

int JobDefinition::IndexOf(absl::string_view canonical) const {
  const auto found = index_of_.find(canonical);
  return found == index_of_.end() ? -1 : found->second;
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> WithMesh(const std::shared_ptr<const JobDefinition>& job,
                                                              const MeshSpec& mesh) {
  if (job->spec().mesh == mesh) return job;
  JobSpec spec = job->spec();
  spec.mesh = mesh;
  return JobDefinition::Create(std::move(spec));
}

absl::StatusOr<std::shared_ptr<const JobDefinition>> DefineJob(JobSpec given, const NameRules& rules,
                                                               const MeshSpec& default_mesh) {
  if (given.mesh.dims.empty()) given.mesh = default_mesh;
  if (given.mesh.dims.empty()) {
    return absl::InvalidArgumentError(
        "mesh is unset and the coordinator has no default mesh; give one, e.g. fsdp=4, or start it with "
        "--default-mesh");
  }
  RETURN_IF_ERROR(ValidateNameRules(rules));
  RETURN_IF_ERROR(CanonicalizeNames(rules, given.parameters));
  ASSIGN_OR_RETURN(auto job, JobDefinition::Create(std::move(given)));
  if (job->plan().num_ranks() > kMaxHostRanks) {
    return absl::ResourceExhaustedError(absl::StrCat("mesh ", job->spec().mesh.ToString(), " has ",
                                                     job->plan().num_ranks(), " ranks; a job has at most ",
                                                     kMaxHostRanks, " ranks; give a smaller mesh"));
  }
  if (absl::c_none_of(job->refusals(), [](const std::string& refusal) { return refusal.empty(); })) {
    return absl::UnimplementedError(job->refusals()[static_cast<int>(TopologyKind::kHostCpu)]);
  }
  return job;
}

MeshSpec FittingMesh(const MeshSpec& wished, const MeshSpec& default_mesh, int64_t live) {
  const auto fits = [&](const MeshSpec& mesh) { return !mesh.dims.empty() && mesh.NumRanks() <= live; };
  const bool like_default = default_mesh.dims.empty() || default_mesh.NumRanks() == wished.NumRanks();
  if (fits(wished) && like_default) return wished;
  if (fits(default_mesh)) return default_mesh;
  if (fits(wished) || live == 0) return wished;
  MeshSpec all;
  all.dims = {{"fsdp", live, DimRole::kShard}};
  return all;
}

absl::StatusOr<std::vector<ResolvedName>> ResolveNames(const JobDefinition& job,
                                                       const std::vector<std::string>& raw_names,
                                                       const NameRules& rules) {
  RETURN_IF_ERROR(ValidateNameRules(rules));
  std::vector<ResolvedName> resolved;
  resolved.reserve(raw_names.size());
  for (const std::string& raw : raw_names) {
    ASSIGN_OR_RETURN(std::string canonical, Canonical(raw, rules));
    const int index = job.IndexOf(canonical);
    if (index < 0) {
      const std::string near = NearestName(canonical, job.spec().parameters);
      return absl::NotFoundError(absl::StrCat(Quoted(raw), ", canonical ", Quoted(canonical),
                                              ", is no parameter of job ", job.spec().name,
                                              near.empty() ? "" : absl::StrCat("; did you mean ", Quoted(near), "?")));
    }
    resolved.push_back({std::move(canonical), job.StorageOf(index)});
  }
  return resolved;
}

}  // namespace shardmesh
