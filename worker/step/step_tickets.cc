#include "worker/step/step_tickets.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/step/step_members.h"

namespace shardmesh {

// Of the replicas of a shard, the first with the digest that most of them have.
int StepTickets::RankOfMost(int shard) const {
  const auto digest = [&](int replica) {
    return view_.control->members[view_.plan->RankOf({shard, replica}).value()].digest.load(std::memory_order_acquire);
  };
  int best = 0, most = 0;
  for (int replica = 0; replica < view_.plan->num_replicas(); ++replica) {
    int same = 0;
    for (int other = 0; other < view_.plan->num_replicas(); ++other) same += digest(other) == digest(replica);
    if (same > most) best = replica;
    most = std::max(most, same);
  }
  return view_.plan->RankOf({shard, best}).value();
}

// Adds one replica of every shard up, and compares the others with it.
void StepTickets::SummarizeDigest() const {
  uint64_t sum = 0, differs = 0;
  for (int shard = 0; shard < view_.plan->num_shards(); ++shard) {
    const int most = RankOfMost(shard);
    sum += view_.control->members[most].digest.load(std::memory_order_acquire);
    for (int replica = 0; replica < view_.plan->num_replicas(); ++replica) {
      const int other = view_.plan->RankOf({shard, replica}).value();
      if (view_.control->members[other].digest.load() == view_.control->members[most].digest.load()) continue;
      if (differs == 0) differs = static_cast<uint64_t>(most + 1) << 32 | static_cast<uint64_t>(other + 1);
      if (view_.job->check_every > 0) StepMembers(view_).Abort(AbortReason::kDiffers, other, Rank(most));
    }
  }
  view_.control->digest_writing.store(view_.control->digest_writing.load() |
                                      1);  // odd already if the last incarnation was at it
  view_.control->digest_value.store(sum);
  view_.control->digest_step.store(view_.command().step);
  view_.control->digest_differs.store(differs);
  view_.control->digest_writing.fetch_add(1);
  view_.control->digest_done.store(static_cast<uint64_t>(view_.command().nonfinite));
}

uint64_t StepTickets::AskForDigest() const {
  const uint64_t ticket = view_.control->digest_wanted.fetch_add(1) + 1;
  FutexBump(*view_.notifier);
  return ticket;
}

absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> StepTickets::DigestOf(uint64_t ticket) const {
  const uint64_t writing = view_.control->digest_writing.load();
  const bool done = view_.control->digest_done.load() >= ticket && writing % 2 == 0;
  const Step step(view_.control->digest_step.load());
  const uint64_t value = view_.control->digest_value.load(), differs = view_.control->digest_differs.load();
  if (!done || view_.control->digest_writing.load() != writing) {  // not yet, or a newer one is just being written
    RETURN_IF_ERROR(StepMembers(view_).Health());
    return std::optional<std::pair<Step, uint64_t>>();
  }
  if (differs == 0) return std::make_optional(std::make_pair(step, value));
  const int a = static_cast<int>(differs >> 32) - 1, b = static_cast<int>(differs & 0xffffffff) - 1;
  return absl::DataLossError(absl::StrCat("replicas differ at step ", step.value(), ": worker ", view_.names[a],
                                          " (rank ", a, ") and worker ", view_.names[b], " (rank ", b,
                                          ") hold the same shard with other bits; check their memory"));
}

uint64_t StepTickets::AskToPublish() const {
  const uint64_t ticket = view_.control->publish_wanted.fetch_add(1) + 1;
  FutexBump(*view_.notifier);
  return ticket;
}

void StepTickets::AnswerPublish(uint64_t ticket, int64_t step) const {
  view_.control->publish_step.store(step);
  view_.control->publish_done.store(ticket);
  FutexBump(view_.control->finished);
}

absl::StatusOr<std::optional<Step>> StepTickets::PublishedFor(uint64_t ticket) const {
  if (view_.control->publish_done.load() < ticket) return std::optional<Step>();
  const Step step(view_.control->publish_step.load());
  if (step.value() >= 0) return std::make_optional(step);
  return absl::ResourceExhaustedError(absl::StrCat("job ", view_.job->name, " has ", view_.job->publications,
                                                   " publications, and all are held: ", publications_.Holders(),
                                                   "; readers must release a version first (shardctl leases ",
                                                   view_.job->name, "), or the job needs more publications"));
}

}  // namespace shardmesh
