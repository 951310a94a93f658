// The work of bench/imbalance: a minibatch through the service, by ranks that are threads of this process. Computing is
// sleeping, so that more ranks than cores wait as they would on cores of their own; gradients and steps are real.
//
// Three ways of waiting (Arm), each over the same samples, and each ends with a step of the service's workers, so that
// what differs is the waiting. For one thread of the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/imbalance/imbalance_plan.h"
#include "bench/imbalance/imbalance_replay.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"

namespace shardmesh::bench {

inline constexpr double kSecondsPerCost = 0.025;  // of CostOf, at speed 1
inline constexpr int kLayers = 12;
inline constexpr int kWorkers = 2;

enum class Arm {
  kCollectives,  // LB-Micro; all ranks meet at every layer of every microbatch, forward and backward. They meet at the
                 // latest of their deadlines, not of their arrivals: neither the meeting nor a late wake-up takes time
  kAssigned,     // LB-Mini; a slot for each rank, in which it adds up its samples. They meet at the step
  kPulling       // a slot for each sample, the longest first; who is done takes the next
};

struct Minibatch {
  int64_t first_sample = 0;  // its number in the run; the others' follow
  std::vector<int64_t> lengths;
  std::vector<double> speeds;  // by rank
};

struct Outcome {
  double seconds = 0;        // until every rank knows that the step was committed
  std::vector<double> idle;  // by rank: the share of it that it did not compute
  int64_t peak = 0;          // with kPulling: most gradients alive at a time, as the service says; 0: it does not say
};

class ImbalanceJob {
 public:
  // Of a service with kWorkers workers. Makes a job with assigned slots and one with pulled slots, of `samples` slots,
  // and attaches `ranks` trainers to each. `name` begins both jobs' names. `client` outlives the object.
  // Errors of Client and Job.
  static absl::StatusOr<std::unique_ptr<ImbalanceJob>> Start(Client& client, const std::string& name, int ranks,
                                                             int samples);
  ~ImbalanceJob();  // deletes both jobs

  // REQUIRES: as many lengths as the job has samples, as many speeds as it has ranks.
  absl::StatusOr<Outcome> Run(Arm arm, const Minibatch& minibatch);

  // Internal: after all steps so far the weights of one job are not, bit for bit, what the reference makes of the same
  // samples in one process. The message names the job.
  absl::Status Verify();

 private:
  struct RankRun;
  class LayerMeeting;

  ImbalanceJob(Client& client, int ranks, int samples) : client_(client), ranks_(ranks), samples_(samples) {}
  absl::StatusOr<std::shared_ptr<Job>> CreateJob(const std::string& name, bool pulled) const;
  absl::Status Attach();
  absl::StatusOr<Outcome> RunPlanned(const std::vector<Parts>& plan, bool meets, const Minibatch& minibatch);
  absl::StatusOr<Outcome> RunPulling(const std::vector<int>& order, const Minibatch& minibatch);
  absl::Status ComputePlanned(const Parts& microbatches, const Minibatch& minibatch, LayerMeeting* meeting,
                              RankRun& run);
  absl::Status ComputePulled(const std::vector<int>& order, const Minibatch& minibatch, RankRun& run);
  template <typename Work>
  absl::StatusOr<Outcome> RunRanks(const Work& work);

  Client& client_;
  const int ranks_, samples_;
  std::shared_ptr<Job> assigned_job_, pulled_job_;
  std::vector<std::unique_ptr<Session>> assigned_;  // by rank
  std::vector<float*> gradients_;                   // of its slot
  std::vector<std::unique_ptr<PullingSession>> pulling_;
  std::unique_ptr<Replay> assigned_replay_, pulled_replay_;
};

}  // namespace shardmesh::bench
