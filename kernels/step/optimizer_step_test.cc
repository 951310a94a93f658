// Every implementation of the step gives the reference's bits.
#include "kernels/optimizer_step.h"

#include <cstring>
#include <memory>

#include "core/base/matchers.h"
#include "kernels/cpu/fp_environment.h"
#include "kernels/cpu/processor.h"
#include "kernels/cuda/optimizer_step_body.h"
#include "kernels/step/step_fixture.h"
#include "kernels/step/step_values.h"
#include "kernels/tile/walk.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

// The body of the CUDA kernel, its threads one after the other: forwards in one phase, backwards in the next, so that
// what depends on their order shows. Memory that threads share begins with anything.
void StepThroughBody(const OptimizerContext& context, const OptimizerRun& run) {
  const ScopedFpEnvironment environment;
  const StepPlan plan = PlanStep(context, run);
  const auto memory = std::make_unique<BodyMemory>();
  std::memset(memory.get(), 0xFF, sizeof(BodyMemory));
  for (int64_t tile = 0; tile * kTileElements < run.num_elements; ++tile) {
    for (int phase = 0; phase < StepBody::kPhases; ++phase) {
      for (int i = 0; i < kTileElements; ++i) {
        const int thread = phase % 2 == 0 ? i : static_cast<int>(kTileElements) - 1 - i;
        StepBody(plan, tile, memory.get()).Phase(phase, thread);
      }
    }
  }
}

void ExpectReferenceBits(OptimizerStepFn step, bool has_rows, const std::vector<int64_t>& lengths) {
  for (const StepCase& each : AllStepCases()) {
    if (each.weights == WeightFormat::kInt8Row && !has_rows) continue;
    SCOPED_TRACE(each.ToString());
    for (const int64_t n : lengths) {
      StepTensor reference(each, n), other(each, n);
      ASSERT_OK(CheckRun(each.Context(1), other.RunOf(1, 0, n)));
      reference.Step(OptimizerStepReference, 2);
      other.Step(step, 2);
      ASSERT_TRUE(reference == other) << n << " elements";
      ASSERT_TRUE(reference.GuardsHold() && other.GuardsHold()) << n << " elements";
    }
  }
}

TEST(OptimizerStep, Simd_IsTheReference_BitForBit) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  ExpectReferenceBits(OptimizerStepSimd, /*has_rows=*/true, {1, 63, 255, 256, 257, 416, 1632});
}

TEST(OptimizerStep, TheCudaKernelsBody_IsTheReference_BitForBit) {
  ExpectReferenceBits(StepThroughBody, /*has_rows=*/false, {7, 257, 416, 512});
}

TEST(OptimizerStep, HoweverATensorIsCut_TheBitsAreTheSame) {
  for (const StepCase& each : AllStepCases()) {
    SCOPED_TRACE(each.ToString());
    StepTensor whole(each, 1632), cut(each, 1632);
    whole.Step(BestOptimizerStep(), 2);
    cut.Step(BestOptimizerStep(), 2, 768);
    ASSERT_TRUE(whole == cut);
  }
}

TEST(OptimizerStep, Copies_AreTheNewWeightsCodes) {
  for (const WeightFormat weights : {WeightFormat::kFp32, WeightFormat::kBf16Sr, WeightFormat::kBf16Plus8Sr}) {
    StepCase each = AllStepCases().back();
    each.weights = weights;
    StepTensor tensor(each, 300);
    const int64_t bytes = LayoutOf(weights).codes.BytesOf(300);
    Guarded copy(bytes, 4);
    OptimizerRun run = tensor.RunOf(1, 0, 300);
    run.copies[0] = copy.data();
    run.num_copies = 1;
    for (const OptimizerStepFn step : {OptimizerStepReference, BestOptimizerStep(), OptimizerStepFn(StepThroughBody)}) {
      step(each.Context(1), run);
      EXPECT_EQ(copy.Bytes(), tensor.parts()[0].Bytes()) << WeightFormatName(weights);
      EXPECT_TRUE(copy.GuardsHold());
    }
  }
}

// Of what is stored, as anybody may compute them afterwards: in every format, whole and cut, in memory that is not
// aligned.
TEST(OptimizerStep, Digests_AreThoseOfWhatIsStored) {
  for (const StepCase& each : AllStepCases()) {
    SCOPED_TRACE(each.ToString());
    for (const OptimizerStepFn step : {OptimizerStepReference, BestOptimizerStep(), OptimizerStepFn(StepThroughBody)}) {
      if (each.weights == WeightFormat::kInt8Row && step == StepThroughBody) continue;
      for (const int64_t n : {1, 257, 804}) {
        StepTensor tensor(each, n);
        tensor.Step(step, 2, each.weights == WeightFormat::kInt8Row ? 0 : 256);
        const std::vector<uint64_t> expected = tensor.StoredDigests();
        ASSERT_EQ(std::memcmp(tensor.digests().data(), expected.data(), 8 * expected.size()), 0) << n << " elements";
      }
    }
  }
}

bool HasBlocks(StateFormat format) { return LayoutOf(format).extra.bytes > 0; }

// Sets both tensors up alike, steps one with the reference and the other with `step`, and compares.
template <class SetUp>
void ExpectSameFrom(const StepCase& each, OptimizerStepFn step, const SetUp& set_up) {
  SCOPED_TRACE(each.ToString());
  StepTensor reference(each, 516), other(each, 516);
  for (StepTensor* tensor : {&reference, &other}) {
    const OptimizerRun run = tensor->RunOf(1, 0, 516);
    set_up(*tensor);
    (tensor == &reference ? OptimizerStepReference : step)(each.Context(1), run);
  }
  ASSERT_TRUE(reference == other);
}

// Codes that no step writes, too: memory may come from anywhere.
TEST(OptimizerStep, AnyCodesOfStates_AreReadAlike) {
  for (const StepCase& each : AllStepCases()) {
    if (!HasBlocks(each.states) || each.weights == WeightFormat::kInt8Row) continue;
    for (const OptimizerStepFn step : {BestOptimizerStep(), OptimizerStepFn(StepThroughBody)}) {
      ExpectSameFrom(each, step, [&](StepTensor& tensor) {
        const int64_t entry = LayoutOf(each.states).extra.bytes;
        constexpr uint32_t kScale = 0x3F000000;  // 0.5; bf16 is its upper half
        for (size_t part = 2; part < tensor.parts().size(); part += 2) {
          Guarded &codes = tensor.parts()[part], &scales = tensor.parts()[part + 1];
          for (int64_t i = 0; i < codes.size(); ++i) codes.data()[i] = static_cast<uint8_t>(255 - i * 7);
          for (int64_t i = 0; i < scales.size(); i += entry) {
            std::memcpy(scales.data() + i, reinterpret_cast<const uint8_t*>(&kScale) + 4 - entry, entry);
          }
        }
      });
    }
  }
}

// A gradient whose square is not finite is accepted: what it leaves behind must be, too.
TEST(OptimizerStep, HugeGradients_LeaveScalesThatCanBeRead) {
  for (const StepCase& each : AllStepCases()) {
    if (!HasBlocks(each.states) || each.weights == WeightFormat::kInt8Row) continue;
    for (const OptimizerStepFn step : {BestOptimizerStep(), OptimizerStepFn(StepThroughBody)}) {
      ExpectSameFrom(each, step, [&](StepTensor& tensor) {
        uint8_t* gradients = tensor.gradients()[0].data();
        const float huge = 1e30f;
        const uint16_t bits = FloatToBf16Rne(huge);
        std::memcpy(gradients + 5 * BytesPerElement(each.gradients),
                    each.gradients == Format::kFp32 ? static_cast<const void*>(&huge) : &bits,
                    BytesPerElement(each.gradients));
      });
    }
    StepTensor tensor(each, 516);
    const OptimizerRun run = tensor.RunOf(1, 0, 516);
    for (Guarded& gradient : tensor.gradients()) std::memset(gradient.data(), 0x71, gradient.size());  // about 1e30
    OptimizerStepReference(each.Context(1), run);
    ASSERT_OK(CheckStepValues(each.Context(2), run)) << each.ToString();
  }
}

// What is told must not be what decides how it is done: runs without it take other ways.
TEST(OptimizerStep, WithoutBeingAsked_TheBitsAreTheSame) {
  for (const StepCase& each : AllStepCases()) {
    SCOPED_TRACE(each.ToString());
    StepTensor asked(each, 600), not_asked(each, 600);
    BestOptimizerStep()(each.Context(1), asked.RunOf(1, 0, 600));
    OptimizerRun run = not_asked.RunOf(1, 0, 600);
    run.square_sums = nullptr;
    run.changed = nullptr;
    run.digests = nullptr;
    run.mx8 = {};
    run.largest = nullptr;
    BestOptimizerStep()(each.Context(1), run);
    for (size_t i = 0; i < asked.parts().size(); ++i) {
      ASSERT_EQ(asked.parts()[i].Bytes(), not_asked.parts()[i].Bytes()) << i;
    }
  }
}

TEST(OptimizerStep, SquareSumsAlone_AreWhatAStepTells) {
  for (const int slots : {1, 2, 3, 4, 5, 8}) {
    for (const Format gradients : {Format::kFp32, Format::kBf16}) {
      StepCase each = AllStepCases()[0];
      each.gradients = gradients;
      each.num_slots = slots;
      StepTensor tensor(each, 1000);
      OptimizerRun run = tensor.RunOf(1, 0, 1000);
      std::vector<float> alone(2 * 4);
      run.square_sums = alone.data();
      GradientSquaresReference(each.Context(1), run);
      run.square_sums = alone.data() + 4;
      BestGradientSquares()(each.Context(1), run);
      BestOptimizerStep()(each.Context(1), tensor.RunOf(1, 0, 1000));
      for (int half = 0; half < 2; ++half) {
        EXPECT_EQ(std::memcmp(tensor.square_sums().data(), alone.data() + 4 * half, 16), 0) << slots << " " << half;
      }
    }
  }
}

TEST(OptimizerStep, SquareSums_AreThoseOfTheMeanGradient) {
  StepCase each = AllStepCases()[0];
  each.gradients = Format::kFp32;
  each.num_slots = 1;
  StepTensor tensor(each, 300);
  BestOptimizerStep()(each.Context(1), tensor.RunOf(1, 0, 300));
  double squares[2] = {0, 0};
  for (int64_t i = 0; i < 300; ++i) {
    float g = 0;
    std::memcpy(&g, tensor.gradients()[0].data() + 4 * i, 4);
    squares[i / 256] += static_cast<double>(g) * 0.625 * (g * 0.625);
  }
  for (int tile = 0; tile < 2; ++tile) {
    float sum = 0;
    std::memcpy(&sum, tensor.square_sums().data() + 4 * tile, 4);
    // The quotient twice, 32 multiply-adds and 3 additions of numbers of one sign, each right to half a unit in the
    // last place.
    EXPECT_NEAR(sum, squares[tile], squares[tile] * 37 * 0x1p-24) << tile;
  }
}

TEST(OptimizerStep, Changed_IsWhereCodesAre) {
  StepCase each = AllStepCases()[0];
  each.hyper.lr = 1e-9;  // only weights of about 0 feel it
  each.weights = WeightFormat::kBf16;
  StepTensor tensor(each, 600);
  std::memset(tensor.parts()[0].data() + 2 * 256, 0, 2 * 256);  // the second tile
  BestOptimizerStep()(each.Context(1), tensor.RunOf(1, 0, 600));
  EXPECT_EQ(tensor.changed().Bytes(), (std::vector<uint8_t>{0, 1, 0}));
}

TEST(CheckRun, WhatIsWrong_IsNamed) {
  const StepCase each = AllStepCases()[0];
  StepTensor tensor(each, 512);
  const OptimizerContext context = each.Context(1);
  const OptimizerRun good = tensor.RunOf(1, 0, 512);
  ASSERT_OK(CheckRun(context, good));
  const auto expect = [&](const char* words, void (*change)(OptimizerRun&)) {
    OptimizerRun run = good;
    change(run);
    EXPECT_THAT(CheckRun(context, run), StatusIs(Code::kInvalidArgument, HasSubstr(words)));
  };
  expect("-1 elements", [](OptimizerRun& run) { run.num_elements = -1; });
  expect("0 gradient slots", [](OptimizerRun& run) { run.num_slots = 0; });
  expect("begins at element 64", [](OptimizerRun& run) { run.first_element = 64; });
  expect("weights is null", [](OptimizerRun& run) { run.weights_in.codes = nullptr; });
  expect("the first state begins at address",
         [](OptimizerRun& run) { run.states_in[0].codes = static_cast<uint8_t*>(run.states_in[0].codes) + 1; });
  expect("overlap", [](OptimizerRun& run) { run.states_out[0].codes = run.weights_out.codes; });
  expect("overlap", [](OptimizerRun& run) { run.weights_out.codes = static_cast<float*>(run.weights_in.codes) + 1; });
  expect("whole blocks of 32", [](OptimizerRun& run) { run.num_elements = 500; });
  expect("the copy in mx8 is null", [](OptimizerRun& run) { run.mx8.extra = nullptr; });
  expect("the largest begins at", [](OptimizerRun& run) {
    run.largest = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(run.largest) + 2);
  });
  expect("overlap", [](OptimizerRun& run) { run.largest = static_cast<float*>(run.weights_out.codes); });
  expect("overlap", [](OptimizerRun& run) { run.changed = static_cast<uint8_t*>(run.mx8.codes); });
  StepCase adam = AllStepCases().back();
  adam.states = StateFormat::kFp32;
  StepTensor two_states(adam, 512);
  OptimizerRun crossed = two_states.RunOf(1, 0, 512);
  std::swap(crossed.states_out[0], crossed.states_out[1]);
  EXPECT_THAT(CheckRun(adam.Context(1), crossed), StatusIs(Code::kInvalidArgument, HasSubstr("overlap")));
  OptimizerContext muon = context;
  muon.hyper.kind = OptimizerKind::kMuon;
  EXPECT_THAT(CheckRun(muon, good), StatusIs(Code::kInvalidArgument, HasSubstr("whole matrices")));
  OptimizerContext nf4 = context;
  nf4.weights = WeightFormat::kNf4;
  EXPECT_THAT(CheckRun(nf4, good), StatusIs(Code::kInvalidArgument, HasSubstr("no step writes nf4 weights")));
}

}  // namespace
}  // namespace shardmesh
