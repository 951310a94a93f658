// Worker's dealings with the keeper of its host (worker/node): what of a job outlives this process, and how the next
// life takes it over.
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "local/futex.h"
#include "worker/node/kept_memory.h"
#include "worker/step_mail.h"
#include "worker/worker.h"

namespace shardmesh {
namespace {

// The memory of one preparation: nothing more is opened once that is cancelled.
class CancellableMemory final : public Memory {
 public:
  // `kept`: the keeper's; unset: `ending`, what ends with this process.
  CancellableMemory(std::optional<KeptMemory> kept, Memory& ending, const std::atomic<bool>& cancelled)
      : kept_(std::move(kept)), ending_(ending), cancelled_(cancelled) {}
  absl::StatusOr<Segment> Open(const std::string& name, int64_t num_bytes, int64_t data_offset) override {
    if (cancelled_.load()) return absl::CancelledError("the job was closed");
    return (kept_.has_value() ? *kept_ : ending_).Open(name, num_bytes, data_offset);
  }

 private:
  std::optional<KeptMemory> kept_;
  Memory& ending_;
  const std::atomic<bool>& cancelled_;
};

// The place in a job that the next life takes: an Assignment, its length before it.
constexpr char kPlace[] = "assignment";

absl::StatusOr<Segment> WritePlace(const v1::Assignment& assignment) {
  const std::string bytes = assignment.SerializeAsString();
  const uint64_t size = bytes.size();
  ASSIGN_OR_RETURN(Segment segment, Segment::Create(kPlace, static_cast<int64_t>(sizeof(size) + size), 0));
  std::memcpy(segment.data(), &size, sizeof(size));
  std::memcpy(segment.data() + sizeof(size), bytes.data(), size);
  return segment;
}

absl::StatusOr<v1::Assignment> ReadPlace(KeeperLink& keeper, const KeptJob& job) {
  ASSIGN_OR_RETURN(const Segment segment, keeper.Find(job.job, job.epoch, kPlace));
  uint64_t size = 0;
  v1::Assignment assignment;
  const auto room = static_cast<uint64_t>(segment.num_bytes()) - sizeof(size);
  if (segment.num_bytes() >= static_cast<int64_t>(sizeof(size))) std::memcpy(&size, segment.data(), sizeof(size));
  if (size == 0 || size > room ||
      !assignment.ParseFromArray(segment.data() + sizeof(size), static_cast<int>(size)) ||
      assignment.spec().name() != job.job || assignment.epoch() != job.epoch || assignment.rank() != job.rank) {
    return absl::FailedPreconditionError("what the keeper has of its place in the job is of another build");
  }
  return assignment;
}

}  // namespace

// Hosts of one job abort together: what one of them keeps is of no use alone. Uses of buckets, and memory of a device,
// are the process's own.
std::unique_ptr<Memory> Worker::MemoryFor(Entry& entry, const JobSpec& spec, const HostRanks& ranks) {
  entry.in_keeper = options_.keeper != nullptr && ranks.num_hosts == 1 && !options_.device.has_value() &&
                    spec.residency == Residency::kFull;
  std::optional<KeptMemory> kept;
  if (entry.in_keeper) kept.emplace(*options_.keeper, spec.name, entry.assignment.epoch(), entry.resumed);
  return std::make_unique<CancellableMemory>(std::move(kept), *memory_, entry.closing);
}

absl::Status Worker::KeepWhole(Entry& entry) {
  if (!entry.in_keeper) return absl::OkStatus();
  const v1::Assignment& assignment = entry.assignment;
  ASSIGN_OR_RETURN(const Segment place, WritePlace(assignment));
  absl::Status whole = options_.keeper->Keep(assignment.spec().name(), assignment.epoch(), kPlace, place);
  if (whole.ok() || absl::IsUnavailable(whole)) {
    whole = options_.keeper->Whole(
        {assignment.spec().name(), assignment.epoch(), assignment.rank(), assignment.plan_hash()});
  }
  if (!whole.ok() && !absl::IsUnavailable(whole)) return Annotate(whole, "the keeper");
  entry.kept.store(true);
  return absl::OkStatus();
}

bool Worker::IsKept(const Entry& entry) const { return entry.kept.load() && options_.keeper->connected(); }

std::vector<std::pair<std::shared_ptr<JobShard>, bool>> Worker::JobsAndWhetherKept() const {
  std::vector<std::pair<std::shared_ptr<JobShard>, bool>> jobs;
  MutexLock lock(mu_);
  for (const auto& [name, entry] : jobs_) {
    if (entry->shard != nullptr) jobs.emplace_back(entry->shard, IsKept(*entry));
  }
  return jobs;
}

void Worker::TellWhetherKept() const {
  for (const auto& [shard, kept] : JobsAndWhetherKept()) {
    shard->protocol().SignOfLife(shard->rank(), MonotonicNanos(), getpid(), kept);
  }
}

void Worker::Resume() {
  if (options_.keeper == nullptr) return;
  for (const KeptJob& left : options_.keeper->left().jobs) {
    absl::StatusOr<v1::Assignment> place = ReadPlace(*options_.keeper, left);
    if (!place.ok()) {
      spdlog::error("event=not_resumed job={} epoch={} error=\"{}\"", left.job, left.epoch, place.status().ToString());
      continue;
    }
    MutexLock lock(mu_);
    auto entry = std::make_shared<Entry>();
    entry->assignment = *std::move(place);
    entry->resumed = true;
    if (!jobs_.emplace(left.job, entry).second) continue;
    entry->preparing = std::thread([this, entry] { Prepare(entry); });
  }
}

void Worker::AwaitOrphans(const std::shared_ptr<Entry>& entry, JobShard& shard) {
  const ControlPage& page = *shard.protocol().page();
  const auto lives = [&](const std::vector<int>& slots) {
    const auto pid = static_cast<pid_t>(page.slots[slots[0]].holder_pid.load());
    return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM);
  };
  const auto give_up = [&](uint64_t session, const std::vector<int>& slots) {
    spdlog::warn("event=trainer_not_back job={} slots={}", shard.spec().name, slots.size());
    GiveSlotsBack(shard.protocol(), slots, session, entry->closing);
  };
  shard.orphans().AwaitClaims(heartbeat_timeout(), [&] { return entry->closing.load(); }, lives, give_up);
}

void Worker::Drop(const Entry& entry) {
  if (options_.keeper == nullptr) return;
  options_.keeper->Drop(entry.assignment.spec().name(), entry.assignment.epoch());
}

}  // namespace shardmesh
