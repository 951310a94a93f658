#include "bench/optimizer/device_pass_job.h"

#include <cstring>
#include <utility>

#include "bench/harness/step_formats.h"
#include "core/base/status.h"
#include "core/format/stream_digest.h"
#include "core/job/support.h"
#include "worker/pass/pass.h"

namespace shardmesh::bench {

absl::StatusOr<std::unique_ptr<DevicePassJob>> DevicePassJob::Create(const JobSpec& spec, const WorkerDevice* device,
                                                                     int threads) {
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(spec));
  std::unique_ptr<DevicePassJob> job(new DevicePassJob(spec, std::move(plan)));
  const Plan& p = job->plan_;
  job->memory_ = NewProcessMemory();
  ASSIGN_OR_RETURN(HostMemory host, HostMemory::Create(*job->memory_, spec.name, spec.num_slots, p,
                                                       device != nullptr ? device->copies : nullptr));
  job->host_ = std::make_unique<HostMemory>(std::move(host));
  if (device != nullptr) {
    RETURN_IF_ERROR(CheckSupported(spec, p, {1, p.num_ranks(), /*device=*/true}));
    ASSIGN_OR_RETURN(job->pass_, DevicePass::Create(job->spec_, p, {0, 0}, *job->host_, *device, {0, 1}, {}));
    return job;
  }
  ASSIGN_OR_RETURN(ShardStorage storage, ShardStorage::Open(*job->memory_, "shard", p, 0));
  job->storage_ = std::make_unique<ShardStorage>(std::move(storage));
  job->pass_ = std::make_unique<Pass>(job->spec_, p, ShardPlace{0, 0}, *job->host_, *job->storage_, threads);
  return job;
}

absl::Status DevicePassJob::Execute(Command& command, const float* initial) {
  command.parity = parity_;
  host_->control()->decided.store(++seq_);
  ASSIGN_OR_RETURN(digest_, pass_->Run(command, seq_, initial, nullptr));
  return absl::OkStatus();
}

absl::Status DevicePassJob::Begin(uint64_t seed) {
  std::vector<float> initial(static_cast<size_t>(plan_.InitialShardBytes(0)) / sizeof(float));
  for (size_t i = 0; i < initial.size(); ++i) initial[i] = StartWeight(static_cast<uint32_t>(seed + i));
  Command command;
  command.kind = CommandKind::kInit;
  command.publish = 0;
  RETURN_IF_ERROR(Execute(command, initial.data()));
  initial = {};
  const int64_t bytes = plan_.gradient_window_bytes();
  std::vector<uint16_t> gradients(static_cast<size_t>(bytes) / sizeof(uint16_t));
  for (int slot = 0; slot < spec_.num_slots; ++slot) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] = FloatToBf16Rne(StartGradient(static_cast<uint32_t>(seed + slot + i)));
    }
    if (host_->device() != nullptr) {
      RETURN_IF_ERROR(host_->device()->Copy(host_->device()->slots[slot].data(), gradients.data(), bytes));
    } else {
      std::memcpy(host_->slot(slot).data(), gradients.data(), static_cast<size_t>(bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status DevicePassJob::Step() {
  Command command;
  command.kind = CommandKind::kStep;
  command.step = ++step_;
  const GroupTable groups(host_->control(), plan_);
  ASSIGN_OR_RETURN(groups.scalars(command.groups)[0], ComputeStepScalars(spec_.optimizer, step_));
  groups.rates(command.groups)[0] = spec_.optimizer.lr;
  command.divide_scale = 1.0f / static_cast<float>(spec_.num_slots);
  command.apply = 1;
  command.publish = static_cast<int32_t>(step_ % 2);
  RETURN_IF_ERROR(Execute(command));
  parity_ = 1 - parity_;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DevicePassJob::Digest() {
  Command command;
  command.kind = CommandKind::kDigest;
  RETURN_IF_ERROR(Execute(command));
  return digest_;
}

absl::StatusOr<uint64_t> DevicePassJob::WindowDigest() {
  const int64_t bytes = plan_.window_bytes();
  std::vector<char> copy(static_cast<size_t>(bytes));
  if (host_->device() != nullptr) {
    RETURN_IF_ERROR(host_->device()->Copy(copy.data(), host_->device()->window.data(), bytes));
  } else {
    std::memcpy(copy.data(), host_->window().data(), copy.size());
  }
  return DigestPart(DigestKey(0, 0, 0), {1, 1}, 0, copy.data(), bytes);
}

int64_t DevicePassJob::MovedBytes() const {
  int64_t bytes = 0;
  for (const Bucket& bucket : plan_.buckets()) {
    const int64_t n = bucket.size(0);
    const StoredLayout weights = LayoutOf(bucket.weights, bucket.row_elements), states = LayoutOf(bucket.states);
    const int64_t stored = weights.codes.BytesOf(n) + weights.extra.BytesOf(n) +
                           bucket.num_states * (states.codes.BytesOf(n) + states.extra.BytesOf(n));
    bytes += 2 * stored + spec_.num_slots * n * BytesPerElement(spec_.gradient_format) + 2 * bucket.CodeOffset(n);
  }
  return bytes;
}

}  // namespace shardmesh::bench
