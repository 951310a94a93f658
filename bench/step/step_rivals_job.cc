#include "bench/step/step_rivals_job.h"

#include <unistd.h>

#include <cstring>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "bench/harness/memory_speed.h"
#include "bench/harness/step_context.h"
#include "core/base/status.h"
#include "core/format/finite.h"

namespace shardmesh::bench {
namespace {

constexpr int kUnpublished = 1 << 20;  // a job publishes every so many steps: never here
constexpr int kNumStates = 2;

std::string FileOf(const Segment& segment) { return absl::StrCat("/proc/", getpid(), "/fd/", segment.fd()); }

// The stored parts of a run: weights, then states, each codes and extra.
struct StoredParts {
  StoredRun run[1 + kNumStates];
  int64_t codes_bytes[1 + kNumStates], extra_bytes[1 + kNumStates];
};

StoredParts PartsOf(const ShardStorage& storage, int range, const ChunkRun& at, int parity) {
  StoredParts parts;
  for (int i = 0; i <= kNumStates; ++i) {
    parts.run[i] = i == 0 ? storage.weights(range, parity, at.offset) : storage.state(i - 1, range, parity, at.offset);
    parts.codes_bytes[i] = storage.ranges()[range].parts[StreamOf(i, false)].BytesOf(at.num_elements);
    parts.extra_bytes[i] = storage.ranges()[range].parts[StreamOf(i, true)].BytesOf(at.num_elements);
  }
  return parts;
}

using Visit = absl::FunctionRef<absl::Status(const ShardStorage& storage, int range, const ChunkRun& run)>;

absl::Status ForEachRun(const StepJob& job, Visit visit) {
  for (const ShardStorage& storage : job.shards) {
    for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
      for (const ChunkRun& run : storage.runs(range)) RETURN_IF_ERROR(visit(storage, range, run));
    }
  }
  return absl::OkStatus();
}

// What all shards hold, run after run.
std::vector<char> Snapshot(const StepJob& job, int parity) {
  std::vector<char> bytes;
  const auto add = [&](const void* data, int64_t n) {
    bytes.insert(bytes.end(), static_cast<const char*>(data), static_cast<const char*>(data) + n);
  };
  ForEachRun(job, [&](const ShardStorage& storage, int range, const ChunkRun& run) {
    const StoredParts parts = PartsOf(storage, range, run, parity);
    for (int i = 0; i <= kNumStates; ++i) {
      add(parts.run[i].codes, parts.codes_bytes[i]);
      add(parts.run[i].extra, parts.extra_bytes[i]);
    }
    return absl::OkStatus();
  }).IgnoreError();
  return bytes;
}

// Steps `stored`, what the snapshot has of a run, in place.
void StepReference(const StepJob& job, const OptimizerContext& context, int64_t bucket_element, const Bucket& bucket,
                   const ChunkRun& at, const StoredParts& stored) {
  std::vector<const void*> gradients;
  for (int s = 0; s < job.spec.num_slots; ++s) {
    gradients.push_back(job.host.slot(s).data() + bucket.gradient_offset +
                        bucket_element * BytesPerElement(context.gradients));
  }
  OptimizerRun run;
  run.gradients = gradients.data();
  run.num_slots = job.spec.num_slots;
  run.divide_scale = 1.0f / static_cast<float>(job.spec.num_slots);
  run.weights_in = run.weights_out = stored.run[0];
  for (int s = 0; s < kNumStates; ++s) run.states_in[s] = run.states_out[s] = stored.run[1 + s];
  run.num_elements = at.num_elements;
  run.first_element = static_cast<uint64_t>(at.first_element);
  run.tensor = static_cast<uint32_t>(at.tensor);
  OptimizerStepReference(context, run);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RivalsJob>> RivalsJob::Start(int ranks, int64_t elements, WeightFormat weights,
                                                            StateFormat states) {
  const StepFormats formats = {weights, states, Format::kFp32};
  std::unique_ptr<RivalsJob> made(new RivalsJob(formats));
  ASSIGN_OR_RETURN(made->job_, StepJob::Create(*made->memory_, elements, {ranks, ranks, formats, kUnpublished}));
  StepJob& job = *made->job_;
  ASSIGN_OR_RETURN(made->team_, WorkerTeam::Start(ranks, [&job](WorkerTeam::Member& member) -> WorkerTeam::Work {
                     auto engine = std::make_shared<StepEngine>(job, member.rank());
                     const Segment& slot = job.host.slot(member.rank());
                     const int64_t bytes = job.plan.gradient_window_bytes();
                     return [&job, &slot, engine, bytes](int task) {
                       if (task == kUpdate) UpdateInPlace(slot.data(), bytes, 0);
                       if (task == kCheckFinite)
                         return AllFiniteBelow(slot.data(), Format::kFp32, bytes / 4, job.spec.num_slots);
                       return engine->staged;
                     };
                   }));
  made->protocol_ = NewStepProtocol(job);
  RETURN_IF_ERROR(made->Run(kReady).status());
  RETURN_IF_ERROR(made->protocol_->outcomes().AwaitCommit(Step(0), absl::Seconds(60)).status());
  return made;
}

absl::Status RivalsJob::VerifyStep() {
  std::vector<char> before = Snapshot(*job_, job_->host.control()->parity.load());
  OptimizerContext context = AdamWContext(formats_, next_step_);
  context.hyper = job_->spec.optimizer;
  context.seed = job_->spec.seed;
  RETURN_IF_ERROR(TakeStep().status());
  const int parity = job_->host.control()->parity.load();
  const int64_t weight_bytes = BytesPerElement(GatheredFormat(formats_.weights));
  char* at = before.data();
  return ForEachRun(*job_, [&](const ShardStorage& storage, int range, const ChunkRun& run) {
    const StoredParts now = PartsOf(storage, range, run, parity);
    StoredParts expected = now;
    for (int i = 0; i <= kNumStates; ++i) {
      expected.run[i] = {at, now.extra_bytes[i] > 0 ? at + now.codes_bytes[i] : nullptr};
      at += now.codes_bytes[i] + now.extra_bytes[i];
    }
    const StorageRange& r = storage.ranges()[range];
    const Bucket& bucket = job_->plan.buckets()[r.bucket];
    const int64_t bucket_element = r.bucket_begin + run.offset;
    StepReference(*job_, context, bucket_element, bucket, run, expected);
    const char* window = job_->host.window().data() + bucket.weight_offset + bucket_element * weight_bytes;
    bool same = std::memcmp(window, expected.run[0].codes, run.num_elements * weight_bytes) == 0;
    for (int i = 0; i <= kNumStates; ++i) {
      same = same && std::memcmp(now.run[i].codes, expected.run[i].codes, now.codes_bytes[i]) == 0 &&
             (now.extra_bytes[i] == 0 || std::memcmp(now.run[i].extra, expected.run[i].extra, now.extra_bytes[i]) == 0);
    }
    if (same) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(Formats(), ", step ", context.step, ": tensor ", run.tensor, ", elements [",
                                            run.first_element, ", ", run.first_element + run.num_elements,
                                            ") are not what the reference makes of them"));
  });
}

std::string RivalsJob::Formats() const { return formats_.ToString(); }
int64_t RivalsJob::bytes() const { return job_->plan.gradient_window_bytes(); }

double RivalsJob::MovedBytes() const {
  const auto slots = static_cast<double>(job_->spec.num_slots * BytesPerElement(formats_.gradients));
  const auto window = static_cast<double>(BytesPerElement(GatheredFormat(formats_.weights)));
  return static_cast<double>(job_->plan.total_elements()) * (slots + 2 * formats_.StoredBytes() + window);
}

std::string RivalsJob::WeightsFile() const { return FileOf(job_->host.window()); }

std::string RivalsJob::Places() const {
  std::string places = absl::StrCat(job_->host.window().data_offset());
  for (int s = 0; s < job_->spec.num_slots; ++s) {
    const Segment& slot = job_->host.slot(s);
    absl::StrAppend(&places, ",", FileOf(slot), ":", slot.data_offset());
  }
  return places;
}

}  // namespace shardmesh::bench
