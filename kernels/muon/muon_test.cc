#include "kernels/muon/muon.h"

#include <cmath>
#include <limits>
#include <thread>

#include "core/base/matchers.h"
#include "core/base/philox.h"
#include "kernels/cpu/processor.h"
#include "kernels/muon/muon_fixture.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

std::vector<std::vector<uint8_t>> AfterTwoSteps(const Settings& settings, int64_t rows, int64_t columns,
                                                MuonStepFn step, const Parallel& parallel = Parallel()) {
  Matrix matrix(settings, rows, columns);
  for (uint64_t t = 0; t < 2; ++t) {
    matrix.Step(step, {Normals(matrix.n(), 10 + t), Normals(matrix.n(), 20 + t)}, parallel);
  }
  auto bytes = matrix.Bytes();
  for (auto& told : matrix.Told()) bytes.push_back(std::move(told));
  return bytes;
}

struct Shape {
  int64_t rows, columns;
};
constexpr Shape kShapes[] = {{1, 1}, {1, 19}, {19, 1}, {7, 13}, {13, 7}, {64, 64}, {65, 33}, {130, 257}, {257, 130}};

TEST(Muon, Simd_AnyShape_SameBitsAsReference) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  for (const Shape shape : kShapes) {
    Settings settings;
    const auto reference = AfterTwoSteps(settings, shape.rows, shape.columns, MuonStepReference);
    EXPECT_EQ(reference, AfterTwoSteps(settings, shape.rows, shape.columns, MuonStepSimd))
        << shape.rows << " x " << shape.columns;
  }
}

TEST(Muon, Simd_AnyFormat_SameBitsAsReference) {
  if (!SimdSupported()) GTEST_SKIP() << "SKIPPED: this processor has no AVX2 and FMA";
  for (const WeightFormat weights : {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Sr,
                                     WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr}) {
    for (const StateFormat states : {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kDyn4,
                                     StateFormat::kFp8, StateFormat::kFp8x32}) {
      for (const bool variant : {false, true}) {
        Settings settings;
        settings.weights = weights;
        settings.states = states;
        settings.gradients = variant ? Format::kBf16 : Format::kFp32;
        settings.hyper.nesterov = !variant;
        settings.hyper.maximize = variant;
        settings.hyper.momentum = variant ? 0.3 : 0.95;
        for (const Shape shape : {Shape{29, 21}, Shape{24, 20}}) {  // the second one has mx8
          EXPECT_EQ(AfterTwoSteps(settings, shape.rows, shape.columns, MuonStepReference),
                    AfterTwoSteps(settings, shape.rows, shape.columns, MuonStepSimd))
              << WeightFormatName(weights) << " " << StateFormatName(states) << " " << shape.rows;
        }
      }
    }
  }
}

StoredRun Behind(const StoredRun& run, const StoredLayout& layout, int64_t elements) {
  return {static_cast<char*>(run.codes) + layout.codes.BytesOf(elements),
          run.extra == nullptr ? nullptr : static_cast<char*>(run.extra) + layout.extra.BytesOf(elements)};
}

// The elements of a run from `first` on, at most 512 of them.
OptimizerRun PartFrom(const OptimizerContext& context, const OptimizerRun& run, int64_t first, const void** gradients) {
  const StoredLayout weights = LayoutOf(context.weights), states = LayoutOf(context.states);
  OptimizerRun part = run;
  for (int slot = 0; slot < run.num_slots; ++slot) {
    gradients[slot] = static_cast<const char*>(run.gradients[slot]) + first * BytesPerElement(context.gradients);
  }
  part.gradients = gradients;
  part.weights_in = Behind(run.weights_in, weights, first);
  part.weights_out = Behind(run.weights_out, weights, first);
  part.states_in[0] = Behind(run.states_in[0], states, first);
  part.states_out[0] = Behind(run.states_out[0], states, first);
  part.copies[0] = static_cast<char*>(run.copies[0]) + weights.codes.BytesOf(first);
  part.square_sums += first / 256;
  part.changed += first / 256;
  if (run.mx8.codes != nullptr) part.mx8 = Behind(run.mx8, {{1}, {1, 32}}, first);
  part.largest += first / 128;
  part.num_elements = std::min<int64_t>(512, run.num_elements - first);
  part.first_element = static_cast<uint64_t>(first);
  return part;
}

// The step in its two parts: the first has nowhere to write, the second goes from the last run to the first, and does
// each of them again, as who is interrupted would.
void StepInParts(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                 MuonScratch& scratch, const Parallel& parallel) {
  OptimizerRun reads = run;
  reads.weights_out = reads.states_out[0] = {nullptr, nullptr};
  MuonUpdate(context, matrix, reads, scratch, parallel);
  const float* const update = scratch.update(matrix.scalars);
  for (int64_t first = (run.num_elements - 1) / 512 * 512; first >= 0; first -= 512) {
    const void* gradients[2];
    OptimizerRun part = PartFrom(context, run, first, gradients);
    MuonApply(context, matrix.scalars, part, update + first);
    part.digests = nullptr;  // which are added to
    MuonApply(context, matrix.scalars, part, update + first);
  }
}

TEST(Muon, InTwoParts_SameBitsAsWhole) {
  for (const Shape shape : kShapes) {
    for (const StateFormat states : {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8}) {
      for (const int iterations : {0, 4, 5}) {
        Settings settings;
        settings.weights = states == StateFormat::kFp32 ? WeightFormat::kBf16Plus8Sr : WeightFormat::kBf16Sr;
        settings.states = states;
        settings.options.iterations = iterations;
        EXPECT_EQ(AfterTwoSteps(settings, shape.rows, shape.columns, MuonStepReference),
                  AfterTwoSteps(settings, shape.rows, shape.columns, StepInParts))
            << shape.rows << " x " << shape.columns << ", " << iterations << " iterations";
      }
    }
  }
}

TEST(Muon, AnyNumberOfThreads_SameBits) {
  const auto run = [](int parts, Parallel::Body body) {
    std::vector<std::thread> threads;
    for (int part = 1; part < parts; ++part) threads.emplace_back([body, part] { body(part); });
    body(0);
    for (std::thread& thread : threads) thread.join();
  };
  Settings settings;
  settings.weights = WeightFormat::kBf16Sr;
  settings.states = StateFormat::kBf16Sr;
  for (const Shape shape : {Shape{5, 3}, Shape{300, 250}, Shape{244, 510}}) {
    const auto one = AfterTwoSteps(settings, shape.rows, shape.columns, BestMuonStep());
    for (const int parts : {2, 3, 7}) {
      EXPECT_EQ(one, AfterTwoSteps(settings, shape.rows, shape.columns, BestMuonStep(), Parallel(parts, run))) << parts;
    }
  }
}

// Squares of 0 and 1 add up exactly in every order, so the norm is the same and nothing else depends on the order.
TEST(Muon, TransposedMatrix_TransposedWeights) {
  constexpr int64_t kRows = 45, kColumns = 70;
  Settings settings;
  settings.hyper.momentum = 0;
  settings.hyper.nesterov = false;
  settings.options.lr_adjust = MuonLrAdjust::kMatchRmsAdamW;
  Floats gradient = Normals(kRows * kColumns, 4);
  for (float& g : gradient) g = g < -1 ? -1.0f : g > 0.5f ? 1.0f : 0.0f;
  Matrix wide(settings, kRows, kColumns), tall(settings, kColumns, kRows);
  wide.Step(BestMuonStep(), {gradient});
  tall.Step(BestMuonStep(), {Transposed(gradient, kRows, kColumns)});
  EXPECT_EQ(Transposed(wide.Weights(), kRows, kColumns), tall.Weights());
  EXPECT_NE(wide.Weights(), Floats(kRows * kColumns));
}

TEST(Muon, ZeroMatrix_ZeroUpdate) {
  for (const MuonStepFn step : {MuonStepReference, BestMuonStep()}) {
    for (const Shape shape : kShapes) {
      Settings settings;
      Matrix matrix(settings, shape.rows, shape.columns);
      Floats weights = Normals(matrix.n(), 6);
      matrix.SetWeights(weights);
      matrix.Step(step, {Floats(matrix.n())});
      for (float& w : weights) w *= static_cast<float>(1 - 1e-3 * 0.1);
      EXPECT_EQ(matrix.Weights(), weights);
    }
  }
}

// Without iterations it is the norm alone that spreads it.
TEST(Muon, OneNanInTheGradient_AllWeightsNan) {
  for (const MuonStepFn step : {MuonStepReference, BestMuonStep()}) {
    for (const int iterations : {0, 5}) {
      Settings settings;
      settings.options.iterations = iterations;
      Matrix matrix(settings, 9, 40);
      Floats gradient = Normals(matrix.n(), 6);
      gradient[77] = std::numeric_limits<float>::quiet_NaN();
      matrix.Step(step, {gradient});
      for (const float w : matrix.Weights()) EXPECT_TRUE(std::isnan(w));
    }
  }
}

#if defined(__x86_64__)
TEST(Muon, CallerFlushesSubnormals_KeptAllTheSame) {
  for (const MuonStepFn step : {MuonStepReference, BestMuonStep()}) {
    Matrix matrix(Settings(), 9, 40);
    const Floats gradient(matrix.n(), 1e-40f);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // results to zero, operands to zero
    matrix.Step(step, {gradient});
    _mm_setcsr(before);
    for (const float m : matrix.Momentum()) EXPECT_EQ(m, 0.05f * 1e-40f);
  }
}
#endif

// Draws are those of the tensor's elements (core/base/philox.h), as in every other step.
TEST(Muon, Bf16Sr_RoundedByTheElementsOwnDraws) {
  Settings exact, rounded;
  rounded.weights = WeightFormat::kBf16Sr;
  rounded.states = StateFormat::kBf16Sr;
  Matrix expected(exact, 31, 17), matrix(rounded, 31, 17);
  const Floats start = Normals(matrix.n(), 8);
  expected.SetWeights(start);
  matrix.SetBf16Weights(start);
  const Floats gradient = Normals(matrix.n(), 9);
  expected.Step(BestMuonStep(), {gradient});
  matrix.Step(BestMuonStep(), {gradient});
  const auto round = [](Floats values, DrawPurpose purpose) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = Bf16ToFloat(FloatToBf16Sr(values[i], Draw16(MakePhiloxKey(7, purpose), 1, 3, i)));
    }
    return values;
  };
  EXPECT_EQ(matrix.Weights(), round(expected.Weights(), DrawPurpose::kWeightRounding));
  EXPECT_EQ(matrix.Momentum(), round(expected.Momentum(), DrawPurpose::kFirstState));
}

// The code 0 of dyn8 is no zero: what lies behind the last element must not enter the norm.
TEST(Muon, Dyn8ShortTile_NormOfTheElementsAlone) {
  Settings settings;
  settings.states = StateFormat::kDyn8;
  settings.hyper.nesterov = false;
  settings.options.iterations = 0;
  settings.hyper.weight_decay = 0;
  settings.hyper.lr = 1;
  for (const MuonStepFn step : {MuonStepReference, BestMuonStep()}) {
    Matrix matrix(settings, 1, 10);
    matrix.Step(step, {Floats(10, 1.0f)});
    const Floats before = matrix.Weights();
    matrix.Step(step, {Floats(10, 1.0f)});
    double squares = 0;
    for (int i = 0; i < 10; ++i) squares += std::pow(matrix.Weights()[i] - before[i], 2);
    EXPECT_NEAR(squares, 1, 1e-5);
  }
}

TEST(MuonScratch, ManyShapes_FitsThoseReserved) {
  MuonScratch scratch(2);
  EXPECT_FALSE(scratch.Fits(1, 1, 1));
  scratch.Reserve(10, 300);
  scratch.Reserve(40, 40);
  EXPECT_TRUE(scratch.Fits(10, 300, 2));
  EXPECT_TRUE(scratch.Fits(300, 10, 1));
  EXPECT_TRUE(scratch.Fits(40, 40, 1));
  EXPECT_FALSE(scratch.Fits(10, 300, 3));
  EXPECT_FALSE(scratch.Fits(41, 41, 1));
  EXPECT_FALSE(scratch.Fits(10, 400, 1));
}

TEST(CheckMuon, WrongRuns_InvalidArgumentSaysWhat) {
  OptimizerContext context;
  context.hyper = OptimizerHyper::Defaults(OptimizerKind::kMuon);
  Floats memory(5 * 24);
  const void* slot = memory.data();
  OptimizerRun run;
  run.gradients = &slot;
  run.num_slots = 1;
  run.weights_in = run.weights_out = {&memory[24], nullptr};
  run.states_in[0] = run.states_out[0] = {&memory[48], nullptr};
  run.num_elements = 24;
  MuonMatrix matrix = {4, 6, {}};
  MuonScratch scratch(1), none(1);
  scratch.Reserve(4, 6);
  const auto fails = [&](const char* words, const MuonScratch* in = nullptr) {
    EXPECT_THAT(CheckMuon(context, matrix, run, in == nullptr ? scratch : *in, Parallel()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(words)));
  };
  EXPECT_OK(CheckMuon(context, matrix, run, scratch, Parallel()));
  matrix.rows = 5;
  fails("5 x 6");
  matrix.rows = 0;
  fails("0 x 6");
  matrix = {4, 7, {}};
  fails("4 x 7");
  matrix.columns = 6;
  matrix.rows = 4;
  run.first_element = 256;
  fails("element 256");
  run.first_element = 0;
  fails("no room", &none);
  run.states_out[0].codes = nullptr;
  fails("the first state is null");
  run.states_out[0].codes = &memory[30];
  fails("overlap");
  context.weights = WeightFormat::kInt8Row;
  fails("muon steps no int8_row");
  context.hyper.kind = OptimizerKind::kLion;
  fails("lion");
}

}  // namespace
}  // namespace shardmesh
