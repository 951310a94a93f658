// Lists of runs, stepped as the blocks of a CUDA launch do it: every unit finds its run and steps it with the body that
// the launch would take; the bits are the reference's.
#include "kernels/cuda/step_list.h"

#include <memory>
#include <random>

#include "core/base/matchers.h"
#include "kernels/cpu/fp_environment.h"
#include "kernels/cuda/row_step_body.h"
#include "kernels/cuda/warp_step_body.h"
#include "kernels/step/step_fixture.h"

namespace shardmesh {
namespace {

// The threads one after the other: forwards in one phase, backwards in the next, so that what depends on their order
// shows. Memory that threads share begins with anything.
template <class Phase>
void WalkPhases(int64_t num_phases, int num_threads, const Phase& phase) {
  for (int64_t p = 0; p < num_phases; ++p) {
    for (int i = 0; i < num_threads; ++i) phase(p, p % 2 == 0 ? i : num_threads - 1 - i);
  }
}

template <class Body>
void StepByWarp(const StepList& list, int64_t num_units) {
  const auto memory = std::make_unique<typename Body::Memory>();
  std::memset(static_cast<void*>(memory.get()), 0xFF, sizeof(*memory));
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const StepPlace place = PlaceOf(list, unit);
    const StepListEntry& entry = list.entries[place.entry];
    std::vector<Body> lanes;
    for (int lane = 0; lane < Body::kLanes; ++lane) {
      lanes.emplace_back(list.contexts[entry.context], entry.run, entry.plan, place.index, memory.get(), lane);
    }
    WalkPhases(Body::kPhases, Body::kLanes,
               [&](int64_t phase, int lane) { lanes[lane].Phase(static_cast<int>(phase)); });
  }
}

void StepByBlock(const StepList& list, int64_t num_units) {
  const auto memory = std::make_unique<RowMemory>();
  std::memset(static_cast<void*>(memory.get()), 0xFF, sizeof(*memory));
  for (int64_t unit = 0; unit < num_units; ++unit) {
    const StepPlace place = PlaceOf(list, unit);
    const StepListEntry& entry = list.entries[place.entry];
    const OptimizerContext& context = list.contexts[entry.context];
    if (context.weights == WeightFormat::kInt8Row) {
      RowBody body(context, entry.run, entry.plan, place.index, memory.get());
      WalkPhases(body.num_phases(), kTileElements, [&](int64_t phase, int thread) { body.Phase(phase, thread); });
      continue;
    }
    StepPlan plan = entry.plan;
    plan.context = &context;
    plan.run = &entry.run;
    WalkPhases(StepBody::kPhases, kTileElements, [&](int64_t phase, int thread) {
      StepBody(plan, place.index, &memory->tile).Phase(static_cast<int>(phase), thread);
    });
  }
}

void StepListOnHost(absl::Span<const OptimizerContext> contexts, absl::Span<const OptimizerItem> items) {
  const ScopedFpEnvironment environment;
  const StepTables tables(contexts, items);
  const StepList list = tables.At(tables.bytes().data());
  const OptimizerContext* shared = SharedWarpContext(contexts, items);
  if (shared == nullptr) return StepByBlock(list, tables.num_units());
  WithWarpBody(*shared, [&](auto tag) { StepByWarp<typename decltype(tag)::Type>(list, tables.num_units()); });
}

void StepOneOnHost(const OptimizerContext& context, const OptimizerRun& run) {
  const OptimizerItem item = {0, run};
  StepListOnHost({&context, 1}, {&item, 1});
}

// Without what only StepBody writes.
OptimizerRun Plain(OptimizerRun run) {
  run.mx8 = {};
  run.largest = nullptr;
  run.digests = nullptr;
  return run;
}
void StepPlainReference(const OptimizerContext& context, const OptimizerRun& run) {
  OptimizerStepReference(context, Plain(run));
}
void StepPlainOnHost(const OptimizerContext& context, const OptimizerRun& run) { StepOneOnHost(context, Plain(run)); }

TEST(StepList, OneRun_IsTheReference_BitForBit) {
  for (const StepCase& each : AllStepCases()) {
    SCOPED_TRACE(each.ToString());
    for (const int64_t n : {131, 512}) {
      StepTensor reference(each, n), other(each, n);
      reference.Step(OptimizerStepReference, 2);
      other.Step(StepOneOnHost, 2);
      ASSERT_TRUE(reference == other) << n << " elements";
      ASSERT_TRUE(reference.GuardsHold() && other.GuardsHold()) << n << " elements";
    }
  }
}

TEST(StepList, OneRunByWarps_IsTheReference_BitForBit) {
  int by_warp = 0;
  for (const StepCase& each : AllStepCases()) {
    SCOPED_TRACE(each.ToString());
    for (const int64_t n : {1, 6, 131, 256, 511}) {
      StepTensor reference(each, n), other(each, n);
      if (!HasWarpBody(each.Context(1), Plain(other.RunOf(1, 0, n)))) continue;
      ++by_warp;
      reference.Step(StepPlainReference, 3);
      other.Step(StepPlainOnHost, 3);
      ASSERT_TRUE(reference == other) << n << " elements";
      ASSERT_TRUE(reference.GuardsHold() && other.GuardsHold()) << n << " elements";
    }
  }
  // Adam twice (its variant is AMSGrad) in 30 pairs of formats, and the cases that end the list; of 5 lengths each.
  EXPECT_GE(by_warp, 5 * (2 * 30 + 24));
}

// Addresses that allow wide loads and stores, too: the fixture's are no better aligned than their elements.
TEST(StepList, AlignedStreams_AreTheReference_BitForBit) {
  for (const StepCase& each : AllStepCases()) {
    if (!HasWarpBody(each.Context(1), {})) continue;
    SCOPED_TRACE(each.ToString());
    StepTensor tensor(each, 1003);
    const OptimizerRun run = Plain(tensor.RunOf(1, 0, 1003));
    std::vector<std::vector<std::vector<uint8_t>>> results;
    for (const OptimizerStepFn step : {OptimizerStepReference, OptimizerStepFn(StepOneOnHost)}) {
      std::vector<std::vector<uint8_t>> parts;  // a vector's memory is aligned to 16 bytes
      for (Guarded& part : tensor.parts()) parts.push_back(part.Bytes());
      std::vector<std::vector<uint8_t>> slots;
      std::vector<const void*> pointers;
      for (Guarded& slot : tensor.gradients()) slots.push_back(slot.Bytes());
      for (const auto& slot : slots) pointers.push_back(slot.data());
      OptimizerRun aligned = run;
      aligned.gradients = pointers.data();
      aligned.weights_in = aligned.weights_out = {parts[0].data(), parts[1].data()};
      for (int s = 0; s < 2; ++s) {
        aligned.states_in[s] = aligned.states_out[s] = {parts[2 + 2 * s].data(), parts[3 + 2 * s].data()};
      }
      step(each.Context(1), aligned);
      results.push_back(parts);
    }
    ASSERT_EQ(results[0], results[1]);
  }
}

TEST(StepList, Copies_AreTheNewWeightsCodes) {
  for (const WeightFormat weights :
       {WeightFormat::kFp32, WeightFormat::kBf16Sr, WeightFormat::kBf16Plus8Sr, WeightFormat::kInt8Row}) {
    StepCase each = AllStepCases().back();
    each.weights = weights;
    StepTensor tensor(each, 300);
    Guarded copy(LayoutOf(weights).codes.BytesOf(300), 4);
    OptimizerRun run = tensor.RunOf(1, 0, 300);
    run.copies[0] = copy.data();
    run.num_copies = 1;
    StepOneOnHost(each.Context(1), run);
    EXPECT_EQ(copy.Bytes(), tensor.parts()[0].Bytes()) << WeightFormatName(weights);
    EXPECT_TRUE(copy.GuardsHold());
  }
}

// Rows shorter and longer than a tile, with every part in common with it; the last unit whole and not.
TEST(StepList, RowsOfManyLengths_AreTheReference_BitForBit) {
  StepCase each = AllStepCases().back();
  each.weights = WeightFormat::kInt8Row;
  each.num_slots = 1;
  for (const StateFormat states : {StateFormat::kFp32, StateFormat::kDyn8, StateFormat::kFp8x32}) {
    each.states = states;
    for (const int64_t row : {1, 3, 64, 96, 256, 300, 512, 768, 769}) {
      const int64_t n = row * (1800 / row);
      StepTensor reference(each, n), other(each, n);
      std::vector<float> new_scales[2];
      for (StepTensor* tensor : {&reference, &other}) {
        OptimizerRun run = tensor->RunOf(1, 0, n);
        run.row_elements = row;
        std::vector<float> scales(n / row, 0.01f);
        run.weights_in.extra = run.weights_out.extra = scales.data();
        (tensor == &other ? StepOneOnHost : OptimizerStepReference)(each.Context(1), run);
        new_scales[tensor == &other] = scales;
      }
      ASSERT_TRUE(other.GuardsHold()) << "rows of " << row;
      ASSERT_EQ(new_scales[0], new_scales[1]) << "rows of " << row;
      ASSERT_TRUE(reference == other) << "rows of " << row;
    }
  }
}

// Steps tensors of `cases` (taken in turns) as one list and one by one.
void ExpectListIsReference(const std::vector<StepCase>& cases, const std::vector<int64_t>& lengths, bool plain) {
  const auto run_of = [&](StepTensor& tensor, int64_t n) {
    return plain ? Plain(tensor.RunOf(1, 0, n)) : tensor.RunOf(1, 0, n);
  };
  std::vector<std::unique_ptr<StepTensor>> reference, listed;
  std::vector<OptimizerContext> contexts;
  for (const StepCase& each : cases) contexts.push_back(each.Context(1));
  std::vector<OptimizerItem> items;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const StepCase& each = cases[i % cases.size()];
    reference.push_back(std::make_unique<StepTensor>(each, std::max<int64_t>(lengths[i], 1)));
    listed.push_back(std::make_unique<StepTensor>(each, std::max<int64_t>(lengths[i], 1)));
    OptimizerStepReference(each.Context(1), run_of(*reference[i], lengths[i]));
    items.push_back({static_cast<int>(i % cases.size()), run_of(*listed[i], lengths[i])});
  }
  StepListOnHost(contexts, items);
  for (size_t i = 0; i < lengths.size(); ++i) {
    ASSERT_TRUE(*reference[i] == *listed[i]) << "tensor " << i << " of " << lengths[i] << " elements";
    ASSERT_TRUE(listed[i]->GuardsHold()) << "tensor " << i;
  }
}

TEST(StepList, TensorsOfTwoGroups_AreTheReference_BitForBit) {
  StepCase decayed = AllStepCases().back();
  decayed.weights = WeightFormat::kBf16Plus8Sr;
  StepCase other = decayed;
  other.hyper.weight_decay = 0;
  other.hyper.lr = 1e-4;
  const OptimizerContext contexts[2] = {decayed.Context(1), other.Context(1)};
  const OptimizerItem items[2] = {{0, {}}, {1, {}}};
  ASSERT_NE(SharedWarpContext(contexts, items), nullptr) << "one body is for both";
  for (const bool plain : {true, false}) {
    ExpectListIsReference({decayed, other}, {768, 1, 0, 300, 0, 0, 2048, 255, 257, 0}, plain);
  }
}

TEST(StepList, OneOtherFormat_HasNoSharedBody) {
  const StepCase first = AllStepCases().back();  // AdamW
  StepCase other = first;
  other.weights = WeightFormat::kFp32;
  const OptimizerItem items[2] = {{0, {}}, {1, {}}};
  EXPECT_EQ(SharedWarpContext({first.Context(1), other.Context(1)}, items), nullptr) << "weights";
  other = first;
  other.states = StateFormat::kFp32;
  EXPECT_EQ(SharedWarpContext({first.Context(1), other.Context(1)}, items), nullptr) << "states";
  other = first;
  other.hyper.amsgrad = true;
  EXPECT_EQ(SharedWarpContext({first.Context(1), other.Context(1)}, items), nullptr) << "no body";
}

TEST(StepList, TensorsOfUnlikeFormats_AreTheReference_BitForBit) {
  std::vector<StepCase> cases;
  for (const StepCase& each : AllStepCases()) {
    if (cases.size() < 60) cases.push_back(each);
  }
  ExpectListIsReference(cases, std::vector<int64_t>(120, 300), /*plain=*/false);
}

TEST(PlaceOf, EveryUnit_IsInItsRun) {
  const uint64_t seed = std::random_device()();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<OptimizerItem> items(1 + random() % 20);
    std::vector<StepPlace> expected;
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].run.num_elements = static_cast<int64_t>(random() % 4 == 0 ? 0 : random() % 1500);
      for (int64_t tile = 0; tile * kTileElements < items[i].run.num_elements; ++tile) {
        expected.push_back({static_cast<int32_t>(i), tile});
      }
    }
    const OptimizerContext context;
    const StepTables tables({&context, 1}, items);
    const StepList list = tables.At(tables.bytes().data());
    ASSERT_EQ(tables.num_units(), static_cast<int64_t>(expected.size())) << "seed " << seed;
    for (size_t unit = 0; unit < expected.size(); ++unit) {
      const StepPlace place = PlaceOf(list, static_cast<int64_t>(unit));
      ASSERT_EQ(place.entry, expected[unit].entry) << "unit " << unit << ", seed " << seed;
      ASSERT_EQ(place.index, expected[unit].index) << "unit " << unit << ", seed " << seed;
    }
  }
}

}  // namespace
}  // namespace shardmesh
