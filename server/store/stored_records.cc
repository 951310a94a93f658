#include "server/store/stored_records.h"

#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/base/utf8.h"
#include "core/job/job.h"

namespace shardmesh {
namespace {

constexpr int64_t kMaxEpoch = int64_t{1} << 62;  // there is always a next one

absl::Status CheckIdentity(const WorkerIdentity& worker) {
  RETURN_IF_ERROR(ValidateId("worker name", worker.name));
  if (worker.pid < 0) {
    return absl::InvalidArgumentError(absl::StrCat("worker ", worker.name, " has pid ", worker.pid, "; it is 0 or more"));
  }
  if (worker.incarnation < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", worker.name, " has incarnation ", worker.incarnation, "; it is above 0"));
  }
  for (const std::string* text : {&worker.address, &worker.host_id, &worker.local_socket}) {
    if (!IsUtf8(*text)) {  // peers refuse messages with such a string
      return absl::InvalidArgumentError(absl::StrCat("worker ", worker.name, " has the address, host or socket \"",
                                                     absl::CHexEscape(*text), "\", which is not UTF-8"));
    }
  }
  return absl::OkStatus();
}

// Which ranks there were at the epoch before is looked at with its mesh (coordinator_reform.cc).
absl::Status CheckMember(const MemberRecord& member) {
  RETURN_IF_ERROR(CheckIdentity(member.worker));
  if (member.was >= -1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("worker ", member.worker.name, " was rank ", member.was, "; it is -1 where it was none"));
}

absl::Status CheckSecretBytes(const std::string& secret) {
  if (secret.size() <= kMaxSecretBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("its secret has ", secret.size(), " bytes; at most ", kMaxSecretBytes));
}

absl::Status CheckSteps(const JobRecord& job) {
  if (job.committed_step < -1 || job.committed_step > kMaxStep) {
    return absl::InvalidArgumentError(
        absl::StrCat("committed_step is ", job.committed_step, "; it is -1 to ", kMaxStep));
  }
  int64_t before = -1;
  for (const int64_t step : job.published_steps) {
    if (step <= before || step > job.committed_step) {
      return absl::InvalidArgumentError(absl::StrCat("step ", step, " is published behind ", before,
                                                     ", with committed_step ", job.committed_step,
                                                     "; they ascend from 0 to that one"));
    }
    before = step;
  }
  return absl::OkStatus();
}

absl::Status CheckCheckpoint(const CheckpointRecord& checkpoint) {
  if (checkpoint.step < 0 || checkpoint.step > kMaxStep) {
    return absl::InvalidArgumentError(
        absl::StrCat("its checkpoint is of step ", checkpoint.step, "; it is 0 to ", kMaxStep));
  }
  if (checkpoint.copied_at != 0) {
    if (checkpoint.copied_at > 0 && checkpoint.folder.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("it has copies of epoch ", checkpoint.copied_at, " in \"",
                                                   absl::CHexEscape(checkpoint.folder), "\"; copies have no folder"));
  }
  if (!checkpoint.folder.empty() && checkpoint.folder[0] == '/' && IsUtf8(checkpoint.folder)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("its checkpoint is in \"", absl::CHexEscape(checkpoint.folder),
                                                 "\"; it is an absolute path in UTF-8"));
}

absl::Status CheckCheckpoints(const JobRecord& job) {
  for (const CheckpointRecord& checkpoint : job.checkpoints) RETURN_IF_ERROR(CheckCheckpoint(checkpoint));
  const GoneBackRecord& back = job.gone_back;
  if (back.checkpoint.is_set()) RETURN_IF_ERROR(CheckCheckpoint(back.checkpoint));
  const bool on_its_way = job.state == JobState::kWaiting || job.state == JobState::kPreparing;
  if (job.goes_back && (!on_its_way || !back.checkpoint.is_set() || job.from_epoch != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("a ", JobStateName(job.state), " job goes back to ",
                                                   back.checkpoint.is_set() ? "a" : "no",
                                                   " checkpoint with from_epoch ", job.from_epoch));
  }
  if (!IsUtf8(back.cause) || back.epoch < 0 || back.epoch > job.epoch || back.lost_step < -1 ||
      back.lost_step > kMaxStep) {
    return absl::InvalidArgumentError(absl::StrCat("it went back to a checkpoint from step ", back.lost_step,
                                                   " for epoch ", back.epoch, "; its epoch is ", job.epoch));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStored(const WorkerRecord& worker) {
  RETURN_IF_ERROR(CheckIdentity(worker.identity));
  return Annotate(CheckSecretBytes(worker.secret), absl::StrCat("worker ", worker.identity.name));
}

absl::Status CheckStored(const JobRecord& job) {
  RETURN_IF_ERROR(ValidateId("job name", job.name));
  if (job.uid < 0) return absl::InvalidArgumentError(absl::StrCat("uid is ", job.uid, "; it is 0 or more"));
  RETURN_IF_ERROR(CheckSecretBytes(job.secret));
  RETURN_IF_ERROR(CheckSteps(job));
  RETURN_IF_ERROR(CheckCheckpoints(job));
  const bool assigned = job.state == JobState::kPreparing || job.state == JobState::kReady;
  if (job.epoch < (assigned ? 1 : 0)) {
    return absl::InvalidArgumentError(absl::StrCat("epoch is ", job.epoch, "; it is ", assigned ? 1 : 0, " or more"));
  }
  if (job.epoch > kMaxEpoch) {
    return absl::InvalidArgumentError(absl::StrCat("epoch is ", job.epoch, "; it is at most ", kMaxEpoch));
  }
  if (job.from_epoch < 0 || (job.from_epoch != 0 && job.from_epoch >= job.epoch)) {
    return absl::InvalidArgumentError(
        absl::StrCat("from_epoch is ", job.from_epoch, "; it is 0, or less than epoch ", job.epoch));
  }
  if (assigned == job.members.empty() && job.state != JobState::kFailed) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", JobStateName(job.state), " job with ", job.members.size(), " members"));
  }
  std::set<std::string> names;
  for (const MemberRecord& member : job.members) {
    RETURN_IF_ERROR(CheckMember(member));
    if (names.insert(member.worker.name).second) continue;
    return absl::InvalidArgumentError(absl::StrCat("worker ", member.worker.name, " is two ranks of it"));
  }
  for (const MemberRecord& other : job.others) RETURN_IF_ERROR(CheckMember(other));
  return absl::OkStatus();
}

}  // namespace shardmesh
