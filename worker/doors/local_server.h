// LocalServer: the UNIX socket of one worker: trainers that attach, and peers that fetch shared memory (local.proto).
// One thread per connection; each ends with its connection or the server. Without a thread it is refused. Only
// processes of this user (or root) are served. What a trainer or reader has is free when its connection closes, or its
// process ends. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/clock.h"
#include "core/base/sync.h"
#include "local/socket/socket.h"
#include "worker/doors/bucket_uses.h"
#include "worker/doors/trainer_watch.h"
#include "worker/process/worker.h"

namespace shardmesh {

inline constexpr int kMaxLocalConnections = 1024;
inline constexpr absl::Duration kGrantLifetime = absl::Seconds(30);
inline constexpr int kMaxGrants = 4096;  // that nobody has redeemed yet

class BucketUses;

class LocalServer {
 public:
  // Errors of LocalListener::Listen. `worker` and `clock` outlive the object.
  // `first_session`: the number of the first session, of 30 bits; unset: any.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(const std::string& path, Worker& worker, const Clock& clock,
                                                            std::optional<uint32_t> first_session = std::nullopt);
  ~LocalServer();

  const std::string& path() const { return listener_.path(); }

  // A token, good once and for kGrantLifetime, to attach to these slots. ResourceExhausted: kMaxGrants are open, or
  // `caller` (CallerKey of rpc/calls/caller_share.h) has its share of them.
  absl::StatusOr<std::string> Grant(std::shared_ptr<JobShard> shard, std::vector<int> slots,
                                    const std::string& caller = "");
  // The same, to map publications. `ttl`: of a lease (version_leases.h).
  absl::StatusOr<std::string> GrantReader(std::shared_ptr<JobShard> shard, absl::Duration ttl,
                                          const std::string& caller = "");

  // A seat for a trainer that is connected to this worker, of a job whose slots are pulled. It is this process's own,
  // and is free when that ends. Waits a moment for one that is just being left.
  //   ResourceExhausted: the job has all its trainers. FailedPrecondition: its slots are assigned.
  struct HeldSeat {
    int seat = 0;
    uint64_t holder = 0;  // control_block.h
  };
  absl::StatusOr<HeldSeat> TakeSeat(const std::shared_ptr<JobShard>& shard);
  void GiveSeatBack(JobShard& shard, const HeldSeat& seat);

 private:
  struct Granted {
    std::shared_ptr<JobShard> shard;
    std::vector<int> slots;
    absl::Duration reader_ttl;  // of a reader's, which has no slots; else 0
    bool needs_all = false;     // TrainerHello.needs_all
    bool resumed = false;       // a session that the worker's last incarnation had
  };
  // One that nobody has redeemed yet. It does not keep the job's memory.
  struct OpenGrant {
    std::weak_ptr<JobShard> shard;
    std::vector<int> slots;
    absl::Duration reader_ttl;
    std::string caller;
    absl::Time until;
  };
  // What a connection's thread has of its session.
  struct Connected {
    BucketUses uses;
    TrainerWatch watch;
  };
  struct Connection {
    std::thread thread;
    std::atomic<bool> done{false};
  };

  LocalServer(LocalListener listener, Worker& worker, const Clock& clock, uint32_t first_session);
  // Instead of a welcome.
  static absl::Status SendError(LocalSocket& socket, const absl::Status& status);
  void AcceptLoop();
  void Serve(LocalSocket socket);
  static void Watch(LocalSocket& socket);
  void ServeTrainer(LocalSocket& socket, const v1::TrainerHello& hello);
  absl::StatusOr<std::string> Grant(OpenGrant granted);
  // local_readers.cc.
  void ServeReader(LocalSocket& socket, const Granted& granted);
  absl::Status WelcomeReader(LocalSocket& socket, JobShard& shard, int seat);
  void AnswerReader(LocalSocket& socket, JobShard& shard, int seat);
  // A trainer of this worker's last incarnation.
  void ServeSession(LocalSocket& socket, const v1::SessionHello& hello);
  absl::Status ClaimSession(LocalSocket& socket, const v1::SessionHello& hello, Granted& granted);
  uint64_t NewHolder(JobShard& shard);
  void FillWelcome(JobShard& shard, uint64_t holder, absl::Span<const int> slots, v1::LocalWelcome& welcome) const;
  absl::StatusOr<Granted> Redeem(const std::string& token);
  static absl::Status TakeSlot(JobShard& shard, int slot, uint64_t holder, pid_t pid);
  static absl::Status AwaitSlotsOpen(StepProtocol& protocol, absl::Span<const Slot> slots, uint64_t holder);
  absl::Status TakeSlots(Granted& granted, uint64_t holder, pid_t pid);
  static bool TakeFreeSeat(Granted& granted, uint64_t holder, pid_t pid);
  absl::Status TakeSeat(Granted& granted, uint64_t holder, pid_t pid);
  void ForgetUnclaimed(JobShard& shard, int slot, pid_t pid);
  absl::Status Welcome(LocalSocket& socket, const Granted& granted, uint64_t holder);
  void AnswerRequests(LocalSocket& socket, const Granted& granted);
  // local_answers.cc. Of a message that is not answered yet: that the worker is alive, or why there will be no answer.
  absl::Status TellOfOpenMessage(LocalSocket& socket, const Granted& granted, const TrainerWatch& watch);
  // An error of Answer: the trainer does not get it, the connection is over; one of the others: its
  // answer.
  absl::Status Answer(LocalSocket& socket, const Granted& granted, Connected& here, const v1::TrainerRequest& message);
  absl::Status AnswerStep(LocalSocket& socket, const Granted& granted, Connected& here,
                          const v1::TrainerRequest& message, v1::TrainerReply& reply);
  absl::Status AnswerDeclare(LocalSocket& socket, const Granted& granted, Connected& here,
                             const v1::TrainerRequest& message, v1::TrainerReply& reply);
  absl::Status AnswerUse(LocalSocket& socket, const Granted& granted, Connected& here,
                         const v1::TrainerRequest& message);
  absl::Status AwaitAlive(LocalSocket& socket, const Granted& granted, Connected& here, uint64_t id,
                          absl::Time deadline, const std::function<absl::Status(absl::Duration)>& wait,
                          const std::function<std::string()>& waits_for);
  static absl::Status CheckSlots(const Granted& granted, absl::Span<const int> slots);
  void ReapConnections();

  LocalListener listener_;
  Worker& worker_;
  const Clock& clock_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> next_session_;
  Mutex mu_;
  std::map<std::string, OpenGrant> grants_ ABSL_GUARDED_BY(mu_);
  std::list<Connection> connections_;  // of the accepting thread
  std::thread acceptor_;
};

}  // namespace shardmesh
