// HostsJob: one host of a job of two shards and two slots, with one worker and its trainer in this process; and raw TCP
// streams between the same two hosts. Both ends of each make the same calls at the same time.
// Not thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "local/descriptor/fd.h"
#include "worker/control/trace.h"
#include "worker/lead/engine.h"
#include "worker/lead/hosts/host_lead.h"
#include "worker/lead/one_host.h"
#include "worker/pass/pass.h"

namespace shardmesh::bench {

struct HostsJobOptions {
  int host = 0;
  int num_hosts = 2;    // 1: both workers are here, for comparison
  std::string address;  // of this host
  std::string folder;   // that both hosts see
  int64_t elements = 0;
};

// How long a step took, and where its time went on this host.
struct HostsStep {
  double seconds = 0;
  double crossing = 0;  // something was under way between the hosts, beside rounds
  double hidden = 0;    // of that: while ranges were stepped
};

class HostsJob {
 public:
  // Errors of the plan, of memory, and of SecureGroup::Connect.
  static absl::StatusOr<std::unique_ptr<HostsJob>> Start(const HostsJobOptions& options);
  ~HostsJob();

  // Declares this host's slots, whose gradients lie in place, and waits for the commit.
  absl::StatusOr<HostsStep> Step();
  absl::StatusOr<uint64_t> Digest();

  // So many bytes each way at once over one connection of its own; the seconds until this end has sent and got all.
  absl::StatusOr<double> Stream(int64_t bytes);

  // That one host sends to the other in a step: its slot's gradient of the other's shard, and its shard's new weights.
  int64_t BytesEachWay() const;

 private:
  explicit HostsJob(const HostsJobOptions& options);
  absl::Status Open();
  absl::Status StartLead();
  absl::Status PlaceWeights();
  absl::Status ConnectStream();
  HostsStep Measured(double seconds, int64_t step) const;
  bool HasSlot(int slot) const { return options_.num_hosts == 1 || slot == options_.host; }

  const HostsJobOptions options_;
  const JobSpec job_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<HostMemory> host_;
  Trace trace_;
  std::vector<std::unique_ptr<ShardStorage>> storages_;
  std::vector<std::unique_ptr<Pass>> passes_;
  std::unique_ptr<StepProtocol> protocol_;
  std::optional<OneHostLead> one_host_lead_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::unique_ptr<HostLead> lead_;
  UniqueFd stream_;
  std::vector<char> sent_, received_;
  int64_t step_ = 0;
};

}  // namespace shardmesh::bench
