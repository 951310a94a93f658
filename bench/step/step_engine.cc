#include "bench/step/step_engine.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh::bench {

std::unique_ptr<StepProtocol> NewStepProtocol(const StepJob& job) {
  std::vector<std::string> names;
  for (int rank = 0; rank < job.plan.num_ranks(); ++rank) names.push_back(absl::StrCat("w", rank));
  return std::make_unique<StepProtocol>(job.host.control(), &job.host.notifier(), &job.spec, &job.plan,
                                        std::move(names));
}

StepEngine::StepEngine(StepJob& job, int rank) : protocol(NewStepProtocol(job)) {
  pass = std::make_unique<Pass>(job.spec, job.plan, job.plan.PlaceOf(Rank(rank)), job.host, job.shards[rank], 1);
  EngineOptions options;
  if (rank == 0) options.lead = &lead.emplace(*protocol, *pass, job.spec, job.plan, LeadOptions()).lead;
  engine = std::make_unique<Engine>(*protocol, *pass, Rank(rank), options);
  protocol->members().SignOfLife(Rank(rank), MonotonicNanos(), getpid());
  const std::vector<float> piece = job.InitialShard(rank);
  staged = engine->StageInitial({piece.begin(), piece.end()}, 1).ok();
}

absl::StatusOr<double> DeclareAndAwait(StepProtocol& protocol, const StepJob& job, Step step) {
  Declaration declaration;
  declaration.step = step;
  for (int s = 0; s < job.spec.num_slots; ++s) {
    declaration.slots.push_back(Slot(s));
    for (int shard = 0; shard < job.plan.num_shards(); ++shard)
      RETURN_IF_ERROR(protocol.declarations().GradientShardReady(Slot(s), shard, step));
  }
  const double start = MonotonicSeconds();
  RETURN_IF_ERROR(protocol.declarations().Declare(declaration).status());
  RETURN_IF_ERROR(protocol.outcomes().AwaitCommit(step, absl::Seconds(60)).status());
  return MonotonicSeconds() - start;
}

}  // namespace shardmesh::bench
