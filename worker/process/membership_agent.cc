#include "worker/process/membership_agent.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "proto/protocol_version.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kRetry = absl::Milliseconds(200);

// A coordinator of another minor version may give jobs that this worker does not understand, or computes otherwise.
std::string OtherBuild(const v1::ProtocolVersion& theirs) {
  const bool silent = theirs.major() == 0 && theirs.minor() == 0;  // from before programs said it
  if (silent || theirs.minor() == kProtocolMinor) return "";
  return absl::StrCat(" (the coordinator speaks protocol version ", theirs.major(), ".", theirs.minor(),
                      ", this worker ", kProtocolMajor, ".", kProtocolMinor,
                      ": if that is why, install one build on both)");
}

}  // namespace

MembershipAgent::MembershipAgent(CoordinatorTransport& coordinator, Worker& worker, v1::JoinRequest identity)
    : coordinator_(coordinator), worker_(worker), identity_(std::move(identity)) {
  identity_.set_secret(RandomSecret());
  worker_.OnChange([this] { Hurry(); });
  thread_ = std::thread([this] { Loop(); });
}

MembershipAgent::~MembershipAgent() { Stop(); }

void MembershipAgent::Stop() {
  worker_.OnChange(nullptr);
  bool joined;
  {
    MutexLock lock(mu_);
    if (stop_) return;
    stop_ = true;
    joined = joined_;
  }
  changed_.SignalAll();
  thread_.join();
  if (!joined) return;
  v1::LeaveRequest leave;
  leave.set_name(identity_.name());
  leave.set_incarnation(identity_.incarnation());
  leave.set_secret(identity_.secret());
  if (const auto left = coordinator_.Leave(leave, kCallTimeout); !left.ok()) {
    spdlog::warn("event=leave_failed error=\"{}\"", left.status().ToString());
  }
}

void MembershipAgent::Hurry() {
  {
    MutexLock lock(mu_);
    hurry_ = true;
  }
  changed_.SignalAll();
}

absl::Status MembershipAgent::AwaitJoined(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(mu_);
  while (!joined_ && MonotonicNow() < deadline) {
    if (absl::IsAlreadyExists(last_error_) || absl::IsAborted(last_error_) || absl::IsInvalidArgument(last_error_)) {
      return last_error_;
    }
    changed_.WaitFor(mu_, deadline - MonotonicNow());
  }
  if (joined_) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("could not join within ", absl::FormatDuration(timeout), ": ", last_error_.message()));
}

bool MembershipAgent::WaitForNext(absl::Duration interval) {
  const absl::Time until = MonotonicNow() + interval;
  MutexLock lock(mu_);
  while (!stop_ && !hurry_ && MonotonicNow() < until) changed_.WaitFor(mu_, until - MonotonicNow());
  hurry_ = false;
  return !stop_;
}

MembershipAgent::Joined MembershipAgent::joined() const {
  MutexLock lock(mu_);
  return as_;
}

// What it was to take over when it began is another incarnation's now, or nobody's.
void MembershipAgent::TakeIncarnation(int64_t next, bool was_joined) {
  spdlog::warn("event=incarnation_refused worker={} was={} takes={}", identity_.name(), identity_.incarnation(), next);
  identity_.set_incarnation(next);
  identity_.set_secret(RandomSecret());
  if (was_joined) {
    identity_.clear_dead_incarnation();
    identity_.clear_resumes();
    identity_.clear_resumed();
  }
  identity_.set_resumes(std::min(identity_.resumes(), next - 1));
  if (identity_.resumes() == 0) identity_.clear_resumed();
}

void MembershipAgent::Loop() {
  bool joined = false, refused = false;
  absl::Duration wait = absl::ZeroDuration();
  while (WaitForNext(wait)) {
    absl::Status status = joined ? Heartbeat() : Join();
    if (status.ok()) {
      MutexLock lock(mu_);
      if (!joined_) changed_.SignalAll();
      if (!last_error_.ok()) spdlog::info("event=coordinator_answers_again worker={}", identity_.name());
      last_error_ = absl::OkStatus();
      joined_ = joined = true;
      refused = false;
      wait = interval_;
      continue;
    }
    wait = kRetry;
    const bool taken = absl::IsAborted(status) || absl::IsPermissionDenied(status);
    if (const std::optional<int64_t> next = NextIncarnationOf(status); taken && next.has_value()) {
      TakeIncarnation(*next, joined);
      joined = false;
      if (!std::exchange(refused, true)) wait = absl::ZeroDuration();
      continue;
    }
    // The coordinator forgot this worker, which holds no job: join again with the same incarnation.
    if (joined && absl::IsNotFound(status)) joined = false;
    MutexLock lock(mu_);
    if (last_error_.code() != status.code()) {
      spdlog::warn("event=coordinator_error worker={} error=\"{}\"", identity_.name(), status.ToString());
    }
    last_error_ = std::move(status);
    changed_.SignalAll();
  }
}

absl::Status MembershipAgent::Join() {
  ASSIGN_OR_RETURN(const v1::JoinReply reply, coordinator_.Join(identity_, kCallTimeout));
  other_build_ = OtherBuild(reply.protocol());
  worker_.SetHeartbeatTimeout(absl::Milliseconds(reply.heartbeat_timeout_ms()));
  {
    MutexLock lock(mu_);
    interval_ = absl::Milliseconds(reply.heartbeat_interval_ms());
    as_ = {identity_.incarnation(), absl::Milliseconds(reply.heartbeat_timeout_ms())};
  }
  spdlog::info("event=joined worker={} incarnation={} resumes={} heartbeat_ms={} timeout_ms={}", identity_.name(),
               identity_.incarnation(), identity_.resumes(), reply.heartbeat_interval_ms(),
               reply.heartbeat_timeout_ms());
  return Heartbeat();
}

absl::Status MembershipAgent::Heartbeat() {
  v1::HeartbeatRequest request;
  request.set_name(identity_.name());
  request.set_incarnation(identity_.incarnation());
  request.set_secret(identity_.secret());
  request.set_spans_hosts(identity_.spans_hosts());
  request.set_has_device(identity_.has_device());
  request.set_retained(identity_.retained());
  for (v1::MemberStatus& status : worker_.Statuses()) {
    if (status.state() == v1::MEMBER_STATE_FAILED) status.mutable_error()->append(other_build_);
    if (status.state() == v1::MEMBER_STATE_READY && status.rank() != 0) {
      // Steps count as rank 0 tells them. Without them this heartbeat is as the last one, which costs the coordinator less.
      status.set_committed_step(kNoStep);
      status.clear_published_steps();
    }
    *request.add_jobs() = std::move(status);
  }
  for (v1::KeptCopies& copies : worker_.Copies()) *request.add_copies() = std::move(copies);
  ASSIGN_OR_RETURN(const v1::HeartbeatReply reply, coordinator_.Heartbeat(request, kCallTimeout));
  worker_.Reconcile({reply.assignments().begin(), reply.assignments().end()});
  return absl::OkStatus();
}

}  // namespace shardmesh
