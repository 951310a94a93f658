#include "kernels/step/torchao_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "kernels/cpu/fp_environment.h"
#include "kernels/encode/torchao_codec.h"
#include "kernels/rules/number.h"
#include "kernels/tile/emit.h"
#include "kernels/tile/gradients.h"
#include "kernels/tile/walk.h"
#include "kernels/tile/weights.h"

namespace shardmesh {
namespace {

// lerp(from, to, weight): base + coefficient * (to - from), from the nearer end.
struct Lerp {
  Lerp(double weight, TorchaoArithmetic arithmetic) : from_end(weight >= 0.5), fused(arithmetic != kCompiled) {
    coefficient = static_cast<float>(weight);
    if (from_end) coefficient = fused ? coefficient - 1 : static_cast<float>(-(1 - weight));
  }
  static constexpr TorchaoArithmetic kCompiled = TorchaoArithmetic::kCompiled;

  float operator()(float from, float to) const {
    const float base = from_end ? to : from, difference = to - from;
    return fused ? MulAdd(coefficient, difference, base) : base + coefficient * difference;
  }

  bool from_end, fused;
  float coefficient;
};

// 1 - beta^step as a tensor of fp32 has it; torchao counts steps in fp32, which ends at 2^24.
float BiasCorrection(double beta, int64_t step) {
  const float count = static_cast<float>(std::min<int64_t>(step, int64_t{1} << 24));
  return 1.0f - std::pow(static_cast<float>(beta), count);
}

struct Constants {
  Constants(const OptimizerContext& context, TorchaoArithmetic arithmetic)
      : decoupled(context.hyper.kind == OptimizerKind::kAdamW),
        lr(static_cast<float>(context.hyper.lr)),
        decay(static_cast<float>(context.hyper.weight_decay)),
        eps(static_cast<float>(context.hyper.eps)),
        bias1(BiasCorrection(context.hyper.beta1, context.step)),
        sqrt_bias2(Sqrt(BiasCorrection(context.hyper.beta2, context.step))),
        first(1 - context.hyper.beta1, arithmetic),
        second(1 - context.hyper.beta2, arithmetic) {
    if (decoupled) decay = lr * decay;
  }

  bool decoupled;
  float lr, decay, eps, bias1, sqrt_bias2;
  Lerp first, second;
};

class TorchaoTile {
 public:
  TorchaoTile(const StepPlan& plan, TorchaoArithmetic arithmetic)
      : plan_(plan), constants_(*plan.context, arithmetic) {}

  // `first_element`: of the tile in its tensor.
  void Step(const TileRun& tile, uint64_t first_element, int64_t elements = kTileElements) {
    const OptimizerContext& context = *plan_.context;
    SumGradients<float>(plan_, tile, gradient_, elements);
    if (tile.square_sum != nullptr) *tile.square_sum = SumSquares<float>(gradient_);
    ClipGradients<float>(plan_, gradient_);
    DecodeWeights<float>(context.weights, tile.weights_in, weights_);
    for (int s = 0; s < plan_.num_states; ++s) {
      DecodeTorchaoStates(context.states, StateIsSigned(context.hyper, s), tile.states_in[s], states_[s]);
    }
    for (int64_t i = 0; i < kTileElements; ++i) Update(i);
    Store(tile, first_element, elements);
  }

 private:
  void Update(int64_t i) {
    const Constants& c = constants_;
    float weight = weights_[i], gradient = gradient_[i];
    if (c.decoupled) {
      weight = weight - c.decay * weight;
    } else {
      gradient = gradient + c.decay * weight;
    }
    const float m = states_[0][i] = c.first(states_[0][i], gradient);
    const float v = states_[1][i] = c.second(states_[1][i], gradient * gradient);
    float largest = v;
    if (plan_.num_states == 3) {
      // A NaN on either side stays.
      if (v <= states_[2][i] || states_[2][i] != states_[2][i]) largest = states_[2][i];
      states_[2][i] = largest;
    }
    const float denominator = Sqrt(largest) / c.sqrt_bias2 + c.eps;
    weights_[i] = weight - c.lr * (m / c.bias1) / denominator;
  }

  void Store(const TileRun& tile, uint64_t first_element, int64_t elements) {
    const OptimizerContext& context = *plan_.context;
    TileDraws draws;
    if (NeedsDraws(context.weights)) DrawFiller<float>::Fill(plan_.weight_draws, first_element, draws);
    uint8_t memory[4 * kTileElements];
    uint8_t* codes = NewCodes(tile, memory);
    EncodeWeights<float>(context.weights, weights_, draws, {codes, tile.weights_out.extra});
    for (int s = 0; s < plan_.num_states; ++s) {
      EncodeTorchaoStates(context.states, StateIsSigned(context.hyper, s), states_[s], tile.states_out[s]);
    }
    EmitTile<float>(plan_, tile, first_element, elements, codes);
  }

  const StepPlan& plan_;
  const Constants constants_;
  float gradient_[kTileElements], weights_[kTileElements], states_[3][kTileElements];
};

__attribute__((noinline)) void StepTiles(const OptimizerContext& context, const OptimizerRun& run,
                                         TorchaoArithmetic arithmetic) {
  const StepPlan plan = PlanStep(context, run);
  TorchaoTile step(plan, arithmetic);
  const int64_t whole = run.num_elements / kTileElements;
  for (int64_t i = 0; i < whole; ++i) step.Step(TileAt(plan, i), run.first_element + i * kTileElements);
  if (run.num_elements % kTileElements == 0) return;
  const ShortTile last(plan, whole);
  step.Step(last.tile(), run.first_element + whole * kTileElements, run.num_elements % kTileElements);
  last.CopyBack();
}

absl::Status CheckFormats(const OptimizerContext& context) {
  if (context.weights != WeightFormat::kFp32 && context.weights != WeightFormat::kBf16 &&
      context.weights != WeightFormat::kBf16Sr) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights in ", WeightFormatName(context.weights), "; torchao steps fp32, bf16 and bf16_sr"));
  }
  if (!TorchaoHasStates(context.states)) {
    return absl::InvalidArgumentError(
        absl::StrCat("states in ", StateFormatName(context.states), "; torchao has dyn8, dyn4, fp8 and fp32"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTorchaoRun(const OptimizerContext& context, const OptimizerRun& run) {
  const OptimizerHyper& hyper = context.hyper;
  if (hyper.kind != OptimizerKind::kAdam && hyper.kind != OptimizerKind::kAdamW) {
    return absl::InvalidArgumentError(
        absl::StrCat("torchao has no ", OptimizerName(hyper.kind), "; it has adam and adamw"));
  }
  if (hyper.maximize) return absl::InvalidArgumentError("torchao's optimizers do not maximize");
  if (context.step < 1) {
    return absl::InvalidArgumentError(absl::StrCat("the step is ", context.step, "; the first step is 1"));
  }
  RETURN_IF_ERROR(CheckFormats(context));
  const int64_t block = LayoutOf(context.states).extra.elements;
  if (run.num_elements % block != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a run of ", run.num_elements, " elements with states in ",
                                                   StateFormatName(context.states), "; torchao has whole blocks of ",
                                                   block, ", and fp32 states for other tensors"));
  }
  return CheckRun(context, run);
}

void TorchaoStep(const OptimizerContext& context, const OptimizerRun& run, TorchaoArithmetic arithmetic) {
  const ScopedFpEnvironment environment;
  StepTiles(context, run, arithmetic);
}

void TorchaoStep(const OptimizerContext& context, const OptimizerRun& run) {
  TorchaoStep(context, run, TorchaoArithmetic::kCompiled);
}

}  // namespace shardmesh
