// Validate(request): what a request must hold before anything else looks at it. One overload for each request message.
//
// Checks what the message alone can tell: required fields, ranges, the characters of ids, sizes. Not the state (does
// the job exist?), and of a job's specification only its size: JobSpecFromProto() and JobSpec::Validate() see to its
// values. A message names the field, its value, and what would be right. Strings from peers are escaped and cut in it.
//   InvalidArgument: a field is missing, has a value out of range, or another form.
//   ResourceExhausted: more entries or bytes than a limit below.
// Pure functions, thread-safe.
#pragma once

#include "absl/status/status.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {

// Names: at most core/names/names.h's kMaxNameBytes each.
inline constexpr int kMaxRawNames = 100'000;     // in one ResolveNames
inline constexpr int kMaxNameRules = 10'000;     // entries of NameRules in all
inline constexpr int kMaxMemberStatuses = 1000;  // in one Heartbeat
inline constexpr int kMaxResumedJobs = 1000;     // in one Join
inline constexpr int kMaxPublishedSteps = 64;    // in one MemberStatus
inline constexpr int kMaxErrorBytes = 4096;      // of a member's error text
inline constexpr int kMaxHostIdBytes = 256;
inline constexpr int kMaxAddressBytes = 512;
inline constexpr int kMaxSocketPathBytes = 107;  // the kernel's sun_path
inline constexpr int kMaxFolderBytes = 3800;     // of a checkpoint; the kernel's PATH_MAX, with room for a file's name
inline constexpr int kMaxMeetKeyBytes = 128;     // of Meet, and
inline constexpr int kMaxMeetValueBytes = 64 << 10;
inline constexpr int64_t kMinChunkBytes = 4096;     // of Pull
inline constexpr int64_t kMaxChunkBytes = 4 << 20;  // of Pull and Push
inline constexpr int64_t kMinLeaseMs = 100, kMaxLeaseMs = 24 * 3600 * 1000;

// The coordinator's.
absl::Status Validate(const v1::CreateJobRequest& request);
absl::Status Validate(const v1::DescribeJobRequest& request);
absl::Status Validate(const v1::ListJobsRequest& request);
absl::Status Validate(const v1::DeleteJobRequest& request);
absl::Status Validate(const v1::ReshardJobRequest& request);
absl::Status Validate(const v1::RecordCheckpointRequest& request);
absl::Status Validate(const v1::ResolveNamesRequest& request);
absl::Status Validate(const v1::GetPlanRequest& request);
absl::Status Validate(const v1::ListVersionsRequest& request);
absl::Status Validate(const v1::JoinRequest& request);
absl::Status Validate(const v1::HeartbeatRequest& request);
absl::Status Validate(const v1::LeaveRequest& request);

// A worker's.
absl::Status Validate(const v1::PushHeader& header);
absl::Status Validate(const v1::PullRequest& request);
absl::Status Validate(const v1::StepRequest& request);
absl::Status Validate(const v1::DeclareBucketRequest& request);
absl::Status Validate(const v1::TrainerRequest& request);  // of Shard.Trainer
absl::Status Validate(const v1::SeatRequest& request);
absl::Status Validate(const v1::AttachRequest& request);
absl::Status Validate(const v1::DigestRequest& request);
absl::Status Validate(const v1::MeetRequest& request);
absl::Status Validate(const v1::TransferRequest& request);
absl::Status Validate(const v1::CopyRequest& request);
absl::Status Validate(const v1::SaveRequest& request);
absl::Status Validate(const v1::LoadRequest& request);
absl::Status Validate(const v1::UseLoadedRequest& request);
absl::Status Validate(const v1::AwaitWeightsRequest& request);
absl::Status Validate(const v1::AcquireLeaseRequest& request);
absl::Status Validate(const v1::RenewLeaseRequest& request);
absl::Status Validate(const v1::ReleaseLeaseRequest& request);
absl::Status Validate(const v1::ListLeasesRequest& request);
absl::Status Validate(const v1::PublishRequest& request);
absl::Status Validate(const v1::GetStatusRequest& request);
absl::Status Validate(const v1::GetTraceRequest& request);

}  // namespace shardmesh
