// HostTransfers: the data of commands (command_data.h) in the memory of one host, as transfers that groups make
// (worker/transport/exchange_group.h). Every host gets the same lists in the same order, each with its own memory.
//
// Not thread-safe; memory is borrowed. Lists are made in memory that is kept until the next call.
#pragma once

#include <vector>

#include "worker/lead/hosts/command_data.h"
#include "worker/memory/host_memory.h"
#include "worker/transport/exchange_group.h"

namespace shardmesh {

class HostTransfers {
 public:
  // `maxima`: for those, too, which take FarMaximaBytes.
  HostTransfers(const JobSpec& job, const Plan& plan, const HostRanks& ranks, HostMemory& memory, bool maxima);

  // As CommandData's. Weights lie in `memory`: the window or a publication.
  absl::Span<const PeerTransfer> Gradients(AllHostWords words, absl::Span<const int> buckets);
  absl::Span<const PeerTransfer> Results(absl::Span<const SeatWindow> windows, int bucket);
  absl::Span<const PeerTransfer> Squares();
  absl::Span<const PeerTransfer> Weights(int bucket, const Segment& memory, HostSet takers);
  absl::Span<const PeerTransfer> Maxima();

  // After the transfers of Maxima(): this host's table takes the others' in.
  void TakeMaxima();
  // After those of Weights(bucket): what came into `from` goes into `to`, too.
  void CopyWeights(int bucket, const Segment& from, const Segment& to);

 private:
  // `weights`: where those lie.
  absl::Span<const PeerTransfer> InMemory(absl::Span<const DataPart> data, const Segment* weights = nullptr);
  char* Begin(const DataPart& part, const Segment* weights);

  const Plan& plan_;
  const HostRanks ranks_;
  HostMemory& memory_;
  CommandData data_;
  std::vector<std::vector<uint32_t>> maxima_;  // by host, as they came; none of this host
  std::vector<PeerTransfer> transfers_;
};

}  // namespace shardmesh
