// CommandData: which bytes have to be on a host before its members execute a command on a bucket, and which of those
// that they write other hosts need behind it. A pure function of the job, its plan and what all leads have said, so
// every host makes the same lists, in the same order.
//
//   gradients of a bucket: a slot's gradient of a shard, to every host that has a replica of that shard, from the first
//             host that has the gradient shard: so all replicas read the same bytes, whoever else wrote some
//   results   with pulled slots, of a bucket: what trainers have finished, from the windows of their seats, to every
//             other host that has a replica of the shard
//   squares   sums of squares of a shard's blocks, to hosts without a replica
//   weights   new weights of a shard, to hosts without a replica; codes and scales where the bucket is quantized, of
//             each scale from the shard that has its first element
//   maxima    every host's table to every other one, which take the largest
//
// Not thread-safe. Lists are made in memory that is kept until the next call.
#pragma once

#include <vector>

#include "worker/control/host_ranks.h"
#include "worker/lead/hosts/host_words.h"

namespace shardmesh {

// Where bytes lie on a host; on all hosts alike.
enum class DataPlace {
  kSlot,     // DataPart::index: which slot's gradient windows, or which seat's
  kSquares,  // the table of sums of squares
  kWeights,  // the parameter window, or a publication
  kMaxima,   // the table of maxima of the sending host: others keep it apart
};

// Bytes that go from a host to another one.
struct DataPart {
  int from = 0, to = 0;
  DataPlace place = DataPlace::kWeights;
  int index = 0;
  int64_t offset = 0, bytes = 0;  // in that place
};

class CommandData {
 public:
  // Borrowed arguments outlive the object. `ranks`: of any host of the job.
  CommandData(const JobSpec& job, const Plan& plan, const HostRanks& ranks);

  // `buckets`: of each slot; -1: none.
  absl::Span<const DataPart> Gradients(AllHostWords words, absl::Span<const int> buckets);
  absl::Span<const DataPart> Results(absl::Span<const SeatWindow> windows, int bucket);
  absl::Span<const DataPart> Squares();
  // To the hosts `takers` that lack them.
  absl::Span<const DataPart> Weights(int bucket, HostSet takers);
  absl::Span<const DataPart> Maxima();

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
  void Add(const DataPart& part);
  // From the shard's source, the first host that has it, to all hosts without it.
  void AddForOthers(int shard, HostSet takers, DataPart part);

  const JobSpec& job_;
  const Plan& plan_;
  const int num_hosts_;
  std::vector<bool> has_;                 // [host][shard]
  std::vector<int> source_;               // by shard: the host that gives its weights and squares to others
  std::vector<std::vector<Part>> parts_;  // by bucket
  std::vector<DataPart> data_;
};

}  // namespace shardmesh
