// StepMembers: who is there, why the job was aborted, and what a member's next incarnation takes over. A part of
// StepProtocol; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "worker/step/step_view.h"
#include "worker/versions/publications.h"

namespace shardmesh {

inline constexpr uint32_t kMaxIncarnationsInCommand = 5;

class StepMembers {
 public:
  explicit StepMembers(const StepView& view) : view_(view) {}

  // `retained`: a node has all that the member's next incarnation needs.
  void SignOfLife(Rank rank, int64_t now_nanos, int64_t pid, bool retained = false) const;
  // Whether a member that is gone may be waited for, until CheckPeers says otherwise.
  bool ComesBack(int rank) const;
  // Aborts when a member that has come was silent for longer than `timeout`.
  void CheckPeers(Rank self, int64_t now_nanos, absl::Duration timeout) const;

  // The first cause stays.
  void Abort(AbortReason reason, int about, Rank reporter, int device = 0) const;
  // The leads of a job's hosts did not meet (kNotMet), or one of them said what cannot be (kBadFacts), and this is why.
  // For this host's lead, once.
  void AbortFor(AbortReason reason, int about, absl::string_view cause) const;
  // Aborted: a caller's epoch of the job is another one.
  absl::Status CheckEpoch(int64_t epoch) const;
  // OK; Unavailable naming the member that is gone and what to do; DataLoss naming where silent corruption was found.
  absl::Status Health() const;
  // The member whose end is why the job was aborted: it died, left, or is not reached any more.
  std::optional<Rank> Lost() const;

  // Takes back what the last incarnation of this member held for a while, and leaves what it said: pins, pushes,
  // declarations that were under way, words it was about to write. Aborts when this incarnation cannot go on: initial
  // weights were lost with the process, or kMaxIncarnationsInCommand incarnations have ended in the open command.
  // REQUIRES: the last incarnation is dead, and nothing was asked of the protocol before.
  void TakeOver(Publications& publications) const;
  // The publication that the open command writes, or the one that follows it at once; -1: none.
  int PublicationInUse() const;
  // It goes on. `away_since_nanos`: since when nobody was this member; 0: not known.
  void GoesOn(int64_t now_nanos, int64_t away_since_nanos) const;

 private:
  // The sentence that Health makes of an AbortWord.
  std::string MemberAt(int rank) const;
  std::string SawOf(uint64_t word) const;
  std::string RemedyOf(uint64_t word) const;
  std::string CauseOf() const;
  std::string DamageOf(int rank) const;
  std::string DifferenceFrom(int rank) const;
  void TakeOverMember(MemberWords& words) const;

  const StepView& view_;
};

}  // namespace shardmesh
