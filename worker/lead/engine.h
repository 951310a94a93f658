// Engine: one worker's thread for one job. It executes the commands that the lead decides (lead.h). Of a job on one
// host the lead has no thread: the engine of the first rank calls it, so a step costs no wake-up of another one. Every
// wait ends at a time limit or at an abort; an aborted engine stops for good. In the next incarnation of a member that
// was killed it goes on where the control block says that the last one was.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/base/sync.h"
#include "local/memory/page_allocator.h"
#include "worker/control/trace.h"
#include "worker/lead/lead.h"
#include "worker/pass/step_pass.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// A shard's part of a job's initial weights (shard.proto).
using InitialShard = std::vector<float, PageAllocator<float>>;

struct EngineOptions {
  absl::Duration step_timeout = absl::Seconds(60);  // of one command; then the slowest is named and the job aborted
  // How long a wait looks at its word before it sleeps. For workers that have a core each and nothing else to do on it.
  absl::Duration spin;
  Lead* lead = nullptr;  // that this engine calls; null: another thread or process does
  // Called from the engine's thread after each commit and after an abort. May be empty.
  std::function<void()> progress;
  Trace* trace = nullptr;  // gets a span for each command and each wait for others
};

class Engine {
 public:
  // Borrowed arguments, and what the options name, outlive the object.
  Engine(StepProtocol& protocol, StepPass& pass, Rank rank, EngineOptions options);
  ~Engine();
  // Ends the thread, between two commands or in a wait; a command that is under way is executed. Not from two threads.
  void Stop();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // This shard's part of the initial weights, as pushed; the set that every member has first counts. Marks it ready in
  // the protocol.
  // Aborted: the job has its weights already.
  absl::Status StageInitial(InitialShard shard, uint64_t push_id);
  // What this shard was in a checkpoint: `read` writes it into the storage, from the calling thread, while no command
  // runs: a job that is about to begin with initial weights waits until it has returned, which it does soon after
  // protocol.decided() is not 0 any more. What was loaded before is lost at once; so is what `read` wrote, if it fails.
  // Aborted: the job has its weights already, or another one is being loaded.
  absl::Status Load(uint64_t load_id, Step step, const std::function<absl::Status()>& read);
  // Marks it ready in the protocol. NotFound: nothing was loaded under that id.
  absl::Status UseLoaded(uint64_t load_id);

 private:
  void Loop();
  // Of a job on several hosts: what the pass asks and tells about buckets.
  class HostGate;
  std::optional<InitialShard> TakeStaged(uint64_t push_id);
  // False: the storage does not hold what was loaded under that id.
  bool HasLoaded(uint64_t load_id);
  // False: the engine is to stop, and somebody still writes into the storage.
  bool AwaitLoading() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Execute(uint64_t seq);
  void Failed(const absl::Status& status);
  // `step`: for the trace. False: the engine is to stop.
  bool AwaitCommitted(uint64_t seq, int64_t step);
  // As the lead: takes what has come. False: the job is over.
  bool Advance() { return options_.lead == nullptr || options_.lead->Advance(); }
  bool Stopping() const;
  void Await(std::atomic<uint32_t>& word, uint32_t seen) const;
  void Call(const std::function<void()>& callback) const;

  StepProtocol& protocol_;
  StepPass& pass_;
  const Rank rank_;
  const EngineOptions options_;
  std::atomic<bool> stop_{false};
  struct Loaded {
    uint64_t id = 0;
    Step step;
  };
  Mutex mu_;
  CondVar loading_ended_;
  bool loading_ ABSL_GUARDED_BY(mu_) = false;          // somebody writes into the storage
  std::optional<Loaded> loaded_ ABSL_GUARDED_BY(mu_);  // what lies there
  // By push_id: this shard's part of that set of initial weights. The oldest first.
  std::vector<std::pair<uint64_t, InitialShard>> staged_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace shardmesh
