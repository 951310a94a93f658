#include "worker/engine.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "local/futex.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often
constexpr size_t kMaxStaged = 2;  // pieces of initial weights: the newest, and the one that may just be decided

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
    case CommandKind::kGather:
      return "gather";
    case CommandKind::kNone:
      break;
  }
  return "none";
}

}  // namespace

Engine::Engine(StepProtocol& protocol, Pass& pass, Rank rank, absl::Duration step_timeout,
               std::function<void()> progress, Trace* trace)
    : protocol_(protocol),
      pass_(pass),
      rank_(rank),
      step_timeout_(step_timeout),
      progress_(std::move(progress)),
      trace_(trace) {
  thread_ = std::thread([this] { Loop(); });
}

Engine::~Engine() {
  stop_.store(true);
  FutexBump(protocol_.page()->doorbell);
  FutexBump(protocol_.page()->decision);
  FutexBump(protocol_.page()->finished);
  thread_.join();
}

absl::Status Engine::StageInitial(std::vector<float> piece, uint64_t push_id) {
  MutexLock lock(mu_);
  if (protocol_.decided() > 0) return absl::AbortedError("the job has its initial weights already");
  if (staged_.size() == kMaxStaged) staged_.erase(staged_.begin());
  staged_.emplace_back(push_id, std::move(piece));
  protocol_.InitialPieceReady(rank_, push_id);
  return absl::OkStatus();
}

bool Engine::Stopping() const { return stop_.load() || !protocol_.Health().ok(); }

void Engine::Loop() {
  ControlPage& page = *protocol_.page();
  uint64_t executed = 0;
  while (!Stopping()) {
    std::atomic<uint32_t>& word = lead() ? page.doorbell : page.decision;
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (lead() && protocol_.decided() == executed) protocol_.Decide();
    if (protocol_.decided() == executed) {
      FutexWait(word, seen, kSlice);
      continue;
    }
    executed = protocol_.decided();
    const int64_t step = protocol_.command().step;  // the command is the lead's again once all are done
    Execute(executed);
    if (lead()) {
      if (!AwaitAllDone(step)) break;
      protocol_.Commit();
    } else if (!AwaitCommitted(executed, step)) {
      break;
    }
    progress_();
  }
  progress_();
}

// The piece of the set that was decided: a newer one may have been staged since, and must not be mixed in.
std::optional<std::vector<float>> Engine::TakeStaged(uint64_t push_id) {
  MutexLock lock(mu_);
  auto staged = std::exchange(staged_, {});
  for (auto& [id, piece] : staged) {
    if (id == push_id) return std::move(piece);
  }
  return std::nullopt;
}

void Engine::Execute(uint64_t seq) {
  const Command& command = protocol_.command();
  const ScopedSpan span(trace_, NameOf(command.kind), command.step);
  std::optional<std::vector<float>> initial = std::vector<float>();
  if (command.kind == CommandKind::kInit) initial = TakeStaged(command.initial_id);
  if (!initial.has_value()) {  // three sets of initial weights raced: this one was dropped after it was decided
    protocol_.Abort(AbortReason::kInternal, rank_.value(), rank_);
    return;
  }
  const uint64_t digest = pass_.Execute(command, seq, initial->data());
  protocol_.page()->members[rank_.value()].digest.store(digest, std::memory_order_release);
  protocol_.Done(rank_, seq);
}

bool Engine::AwaitAllDone(int64_t step) {
  ControlPage& page = *protocol_.page();
  const ScopedSpan span(trace_, "wait for members", step);
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(step_timeout_);
  while (!Stopping()) {
    const uint32_t seen = page.doorbell.load(std::memory_order_acquire);
    if (protocol_.AllDone()) return true;
    if (MonotonicNanos() > deadline) {
      const std::vector<int> late = protocol_.NotDone();
      if (late.empty()) continue;  // the last one finished just now
      protocol_.Abort(AbortReason::kLate, late.front(), rank_);
    }
    FutexWait(page.doorbell, seen, kSlice);
  }
  return false;
}

bool Engine::AwaitCommitted(uint64_t seq, int64_t step) {
  ControlPage& page = *protocol_.page();
  const ScopedSpan span(trace_, "wait for lead", step);
  // Longer than the lead's own limit: the lead names the slow one; only a lead that does not is named here.
  const int64_t deadline = MonotonicNanos() + 2 * absl::ToInt64Nanoseconds(step_timeout_);
  while (!Stopping()) {
    const uint32_t seen = page.finished.load(std::memory_order_acquire);
    if (protocol_.committed() >= seq) return true;
    if (MonotonicNanos() > deadline) protocol_.Abort(AbortReason::kLate, 0, rank_);
    FutexWait(page.finished, seen, kSlice);
  }
  return false;
}

}  // namespace shardmesh
