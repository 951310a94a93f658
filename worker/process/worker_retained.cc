// Worker's dealings with the node of its host (worker/node): what of a job outlives this process, and how the next
// incarnation takes it over.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "local/process/process_end.h"
#include "worker/job/second_look.h"
#include "worker/lead/step_mail.h"
#include "worker/node/retained_memory.h"
#include "worker/process/worker.h"

namespace shardmesh {
namespace {

// The memory of one preparation: nothing more is opened once that is cancelled.
class CancellableMemory final : public Memory {
 public:
  // `retained`: the node's; unset: `ending`, what ends with this process.
  CancellableMemory(std::optional<RetainedMemory> retained, Memory& ending, const std::atomic<bool>& cancelled)
      : retained_(std::move(retained)), ending_(ending), cancelled_(cancelled) {}
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    if (cancelled_.load()) return absl::CancelledError("the job was closed");
    return (retained_.has_value() ? *retained_ : ending_).Open(name, num_bytes, data_offset);
  }

 private:
  std::optional<RetainedMemory> retained_;
  Memory& ending_;
  const std::atomic<bool>& cancelled_;
};

// The place in a job that the next incarnation takes: a PlaceHead and an Assignment.
constexpr char kPlace[] = "assignment";

struct PlaceHead {
  uint64_t size;  // bytes of the Assignment behind it
  int64_t heartbeat_timeout_nanos;
};

absl::StatusOr<Segment> WritePlace(const v1::Assignment& assignment, absl::Duration heartbeat_timeout) {
  const std::string bytes = assignment.SerializeAsString();
  const PlaceHead head = {bytes.size(), absl::ToInt64Nanoseconds(heartbeat_timeout)};
  ASSIGN_OR_RETURN(Segment segment, Segment::Create(kPlace, static_cast<int64_t>(sizeof(head) + bytes.size()), 0));
  std::memcpy(segment.data(), &head, sizeof(head));
  std::memcpy(segment.data() + sizeof(head), bytes.data(), bytes.size());
  return segment;
}

absl::StatusOr<v1::Assignment> ReadPlace(NodeLink& node, const RetainedJob& job, absl::Duration& heartbeat_timeout) {
  ASSIGN_OR_RETURN(const Segment segment, node.Find(job.job, job.epoch, kPlace));
  PlaceHead head = {};
  v1::Assignment assignment;
  if (segment.num_bytes() >= static_cast<int64_t>(sizeof(head))) std::memcpy(&head, segment.data(), sizeof(head));
  if (head.size == 0 || head.heartbeat_timeout_nanos <= 0 ||
      head.size > static_cast<uint64_t>(segment.num_bytes()) - sizeof(head) ||
      !assignment.ParseFromArray(segment.data() + sizeof(head), static_cast<int>(head.size)) ||
      assignment.spec().name() != job.job || assignment.epoch() != job.epoch || assignment.rank() != job.rank) {
    return absl::FailedPreconditionError("what the node has of its place in the job is of another build");
  }
  heartbeat_timeout = absl::Nanoseconds(head.heartbeat_timeout_nanos);
  return assignment;
}

}  // namespace

std::unique_ptr<Memory> Worker::MemoryFor(Entry& entry, bool restarts) {
  entry.in_node = options_.node != nullptr && restarts;
  std::optional<RetainedMemory> retained;
  const v1::Assignment& assignment = entry.assignment;
  if (entry.in_node) retained.emplace(*options_.node, assignment.spec().name(), assignment.epoch(), entry.resumed);
  return std::make_unique<CancellableMemory>(std::move(retained), *memory_, entry.closing);
}

absl::Status Worker::KeepWhole(Entry& entry) {
  if (!entry.in_node) return absl::OkStatus();
  const v1::Assignment& assignment = entry.assignment;
  ASSIGN_OR_RETURN(const Segment place, WritePlace(assignment, heartbeat_timeout()));
  absl::Status whole = options_.node->Keep(assignment.spec().name(), assignment.epoch(), kPlace, place);
  if (whole.ok() || absl::IsUnavailable(whole)) {
    whole =
        options_.node->Whole({assignment.spec().name(), assignment.epoch(), assignment.rank(), assignment.plan_hash()});
  }
  if (absl::IsResourceExhausted(whole)) {  // the job goes on, and ends with this process
    spdlog::warn("event=not_retained worker={} job={} epoch={} cause=\"{}\"", options_.name, assignment.spec().name(),
                 assignment.epoch(), std::string(whole.message()));
    return absl::OkStatus();
  }
  if (!whole.ok() && !absl::IsUnavailable(whole)) return Annotate(whole, "the node");
  entry.retained.store(true);
  return absl::OkStatus();
}

bool Worker::IsRetained(const Entry& entry) const { return entry.retained.load() && options_.node->connected(); }

std::vector<std::pair<std::shared_ptr<JobShard>, bool>> Worker::JobsAndWhetherRetained() const {
  std::vector<std::pair<std::shared_ptr<JobShard>, bool>> jobs;
  MutexLock lock(mu_);
  for (const Entries* all : {&jobs_, &staged_}) {
    for (const auto& [name, entry] : *all) {
      if (entry->shard != nullptr) jobs.emplace_back(entry->shard, IsRetained(*entry));
    }
  }
  return jobs;
}

void Worker::TellWhetherRetained() {
  const auto jobs = JobsAndWhetherRetained();
  for (const auto& [shard, retained] : jobs) {
    shard->protocol().members().SignOfLife(shard->rank(), MonotonicNanos(), getpid(), retained);
  }
  // Now peers know, too: whether they would wait for the next incarnation of this worker.
  spdlog::info("event={} worker={} jobs={}", options_.node->connected() ? "retained_again" : "not_retained",
               options_.name, jobs.size());
  Changed();
}

// Of a job that was made again before the older one was dropped there are two: the newer counts. If it goes on from the
// older one it may not be READY yet, and need that still.
std::vector<v1::ResumedJob> Worker::Resume() {
  if (options_.node == nullptr) return {};
  std::map<std::string, std::map<int64_t, RetainedJob>> left;  // by epoch
  for (const RetainedJob& job : options_.node->left().jobs) left[job.job][job.epoch] = job;
  std::vector<v1::ResumedJob> resumed;
  for (const auto& [name, epochs] : left) {
    std::shared_ptr<Entry> newest;
    for (auto job = epochs.rbegin(); job != epochs.rend(); ++job) {
      const bool older = newest != nullptr;
      const bool wanted = !older || (newest->before == nullptr && newest->assignment.has_from() &&
                                     newest->assignment.from().epoch() == job->first);
      const std::shared_ptr<Entry> entry = wanted ? ResumeOne(job->second) : nullptr;
      if (entry == nullptr) {
        options_.node->Drop(name, job->first);
        continue;
      }
      v1::ResumedJob& taken = resumed.emplace_back();
      taken.set_job(name);
      taken.set_epoch(job->first);
      taken.set_rank(job->second.rank);
      taken.set_secret(entry->assignment.secret());
      (older ? newest->before : newest) = entry;
    }
    if (newest == nullptr) continue;
    MutexLock lock(mu_);
    if (newest->before != nullptr) BeginPreparing(newest->before);
    BeginPreparing(newest);
    jobs_[name] = newest;
  }
  return resumed;
}

std::shared_ptr<Worker::Entry> Worker::ResumeOne(const RetainedJob& left) {
  absl::Duration timeout;
  absl::StatusOr<v1::Assignment> place = ReadPlace(*options_.node, left, timeout);
  if (!place.ok()) {
    spdlog::error("event=not_resumed job={} epoch={} error=\"{}\"", left.job, left.epoch, place.status().ToString());
    return nullptr;
  }
  auto entry = std::make_shared<Entry>();
  entry->assignment = *std::move(place);
  entry->assignment.set_staged(false);
  entry->resumed = true;
  MutexLock lock(mu_);
  heartbeat_timeout_ = timeout;  // until the coordinator says it anew
  return entry;
}

// A process that is not seen from here (another pid namespace) may live.
void Worker::AwaitClaims(const std::shared_ptr<Entry>& entry, JobShard& shard) {
  const ControlBlock& control = *shard.protocol().control();
  const auto holder_of = [&](const std::vector<int>& slots) {
    return static_cast<pid_t>(control.slots[slots[0]].holder_pid.load());
  };
  const auto lives = [&](const std::vector<int>& slots) { return !HasEnded(holder_of(slots)); };
  const auto give_up = [&](uint64_t session, const std::vector<int>& slots) {
    spdlog::warn("event=trainer_not_back job={} slots={}", shard.spec().name, slots.size());
    const SecondLook look(*shard.protocol().control(), holder_of(slots));
    GiveSlotsBack(shard.protocol(), slots, session, entry->closing);
  };
  for (const auto& [session, slots] : shard.protocol().slots().Sessions().leaving) give_up(session, slots);
  shard.unclaimed().AwaitClaims([&] { return entry->closing.load(); }, lives, give_up);
}

void Worker::Drop(const Entry& entry) {
  if (options_.node == nullptr) return;
  options_.node->Drop(entry.assignment.spec().name(), entry.assignment.epoch());
}

}  // namespace shardmesh
