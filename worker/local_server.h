// LocalServer: the UNIX socket of one worker: trainers that attach, and peers that fetch shared memory (local.proto).
// One thread per connection; each ends with its connection or the server. Only processes of this user (or root) are
// served. Thread-safe.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/clock.h"
#include "core/sync.h"
#include "local/socket.h"
#include "worker/worker.h"

namespace shardmesh {

inline constexpr int kMaxLocalConnections = 1024;
inline constexpr absl::Duration kGrantLife = absl::Seconds(30);

class LocalServer {
 public:
  // Errors of LocalListener::Listen. `worker` and `clock` outlive the object.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(const std::string& path, Worker& worker,
                                                            const Clock& clock);
  ~LocalServer();

  const std::string& path() const { return listener_.path(); }

  // A token, good once and for kGrantLife, to attach to these slots.
  absl::StatusOr<std::string> Grant(std::shared_ptr<JobShard> shard, std::vector<int> slots);

 private:
  struct Granted {
    std::shared_ptr<JobShard> shard;
    std::vector<int> slots;
    absl::Time until;
  };
  struct Connection {
    std::thread thread;
    std::atomic<bool> done{false};
  };

  LocalServer(LocalListener listener, Worker& worker, const Clock& clock);
  void AcceptLoop();
  void Serve(LocalSocket socket);
  void ServeTrainer(LocalSocket& socket, const std::string& token);
  absl::StatusOr<Granted> Redeem(const std::string& token);
  static absl::Status TakeSlot(StepProtocol& protocol, int slot, uint64_t holder);
  static absl::Status AwaitSlotsOpen(StepProtocol& protocol, absl::Span<const Slot> slots);
  absl::Status TakeSlots(const Granted& granted, uint64_t holder);
  absl::Status Welcome(LocalSocket& socket, const Granted& granted);
  void AnswerSteps(LocalSocket& socket, const Granted& granted);
  absl::Status AnswerStep(LocalSocket& socket, const Granted& granted, const v1::StepRequest& request);
  void ReapConnections();

  LocalListener listener_;
  Worker& worker_;
  const Clock& clock_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> next_session_{1};
  Mutex mu_;
  std::map<std::string, Granted> grants_ ABSL_GUARDED_BY(mu_);
  std::list<Connection> connections_;  // of the accepting thread
  std::thread acceptor_;
};

}  // namespace shardmesh
