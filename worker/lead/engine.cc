#include "worker/lead/engine.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often
constexpr size_t kMaxStaged = 2;  // shards of initial weights: the newest, and the one that may just be decided

const char* NameOf(CommandKind kind) {
  switch (kind) {
    case CommandKind::kInit:
      return "init";
    case CommandKind::kStep:
      return "step";
    case CommandKind::kDigest:
      return "digest";
    case CommandKind::kNorm:
      return "norm";
    case CommandKind::kQuantize:
      return "quantize";
    case CommandKind::kReduceBucket:
      return "reduce_bucket";
    case CommandKind::kGatherBucket:
      return "gather_bucket";
    case CommandKind::kMerge:
      return "merge";
    case CommandKind::kRestore:
      return "restore";
    case CommandKind::kPublish:
      return "publish";
    case CommandKind::kNone:
      break;
  }
  return "none";
}

}  // namespace

class Engine::HostGate final : public BucketGate {
 public:
  HostGate(StepProtocol& protocol, Rank rank) : protocol_(protocol), rank_(rank) {}
  bool AwaitGradients(const Command& command, int bucket) override {
    return protocol_.commands().AwaitGradients(Step(command.step), bucket);
  }
  void Done(uint64_t seq, int buckets) override { protocol_.commands().BucketsDone(rank_, seq, buckets); }

 private:
  StepProtocol& protocol_;
  const Rank rank_;
};

Engine::Engine(StepProtocol& protocol, StepPass& pass, Rank rank, EngineOptions options)
    : protocol_(protocol), pass_(pass), rank_(rank), options_(std::move(options)) {
  const MemberWords& words = protocol_.control()->members[rank_.value()];
  if (const uint64_t loaded = words.loaded_id.load(); loaded != 0) {  // by its last incarnation, whose storage this is
    MutexLock lock(mu_);
    loaded_ = Loaded{loaded, Step(words.loaded_step.load())};
  }
  thread_ = std::thread([this] { Loop(); });
}

Engine::~Engine() { Stop(); }

void Engine::Stop() {
  stop_.store(true);
  FutexBump(protocol_.notifier());
  FutexBump(protocol_.control()->decision);
  FutexBump(protocol_.control()->finished);
  if (thread_.joinable()) thread_.join();
}

absl::Status Engine::StageInitial(InitialShard shard, uint64_t push_id) {
  MutexLock lock(mu_);
  if (protocol_.decided() > 0) return absl::AbortedError("the job has its initial weights already");
  if (staged_.size() == kMaxStaged) staged_.erase(staged_.begin());
  staged_.emplace_back(push_id, std::move(shard));
  protocol_.commands().InitialShardReady(rank_, push_id);
  return absl::OkStatus();
}

absl::Status Engine::Load(uint64_t load_id, Step step, const std::function<absl::Status()>& read) {
  constexpr absl::string_view kHasWeights = "the job has its weights already";
  {
    MutexLock lock(mu_);
    if (loading_) return absl::AbortedError("another load of this shard is under way; try again");
    if (protocol_.decided() > 0) return absl::AbortedError(kHasWeights);
    protocol_.commands().LoadedReady(rank_, 0,
                                     Step(kNoStep));  // from here on the storage is not what was loaded before
    loaded_.reset();
    loading_ = true;
  }
  bool whole = false;
  const absl::Cleanup end = [&] {
    MutexLock lock(mu_);
    loading_ = false;
    if (whole) loaded_ = Loaded{load_id, step};
    loading_ended_.SignalAll();
  };
  RETURN_IF_ERROR(read());
  if (protocol_.decided() > 0) return absl::AbortedError(kHasWeights);
  whole = true;
  return absl::OkStatus();
}

absl::Status Engine::UseLoaded(uint64_t load_id) {
  MutexLock lock(mu_);
  if (!loaded_.has_value() || loaded_->id != load_id) {
    return absl::NotFoundError(absl::StrCat("rank ", rank_.value(), " did not load ", load_id, "; load it first"));
  }
  protocol_.commands().LoadedReady(rank_, load_id, loaded_->step);
  return absl::OkStatus();
}

bool Engine::AwaitLoading() {
  while (loading_ && !Stopping()) loading_ended_.WaitFor(mu_, kSlice);
  return !loading_;
}

bool Engine::HasLoaded(uint64_t load_id) {
  MutexLock lock(mu_);
  staged_.clear();
  return AwaitLoading() && loaded_.has_value() && loaded_->id == load_id;
}

bool Engine::Stopping() const { return stop_.load() || !protocol_.members().Health().ok(); }

void Engine::Await(std::atomic<uint32_t>& word, uint32_t seen) const {
  const absl::Duration wait = options_.lead != nullptr ? options_.lead->Patience() : kSlice;
  if (wait > absl::ZeroDuration()) AwaitChange(word, seen, options_.spin, wait);
}

void Engine::Call(const std::function<void()>& callback) const {
  if (callback) callback();
}

void Engine::Loop() {
  ControlBlock& control = *protocol_.control();
  std::atomic<uint32_t>& word = options_.lead != nullptr ? protocol_.notifier() : control.decision;
  uint64_t executed = control.members[rank_.value()].done.load();  // by this member's last incarnation, if it had one
  while (!Stopping()) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (!Advance()) break;
    if (protocol_.decided() == executed && protocol_.committed() == executed) {
      Await(word, seen);
      continue;
    }
    const int64_t step = protocol_.command().step;  // the command is the lead's again once all are done
    if (protocol_.decided() != executed) {
      executed = protocol_.decided();
      Reach(FaultPoint::kCommandSeen);
      Execute(executed);
    }
    if (!AwaitCommitted(executed, step)) break;
    Call(options_.progress);
  }
  Call(options_.progress);
}

// Initial weights of the set that was decided: a newer one may have been staged since, and must not be mixed in.
std::optional<InitialShard> Engine::TakeStaged(uint64_t push_id) {
  MutexLock lock(mu_);
  if (!AwaitLoading()) return std::nullopt;
  auto staged = std::exchange(staged_, {});
  loaded_.reset();
  for (auto& [id, shard] : staged) {
    if (id == push_id) return std::move(shard);
  }
  return std::nullopt;
}

void Engine::Execute(uint64_t seq) {
  const Command& command = protocol_.command();
  const ScopedSpan span(options_.trace, NameOf(command.kind), command.step, command.bucket);
  std::optional<InitialShard> initial = InitialShard();
  if (command.kind == CommandKind::kInit) initial = TakeStaged(command.initial_id);
  const bool loads = command.kind == CommandKind::kRestore && command.initial_id != 0;
  // What was staged is gone where three sets raced, or in the next incarnation of a process.
  if (!initial.has_value() || (loads && !HasLoaded(command.initial_id))) {
    protocol_.members().Abort(AbortReason::kInternal, rank_.value(), rank_);
    return;
  }
  HostGate gate(protocol_, rank_);
  const bool several = !protocol_.local().alone();
  const absl::StatusOr<uint64_t> digest = pass_.Run(command, seq, initial->data(), several ? &gate : nullptr);
  if (several && !protocol_.members().Health().ok()) return;  // it may not be whole
  if (!digest.ok()) {
    Failed(digest.status());
    return;
  }
  protocol_.control()->members[rank_.value()].digest.store(*digest, std::memory_order_release);
  Reach(FaultPoint::kExecuted);
  protocol_.commands().Done(rank_, seq);
}

// A pass that fails is one on a device, or has found damage.
void Engine::Failed(const absl::Status& status) {
  spdlog::error("event=pass_failed rank={} device={} error=\"{}\"", rank_.value(), pass_.device(), status.ToString());
  if (!protocol_.members().Health().ok()) return;  // it was aborted for another reason
  const AbortReason reason = absl::IsDataLoss(status) ? AbortReason::kDamaged : AbortReason::kDevice;
  protocol_.members().Abort(reason, rank_.value(), rank_, std::max(pass_.device(), 0));
}

bool Engine::AwaitCommitted(uint64_t seq, int64_t step) {
  ControlBlock& control = *protocol_.control();
  const bool leads = options_.lead != nullptr;
  const ScopedSpan span(options_.trace, leads ? "wait for members" : "wait for lead", step);
  std::atomic<uint32_t>& word = leads ? protocol_.notifier() : control.finished;
  // Longer than the lead's own limit: the lead names the slow one; only a lead that does not is named here.
  const int64_t times = protocol_.local().alone() ? 2 : 4;
  const int64_t deadline = MonotonicNanos() + times * absl::ToInt64Nanoseconds(options_.step_timeout);
  while (!Stopping()) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (!Advance()) return false;
    if (protocol_.committed() >= seq) return true;
    if (!leads && MonotonicNanos() > deadline) {
      protocol_.members().Abort(AbortReason::kLate, protocol_.local().first(), rank_);
    }
    Await(word, seen);
  }
  return false;
}

}  // namespace shardmesh
