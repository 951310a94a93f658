#include "kernels/tile/walk.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

namespace shardmesh {
namespace {

DrawStream DrawsOf(const OptimizerContext& context, const OptimizerRun& run, DrawPurpose purpose) {
  return {KeyOfStep(MakePhiloxKey(context.seed, purpose), context.step),
          static_cast<uint32_t>(static_cast<uint64_t>(context.step)), run.tensor};
}

TileBytes BytesOfTile(const StoredLayout& layout) {
  return {layout.codes.BytesOf(kTileElements), layout.extra.BytesOf(kTileElements)};
}

TileDigest DigestOf(const OptimizerRun& run, int stream, int part, const PartLayout& layout) {
  const int64_t word_bytes = DigestWordBytes(layout), bytes = layout.BytesOf(kTileElements);
  return {DigestKey(run.tensor, stream, part), word_bytes, static_cast<uint64_t>(bytes / word_bytes)};
}

void Copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

StepPlan PlanStep(const OptimizerContext& context, const OptimizerRun& run) {
  constexpr DrawPurpose kStates[3] = {DrawPurpose::kFirstState, DrawPurpose::kSecondState, DrawPurpose::kThirdState};
  StepPlan plan;
  plan.context = &context;
  plan.run = &run;
  plan.num_states = NumStates(context.hyper);
  plan.gradient_scale = run.clip * context.scalars.gradient_sign;
  plan.weight_draws = DrawsOf(context, run, DrawPurpose::kWeightRounding);
  for (int s = 0; s < 3; ++s) plan.state_draws[s] = DrawsOf(context, run, kStates[s]);
  plan.weights = LayoutOf(context.weights, std::max<int64_t>(run.row_elements, 1));
  plan.states = LayoutOf(context.states);
  plan.weights_tile = BytesOfTile(plan.weights);
  plan.states_tile = BytesOfTile(plan.states);
  for (int stream = 0; run.digests != nullptr && stream <= plan.num_states; ++stream) {
    const StoredLayout& layout = stream == 0 ? plan.weights : plan.states;
    plan.digests[stream][0] = DigestOf(run, stream, 0, layout.codes);
    plan.digests[stream][1] = DigestOf(run, stream, 1, layout.extra);
  }
  return plan;
}

int64_t RowUnitElements(const OptimizerRun& run) {
  return std::min(std::lcm(run.row_elements, kTileElements), run.num_elements);
}

float* RowMemory(int64_t elements) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < elements) memory.resize(static_cast<size_t>(elements));
  return memory.data();
}

OptimizerRun PartOf(const StepPlan& plan, const TileRun& tile, int64_t begin, int64_t num_elements, float* weights,
                    uint64_t* digests) {
  OptimizerRun part = *plan.run;
  part.weights_in = part.weights_out = {weights, nullptr};
  part.num_copies = 0;
  part.square_sums = tile.square_sum;
  part.changed = nullptr;
  part.mx8 = {};
  part.largest = nullptr;
  part.digests = part.digests == nullptr ? nullptr : digests;
  part.num_elements = num_elements;
  part.first_element += static_cast<uint64_t>(begin);
  for (int s = 0; s < plan.num_states; ++s) {
    part.states_in[s] = {const_cast<uint8_t*>(tile.states_in[s].codes), const_cast<uint8_t*>(tile.states_in[s].extra)};
    part.states_out[s] = {tile.states_out[s].codes, tile.states_out[s].extra};
  }
  return part;
}

ShortTile::ShortTile(const StepPlan& plan, int64_t index)
    : plan_(plan), begin_(index * kTileElements), elements_(plan.run->num_elements - begin_) {
  const OptimizerRun& run = *plan.run;
  const TileRun there = TileAt(plan, index);
  tile_.gradients = there.gradients;
  tile_.gradient_offset = there.gradient_offset;
  const auto fill = [&](const ConstStoredTile& from, const StoredLayout& layout, Stream& stream) {
    std::memset(&stream, 0, sizeof(stream));
    Copy(stream.codes, from.codes, layout.codes.BytesOf(elements_));
    Copy(stream.extra, from.extra, layout.extra.BytesOf(elements_));
  };
  fill(there.weights_in, plan.weights, weights_);
  tile_.weights_in = {weights_.codes, weights_.extra};
  tile_.weights_out = {weights_.codes, weights_.extra};
  for (int s = 0; s < plan.num_states; ++s) {
    fill(there.states_in[s], plan.states, states_[s]);
    tile_.states_in[s] = {states_[s].codes, states_[s].extra};
    tile_.states_out[s] = {states_[s].codes, states_[s].extra};
  }
  for (int c = 0; c < run.num_copies; ++c) tile_.copies[c] = copies_[c];
  tile_.square_sum = there.square_sum;
  tile_.changed = there.changed;
  tile_.mx8 = there.mx8;
  tile_.largest = there.largest;
}

void ShortTile::CopyBack() const {
  const TileRun there = TileAt(plan_, begin_ / kTileElements);
  const auto back = [&](const StoredTile& to, const StoredLayout& layout, const Stream& stream) {
    Copy(to.codes, stream.codes, layout.codes.BytesOf(elements_));
    Copy(to.extra, stream.extra, layout.extra.BytesOf(elements_));
  };
  back(there.weights_out, plan_.weights, weights_);
  for (int s = 0; s < plan_.num_states; ++s) back(there.states_out[s], plan_.states, states_[s]);
  for (int c = 0; c < plan_.run->num_copies; ++c) {
    Copy(there.copies[c], copies_[c], plan_.weights.codes.BytesOf(elements_));
  }
}

}  // namespace shardmesh
