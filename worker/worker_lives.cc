// Worker's dealings with the keeper of its host (worker/node): what of a job outlives this process, and how the next
// life takes it over.
#include <signal.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"
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
  const absl::Status whole =
      options_.keeper->Whole({assignment.spec().name(), assignment.epoch(), assignment.rank(), assignment.plan_hash(),
                              assignment.SerializeAsString()});
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

void Worker::Resume() {
  if (options_.keeper == nullptr) return;
  MutexLock lock(mu_);
  for (const KeptJob& left : options_.keeper->left().jobs) {
    auto entry = std::make_shared<Entry>();
    if (!entry->assignment.ParseFromString(left.assignment) || entry->assignment.spec().name() != left.job ||
        entry->assignment.epoch() != left.epoch || entry->assignment.rank() != left.rank || jobs_.count(left.job) > 0) {
      spdlog::error("event=not_resumed job={} epoch={} error=\"what the keeper has of it is of another build\"", left.job,
                    left.epoch);
      continue;
    }
    entry->resumed = true;
    entry->preparing = std::thread([this, entry] { Prepare(entry); });
    jobs_[left.job] = entry;
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
