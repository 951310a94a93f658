#include "kernels/step/torchao_step.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "core/base/matchers.h"
#include "core/base/philox.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

// Of tools/record_torchao.py: bytes as hexadecimal digits.
struct Recorded {
  StateFormat states;
  WeightFormat weights;
  const char *first_codes, *first_scales, *second_codes, *second_scales, *last_weights;
};
#include "kernels/step/torchao_recorded.inc"

// That script's inputs: numbers of both signs and many sizes, and a few zeros.
std::vector<float> Inputs(uint64_t seed, int64_t n) {
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = Mix64((seed << 32) + static_cast<uint64_t>(i));
    const auto mantissa = static_cast<float>(static_cast<int64_t>(bits >> 40) - (int64_t{1} << 23));
    values[i] = bits % 17 == 0 ? 0 : std::ldexp(mantissa, -23 - static_cast<int>(bits & 15));
  }
  return values;
}

std::vector<uint16_t> ToBf16(const std::vector<float>& values) {
  std::vector<uint16_t> halves;
  for (float x : values) halves.push_back(FloatToBf16Rne(x));
  return halves;
}

OptimizerContext Context(OptimizerKind kind, WeightFormat weights, StateFormat states) {
  OptimizerContext context;
  context.hyper = OptimizerHyper::Defaults(kind);
  context.hyper.lr = 1e-2;
  context.hyper.weight_decay = 0.1;
  context.weights = weights;
  context.states = states;
  context.seed = 11;
  return context;
}

// A tensor's weights and states, stored; weights begin as Inputs(1).
struct Tensor {
  Tensor(const OptimizerContext& context, int64_t n) : num_elements(n), layout(LayoutOf(context.states)) {
    const std::vector<float> start = Inputs(1, n);
    const std::vector<uint16_t> halves = ToBf16(start);
    const void* from = start.data();
    if (context.weights != WeightFormat::kFp32) from = halves.data();
    weights.resize(LayoutOf(context.weights).codes.BytesOf(n));
    std::memcpy(weights.data(), from, weights.size());
    for (int s = 0; s < NumStates(context.hyper); ++s) {
      codes.emplace_back(layout.codes.BytesOf(n));
      scales.emplace_back(layout.extra.BytesOf(n));
    }
  }

  // The run of elements [begin, end), in place.
  OptimizerRun Run(int64_t begin, int64_t end) {
    OptimizerRun run;
    const int64_t weight_bytes = static_cast<int64_t>(weights.size()) / num_elements;
    run.weights_in = run.weights_out = {weights.data() + begin * weight_bytes, nullptr};
    for (size_t s = 0; s < codes.size(); ++s) {
      run.states_in[s] = {codes[s].data() + layout.codes.BytesOf(begin),
                          scales[s].data() + layout.extra.BytesOf(begin)};
      run.states_out[s] = run.states_in[s];
    }
    run.num_slots = 1;
    run.num_elements = end - begin;
    run.first_element = begin;
    run.tensor = 3;
    return run;
  }

  float Weight(int64_t i) const { return reinterpret_cast<const float*>(weights.data())[i]; }
  float State(int s, int64_t i) const { return reinterpret_cast<const float*>(codes[s].data())[i]; }
  bool operator==(const Tensor& other) const {
    return weights == other.weights && codes == other.codes && scales == other.scales;
  }

  int64_t num_elements;
  StoredLayout layout;
  std::vector<uint8_t> weights;
  std::vector<std::vector<uint8_t>> codes, scales;
};

void StepRun(const OptimizerContext& context, OptimizerRun run, const void* gradient,
             TorchaoArithmetic arithmetic = TorchaoArithmetic::kCompiled) {
  run.gradients = &gradient;
  ASSERT_OK(CheckTorchaoRun(context, run));
  TorchaoStep(context, run, arithmetic);
}

// Steps 1 to `steps`, with gradients Inputs(2), Inputs(3), ..., cut at `cut`.
Tensor Stepped(OptimizerContext context, int64_t n, int steps, int64_t cut = 0,
               TorchaoArithmetic arithmetic = TorchaoArithmetic::kCompiled) {
  Tensor tensor(context, n);
  for (context.step = 1; context.step <= steps; ++context.step) {
    const std::vector<float> gradient = Inputs(1 + context.step, n);
    if (cut > 0) StepRun(context, tensor.Run(0, cut), gradient.data(), arithmetic);
    StepRun(context, tensor.Run(cut, n), gradient.data() + cut, arithmetic);
  }
  return tensor;
}

std::string Hex(const std::vector<uint8_t>& bytes) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

TEST(TorchaoStep, ThreeSteps_AreTorchaosBits) {
  for (const Recorded& recorded : kRecorded) {
    SCOPED_TRACE(StateFormatName(recorded.states));
    OptimizerContext context = Context(OptimizerKind::kAdamW, recorded.weights, recorded.states);
    const bool fp32 = recorded.weights == WeightFormat::kFp32;
    context.gradients = fp32 ? Format::kFp32 : Format::kBf16;
    Tensor tensor(context, 256);
    for (context.step = 1; context.step <= 3; ++context.step) {
      const std::vector<float> gradient = Inputs(1 + context.step, 256);
      const std::vector<uint16_t> halves = ToBf16(gradient);
      const void* from = gradient.data();
      if (!fp32) from = halves.data();
      StepRun(context, tensor.Run(0, 256), from);
    }
    EXPECT_EQ(Hex(tensor.codes[0]), recorded.first_codes);
    EXPECT_EQ(Hex(tensor.scales[0]), recorded.first_scales);
    EXPECT_EQ(Hex(tensor.codes[1]), recorded.second_codes);
    EXPECT_EQ(Hex(tensor.scales[1]), recorded.second_scales);
    EXPECT_EQ(Hex(tensor.weights), recorded.last_weights);
  }
}

TEST(TorchaoStep, CutRuns_SameBits) {
  for (WeightFormat weights : {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Sr}) {
    for (StateFormat states : {StateFormat::kFp32, StateFormat::kDyn8, StateFormat::kDyn4, StateFormat::kFp8}) {
      OptimizerContext context = Context(OptimizerKind::kAdam, weights, states);
      context.hyper.amsgrad = true;
      EXPECT_TRUE(Stepped(context, 1024, 3) == Stepped(context, 1024, 3, 768)) << StateFormatName(states);
    }
  }
}

TEST(TorchaoStep, LengthsThatEndInATile_TheRestIsUntouched) {
  // 300 elements in fp32, and 384 with the blocks of dyn4, are the beginning of 512.
  for (auto [states, n] : {std::pair{StateFormat::kFp32, 300}, std::pair{StateFormat::kDyn4, 384}}) {
    OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kFp32, states);
    const Tensor whole = Stepped(context, 512, 2), part = Stepped(context, n, 2);
    EXPECT_TRUE(std::equal(part.weights.begin(), part.weights.end(), whole.weights.begin()));
    EXPECT_TRUE(std::equal(part.codes[1].begin(), part.codes[1].end(), whole.codes[1].begin()));
    EXPECT_TRUE(std::equal(part.scales[1].begin(), part.scales[1].end(), whole.scales[1].begin()));
  }
}

TEST(TorchaoStep, OtherOutputsAndCopies_SameBits) {
  OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kBf16, StateFormat::kDyn8);
  const Tensor expected = Stepped(context, 512, 1);
  Tensor in(context, 512), out(context, 512);
  const Tensor before = in;
  std::vector<uint8_t> copies[2] = {std::vector<uint8_t>(1024), std::vector<uint8_t>(1024)};
  OptimizerRun run = in.Run(0, 512), outputs = out.Run(0, 512);
  run.weights_out = outputs.weights_out;
  for (int s = 0; s < 2; ++s) run.states_out[s] = outputs.states_out[s];
  run.num_copies = 2;
  for (int c = 0; c < 2; ++c) run.copies[c] = copies[c].data();
  StepRun(context, run, Inputs(2, 512).data());
  EXPECT_TRUE(out == expected);
  EXPECT_TRUE(in == before);
  EXPECT_EQ(copies[0], expected.weights);
  EXPECT_EQ(copies[1], expected.weights);
}

TEST(TorchaoStep, StochasticWeights_AreTheFp32OnesWithTheJobsDraws) {
  OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kBf16Sr, StateFormat::kFp32);
  context.step = 5;
  Tensor rounded(context, 1024);
  const std::vector<float> gradient = Inputs(2, 1024);
  StepRun(context, rounded.Run(256, 1024), gradient.data() + 256);
  context.weights = WeightFormat::kFp32;
  Tensor exact(context, 1024);
  auto* weights = reinterpret_cast<float*>(exact.weights.data());
  for (int i = 0; i < 1024; ++i) weights[i] = Bf16ToFloat(FloatToBf16Rne(weights[i]));
  StepRun(context, exact.Run(256, 1024), gradient.data() + 256);
  const PhiloxKey key = MakePhiloxKey(context.seed, DrawPurpose::kWeightRounding);
  for (int i = 256; i < 1024; ++i) {
    ASSERT_EQ(reinterpret_cast<const uint16_t*>(rounded.weights.data())[i],
              FloatToBf16Sr(weights[i], Draw16(key, context.step, 3, i)))
        << i;
  }
}

TEST(TorchaoStep, Slots_AreSummedScaledAndClipped) {
  const OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kDyn8);
  Tensor slots(context, 256), one(context, 256);
  const std::vector<float> a = Inputs(2, 256), b = Inputs(3, 256);
  std::vector<float> sum(256);
  for (int i = 0; i < 256; ++i) sum[i] = (a[i] + b[i]) * 0.3f * 0.7f;
  const void* both[2] = {a.data(), b.data()};
  OptimizerRun run = slots.Run(0, 256);
  run.gradients = both;
  run.num_slots = 2;
  run.divide_scale = 0.3f;
  run.clip = 0.7f;
  TorchaoStep(context, run);
  StepRun(context, one.Run(0, 256), sum.data());
  EXPECT_TRUE(slots == one);
}

TEST(TorchaoStep, AdamDecay_IsAPartOfTheGradient) {
  OptimizerContext context = Context(OptimizerKind::kAdam, WeightFormat::kFp32, StateFormat::kDyn8);
  const Tensor adam = Stepped(context, 256, 1);
  context.hyper.kind = OptimizerKind::kAdamW;
  context.hyper.weight_decay = 0;
  Tensor adamw(context, 256);
  std::vector<float> gradient = Inputs(2, 256);
  for (int i = 0; i < 256; ++i) gradient[i] += 0.1f * adamw.Weight(i);
  StepRun(context, adamw.Run(0, 256), gradient.data());
  EXPECT_TRUE(adam == adamw);
}

TEST(TorchaoStep, Amsgrad_DividesByTheLargestSecondMoment) {
  OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp32);
  context.hyper.weight_decay = 0;
  context.hyper.beta1 = 0;
  context.hyper.beta2 = 0.5;
  context.hyper.amsgrad = true;
  Tensor tensor(context, 256);
  std::vector<float> gradient(256, 8.0f);
  gradient[1] = std::nanf("");
  StepRun(context, tensor.Run(0, 256), gradient.data());
  EXPECT_EQ(tensor.State(2, 0), 32);
  const float before = tensor.Weight(0);
  reinterpret_cast<float*>(tensor.codes[1].data())[1] = 0;  // the NaN is left in the largest one alone
  context.step = 2;
  const std::vector<float> ones(256, 1.0f);
  StepRun(context, tensor.Run(0, 256), ones.data());
  EXPECT_EQ(tensor.State(1, 0), 16.5f);
  EXPECT_EQ(tensor.State(2, 0), 32);
  EXPECT_EQ(tensor.Weight(0), before - 0.01f / (std::sqrt(32.0f) / std::sqrt(0.75f) + 1e-8f));
  EXPECT_TRUE(std::isnan(tensor.State(2, 1)));
}

// Moments 1 and beside it a gradient: what a lerp makes of them, at both of its ends.
TEST(TorchaoStep, Lerp_RoundsTwiceCompiledAndOnceEager) {
  for (double beta : {0.1, 0.9}) {
    for (TorchaoArithmetic arithmetic : {TorchaoArithmetic::kCompiled, TorchaoArithmetic::kEager}) {
      OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp32);
      context.hyper.beta1 = beta;
      const Tensor before = Stepped(context, 1024, 1, 0, arithmetic), after = Stepped(context, 1024, 2, 0, arithmetic);
      const std::vector<float> gradient = Inputs(3, 1024);
      for (int i = 0; i < 1024; ++i) {
        const float m = before.State(0, i), difference = gradient[i] - m;
        const float base = beta < 0.5 ? gradient[i] : m;
        float coefficient = static_cast<float>(beta < 0.5 ? -beta : 1 - beta);
        if (beta < 0.5 && arithmetic == TorchaoArithmetic::kEager) coefficient = static_cast<float>(1 - beta) - 1;
        ASSERT_EQ(after.State(0, i), arithmetic == TorchaoArithmetic::kEager ? std::fma(coefficient, difference, base)
                                                                             : base + coefficient * difference);
      }
    }
  }
}

TEST(TorchaoStep, StepsBeyondFp32_StandStill) {
  OptimizerContext context = Context(OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp32);
  context.hyper.beta1 = context.hyper.beta2 = 1 - 6e-8;  // the largest fp32 below 1
  const std::vector<float> gradient = Inputs(2, 256);
  std::vector<uint8_t> weights[2];
  for (int64_t past : {0, 1}) {
    context.step = (int64_t{1} << 24) + past * (int64_t{1} << 24);
    Tensor tensor(context, 256);
    StepRun(context, tensor.Run(0, 256), gradient.data());
    weights[past] = tensor.weights;
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST(TorchaoStep, Check_RefusesWhatTorchaoDoesNotHave) {
  const OptimizerContext good = Context(OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kDyn8);
  const std::vector<float> gradient(512);
  const auto expect = [&](const char* message, const auto& change, int64_t n = 512) {
    OptimizerContext context = good;
    Tensor tensor(context, 512);
    OptimizerRun run = tensor.Run(0, n);
    const void* slot = gradient.data();
    run.gradients = &slot;
    change(context, run);
    EXPECT_THAT(CheckTorchaoRun(context, run), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  };
  expect("no lion", [](auto& context, auto&) { context.hyper.kind = OptimizerKind::kLion; });
  expect("do not maximize", [](auto& context, auto&) { context.hyper.maximize = true; });
  expect("the step is 0", [](auto& context, auto&) { context.step = 0; });
  expect("weights in bf16+16", [](auto& context, auto&) { context.weights = WeightFormat::kBf16Plus16; });
  expect("weights in int8_row", [](auto& context, auto&) { context.weights = WeightFormat::kInt8Row; });
  expect("states in fp8x32", [](auto& context, auto&) { context.states = StateFormat::kFp8x32; });
  expect("states in bf16_sr", [](auto& context, auto&) { context.states = StateFormat::kBf16Sr; });
  expect(
      "whole blocks of 256", [](auto&, auto&) {}, 384);
  expect("null", [](auto&, auto& run) { run.weights_out.codes = nullptr; });
}

}  // namespace
}  // namespace shardmesh
