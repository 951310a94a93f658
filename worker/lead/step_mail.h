// StepMail: the lead's end of the mailboxes of a job's attached trainers (local/memory/mailbox.h). The engine's thread
// takes the messages itself and writes the answers itself, so a step costs two wake-ups, of the lead and of the
// trainer; none when both spin.
//
// A message is a TrainerRequest, an answer a TrainerReply (trainer.proto). A session writes its messages into the
// mailbox of its first slot and notifies. A message counts while its session holds the slot it came through; of any
// other, and of one that cannot be read, nothing is done and nobody is answered. While the answer to a call that was
// given up lies in the mailbox, the next one is kept until there is room; a newer message replaces it.
//
// For the engine's thread of the lead.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "worker/lead/mail.h"
#include "worker/lead/trainer_requests.h"
#include "worker/memory/host_memory.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

class StepMail final : public Mail {
 public:
  // Borrowed arguments outlive the object. `num_writers`: the job's.
  StepMail(const HostMemory& host, StepProtocol& protocol, int num_writers, const TrainerRequests& requests);

  // In the lead's next incarnation: messages that the last one took and did not answer are taken again. Before Poll.
  void TakeOver();

  // Takes the messages that have come, and answers those whose step is committed, or cannot be. Of trainers that pull
  // slots: those for which there is one, or of which a step was committed that they do not know.
  void Poll() override;

 private:
  void Take(int slot);
  // InvalidArgument: a slot that the session does not hold.
  absl::Status CheckSlots(const v1::TrainerRequest& request) const;
  void AnswerIfDone(int slot);
  void Answer(int slot, const absl::StatusOr<StepOutcome>& outcome);
  // pulled_mail.cc: what a trainer in a seat has finished, and the slot that it asked for.
  void Reopen();
  void PollPulling();
  absl::Status Finish(int seat, const v1::SlotRequest& request, v1::SlotReply& reply);
  void Finished(int seat, PulledSlots::Result result, v1::SlotReply& reply) const;
  bool FinishIsKnown(int seat);
  void TakePulling(int seat, bool counts);
  absl::StatusOr<bool> TryTake(int seat, int64_t now_nanos, v1::SlotReply& reply);
  void AnswerPulling(int seat, const absl::Status& status);
  void Deliver(int slot);

  const HostMemory& host_;
  StepProtocol& protocol_;
  const TrainerRequests& requests_;
  // By the slot whose mailbox it came through: what is declared and not answered.
  struct Open {
    int64_t step = 0;  // 0: nothing
    uint64_t id = 0;
    std::vector<Slot> slots;
    std::string answer;  // that there is no room for yet
    // Of a trainer that pulls: it waits for a slot; the newest step that it knows, and what it is told beside.
    uint64_t session = 0;
    bool takes = false, finishes = false;  // it waits for a slot; for what becomes of one that it finished
    int finished_slot = 0;
    int64_t after_step = 0, until_nanos = 0;
    v1::SlotReply pull;
  };
  std::vector<Open> open_;
  std::string bytes_;
  v1::TrainerRequest request_;
  v1::TrainerReply reply_;
};

// Gives the slots of a session that is gone back, and the buckets that it used. A message of it that the lead has taken
// is declared first, later ones are dropped. Returns early, with the slots still held, when the job is aborted or
// `stop` is set.
void GiveSlotsBack(StepProtocol& protocol, absl::Span<const int> slots, uint64_t holder, const std::atomic<bool>& stop);

}  // namespace shardmesh
