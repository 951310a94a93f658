// HostTransfers: which bytes go from one host's memory to another's for a step, and where they lie. Every host gets the
// same lists of transfers in the same order, each with its own memory (worker/transport/exchange_group.h).
//
//   gradient shards    of a bucket: a slot's gradient of a shard, to every host that has a replica of that shard, from
//             the first host that has the gradient shard: so all replicas read the same bytes, whoever else wrote some
//   squares   sums of squares of a shard's blocks, to hosts without a replica
//   weights   new weights of a shard, in the parameter window or a publication, to hosts without a replica; codes and
//             scales where the bucket is quantized, of each scale from the shard that has its first element
//   maxima    every host's table to every other one, which take the largest
//
// Not thread-safe; memory is borrowed. Lists are made in memory that is kept from call to call.
#pragma once

#include <vector>

#include "worker/control/host_ranks.h"
#include "worker/lead/host_words.h"
#include "worker/memory/host_memory.h"
#include "worker/transport/exchange_group.h"

namespace shardmesh {

class HostTransfers {
 public:
  // `maxima`: for those, too, which take FarMaximaBytes.
  HostTransfers(const JobSpec& job, const Plan& plan, const HostRanks& ranks, HostMemory& memory, bool maxima);

  // `buckets`: of each slot; -1: none.
  absl::Span<const PeerTransfer> Pieces(AllHostWords words, absl::Span<const int> buckets);
  // Of a bucket, with pulled slots: results in windows of seats, to every other host that has a replica of the shard.
  absl::Span<const PeerTransfer> Results(absl::Span<const SeatWindow> windows, int bucket);
  absl::Span<const PeerTransfer> Squares();
  // To the hosts `takers` that lack them, in `memory`: the window or a publication.
  absl::Span<const PeerTransfer> Weights(int bucket, const Segment& memory, HostSet takers);
  absl::Span<const PeerTransfer> Maxima();

  // After the transfers of Maxima(): this host's table takes the others' in.
  void TakeMaxima();
  // After those of Weights(bucket): what came into `from` goes into `to`, too.
  void CopyWeights(int bucket, const Segment& from, const Segment& to);

 private:
  // Bytes of a shard in the parameter window.
  struct Part {
    int shard = 0;
    int64_t offset = 0, bytes = 0;
  };
  std::vector<Part> PartsOf(int bucket) const;
  // Of nf4, for a shard that has the first elements of scales [first, last) of `num_blocks`, which begin at `scales`:
  // the factors whose first scale is among them, and the mean of the tensor with the first one.
  static void AddNf4Parts(std::vector<Part>& parts, int shard, int64_t scales, int64_t num_blocks, int64_t first,
                          int64_t last);
  bool Has(int host, int shard) const { return has_[host * plan_.num_shards() + shard]; }
  // The host that gives a shard's weights and squares to others.
  int SourceOf(int shard) const { return source_[shard]; }
  void Add(int from, int to, char* memory, int64_t bytes);
  // From the shard's source to all hosts without it.
  void AddForOthers(int shard, char* memory, int64_t bytes, HostSet takers);

  const JobSpec& job_;
  const Plan& plan_;
  const HostRanks ranks_;
  HostMemory& memory_;
  std::vector<bool> has_;  // [host][shard]
  std::vector<int> source_;
  std::vector<std::vector<Part>> parts_;       // by bucket
  std::vector<std::vector<uint32_t>> maxima_;  // by host, as they came; none of this host
  std::vector<PeerTransfer> transfers_;
};

}  // namespace shardmesh
