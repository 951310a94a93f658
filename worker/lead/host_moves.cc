// Of HostLead: the bytes that go from one host's memory to another's, on the threads of its lanes.
#include <algorithm>

#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/lead/host_lead.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits for members end and begin again this often
}  // namespace

absl::Status HostLead::MoveOneBucket(ExchangeGroup& group, const std::vector<HostWords>& words,
                                     const std::vector<int>& buckets) {
  std::vector<const HostWords*> views;
  for (const HostWords& host : words) views.push_back(&host);
  const auto transfers = pieces_of_.Pieces(views, buckets);
  if (transfers.empty()) return absl::OkStatus();
  const ScopedSpan span(trace_, "gradients", words[0].committed + 1, *std::max_element(buckets.begin(), buckets.end()));
  return Exchange(group, transfers, gradient_bytes_in_);
}

// And counts what has come.
absl::Status HostLead::Exchange(ExchangeGroup& group, absl::Span<const PeerTransfer> transfers,
                                std::atomic<int64_t>& in) {
  RETURN_IF_ERROR(group.Exchange(transfers, options_.step_timeout));
  for (const PeerTransfer& transfer : transfers) {
    if (transfer.to == group.rank()) in.fetch_add(transfer.bytes, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

absl::Status HostLead::MovePieces(ExchangeGroup& group, const std::vector<HostWords>& words,
                                  const std::vector<int>& begin) {
  std::vector<int> buckets(begin.size());
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    for (size_t s = 0; s < begin.size(); ++s) buckets[s] = begin[s] <= b ? b : -1;
    RETURN_IF_ERROR(MoveOneBucket(group, words, buckets));
    protocol_.commands().GradientsHere(Step(words[0].committed + 1), b + 1);
  }
  return absl::OkStatus();
}

absl::Status HostLead::MoveWindows(ExchangeGroup& group, const std::vector<SeatWindow>& windows) {
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    const auto transfers = pieces_of_.Results(windows, b);
    if (transfers.empty() || plan_.buckets()[b].frozen) continue;
    RETURN_IF_ERROR(Exchange(group, transfers, gradient_bytes_in_));
  }
  return absl::OkStatus();
}

absl::Status HostLead::AwaitMembers(uint64_t seq, int buckets) {
  while (true) {
    const uint32_t word = protocol_.notifier().load(std::memory_order_acquire);
    if (protocol_.commands().AllBucketsDone(seq, buckets)) return absl::OkStatus();
    RETURN_IF_ERROR(protocol_.members().Health());
    if (stop_.load()) return absl::CancelledError("the job was closed");
    AwaitChange(protocol_.notifier(), word, options_.spin, kSlice);
  }
}

absl::Status HostLead::MoveResults(ExchangeGroup& group) {
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
  if (!raises || plan_.num_maxima() == 0) return absl::OkStatus();
  RETURN_IF_ERROR(AwaitMembers(seq, all));
  RETURN_IF_ERROR(group.Exchange(results_of_.Maxima(), options_.step_timeout));
  results_of_.TakeMaxima();
  return absl::OkStatus();
}

// Of the buckets whose weights the command writes, each when this host's members are done with it.
absl::Status HostLead::MoveWeights(ExchangeGroup& group, const Command& command, uint64_t seq) {
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
absl::Status HostLead::MoveBucketWeights(ExchangeGroup& group, const Command& command, uint64_t seq, int b) {
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
  RETURN_IF_ERROR(Exchange(group, transfers, weight_bytes_in_));
  for (size_t i = 1; i < to.size(); ++i) results_of_.CopyWeights(b, *to.front(), *to[i]);
  return absl::OkStatus();
}

}  // namespace shardmesh
