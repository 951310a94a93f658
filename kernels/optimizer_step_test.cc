#include "kernels/optimizer_step.h"

#include <cmath>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "core/matchers.h"
#include "kernels/fused_step.h"

namespace shardmesh {
namespace {

constexpr WeightFormat kWeights[] = {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Sr,
                                     WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr};
constexpr StateFormat kStates[] = {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8,
                                   StateFormat::kDyn4, StateFormat::kFp8,    StateFormat::kFp8x32};

OptimizerHyper Hyper(OptimizerKind kind, bool variant) {
  OptimizerHyper hyper = OptimizerHyper::Defaults(kind);
  hyper.lr = 3e-3;
  hyper.weight_decay = 0.03;
  hyper.beta1 = 0.85;
  hyper.beta2 = 0.97;
  hyper.eps = 1e-7;
  if (kind == OptimizerKind::kSgd) {
    hyper.momentum = 0.8;
    hyper.nesterov = variant;
    hyper.dampening = variant ? 0 : 0.1;
  } else {
    hyper.amsgrad = variant && kind != OptimizerKind::kLion;
    hyper.maximize = variant;
  }
  return hyper;
}

// Memory between guards that nothing may touch, at an address that is no better aligned than its elements.
class Guarded {
 public:
  Guarded(int64_t bytes, int64_t alignment) : bytes_(bytes), memory_(bytes + 2 * kGuard + 64, kFill) {
    offset_ = kGuard + (64 - reinterpret_cast<uintptr_t>(memory_.data() + kGuard) % 64) % 64;
    if (alignment < 32) offset_ += alignment;
  }
  uint8_t* data() { return memory_.data() + offset_; }
  void Fill(const std::vector<uint8_t>& bytes) { std::memcpy(data(), bytes.data(), bytes.size()); }
  std::vector<uint8_t> Bytes() const { return {memory_.begin() + offset_, memory_.begin() + offset_ + bytes_}; }
  bool GuardsHold() const {
    for (int64_t i = 0; i < static_cast<int64_t>(memory_.size()); ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && memory_[i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 128;
  static constexpr uint8_t kFill = 0xFF;  // NaN in every format
  int64_t bytes_, offset_ = 0;
  std::vector<uint8_t> memory_;
};

// All streams of a tensor, as stored.
struct Tensor {
  Tensor(const OptimizerContext& context, int64_t n) : num_elements(n) {
    const StoredLayout weights = LayoutOf(context.weights), states = LayoutOf(context.states);
    Add(weights, n);
    for (int s = 0; s < NumStates(context.hyper); ++s) Add(states, n);
  }
  void Add(const StoredLayout& layout, int64_t n) {
    parts.emplace_back(layout.codes.BytesOf(n), layout.codes.elements == 1 ? layout.codes.bytes : 1);
    parts.emplace_back(layout.extra.BytesOf(n), std::max<int64_t>(layout.extra.bytes, 1));
  }
  StoredRun Part(int stream) { return {parts[2 * stream].data(), parts[2 * stream + 1].data()}; }
  bool operator==(const Tensor& other) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].Bytes() != other.parts[i].Bytes()) return false;
    }
    return true;
  }

  int64_t num_elements;
  std::vector<Guarded> parts;
};

std::vector<float> Gradients(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> gradients(n);
  for (float& g : gradients) g = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 12) - 10);
  if (n > 3) gradients[3] = 0;
  return gradients;
}

OptimizerContext Context(const OptimizerHyper& hyper, WeightFormat weights, StateFormat states, int64_t step) {
  OptimizerContext context;
  context.hyper = hyper;
  context.scalars = ComputeStepScalars(hyper, step).value();
  context.weights = weights;
  context.states = states;
  context.seed = 7;
  context.step = step;
  return context;
}

// Zeros as stored weights, then as many steps; the streams are those of the whole tensor.
void Step(OptimizerStepFn step, const OptimizerHyper& hyper, WeightFormat weights, StateFormat states, int steps,
          Tensor& tensor, int64_t cut = 0) {
  for (int t = 1; t <= steps; ++t) {
    const OptimizerContext context = Context(hyper, weights, states, t);
    const std::vector<float> gradients[2] = {Gradients(tensor.num_elements, 100 + t),
                                             Gradients(tensor.num_elements, 200 + t)};
    const StoredLayout layouts[2] = {LayoutOf(weights), LayoutOf(states)};
    for (int64_t begin = 0; begin < tensor.num_elements;) {
      const int64_t end = cut > begin ? std::min(cut, tensor.num_elements) : tensor.num_elements;
      const void* slots[2] = {gradients[0].data() + begin, gradients[1].data() + begin};
      OptimizerRun run;
      run.gradients = slots;
      run.num_slots = 2;
      run.divide_scale = 0.5f;
      run.clip = 0.75f;
      const auto at = [&](int stream) {
        const StoredLayout& layout = layouts[stream > 0];
        StoredRun part = tensor.Part(stream);
        part.codes = static_cast<uint8_t*>(part.codes) + layout.codes.BytesOf(begin);
        part.extra = static_cast<uint8_t*>(part.extra) + layout.extra.BytesOf(begin);
        return part;
      };
      run.weights_in = run.weights_out = at(0);
      for (int s = 0; s < NumStates(hyper); ++s) run.states_in[s] = run.states_out[s] = at(1 + s);
      run.num_elements = end - begin;
      run.first_element = begin;
      run.tensor = 3;
      ASSERT_OK(CheckRun(context, run));
      step(context, run);
      begin = end;
    }
  }
}

// Starts from weights that are not 0: a step of plain SGD with lr -1 would do; here the codes of small numbers.
void Start(Tensor& tensor, WeightFormat weights) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (Guarded& part : tensor.parts) std::memset(part.data(), 0, part.Bytes().size());
  for (int64_t i = 0; i < tensor.num_elements; ++i) {
    const float w = normal(random);
    if (weights == WeightFormat::kFp32) {
      std::memcpy(tensor.parts[0].data() + 4 * i, &w, 4);
    } else {
      const uint16_t bits = FloatToBf16Rne(w);
      std::memcpy(tensor.parts[0].data() + 2 * i, &bits, 2);
    }
  }
}

struct Case {
  OptimizerKind kind;
  bool variant;
};
constexpr Case kCases[] = {{OptimizerKind::kSgd, false},  {OptimizerKind::kSgd, true},    {OptimizerKind::kAdam, false},
                           {OptimizerKind::kAdam, true},  {OptimizerKind::kAdamW, false}, {OptimizerKind::kAdamW, true},
                           {OptimizerKind::kLion, false}, {OptimizerKind::kLion, true}};

// Calls visit(hyper, weights, states) for every combination there is.
template <typename Visit>
void ForEachCombination(Visit visit) {
  for (const Case& each : kCases) {
    for (const WeightFormat weights : kWeights) {
      for (const StateFormat states : kStates) {
        const OptimizerHyper hyper = Hyper(each.kind, each.variant);
        SCOPED_TRACE(absl::StrCat(OptimizerName(hyper.kind), each.variant ? " (variant)" : "", " ",
                                  WeightFormatName(weights), " ", StateFormatName(states)));
        visit(hyper, weights, states);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(OptimizerStep, Simd_IsTheReference_BitForBit) {
  if (!SimdSupported()) GTEST_SKIP() << "this processor has no AVX2 and FMA";
  ForEachCombination([](const OptimizerHyper& hyper, WeightFormat weights, StateFormat states) {
    for (const int64_t n : {1, 7, 63, 255, 256, 257, 512, 1000}) {
      const OptimizerContext context = Context(hyper, weights, states, 1);
      Tensor reference(context, n), simd(context, n);
      Start(reference, weights);
      Start(simd, weights);
      Step(OptimizerStepReference, hyper, weights, states, 3, reference);
      Step(OptimizerStepSimd, hyper, weights, states, 3, simd);
      ASSERT_TRUE(reference == simd) << n << " elements";
      for (const Guarded& part : simd.parts) ASSERT_TRUE(part.GuardsHold()) << n << " elements";
      for (const Guarded& part : reference.parts) ASSERT_TRUE(part.GuardsHold()) << n << " elements";
    }
  });
}

TEST(OptimizerStep, HoweverATensorIsCut_TheBitsAreTheSame) {
  ForEachCombination([](const OptimizerHyper& hyper, WeightFormat weights, StateFormat states) {
    const OptimizerContext context = Context(hyper, weights, states, 1);
    Tensor whole(context, 1500), cut(context, 1500);
    Start(whole, weights);
    Start(cut, weights);
    Step(BestOptimizerStep(), hyper, weights, states, 2, whole);
    Step(BestOptimizerStep(), hyper, weights, states, 2, cut, 768);
    ASSERT_TRUE(whole == cut);
  });
}

// A step that is wrong in both implementations would pass the tests above.
TEST(OptimizerStep, MovesWeights) {
  ForEachCombination([](const OptimizerHyper& hyper, WeightFormat weights, StateFormat states) {
    const OptimizerContext context = Context(hyper, weights, states, 1);
    Tensor before(context, 300), after(context, 300);
    Start(before, weights);
    Start(after, weights);
    Step(BestOptimizerStep(), hyper, weights, states, 2, after);
    ASSERT_FALSE(before == after);
  });
}

}  // namespace
}  // namespace shardmesh
