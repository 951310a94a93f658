#include "kernels/step/step_fixture.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "core/format/format.h"
#include "core/format/stream_digest.h"

namespace shardmesh {
namespace {

constexpr int64_t kGuard = 128;
constexpr uint8_t kFill = 0xFF;  // NaN in every format

OptimizerHyper Hyper(OptimizerKind kind, bool variant) {
  OptimizerHyper hyper = OptimizerHyper::Defaults(kind);
  hyper.lr = 3e-3;
  hyper.weight_decay = 0.03;
  hyper.beta1 = 0.85;
  hyper.beta2 = 0.97;
  hyper.eps = 1e-7;
  hyper.maximize = variant;
  if (kind == OptimizerKind::kSgd) {
    hyper.momentum = 0.8;
    hyper.nesterov = variant;
    hyper.dampening = variant ? 0 : 0.1;
  } else {
    hyper.amsgrad = variant && kind != OptimizerKind::kLion;
  }
  return hyper;
}

}  // namespace

Guarded::Guarded(int64_t bytes, int64_t alignment) : bytes_(bytes), memory_(bytes + 2 * kGuard + 64, kFill) {
  offset_ = kGuard + (64 - reinterpret_cast<uintptr_t>(memory_.data() + kGuard) % 64) % 64;
  if (alignment < 32) offset_ += alignment;
}

bool Guarded::GuardsHold() const {
  for (int64_t i = 0; i < static_cast<int64_t>(memory_.size()); ++i) {
    if ((i < offset_ || i >= offset_ + bytes_) && memory_[i] != kFill) return false;
  }
  return true;
}

std::string StepCase::ToString() const {
  return absl::StrCat(OptimizerName(hyper.kind), hyper.maximize ? " (variant) " : " ", WeightFormatName(weights), " ",
                      StateFormatName(states), ", ", num_slots, " slots in ", FormatName(gradients));
}

OptimizerContext StepCase::Context(int64_t step) const {
  OptimizerContext context;
  context.hyper = hyper;
  context.scalars = ComputeStepScalars(hyper, step).value();
  context.weights = weights;
  context.states = states;
  context.gradients = gradients;
  context.seed = 7;
  context.step = step;
  return context;
}

std::vector<StepCase> AllStepCases() {
  constexpr WeightFormat kWeights[] = {WeightFormat::kFp32,       WeightFormat::kBf16,        WeightFormat::kBf16Sr,
                                       WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr, WeightFormat::kInt8Row};
  constexpr StateFormat kStates[] = {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8,
                                     StateFormat::kDyn4, StateFormat::kFp8,    StateFormat::kFp8x32};
  constexpr int kSlots[] = {1, 2, 3, 4, 8};
  std::vector<StepCase> cases;
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kLion}) {
    for (const bool variant : {false, true}) {
      for (const WeightFormat weights : kWeights) {
        for (const StateFormat states : kStates) {
          const Format gradients = cases.size() % 3 == 0 ? Format::kFp32 : Format::kBf16;
          cases.push_back({Hyper(kind, variant), weights, states, gradients, kSlots[cases.size() % std::size(kSlots)]});
        }
      }
    }
  }
  // What has a loop of its own, with one slot and with several of each format.
  for (const StateFormat states : kStates) {
    for (const Format gradients : {Format::kFp32, Format::kBf16}) {
      for (const int slots : {1, 5}) {
        OptimizerHyper hyper = Hyper(OptimizerKind::kAdamW, false);
        hyper.maximize = slots == 1;
        cases.push_back({hyper, WeightFormat::kBf16Sr, states, gradients, slots});
      }
    }
  }
  return cases;
}

StepTensor::StepTensor(const StepCase& step_case, int64_t num_elements)
    : case_(step_case),
      num_elements_(num_elements),
      row_elements_(num_elements % 12 == 0 ? 12 : num_elements),
      square_sums_((num_elements + kStepAlignment - 1) / kStepAlignment * 4, 4),
      changed_((num_elements + kStepAlignment - 1) / kStepAlignment, 1),
      digests_(8 * (1 + NumStates(step_case.hyper)), 8),
      mx8_codes_(num_elements, 1),
      mx8_scales_(num_elements / 32, 1),
      largest_((num_elements + kLargestElements - 1) / kLargestElements * 4, 4) {
  Add(LayoutOf(case_.weights, row_elements_));
  for (int s = 0; s < NumStates(case_.hyper); ++s) Add(LayoutOf(case_.states));
  const int64_t bytes = case_.gradients == Format::kFp32 ? 4 : 2;
  for (int slot = 0; slot < case_.num_slots; ++slot) gradients_.emplace_back(num_elements * bytes, bytes);
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (Guarded& part : parts_) std::memset(part.data(), 0, part.size());
  std::memset(digests_.data(), 0, digests_.size());
  for (int64_t i = 0; i < num_elements_; ++i) {
    const float w = normal(random);
    const uint16_t bits = FloatToBf16Rne(w);
    switch (case_.weights) {
      case WeightFormat::kFp32:
        std::memcpy(parts_[0].data() + 4 * i, &w, 4);
        break;
      case WeightFormat::kInt8Row:
        parts_[0].data()[i] = static_cast<uint8_t>(static_cast<int8_t>(30 * w));
        break;
      default:
        std::memcpy(parts_[0].data() + 2 * i, &bits, 2);
    }
  }
  const float scale = 0.01f;
  for (int64_t at = 0; case_.weights == WeightFormat::kInt8Row && at < parts_[1].size(); at += 4) {
    std::memcpy(parts_[1].data() + at, &scale, 4);
  }
}

void StepTensor::Add(const StoredLayout& layout) {
  parts_.emplace_back(layout.codes.BytesOf(num_elements_), layout.codes.elements == 1 ? layout.codes.bytes : 1);
  parts_.emplace_back(layout.extra.BytesOf(num_elements_), std::max<int64_t>(layout.extra.bytes, 1));
}

void StepTensor::FillGradients(int64_t step) {
  filled_step_ = step;
  for (size_t slot = 0; slot < gradients_.size(); ++slot) {
    std::mt19937 random(static_cast<uint32_t>(100 * step + static_cast<int64_t>(slot)));
    for (int64_t i = 0; i < num_elements_; ++i) {
      // Both signs, over twelve powers of two.
      const uint32_t bits32 = random();
      float g = std::ldexp(static_cast<float>(static_cast<int32_t>(bits32)), -31 - static_cast<int>(bits32 % 12));
      if (i == 3) g = 0;
      const uint16_t bits = FloatToBf16Rne(g);
      if (case_.gradients == Format::kFp32) std::memcpy(gradients_[slot].data() + 4 * i, &g, 4);
      if (case_.gradients != Format::kFp32) std::memcpy(gradients_[slot].data() + 2 * i, &bits, 2);
    }
  }
}

OptimizerRun StepTensor::RunOf(int64_t step, int64_t begin, int64_t end) {
  if (filled_step_ != step) FillGradients(step);
  slots_.clear();
  for (Guarded& slot : gradients_) slots_.push_back(slot.data() + begin * (case_.gradients == Format::kFp32 ? 4 : 2));
  OptimizerRun run;
  run.gradients = slots_.data();
  run.num_slots = case_.num_slots;
  run.divide_scale = 0.625f / static_cast<float>(case_.num_slots);
  run.clip = 0.75f;
  const auto at = [&](int stream) {
    const StoredLayout layout = stream == 0 ? LayoutOf(case_.weights, row_elements_) : LayoutOf(case_.states);
    return StoredRun{parts_[2 * stream].data() + layout.codes.BytesOf(begin),
                     parts_[2 * stream + 1].data() + layout.extra.BytesOf(begin)};
  };
  run.weights_in = run.weights_out = at(0);
  for (int s = 0; s < NumStates(case_.hyper); ++s) run.states_in[s] = run.states_out[s] = at(1 + s);
  run.square_sums = reinterpret_cast<float*>(square_sums_.data()) + begin / kStepAlignment;
  run.changed = changed_.data() + begin / kStepAlignment;
  run.digests = reinterpret_cast<uint64_t*>(digests_.data());
  if ((end - begin) % 32 == 0) run.mx8 = {mx8_codes_.data() + begin, mx8_scales_.data() + begin / 32};
  run.largest = reinterpret_cast<float*>(largest_.data()) + begin / kLargestElements;
  run.num_elements = end - begin;
  run.first_element = begin;
  run.tensor = 3;
  run.row_elements = row_elements_;
  return run;
}

void StepTensor::Step(OptimizerStepFn step, int steps, int64_t cut) {
  for (int64_t t = 1; t <= steps; ++t) {
    std::memset(digests_.data(), 0, digests_.size());
    const OptimizerContext context = case_.Context(t);
    const int64_t middle = cut > 0 ? std::min(cut, num_elements_) : num_elements_;
    step(context, RunOf(t, 0, middle));
    if (middle < num_elements_) step(context, RunOf(t, middle, num_elements_));
  }
}

std::vector<float> StepTensor::PublishedWeights() {
  std::vector<float> weights(num_elements_);
  for (int64_t i = 0; i < num_elements_; ++i) {
    const uint8_t* codes = parts_[0].data();
    uint16_t half = 0;
    float scale = 0;
    switch (case_.weights) {
      case WeightFormat::kFp32:
        std::memcpy(&weights[i], codes + 4 * i, 4);
        break;
      case WeightFormat::kInt8Row:
        std::memcpy(&scale, parts_[1].data() + i / row_elements_ * 4, 4);
        weights[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
        break;
      default:
        std::memcpy(&half, codes + 2 * i, 2);
        weights[i] = Bf16ToFloat(half);
    }
  }
  return weights;
}

std::vector<uint64_t> StepTensor::StoredDigests() {
  std::vector<uint64_t> digests;
  for (int stream = 0; stream <= NumStates(case_.hyper); ++stream) {
    const StoredLayout layout = stream == 0 ? LayoutOf(case_.weights, row_elements_) : LayoutOf(case_.states);
    digests.push_back(
        DigestStream(3, stream, layout, 0, parts_[2 * stream].data(), parts_[2 * stream + 1].data(), num_elements_));
  }
  return digests;
}

bool StepTensor::GuardsHold() const {
  const auto holds = [](const Guarded& part) { return part.GuardsHold(); };
  return std::all_of(parts_.begin(), parts_.end(), holds) && std::all_of(gradients_.begin(), gradients_.end(), holds) &&
         holds(square_sums_) && holds(changed_) && holds(digests_) && holds(mx8_codes_) && holds(mx8_scales_) &&
         holds(largest_);
}

bool StepTensor::operator==(const StepTensor& other) const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].Bytes() != other.parts_[i].Bytes()) return false;
  }
  return square_sums_.Bytes() == other.square_sums_.Bytes() && changed_.Bytes() == other.changed_.Bytes() &&
         digests_.Bytes() == other.digests_.Bytes() && mx8_codes_.Bytes() == other.mx8_codes_.Bytes() &&
         mx8_scales_.Bytes() == other.mx8_scales_.Bytes() && largest_.Bytes() == other.largest_.Bytes();
}

}  // namespace shardmesh
