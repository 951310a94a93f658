// Engine: one worker's thread for one job. It executes the commands that the lead decides; on the lead it also decides
// and commits (control_page.h). Every wait ends at a time limit or at an abort; an aborted engine stops for good.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/ids.h"
#include "core/sync.h"
#include "worker/pass.h"
#include "worker/step_protocol.h"
#include "worker/trace.h"

namespace shardmesh {

class Engine {
 public:
  // Borrowed arguments outlive the object. `step_timeout`: how long members may take for one command before the slowest
  // is named and the job aborted. `progress` is called from the engine's thread after each commit and after an abort.
  // `trace` gets a span for each command and each wait for others; may be null.
  Engine(StepProtocol& protocol, Pass& pass, Rank rank, absl::Duration step_timeout, std::function<void()> progress,
         Trace* trace = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // This shard's piece of initial weights, as pushed; the set that every member has first counts. Marks it ready in the
  // protocol.
  // Aborted: the job has its weights already.
  absl::Status StageInitial(std::vector<float> piece, uint64_t push_id);

 private:
  void Loop();
  bool lead() const { return rank_ == Rank(0); }
  std::optional<std::vector<float>> TakeStaged(uint64_t push_id);
  void Execute(uint64_t seq);
  // `step`: for the trace.
  bool AwaitAllDone(int64_t step);
  bool AwaitCommitted(uint64_t seq, int64_t step);
  bool Stopping() const;

  StepProtocol& protocol_;
  Pass& pass_;
  const Rank rank_;
  const absl::Duration step_timeout_;
  const std::function<void()> progress_;
  Trace* const trace_;
  std::atomic<bool> stop_{false};
  Mutex mu_;
  std::vector<std::pair<uint64_t, std::vector<float>>> staged_ ABSL_GUARDED_BY(mu_);  // (push_id, piece), oldest first
  std::thread thread_;
};

}  // namespace shardmesh
