// Validate() of the coordinator's requests.
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/job/job.h"
#include "core/mesh/mesh_spec.h"
#include "core/names/names.h"
#include "proto/field_checks.h"
#include "proto/validate.h"

namespace shardmesh {
namespace {

constexpr int64_t kNoLimit = INT64_MAX;

absl::Status CheckNameRules(const v1::NameRules& rules) {
  RETURN_IF_ERROR(CheckCount("entries of name rules",
                             int64_t{rules.root_wrappers_size()} + rules.wrapped_at_size() + rules.literals_size(),
                             kMaxNameRules));
  for (const std::string& text : rules.root_wrappers()) {
    RETURN_IF_ERROR(CheckText("an entry of names.root_wrappers", text, kMaxNameBytes));
  }
  for (const std::string& text : rules.wrapped_at()) {
    RETURN_IF_ERROR(CheckText("an entry of names.wrapped_at", text, kMaxNameBytes));
  }
  for (const std::string& text : rules.literals()) {
    RETURN_IF_ERROR(CheckText("an entry of names.literals", text, kMaxNameBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckParameter(int index, const v1::Parameter& parameter) {
  if (parameter.name().empty() || parameter.name().size() > kMaxNameBytes) {
    return CheckText(absl::StrCat("the name of parameter ", index), parameter.name(), kMaxNameBytes);
  }
  if (parameter.tied_to().size() > kMaxNameBytes) {
    return CheckText(absl::StrCat("tied_to of parameter ", index), parameter.tied_to(), kMaxNameBytes);
  }
  if (parameter.given().size() > kMaxNameBytes) {
    return CheckText(absl::StrCat("given of parameter ", index), parameter.given(), kMaxNameBytes);
  }
  return absl::OkStatus();
}

absl::Status CheckMemberStatus(const v1::MemberStatus& status) {
  RETURN_IF_ERROR(ValidateId("job", status.job()));
  RETURN_IF_ERROR(CheckRange("epoch", status.epoch(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckRange("rank", status.rank(), 0, kMaxMeshRanks - 1));
  RETURN_IF_ERROR(CheckRange("state", status.state(), v1::MEMBER_STATE_PREPARING, v1::MEMBER_STATE_PREPARED));
  if (!status.plan_hash().empty() || status.state() == v1::MEMBER_STATE_READY) {
    RETURN_IF_ERROR(CheckHash("plan_hash", status.plan_hash()));
  }
  if (status.has_lost_rank()) RETURN_IF_ERROR(CheckRange("lost_rank", status.lost_rank(), 0, kMaxMeshRanks - 1));
  RETURN_IF_ERROR(CheckRange("committed_step", status.committed_step(), -1, kMaxStep));
  RETURN_IF_ERROR(CheckCount("published_steps", status.published_steps_size(), kMaxPublishedSteps));
  int64_t previous = -1;
  for (int64_t step : status.published_steps()) {
    if (step <= previous || step > status.committed_step()) {
      return absl::InvalidArgumentError(absl::StrCat("published step ", step, " comes after ", previous,
                                                     " with committed step ", status.committed_step(),
                                                     "; they ascend from 0 to the committed step"));
    }
    previous = step;
  }
  if (status.state() != v1::MEMBER_STATE_FAILED) return absl::OkStatus();
  if (status.error().empty()) return absl::InvalidArgumentError("error is unset; state FAILED needs it");
  if (status.error().size() <= kMaxErrorBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("error has ", status.error().size(), " bytes; at most ", kMaxErrorBytes));
}

absl::Status CheckResumed(const v1::JoinRequest& request) {
  RETURN_IF_ERROR(CheckRange("resumes", request.resumes(), 0, request.incarnation() - 1));
  RETURN_IF_ERROR(CheckCount("resumed", request.resumed_size(), kMaxResumedJobs));
  if (request.resumes() == 0 && request.resumed_size() > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("resumed names ", request.resumed_size(),
                     " jobs, and resumes is unset; set it to the incarnation that held them"));
  }
  for (int i = 0; i < request.resumed_size(); ++i) {
    const v1::ResumedJob& resumed = request.resumed(i);
    absl::Status status = ValidateId("job", resumed.job());
    if (status.ok()) status = CheckRange("epoch", resumed.epoch(), 1, kNoLimit);
    if (status.ok()) status = CheckRange("rank", resumed.rank(), 0, kMaxMeshRanks - 1);
    if (status.ok()) status = CheckSecret(resumed.secret());
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("resumed[", i, "]: ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status CheckCopies(const v1::KeptCopies& copies) {
  RETURN_IF_ERROR(ValidateId("copies.job", copies.job()));
  RETURN_IF_ERROR(CheckRange("copies.epoch", copies.epoch(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckRange("copies.rank", copies.rank(), 0, kNoLimit));
  RETURN_IF_ERROR(CheckRange("copies.hosts", copies.hosts(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckText("copies.mesh", copies.mesh(), kMaxMeetKeyBytes * kMaxMeshDims));
  RETURN_IF_ERROR(CheckRange("copies.step", copies.step(), 0, kMaxStep));
  return CheckSecret(copies.secret());
}

}  // namespace

absl::Status Validate(const v1::CreateJobRequest& request) {
  if (!request.has_spec()) return absl::InvalidArgumentError("spec is unset; it is required");
  RETURN_IF_ERROR(ValidateId("job name", request.spec().name()));
  RETURN_IF_ERROR(CheckRange("uid", request.uid(), 0, kNoLimit));
  RETURN_IF_ERROR(CheckRange("replaces_uid", request.replaces_uid(), 0, kNoLimit));
  RETURN_IF_ERROR(CheckCount("mesh dimensions", request.spec().mesh_size(), kMaxMeshDims));
  RETURN_IF_ERROR(CheckCount("parameters", request.spec().parameters_size(), kMaxParameters));
  for (int i = 0; i < request.spec().parameters_size(); ++i) {
    RETURN_IF_ERROR(CheckParameter(i, request.spec().parameters(i)));
  }
  return CheckNameRules(request.names());
}

absl::Status Validate(const v1::DescribeJobRequest& request) { return ValidateId("job", request.job()); }

absl::Status Validate(const v1::ListJobsRequest&) { return absl::OkStatus(); }

absl::Status Validate(const v1::DeleteJobRequest& request) {
  RETURN_IF_ERROR(ValidateId("job", request.job()));
  return CheckRange("uid", request.uid(), 0, kNoLimit);
}

absl::Status Validate(const v1::ReshardJobRequest& request) {
  RETURN_IF_ERROR(ValidateId("job", request.job()));
  if (request.mesh().empty()) return absl::InvalidArgumentError("mesh is unset; give one, such as \"fsdp=4\"");
  return CheckCount("mesh dimensions", request.mesh_size(), kMaxMeshDims);
}

absl::Status Validate(const v1::RecordCheckpointRequest& request) {
  RETURN_IF_ERROR(ValidateId("job", request.job()));
  RETURN_IF_ERROR(CheckRange("uid", request.uid(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckRange("epoch", request.epoch(), 1, kNoLimit));
  if (!request.has_checkpoint()) return absl::InvalidArgumentError("checkpoint is unset; it is required");
  const std::string& folder = request.checkpoint().folder();
  RETURN_IF_ERROR(CheckText("checkpoint.folder", folder, kMaxFolderBytes));
  if (folder[0] != '/') {
    return absl::InvalidArgumentError(
        absl::StrCat("checkpoint.folder is ", QuotedField(folder), "; it is an absolute path"));
  }
  return CheckRange("checkpoint.step", request.checkpoint().step(), 0, kMaxStep);
}

absl::Status Validate(const v1::ResolveNamesRequest& request) {
  RETURN_IF_ERROR(ValidateId("job", request.job()));
  RETURN_IF_ERROR(CheckCount("raw_names", request.raw_names_size(), kMaxRawNames));
  for (const std::string& name : request.raw_names()) {
    if (name.empty() || name.size() > kMaxNameBytes) return CheckText("an entry of raw_names", name, kMaxNameBytes);
  }
  return CheckNameRules(request.rules());
}

absl::Status Validate(const v1::GetPlanRequest& request) { return ValidateId("job", request.job()); }

absl::Status Validate(const v1::ListVersionsRequest& request) { return ValidateId("job", request.job()); }

absl::Status Validate(const v1::JoinRequest& request) {
  RETURN_IF_ERROR(ValidateId("worker name", request.name()));
  RETURN_IF_ERROR(CheckRange("incarnation", request.incarnation(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckText("address", request.address(), kMaxAddressBytes));
  RETURN_IF_ERROR(CheckText("host_id", request.host_id(), kMaxHostIdBytes));
  RETURN_IF_ERROR(CheckText("local_socket", request.local_socket(), kMaxSocketPathBytes));
  RETURN_IF_ERROR(CheckRange("dead_incarnation", request.dead_incarnation(), 0, kNoLimit));
  RETURN_IF_ERROR(CheckResumed(request));
  RETURN_IF_ERROR(CheckSecret(request.secret()));
  return CheckRange("pid", request.pid(), 1, kNoLimit);
}

absl::Status Validate(const v1::HeartbeatRequest& request) {
  RETURN_IF_ERROR(ValidateId("worker name", request.name()));
  RETURN_IF_ERROR(CheckRange("incarnation", request.incarnation(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckSecret(request.secret()));
  RETURN_IF_ERROR(CheckCount("jobs", request.jobs_size(), kMaxMemberStatuses));
  for (int i = 0; i < request.jobs_size(); ++i) {
    if (const absl::Status status = CheckMemberStatus(request.jobs(i)); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("jobs[", i, "] ", QuotedField(request.jobs(i).job()), ": ", status.message()));
    }
  }
  RETURN_IF_ERROR(CheckCount("copies", request.copies_size(), kMaxMemberStatuses));
  for (const v1::KeptCopies& copies : request.copies()) RETURN_IF_ERROR(CheckCopies(copies));
  return absl::OkStatus();
}

absl::Status Validate(const v1::LeaveRequest& request) {
  RETURN_IF_ERROR(ValidateId("worker name", request.name()));
  RETURN_IF_ERROR(CheckSecret(request.secret()));
  return CheckRange("incarnation", request.incarnation(), 1, kNoLimit);
}

}  // namespace shardmesh
