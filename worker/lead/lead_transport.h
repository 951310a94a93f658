// LeadTransport: what a lead needs of the leads of the job's other hosts: rounds in which all say how far they are, and
// the bytes that one host's memory lacks. OneHost has nobody to ask; SeveralHosts meets the others over groups. A lead
// (lead.h) is the same with either.
//
// A part of the work is numbered, and the same on all hosts: getting ready for a command, or executing it. For the
// lead's thread, but Leave.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "worker/step/facts.h"

namespace shardmesh {

// What a lead says of itself in a round.
struct LeadState {
  uint64_t part = 0;                 // the newest one that this host is done with
  const Command* command = nullptr;  // agreed on and not committed; null: it waits for facts that lead to one
  int publication = -1;              // that it has set aside for the next version
};

class LeadTransport {
 public:
  virtual ~LeadTransport() = default;

  // Whether there is no other host: nothing has to be brought here, and nothing set aside before all have met.
  virtual bool alone() const = 0;

  // A round: says this host's state, and takes in what the others say. It ends when all leads have come. False: the job
  // is over, and aborted here.
  virtual bool Exchange(const LeadState& mine) = 0;
  // By the newest round: whether all hosts are done with the part.
  virtual bool AllDone(uint64_t part) const = 0;
  // The publication that all have set aside; -1: they have not the same.
  virtual int CommonPublication(int mine) const = 0;
  // The facts that all hosts agree on.
  virtual void ReadFacts(Facts& facts) const = 0;

  // Brings the gradients here that this host's members need for the command, while the lead goes on.
  virtual void BringGradients(const Command& command) = 0;
  // Some of those that the next step will need, if all hosts are done with `part`.
  virtual void BringEarly(uint64_t part) = 0;
  // Whether the command may be issued while gradients are still on their way: members wait for those.
  virtual bool MayRunAhead(const Command& command) const = 0;
  // All hosts are ready for the command.
  virtual void Ready(const Command& command) = 0;
  // Before the command is issued, and behind it: sends what its members write, and brings what others do.
  virtual void BeforeIssue(const Command& command) = 0;
  virtual void SendResults(const Command& command) = 0;
  // Whether no gradients are on their way to this host, or nothing at all is. A failure aborts the job.
  virtual bool HasGradients() = 0;
  virtual bool IsIdle() = 0;

  // Around the commit, which all hosts make. `more`: a command follows at once, from the same facts.
  virtual void BeforeCommit(const Command& command) = 0;
  virtual void AfterCommit(bool more) = 0;

  // How long to wait for this host's news before the next round: while the lead collects, and while a part is under
  // way. Zero: the others' news come by the round itself.
  virtual absl::Duration PatienceToCollect() = 0;
  virtual absl::Duration PatienceToRun() const = 0;

  // Lets no other lead wait for this one: its calls end, and fail. Thread-safe.
  virtual void Leave(absl::string_view reason) = 0;
};

}  // namespace shardmesh
