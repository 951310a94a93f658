#include "bench/optimizer/optimizer_job.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/harness/step_context.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kPhaseBytes = (64 << 10) + (4 << 10), kPhasePeriod = 2 << 20, kLine = 64;
constexpr int kGradients = 0, kWeights = 1, kStates = 3;  // streams

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

absl::StatusOr<Mapping> Mapping::Create(int64_t num_bytes, int phase) {
  Mapping mapping;
  mapping.num_bytes_ = num_bytes;
  mapping.mapped_bytes_ = num_bytes + 2 * kPhasePeriod;
  void* mapped =
      mmap(nullptr, mapping.mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return absl::ResourceExhaustedError(absl::StrCat("no memory for ", num_bytes, " bytes"));
  mapping.mapped_ = mapped;
  const int64_t address = RoundUp(static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped)), kPhasePeriod);
  mapping.data_ = reinterpret_cast<uint8_t*>(address + phase * kPhaseBytes % kPhasePeriod);
  madvise(mapped, mapping.mapped_bytes_, MADV_HUGEPAGE);  // a wish: ordinary pages are fine
  std::memset(mapping.data_, 0, num_bytes);
  return mapping;
}

Mapping::Mapping(Mapping&& other) noexcept
    : mapped_(std::exchange(other.mapped_, nullptr)),
      mapped_bytes_(other.mapped_bytes_),
      num_bytes_(other.num_bytes_),
      data_(other.data_) {}

Mapping::~Mapping() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

absl::StatusOr<std::unique_ptr<OptimizerJob>> OptimizerJob::Create(const std::vector<int64_t>& sizes,
                                                                   const StepFormats& formats, ThreadTeam& team,
                                                                   OptimizerStepFn step) {
  std::unique_ptr<OptimizerJob> job(new OptimizerJob(formats, team, step));
  RETURN_IF_ERROR(job->Allocate(sizes));
  job->FillWeights();
  job->FillGradients(0);
  RETURN_IF_ERROR(job->CutRuns(sizes));
  return job;
}

absl::Status OptimizerJob::Allocate(const std::vector<int64_t>& sizes) {
  const StoredLayout weights = LayoutOf(formats_.weights), states = LayoutOf(formats_.states);
  parts_ = {{BytesPerElement(formats_.gradients)},
            weights.codes,
            weights.extra,
            states.codes,
            states.extra,
            states.codes,
            states.extra};
  for (size_t stream = 0; stream < parts_.size(); ++stream) {
    std::vector<int64_t> offsets;
    int64_t bytes = 0;
    for (const int64_t size : sizes) {
      offsets.push_back(bytes);
      bytes += RoundUp(parts_[stream].BytesOf(size), kLine);
      if (stream != kGradients) stored_bytes_ += parts_[stream].BytesOf(size);
    }
    offsets_.push_back(std::move(offsets));
    ASSIGN_OR_RETURN(Mapping mapping, Mapping::Create(bytes, static_cast<int>(stream)));
    streams_.push_back(std::move(mapping));
  }
  for (const int64_t size : sizes) {
    first_elements_.push_back(num_elements_);
    num_elements_ += size;
  }
  first_elements_.push_back(num_elements_);
  return absl::OkStatus();
}

// Writes value(i) for every element i of the list to a stream of fp32 or bf16.
template <typename Value>
static void Fill(uint8_t* stream, int64_t bytes_an_element, const std::vector<int64_t>& offsets,
                 const std::vector<int64_t>& first_elements, const Value& value) {
  for (size_t tensor = 0; tensor < offsets.size(); ++tensor) {
    uint8_t* to = stream + offsets[tensor];
    for (int64_t i = first_elements[tensor]; i < first_elements[tensor + 1]; ++i, to += bytes_an_element) {
      const float x = value(static_cast<uint32_t>(i));
      const uint16_t bits = FloatToBf16Rne(x);
      if (bytes_an_element == 4) {
        std::memcpy(to, &x, sizeof(x));
      } else {
        std::memcpy(to, &bits, sizeof(bits));
      }
    }
  }
}

// A split weight starts without a remainder.
void OptimizerJob::FillWeights() {
  Fill(streams_[kWeights].data(), parts_[kWeights].bytes, offsets_[kWeights], first_elements_, StartWeight);
}

void OptimizerJob::FillGradients(int64_t shift) {
  Fill(streams_[kGradients].data(), parts_[kGradients].bytes, offsets_[kGradients], first_elements_,
       [shift](uint32_t i) { return StartGradient(i + static_cast<uint32_t>(shift)); });
}

absl::Status OptimizerJob::CutRuns(const std::vector<int64_t>& sizes) {
  const auto threads = static_cast<int64_t>(runs_.size());
  gradients_.reserve(sizes.size() + threads);  // runs point to its elements
  for (int64_t thread = 0; thread < threads; ++thread) {
    const int64_t share_begin = num_elements_ * thread / threads, share_end = num_elements_ * (thread + 1) / threads;
    for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
      const int64_t size = sizes[tensor];
      // Where a place of the list falls in this tensor: a multiple of kStepAlignment, but for the end.
      const auto cut = [&](int64_t place) {
        const int64_t in_tensor = std::clamp<int64_t>(place - first_elements_[tensor], 0, size);
        return in_tensor == size ? size : in_tensor / kStepAlignment * kStepAlignment;
      };
      const int64_t begin = cut(share_begin), end = cut(share_end);
      if (begin < end) RETURN_IF_ERROR(AddRun(static_cast<int>(thread), static_cast<int>(tensor), begin, end));
    }
  }
  return absl::OkStatus();
}

absl::Status OptimizerJob::AddRun(int thread, int tensor, int64_t begin, int64_t end) {
  const auto at = [&](int stream) -> void* {
    if (parts_[stream].bytes == 0) return nullptr;
    return streams_[stream].data() + offsets_[stream][tensor] + parts_[stream].BytesOf(begin);
  };
  gradients_.push_back(at(kGradients));
  OptimizerRun run;
  run.gradients = &gradients_.back();
  run.num_slots = 1;
  run.weights_in = run.weights_out = {at(kWeights), at(kWeights + 1)};
  for (int state = 0; state < 2; ++state) {
    const int stream = kStates + 2 * state;
    run.states_in[state] = run.states_out[state] = {at(stream), at(stream + 1)};
  }
  run.num_elements = end - begin;
  run.first_element = begin;
  run.tensor = tensor;
  runs_[thread].push_back(run);
  return CheckRun(AdamWContext(formats_, 1), run);
}

void OptimizerJob::Step() {
  const OptimizerContext context = AdamWContext(formats_, ++steps_);
  team_.Run([&](int thread) {
    for (const OptimizerRun& run : runs_[thread]) step_fn_(context, run);
  });
}

double OptimizerJob::StoredBytes() const {
  return static_cast<double>(stored_bytes_) / static_cast<double>(num_elements_);
}

}  // namespace shardmesh::bench
