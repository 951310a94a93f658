// Of SeveralHosts: the bytes that go from one host's memory to another's: what is begun on the lead's thread, and what
// is done on the threads of its lanes.
#include <algorithm>

#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/control/residency.h"
#include "worker/lead/hosts/gradient_sources.h"
#include "worker/lead/hosts/several_hosts.h"
#include "worker/step/decide.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits for members end and begin again this often

// Whether it writes weights of buckets, which windows of other hosts may get.
bool WritesBuckets(const Command& command) {
  return command.kind == CommandKind::kGatherBucket || command.kind == CommandKind::kQuantize ||
         PublishesOf(command) == Publishes::kItsVersion;
}
}  // namespace

bool SeveralHosts::IsIdle(Lane& lane) {
  if (!lane.moving) return true;
  const absl::Status moved = lane.moved.Wait(absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(moved)) return false;
  lane.moving = false;
  if (!moved.ok()) Broke(moved);
  return moved.ok();
}

void SeveralHosts::Submit(Lane& lane, std::function<absl::Status(ExchangeGroup&)> work) {
  lane.moving = true;
  lane.moved = lane.queue.Submit([this, work = std::move(work)](Group& group) {
    const absl::Status status = work(static_cast<ExchangeGroup&>(group));
    FutexBump(protocol_.notifier());
    return status;
  });
}

void SeveralHosts::BringGradients(const Command& command) {
  const auto sources = [&] {
    NoteSources(control(), views_, job_, plan_, command);
    return WordsOfSources(control(), job_, plan_, command, protocol_.local().num_hosts);
  };
  if (command.kind == CommandKind::kReduceBucket) {
    Submit(gradients_, [this, words = sources(), buckets = std::vector<int>(job_.num_slots, command.bucket)](
                           ExchangeGroup& group) { return MoveOneBucket(group, words, buckets); });
  } else if (command.kind == CommandKind::kMerge) {
    Submit(gradients_,
           [this, windows = seats_.WindowsOf(command)](ExchangeGroup& group) { return MoveWindows(group, windows); });
  } else if (plan_.bucketed() || plan_.pulled()) {
    protocol_.commands().GradientsHere(Step(command.step), static_cast<int>(plan_.buckets().size()));  // as sums
  } else if (command.kind == CommandKind::kNorm || command.kind == CommandKind::kStep) {
    Submit(gradients_, [this, words = sources(), begin = moved_](ExchangeGroup& group) {
      return MoveGradients(group, words, begin);
    });
    std::fill(moved_.begin(), moved_.end(), 0);
  }
}

// All leads see by the same words that nothing is under way anywhere. Behind a part of the open step its gradients have
// crossed already.
void SeveralHosts::BringEarly(uint64_t part) {
  if (!AllDone(part) || control().gradient_sources_step.load() == words_[0].committed + 1) return;
  const SlotSet settled = SettledSlots(views_, job_, plan_);
  std::vector<int> buckets(job_.num_slots, -1);
  bool any = false;
  for (int s = 0; s < job_.num_slots; ++s) {
    if (!settled[s] || moved_[s] == static_cast<int>(plan_.buckets().size())) continue;
    buckets[s] = moved_[s]++;
    any = true;
  }
  if (!any) return;
  Submit(gradients_,
         [this, words = words_, buckets](ExchangeGroup& group) { return MoveOneBucket(group, words, buckets); });
}

// Members wait for the gradient shards of a step bucket by bucket; what is summed lies here before the sum is made. With
// replicas a step that any host decides can be executed by every other, whoever dies (hosts_ending.h).
bool SeveralHosts::MayRunAhead(const Command& command) const {
  return plan_.num_replicas() == 1 && command.kind != CommandKind::kReduceBucket && command.kind != CommandKind::kMerge;
}

void SeveralHosts::Ready(const Command& command) {
  const bool steps = command.kind == CommandKind::kNorm || command.kind == CommandKind::kStep;
  if (steps && !plan_.pulled() && !plan_.bucketed()) SettleSources(control(), command.step);
  for (int s = 0; s < job_.num_slots && steps && !plan_.pulled(); ++s) {
    control().slots[s].declared.store(command.step);
    for (int p = 0; p < plan_.num_shards() && !plan_.bucketed(); ++p) {
      control().gradient_shards[s][p].store(command.step);
    }
  }
}

void SeveralHosts::BeforeIssue(const Command& command) {
  if (plan_.bucketed()) LendBuckets(command);
}

void SeveralHosts::SendResults(const Command& command) {
  if (command.kind == CommandKind::kDigest) return;  // digests are in the words
  Submit(results_, [this](ExchangeGroup& group) { return MoveResults(group); });
}

// All leads see the same words, of hosts whose windows stay as they are until the commit.
void SeveralHosts::LendBuckets(const Command& command) {
  if (!WritesBuckets(command)) return;
  const bool gathers_bucket = command.kind == CommandKind::kGatherBucket;
  for (int b = 0; b < static_cast<int>(takers_.size()); ++b) {
    const HostSet held = HostsWith(views_, b, HostBucket::kHeld);
    takers_[b] = held;
    if (gathers_bucket) takers_[b] = b == command.bucket ? HostsWith(views_, b, HostBucket::kUsed) & ~held : 0;
  }
  LendToTakers(command);
}

void SeveralHosts::LendToTakers(const Command& command) {
  if (!WritesBuckets(command)) return;
  const bool gathers_bucket = command.kind == CommandKind::kGatherBucket;
  const ResidencyTable table(&control(), plan_);
  for (int b = 0; b < static_cast<int>(takers_.size()); ++b) {
    BucketWords& words = table.bucket(b);
    words.takers.store(takers_[b]);
    const bool held = words.held.load() != kBucketAbsent;
    const bool in_window = (gathers_bucket || command.publish < 0) && takers_[b] != 0;
    words.lent.store(in_window && !IsHere(takers_[b]) && !held ? 1 : 0);
  }
}

void SeveralHosts::ReturnLent() {
  const ResidencyTable table(&control(), plan_);
  for (int b = 0; b < static_cast<int>(takers_.size()); ++b) {
    if (table.bucket(b).lent.exchange(0) == 0) continue;
    // Memory that cannot be given back breaks what bucket residency promises.
    if (const absl::Status status = pass_.GiveBackWeights(b); !status.ok()) Fail(status);
  }
}

absl::Status SeveralHosts::MoveOneBucket(ExchangeGroup& group, const std::vector<HostWords>& words,
                                         const std::vector<int>& buckets) {
  std::vector<const HostWords*> views;
  for (const HostWords& host : words) views.push_back(&host);
  const auto transfers = gradients_of_.Gradients(views, buckets);
  if (transfers.empty()) return absl::OkStatus();
  const ScopedSpan span(trace_, "gradients", words[0].committed + 1, *std::max_element(buckets.begin(), buckets.end()));
  return Cross(group, transfers, traffic_.gradient_bytes_in);
}

// And counts what has come.
absl::Status SeveralHosts::Cross(ExchangeGroup& group, absl::Span<const PeerTransfer> transfers,
                                 std::atomic<int64_t>& in) {
  RETURN_IF_ERROR(group.Exchange(transfers, options_.step_timeout));
  for (const PeerTransfer& transfer : transfers) {
    if (transfer.to == group.rank()) in.fetch_add(transfer.bytes, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

absl::Status SeveralHosts::MoveGradients(ExchangeGroup& group, const std::vector<HostWords>& words,
                                         const std::vector<int>& begin) {
  std::vector<int> buckets(begin.size());
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    for (size_t s = 0; s < begin.size(); ++s) buckets[s] = begin[s] <= b ? b : -1;
    RETURN_IF_ERROR(MoveOneBucket(group, words, buckets));
    protocol_.commands().GradientsHere(Step(words[0].committed + 1), b + 1);
  }
  return absl::OkStatus();
}

absl::Status SeveralHosts::MoveWindows(ExchangeGroup& group, const std::vector<SeatWindow>& windows) {
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    const auto transfers = gradients_of_.Results(windows, b);
    if (transfers.empty() || plan_.buckets()[b].frozen) continue;
    RETURN_IF_ERROR(Cross(group, transfers, traffic_.gradient_bytes_in));
  }
  return absl::OkStatus();
}

absl::Status SeveralHosts::AwaitMembers(uint64_t seq, int buckets) {
  while (true) {
    const uint32_t word = protocol_.notifier().load(std::memory_order_acquire);
    if (protocol_.commands().AllBucketsDone(seq, buckets)) return absl::OkStatus();
    RETURN_IF_ERROR(protocol_.members().Health());
    if (left_.load()) return absl::CancelledError("the job was closed");
    AwaitChange(protocol_.notifier(), word, options_.spin, kSlice);
  }
}

absl::Status SeveralHosts::MoveResults(ExchangeGroup& group) {
  const Command command = protocol_.command();
  const uint64_t seq = protocol_.decided();
  const int all = static_cast<int>(plan_.buckets().size());
  if (command.kind == CommandKind::kStep && command.apply == 0) return absl::OkStatus();
  if (command.kind == CommandKind::kReduceBucket || command.kind == CommandKind::kMerge) return absl::OkStatus();
  if (command.kind == CommandKind::kPublish && !plan_.bucketed()) return absl::OkStatus();  // windows have it
  if (command.kind == CommandKind::kNorm) {
    RETURN_IF_ERROR(AwaitMembers(seq, all));
    const auto squares = results_of_.Squares();
    return squares.empty() ? absl::OkStatus() : group.Exchange(squares, options_.step_timeout);
  }
  RETURN_IF_ERROR(MoveWeights(group, command, seq));
  const bool raises = PublishesOf(command) == Publishes::kItsVersion;
  if (!raises || plan_.scales().num_maxima == 0) return absl::OkStatus();
  RETURN_IF_ERROR(AwaitMembers(seq, all));
  RETURN_IF_ERROR(group.Exchange(results_of_.Maxima(), options_.step_timeout));
  results_of_.TakeMaxima();
  return absl::OkStatus();
}

// Of the buckets whose weights the command writes, each when this host's members are done with it.
absl::Status SeveralHosts::MoveWeights(ExchangeGroup& group, const Command& command, uint64_t seq) {
  if (command.kind == CommandKind::kGatherBucket) return MoveBucketWeights(group, command, seq, command.bucket);
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    const Bucket& bucket = plan_.buckets()[b];
    const bool written =
        command.kind == CommandKind::kPublish || bucket.quantized() == (command.kind == CommandKind::kQuantize);
    if (!written || (bucket.frozen && command.first == 0)) continue;
    RETURN_IF_ERROR(MoveBucketWeights(group, command, seq, b));
  }
  return absl::OkStatus();
}

// Through the window, or, where windows lack buckets, through the first publication that gets the bucket.
absl::Status SeveralHosts::MoveBucketWeights(ExchangeGroup& group, const Command& command, uint64_t seq, int b) {
  std::vector<const Segment*> to;
  for (int i = 0; i < job_.publications && command.kind != CommandKind::kGatherBucket; ++i) {
    if (plan_.buckets()[b].frozen || i == command.publish) to.push_back(&memory_.publication(i));
  }
  const bool all = !plan_.bucketed() || !to.empty();
  if (!plan_.bucketed() || to.empty()) {
    to.insert(to.begin(), &memory_.window());
  } else if (command.kind != CommandKind::kPublish && IsHere(takers_[b])) {
    to.push_back(&memory_.window());
  }
  const auto transfers = results_of_.Weights(b, *to.front(), all ? ~HostSet{0} : takers_[b]);
  if (transfers.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(AwaitMembers(seq, b + 1));
  const ScopedSpan span(trace_, "weights", command.step, b);
  RETURN_IF_ERROR(Cross(group, transfers, traffic_.weight_bytes_in));
  for (size_t i = 1; i < to.size(); ++i) results_of_.CopyWeights(b, *to.front(), *to[i]);
  return absl::OkStatus();
}

}  // namespace shardmesh
