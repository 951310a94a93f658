// Small valid jobs and workers for tests. Tests only.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/job/job.h"
#include "core/mesh/mesh_spec.h"
#include "server/coordinator/coordinator.h"
#include "server/jobs/job_definition.h"

namespace shardmesh {

// A job of `ranks` shards with parameters "a.w" and "b.w".
inline JobSpec SmallSpec(const std::string& name, int ranks) {
  JobSpec spec;
  spec.name = name;
  spec.mesh.dims = {{"fsdp", ranks, DimRole::kShard}};
  spec.parameters = {{"a.w", {3, 5}, WeightFormat::kFp32, ""}, {"b.w", {7}, WeightFormat::kBf16Sr, ""}};
  return spec;
}

inline std::shared_ptr<const JobDefinition> SmallJob(const std::string& name, int ranks) {
  return JobDefinition::Create(SmallSpec(name, ranks)).value();
}

// On another mesh, "ddp=2,fsdp=2".
inline JobSpec SmallMeshSpec(const std::string& name, const std::string& mesh) {
  JobSpec spec = SmallSpec(name, 1);
  spec.mesh = ParseMeshSpec(mesh).value();
  return spec;
}

inline std::shared_ptr<const JobDefinition> SmallMeshJob(const std::string& name, const std::string& mesh) {
  return JobDefinition::Create(SmallMeshSpec(name, mesh)).value();
}

inline WorkerIdentity SmallWorker(const std::string& name, int64_t incarnation = 1, const std::string& host = "h1") {
  return {name,
          incarnation,
          absl::StrCat("localhost:", 1000 + incarnation % 1000),
          host,
          absl::StrCat("/run/", name),
          70 + incarnation % 1000};
}

// What a member of SmallJob(job) reports.
inline MemberReport ReadyReport(const Assignment& assignment, int64_t committed_step = -1) {
  MemberReport report;
  report.job = assignment.definition->spec().name;
  report.epoch = assignment.epoch;
  report.rank = assignment.rank;
  report.state = MemberReport::State::kReady;
  report.plan_hash = assignment.definition->plan().hash();
  report.committed_step = committed_step;
  return report;
}

}  // namespace shardmesh
