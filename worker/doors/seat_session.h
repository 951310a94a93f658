// SeatSession: a connected trainer's seat in a job whose slots are pulled (Shard.Seat, Shard.Trainer). It stands in for
// the trainer on the workers' host: pushed gradients go into the seat's windows, and requests into the seat's mailbox,
// as those of an attached trainer do (local/memory/mailbox.h). So the lead, and leads of several hosts, see one kind of
// trainer.
//
// It looks at the gradients of a slot when that is finished (core/job/gradient_run.h), as an attached trainer does.
// From then on the window is the workers', and pushes are refused until the next slot is taken. A request that is
// repeated is sent to the lead as it was, so that it counts once.
//
// Thread-safe; Run is for one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/clock.h"
#include "core/base/sync.h"
#include "worker/job/job_shard.h"

namespace shardmesh {

class SeatSession {
 public:
  using Done = std::function<void(absl::StatusOr<v1::SlotReply>)>;

  // `holder`: that the seat was taken with (control_block.h).
  SeatSession(std::shared_ptr<JobShard> shard, int seat, uint64_t holder);

  uint64_t id() const { return id_; }  // random: only who took the seat knows it
  int seat() const { return seat_; }
  JobShard& shard() const { return *shard_; }

  // One request of the trainer; `done` is called once, on the thread of Run or of End. A request that is waited for is
  // answered with Aborted when another one comes.
  void Ask(v1::SlotRequest message, absl::Time deadline, Done done);
  // Answers requests until End, or until the job is closed, which is returned (NotFound).
  absl::Status Run();
  // The trainer is gone. What it still asks for is answered with Cancelled, what it still pushes refused.
  void End();

  // A push of one shard's gradient of the slot that was taken.
  struct Push {
    char* window = nullptr;   // null: the bytes are not needed
    bool applied = false;     // since the step is committed
    uint64_t generation = 0;  // of the window: while it is the same the trainer writes there
  };
  //   FailedPrecondition: the slot of that step was not taken. Aborted: another push of the gradient shard is under
  //   way.
  absl::StatusOr<Push> BeginPush(const v1::PushHeader& header);
  // Aborted: the slot was finished, or taken back, meanwhile.
  absl::Status Write(const Push& push, char* to, absl::string_view bytes);
  void EndPush(const Push& push, int shard, bool complete);

 private:
  struct Request {
    v1::SlotRequest message;
    absl::Time deadline;
    Done done;
  };
  // What the lead said; `answered` is false if it said nothing, so that the request may count or not.
  struct Answer {
    bool answered = false;
    absl::StatusOr<v1::SlotReply> reply;
  };
  struct Taken {
    int slot = 0, window = 0;
    int64_t step = 0;
  };

  absl::StatusOr<v1::SlotReply> Serve(Request& request);
  // Completes what the trainer says of a finished slot, and takes the window from it.
  absl::Status Fill(v1::FinishedSlot& finished);
  absl::StatusOr<const char*> Seal(const v1::FinishedSlot& finished);
  void Open(int slot);  // after an error: the trainer may write the slot, and finish it, again
  void NoteReply(const v1::SlotRequest& message, const Answer& answer);
  Answer Send(const v1::SlotRequest& message, absl::Time deadline);
  absl::Status Post(const std::string& bytes, absl::Time deadline);
  Answer Await(uint64_t id, absl::Time deadline);
  // Why no answer is waited for any more; or OK.
  absl::Status CheckWaits(absl::Time deadline) const;
  char* WindowOf(const Taken& taken) const;

  const std::shared_ptr<JobShard> shard_;
  const int seat_;
  const uint64_t holder_, id_;
  uint64_t messages_ = 0;  // of the thread of Run, as the next
  std::string bytes_;

  mutable Mutex mu_;
  CondVar asked_;
  std::optional<Request> next_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Taken> taken_ ABSL_GUARDED_BY(mu_);
  bool sealed_ ABSL_GUARDED_BY(mu_) = false;              // its window is not the trainer's
  uint64_t generation_ ABSL_GUARDED_BY(mu_) = 0;          // of taken_
  std::vector<bool> has_, pushing_ ABSL_GUARDED_BY(mu_);  // by shard: the gradient shard is there; is being pushed
  // What was said of slots of finished_step_, by slot: said again where a request is repeated.
  int64_t finished_step_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, v1::FinishedSlot> finished_ ABSL_GUARDED_BY(mu_);
};

inline constexpr int kMaxSeatCalls = 1024;  // open at a time, seats of all jobs and those who ask for one

// The sessions of a worker, by id. Thread-safe.
class SeatSessions {
 public:
  // Counts a call that may give a seat: each has a thread. ResourceExhausted: there are kMaxSeatCalls.
  absl::Status Enter();
  void Leave() { calls_.fetch_sub(1); }
  void Add(std::shared_ptr<SeatSession> session);
  void Remove(const SeatSession& session);
  // NotFound: none, or it has ended.
  absl::StatusOr<std::shared_ptr<SeatSession>> Find(uint64_t id) const;

 private:
  std::atomic<int> calls_{0};
  mutable Mutex mu_;
  std::map<uint64_t, std::shared_ptr<SeatSession>> sessions_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
