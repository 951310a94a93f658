#include "bench/optimizer/optimizer_cuda_job.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "bench/harness/step_context.h"
#include "bench/optimizer/device_cuda.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kLine = 256;  // bytes, that a tensor's part of a stream begins at a multiple of
constexpr int kWeights = 0, kStates = 2;

absl::Status StatusOf(const char* error) {
  return error == nullptr ? absl::OkStatus() : absl::InternalError(absl::StrCat("the device: ", error));
}

}  // namespace

absl::StatusOr<std::unique_ptr<OptimizerCudaJob>> OptimizerCudaJob::Create(const std::vector<int64_t>& sizes,
                                                                           const StepFormats& formats) {
  std::unique_ptr<OptimizerCudaJob> job(new OptimizerCudaJob(formats));
  RETURN_IF_ERROR(job->Allocate(sizes));
  RETURN_IF_ERROR(job->Fill());
  RETURN_IF_ERROR(job->MakeItems());
  return job;
}

absl::Status OptimizerCudaJob::Allocate(const std::vector<int64_t>& sizes) {
  sizes_ = sizes;
  const StoredLayout weights = LayoutOf(formats_.weights), states = LayoutOf(formats_.states);
  parts_ = {weights.codes, weights.extra, states.codes, states.extra, states.codes, states.extra};
  parts_.push_back({BytesPerElement(formats_.gradients)});
  int64_t elements = 0;
  for (const int64_t size : sizes) {
    first_elements_.push_back(elements);
    elements += size;
  }
  for (const PartLayout& part : parts_) {
    std::vector<int64_t> offsets;
    int64_t bytes = 0;
    for (const int64_t size : sizes) {
      offsets.push_back(bytes);
      bytes += (part.BytesOf(size) + kLine - 1) / kLine * kLine;
    }
    offsets_.push_back(std::move(offsets));
    streams_.push_back(std::make_unique<DeviceBlock>(std::max(bytes, kLine)));
    if (streams_.back()->data() == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no ", bytes, " bytes on the device for a stream of ", elements, " elements"));
    }
    RETURN_IF_ERROR(StatusOf(FillZero(streams_.back()->data(), std::max(bytes, kLine))));
  }
  return absl::OkStatus();
}

// A split weight starts without a remainder, states as zeros.
absl::Status OptimizerCudaJob::Fill() const {
  for (const bool gradients : {false, true}) {
    const int stream = gradients ? kStreams : kWeights;
    for (size_t tensor = 0; tensor < sizes_.size(); ++tensor) {
      RETURN_IF_ERROR(StatusOf(FillStart(gradients ? StartKind::kGradient : StartKind::kWeight,
                                         parts_[stream].bytes == 4, static_cast<uint32_t>(first_elements_[tensor]),
                                         sizes_[tensor], streams_[stream]->data() + offsets_[stream][tensor])));
    }
  }
  return absl::OkStatus();
}

absl::Status OptimizerCudaJob::MakeItems() {
  std::vector<const void*> slots;
  for (const int64_t offset : offsets_[kStreams]) slots.push_back(streams_[kStreams]->data() + offset);
  const auto bytes = static_cast<int64_t>(slots.size() * sizeof(void*));
  slots_ = std::make_unique<DeviceBlock>(bytes);
  if (slots_->data() == nullptr) return absl::ResourceExhaustedError("no memory on the device for pointers");
  RETURN_IF_ERROR(StatusOf(slots_->CopyFromHost(slots.data(), bytes)));
  for (size_t tensor = 0; tensor < sizes_.size(); ++tensor) {
    const auto at = [&](int stream) -> void* {
      return parts_[stream].bytes == 0 ? nullptr : streams_[stream]->data() + offsets_[stream][tensor];
    };
    OptimizerItem item;
    item.run.gradients = reinterpret_cast<const void* const*>(slots_->data()) + tensor;
    item.run.num_slots = 1;
    item.run.weights_in = item.run.weights_out = {at(kWeights), at(kWeights + 1)};
    for (int s = 0; s < 2; ++s) {
      item.run.states_in[s] = item.run.states_out[s] = {at(kStates + 2 * s), at(kStates + 2 * s + 1)};
    }
    item.run.num_elements = sizes_[tensor];
    item.run.tensor = static_cast<uint32_t>(tensor);
    items_.push_back(item);
  }
  return absl::OkStatus();
}

absl::Status OptimizerCudaJob::Step() {
  const OptimizerContext context = AdamWContext(formats_, ++steps_);
  return OptimizerStepListCuda({&context, 1}, items_, tables_[steps_ % 2], nullptr);
}

absl::Status OptimizerCudaJob::Verify(int samples) const {
  for (int sample = 0; sample < samples; ++sample) {
    // The golden ratio's multiples spread evenly; the last tile of a tensor, which may be short, in every other sample.
    const size_t tensor = static_cast<size_t>(sample) * 618'034 % 1'000'000 * sizes_.size() / 1'000'000;
    const int64_t tiles = (sizes_[tensor] + kStepAlignment - 1) / kStepAlignment;
    RETURN_IF_ERROR(VerifyTile(tensor, sample % 2 == 0 ? tiles - 1 : int64_t{sample} * 7919 % tiles));
  }
  return absl::OkStatus();
}

absl::Status OptimizerCudaJob::VerifyTile(size_t tensor, int64_t tile) const {
  const int64_t begin = tile * kStepAlignment, n = std::min(kStepAlignment, sizes_[tensor] - begin);
  std::vector<std::vector<uint8_t>> streams;
  for (const PartLayout& part : parts_) streams.emplace_back(part.BytesOf(n));
  for (int64_t i = 0; i < n; ++i) {
    const auto element = static_cast<uint32_t>(first_elements_[tensor] + begin + i);
    for (const int stream : {kWeights, kStreams}) {
      const float x = stream == kWeights ? StartWeight(element) : StartGradient(element);
      const uint16_t bits = FloatToBf16Rne(x);
      if (parts_[stream].bytes == 4) std::memcpy(streams[stream].data() + 4 * i, &x, 4);
      if (parts_[stream].bytes == 2) std::memcpy(streams[stream].data() + 2 * i, &bits, 2);
    }
  }
  OptimizerRun run = items_[tensor].run;
  const void* const slot = streams[kStreams].data();
  run.gradients = &slot;
  run.weights_in = run.weights_out = {streams[kWeights].data(), streams[kWeights + 1].data()};
  for (int s = 0; s < 2; ++s) {
    run.states_in[s] = run.states_out[s] = {streams[kStates + 2 * s].data(), streams[kStates + 2 * s + 1].data()};
  }
  run.first_element = static_cast<uint64_t>(begin);
  run.num_elements = n;
  for (int64_t step = 1; step <= steps_; ++step) OptimizerStepReference(AdamWContext(formats_, step), run);
  for (int stream = 0; stream < kStreams; ++stream) {
    std::vector<uint8_t> there(streams[stream].size());
    const int64_t offset = offsets_[stream][tensor] + parts_[stream].BytesOf(begin);
    RETURN_IF_ERROR(StatusOf(streams_[stream]->CopyToHost(there.data(), static_cast<int64_t>(there.size()), offset)));
    if (there == streams[stream]) continue;
    return absl::InternalError(absl::StrCat(formats_.ToString(), ": after ", steps_, " steps, stream ", stream,
                                            " of tensor ", tensor, ", tile ", tile, " is not the reference's"));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
