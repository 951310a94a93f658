#include "tests/testing/training/variant.h"

#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh::testing {
namespace {

// One step whose gradients come as backward makes them.
absl::Status StepByBucket(Session& session) {
  constexpr absl::Duration kTimeout = absl::Seconds(30);
  const Step step = session.committed_step().next();
  const absl::Span<const Bucket> buckets = session.job().plan().buckets();
  for (int b = static_cast<int>(buckets.size()) - 1; b >= 0; --b) {
    if (buckets[b].frozen) continue;
    RETURN_IF_ERROR(WriteBucketGradients(session, step, b));
    RETURN_IF_ERROR(session.DeclareBucket(b, kTimeout));
  }
  StepOptions options;
  options.learning_rates = LearningRates(session.job().spec(), step.value());
  options.timeout = kTimeout;
  return session.Step(options).status();
}

absl::Status RunTrainer(Job& job, const Trainer& trainer, int64_t steps) {
  std::vector<Slot> slots;
  for (int slot : trainer.slots) slots.push_back(Slot(slot));
  ASSIGN_OR_RETURN(const auto session, trainer.attached ? job.Attach(slots) : job.Connect(slots));
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  if (job.spec().residency == Residency::kFull) return TrainTo(*session, steps);
  while (session->committed_step().value() < steps) RETURN_IF_ERROR(StepByBucket(*session));
  return absl::OkStatus();
}

}  // namespace

std::string Describe(const Variant& variant) {
  std::string text = absl::StrCat(variant.mesh, " buckets of ", variant.bucket_elements,
                                  variant.residency == Residency::kBucket ? " in turn" : "");
  for (const Trainer& trainer : variant.trainers) {
    absl::StrAppend(&text, trainer.attached ? " attached" : " connected");
    for (int slot : trainer.slots) absl::StrAppend(&text, " ", slot);
  }
  return text;
}

std::vector<Variant> VariantsOfThreeSlots() {
  const std::vector<Trainer> attached = {{{0, 1, 2}, true}}, connected = {{{0, 1, 2}, false}};
  const std::vector<Trainer> two = {{{2, 0}, true}, {{1}, true}}, mixed = {{{1}, true}, {{0, 2}, false}};
  return {
      {"fsdp=1", attached},         {"fsdp=2", two},         {"fsdp=3", mixed, 1024},    {"ddp=2,fsdp=2", connected},
      {"fsdp=8", two, 1024},        {"ddp=2,fsdp=4", mixed}, {"ddp=4,fsdp=2", attached}, {"ddp=2,fsdp=2,abcd=2", two},
      {"ddp=3", connected, 1 << 20}};
}

absl::StatusOr<Learnt> TrainVariant(Client& client, JobSpec spec, const Variant& variant, int64_t steps) {
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(variant.mesh));
  spec.bucket_elements = variant.bucket_elements;
  if (variant.residency == Residency::kBucket) spec.residency = Residency::kBucket;
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(Initialize(*job));
  std::vector<absl::Status> ends(variant.trainers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ends.size(); ++i) {
    threads.emplace_back([&, i] { ends[i] = RunTrainer(*job, variant.trainers[i], steps); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
  absl::StatusOr<Learnt> learnt = Learn(*job, steps);
  RETURN_IF_ERROR(Delete(client, spec.name));
  return learnt;
}

}  // namespace shardmesh::testing
