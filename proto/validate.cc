// Validate() of a worker's requests. The coordinator's: validate_coordinator.cc.
#include "proto/validate.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/job/adamw.h"
#include "core/job/job.h"
#include "core/mesh/mesh_spec.h"
#include "proto/field_checks.h"

namespace shardmesh {
namespace {

constexpr int64_t kNoLimit = INT64_MAX;

absl::Status CheckJobAndEpoch(absl::string_view job, int64_t epoch) {
  RETURN_IF_ERROR(ValidateId("job", job));
  return CheckRange("epoch", epoch, 1, kNoLimit);
}

absl::Status CheckFolder(const std::string& folder) {
  RETURN_IF_ERROR(CheckText("folder", folder, kMaxFolderBytes));
  if (folder[0] == '/') return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("folder is \"", absl::CEscape(folder.substr(0, 200)),
                                                 "\"; it is an absolute path, which begins with /"));
}

absl::Status CheckLoadId(uint64_t id) {
  return id != 0 ? absl::OkStatus() : absl::InvalidArgumentError("load_id is 0; it is a random value, not 0");
}

absl::Status CheckLeaseId(uint64_t id) {
  return id != 0 ? absl::OkStatus() : absl::InvalidArgumentError("the lease's id is 0; it is as AcquireLease said");
}

absl::Status CheckTtl(int64_t ttl_ms) { return CheckRange("ttl_ms", ttl_ms, kMinLeaseMs, kMaxLeaseMs); }

}  // namespace

absl::Status Validate(const v1::PushHeader& header) {
  RETURN_IF_ERROR(CheckJobAndEpoch(header.job(), header.epoch()));
  switch (header.content()) {
    case v1::PushHeader::CONTENT_GRADIENT:
      RETURN_IF_ERROR(CheckRange("slot", header.slot(), 0, kMaxSlots - 1));
      RETURN_IF_ERROR(CheckRange("step of a gradient", header.step(), 1, kNoLimit));
      break;
    case v1::PushHeader::CONTENT_INITIAL_WEIGHTS:
      RETURN_IF_ERROR(CheckRange("slot of initial weights", header.slot(), 0, 0));
      RETURN_IF_ERROR(CheckRange("step of initial weights", header.step(), 0, 0));
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat("content is ", static_cast<int>(header.content()),
                                                     "; it is 1 (gradient) or 2 (initial weights)"));
  }
  if (header.session() != 0 && header.content() != v1::PushHeader::CONTENT_GRADIENT) {
    return absl::InvalidArgumentError("initial weights with a session, which is a trainer's; leave it out");
  }
  if (header.has_bucket() && header.content() != v1::PushHeader::CONTENT_GRADIENT) {
    return absl::InvalidArgumentError("initial weights of one bucket; push those of all");
  }
  RETURN_IF_ERROR(CheckRange("total_bytes", header.total_bytes(), 0, kNoLimit));
  return CheckRange("shard", header.shard(), 0, kMaxMeshRanks - 1);
}

absl::Status Validate(const v1::PullRequest& request) {
  RETURN_IF_ERROR(ValidateId("job", request.job()));
  RETURN_IF_ERROR(CheckRange("epoch", request.epoch(), 0, kNoLimit));
  switch (request.version_case()) {
    case v1::PullRequest::kExact:
      RETURN_IF_ERROR(CheckRange("exact", request.exact(), 0, kNoLimit));
      break;
    case v1::PullRequest::kAtLeast:
      RETURN_IF_ERROR(CheckRange("at_least", request.at_least(), 0, kNoLimit));
      break;
    case v1::PullRequest::kLatest:
      if (!request.latest())
        return absl::InvalidArgumentError("latest is false; set it to true, or set another version");
      break;
    case v1::PullRequest::kForSlot:
      RETURN_IF_ERROR(CheckRange("for_slot", request.for_slot(), 0, kMaxSlots - 1));
      break;
    case v1::PullRequest::kLease:
      RETURN_IF_ERROR(CheckLeaseId(request.lease()));
      break;
    case v1::PullRequest::VERSION_NOT_SET:
      return absl::InvalidArgumentError("no version is named; set one of exact, at_least, latest, for_slot, lease");
  }
  if (request.has_bucket() && request.version_case() != v1::PullRequest::kForSlot) {
    return absl::InvalidArgumentError("a bucket of a published version; pull all of it, or one bucket for_slot");
  }
  if (request.chunk_bytes() == 0) return absl::OkStatus();
  return CheckRange("chunk_bytes", request.chunk_bytes(), kMinChunkBytes, kMaxChunkBytes);
}

absl::Status Validate(const v1::AcquireLeaseRequest& request) {
  RETURN_IF_ERROR(ValidateId("job", request.job()));
  switch (request.version_case()) {
    case v1::AcquireLeaseRequest::kExact:
      RETURN_IF_ERROR(CheckRange("exact", request.exact(), 0, kNoLimit));
      break;
    case v1::AcquireLeaseRequest::kAtLeast:
      RETURN_IF_ERROR(CheckRange("at_least", request.at_least(), 0, kNoLimit));
      break;
    case v1::AcquireLeaseRequest::kLatest:
      if (!request.latest())
        return absl::InvalidArgumentError("latest is false; set it to true, or set another version");
      break;
    case v1::AcquireLeaseRequest::VERSION_NOT_SET:
      return absl::InvalidArgumentError("no version is named; set one of exact, at_least, latest");
  }
  if (request.nonce() == 0) return absl::InvalidArgumentError("nonce is 0; it is a random value, not 0");
  return CheckTtl(request.ttl_ms());
}

absl::Status Validate(const v1::RenewLeaseRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckLeaseId(request.id()));
  return CheckTtl(request.ttl_ms());
}

absl::Status Validate(const v1::ReleaseLeaseRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  return CheckLeaseId(request.id());
}

absl::Status Validate(const v1::ListLeasesRequest& request) { return ValidateId("job", request.job()); }

absl::Status Validate(const v1::PublishRequest& request) { return ValidateId("job", request.job()); }

absl::Status Validate(const v1::DeclareBucketRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckSlots(request.slots()));
  return CheckRange("step", request.step(), 1, kNoLimit);
}

namespace {

absl::Status Validate(const v1::SlotRequest& message) {
  if (!message.take() && !message.has_finished()) {
    return absl::InvalidArgumentError("slot neither takes nor finishes; set take, finished, or both");
  }
  if (message.take()) RETURN_IF_ERROR(CheckRange("after_step", message.after_step(), -1, kNoLimit));
  if (!message.has_finished()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckRange("slot.finished.slot", message.finished().slot(), 0, kMaxSlots - 1));
  RETURN_IF_ERROR(CheckRange("slot.finished.step", message.finished().step(), 1, kNoLimit));
  return CheckCount("slot.finished.learning_rates", message.finished().learning_rates_size(), kMaxGroups);
}

}  // namespace

absl::Status Validate(const v1::TrainerRequest& request) {
  const int kinds = int{request.has_step()} + int{request.has_declare()} + int{request.has_slot()};
  if (request.has_use() || request.renew()) {
    return absl::InvalidArgumentError(
        "a connected trainer's request is one of step, declare and slot; pull buckets "
        "with Shard.Pull in place of using them");
  }
  if (kinds != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a trainer's request with ", kinds, " of step, declare and slot; set one"));
  }
  if (request.has_step()) return Validate(request.step());
  if (request.has_declare()) return Validate(request.declare());
  if (request.session() == 0) {
    return absl::InvalidArgumentError("session is 0; take a seat first (Shard.Seat) and say its session");
  }
  return Validate(request.slot());
}

absl::Status Validate(const v1::SeatRequest& request) { return CheckJobAndEpoch(request.job(), request.epoch()); }

absl::Status Validate(const v1::StepRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckSlots(request.slots()));
  RETURN_IF_ERROR(CheckRange("step", request.step(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckCount("learning_rates", request.learning_rates_size(), kMaxGroups));
  for (int group = 0; group < request.learning_rates_size(); ++group) {
    const double lr = request.learning_rates(group);
    if (lr >= 0 && lr <= kMaxLearningRate) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("learning rate ", request.learning_rates_size() == 1 ? "" : absl::StrCat("of group ", group, " "),
                     "is ", lr, "; it is 0 to ", kMaxLearningRate));
  }
  return absl::OkStatus();
}

absl::Status Validate(const v1::AttachRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  if (request.slots_size() > 0) RETURN_IF_ERROR(CheckSlots(request.slots()));
  if (request.reader_ttl_ms() != 0) {
    RETURN_IF_ERROR(CheckRange("reader_ttl_ms", request.reader_ttl_ms(), kMinLeaseMs, kMaxLeaseMs));
    if (request.slots_size() > 0) return absl::InvalidArgumentError("reader_ttl_ms with slots; a reader has none");
  }
  return CheckText("host_id", request.host_id(), kMaxHostIdBytes);
}

absl::Status Validate(const v1::DigestRequest& request) { return ValidateId("job", request.job()); }

absl::Status Validate(const v1::MeetRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckRange("rank", request.rank(), 0, kNoLimit));
  RETURN_IF_ERROR(CheckRange("incarnation", request.incarnation(), 1, kNoLimit));
  RETURN_IF_ERROR(CheckHash("plan_hash", request.plan_hash()));
  RETURN_IF_ERROR(CheckSecret(request.secret()));
  RETURN_IF_ERROR(CheckText("key", request.key(), kMaxMeetKeyBytes));
  return CheckRange("bytes of value", static_cast<int64_t>(request.value().size()), 0, kMaxMeetValueBytes);
}

absl::Status Validate(const v1::TransferRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckRange("rank", request.rank(), 0, kNoLimit));
  RETURN_IF_ERROR(CheckSecret(request.secret()));
  if (request.ending()) return absl::OkStatus();
  if (request.has_kept()) {
    RETURN_IF_ERROR(CheckRange("kept.rank", request.kept().rank(), 0, kNoLimit));
    RETURN_IF_ERROR(CheckRange("kept.step", request.kept().step(), 0, kMaxStep));
  }
  return CheckText("mesh", request.mesh(), kMaxMeetKeyBytes * kMaxMeshDims);
}

absl::Status Validate(const v1::CopyRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckSecret(request.secret()));
  return CheckRange("whole.step", request.whole().step(), 0, kMaxStep);
}

absl::Status Validate(const v1::SaveRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckCount("buffers", request.buffers_size(), kMaxParameters));
  return CheckFolder(request.folder());
}

absl::Status Validate(const v1::LoadRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  RETURN_IF_ERROR(CheckCount("buffers", request.buffers_size(), kMaxParameters));
  RETURN_IF_ERROR(CheckFolder(request.folder()));
  RETURN_IF_ERROR(CheckRange("step", request.step(), 0, kMaxStep));
  return CheckLoadId(request.load_id());
}

absl::Status Validate(const v1::UseLoadedRequest& request) {
  RETURN_IF_ERROR(CheckJobAndEpoch(request.job(), request.epoch()));
  return CheckLoadId(request.load_id());
}

absl::Status Validate(const v1::AwaitWeightsRequest& request) {
  return CheckJobAndEpoch(request.job(), request.epoch());
}

absl::Status Validate(const v1::GetStatusRequest&) { return absl::OkStatus(); }

absl::Status Validate(const v1::GetTraceRequest& request) { return ValidateId("job", request.job()); }

}  // namespace shardmesh
