// StepTickets: what somebody asks the job for between steps: a digest of its weights, or that the newest version is
// published. Who asks gets a ticket, and looks for the answer to that. A part of StepProtocol; thread-safe.
#pragma once

#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "worker/step/step_view.h"
#include "worker/versions/publications.h"

namespace shardmesh {

class StepTickets {
 public:
  StepTickets(const StepView& view, const Publications& publications) : view_(view), publications_(publications) {}

  uint64_t AskForDigest() const;
  // nullopt: not computed yet. DataLoss: replicas differ.
  absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> DigestOf(uint64_t ticket) const;
  // Of members' digests, when all have executed kDigest: one replica of each shard is added up, and the others are
  // compared with it. For the lead.
  void SummarizeDigest() const;

  // Asks that the newest committed version is published, which it may be.
  uint64_t AskToPublish() const;
  // Its step. nullopt: not yet. ResourceExhausted: every publication is held.
  absl::StatusOr<std::optional<Step>> PublishedFor(uint64_t ticket) const;
  // Answers who asked for it on this host: the step, or -1: no publication is free. For the lead.
  void AnswerPublish(uint64_t ticket, int64_t step) const;

 private:
  int RankOfMost(int shard) const;

  const StepView& view_;
  const Publications& publications_;
};

}  // namespace shardmesh
