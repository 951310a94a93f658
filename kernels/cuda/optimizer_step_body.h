// The step of one tile as 256 threads do it together, one element each: the body of the CUDA kernel, in phases between
// which all threads meet. Element rules and formats are those of the other implementations (kernels/rules/,
// kernels/tile/), so are the bits. Compiled for the CPU too, where a test walks the phases thread by thread.
//
//   for each phase p of StepBody::kPhases: every thread calls Phase(p, thread), then all wait for each other
#pragma once

#include "core/base/reduction.h"
#include "kernels/rules/optimizers.h"
#include "kernels/tile/emit.h"
#include "kernels/tile/states.h"

namespace shardmesh {

// What the threads of a tile share.
struct BodyMemory {
  TileDraws draws[4];  // of the weights, and of each state
  float weights[kTileElements];
  float states[3][kTileElements];
  uint32_t largest[3][kTileElements / 32];          // the bits of each block's largest magnitude
  uint32_t published[kTileElements / kMxElements];  // the same of 32 weights as readers get them
  uint8_t codes[3][kTileElements];                  // of 4-bit states, before they are packed
  float gradient[kTileElements];                    // before clipping
  float square_sums[8];                             // each of every eighth element
  uint32_t changed;                                 // whether a weight's codes did
  uint64_t digests[4];                              // of the weights and each state
};

// Keeps the larger of two floats that are not negative, by their bits; a NaN is none.
SHARDMESH_RULE void KeepLarger(uint32_t* bits, float magnitude) {
  if (magnitude != magnitude) return;
#ifdef __CUDA_ARCH__
  atomicMax(bits, FloatBits(magnitude));
#else
  if (*bits < FloatBits(magnitude)) *bits = FloatBits(magnitude);
#endif
}

// What is published of element `thread` of a tile, `value` as readers get it. `published`: the bits of the largest
// magnitudes of every 32.
SHARDMESH_RULE void PublishElement(const TileRun& tile, const uint32_t* published, float value, int thread) {
  if (tile.mx8.codes != nullptr) {
    const auto scale = MxScaleCeil(FloatOfBits(published[thread / kMxElements]));
    if (thread % kMxElements == 0) tile.mx8.extra[thread / kMxElements] = static_cast<uint8_t>(scale.code);
    tile.mx8.codes[thread] = static_cast<uint8_t>(EncodeMinifloat<E4M3>(value * scale.multiplier));
  }
  if (tile.largest != nullptr && thread % kLargestElements == 0) {
    float largest = 0;
    for (int b = 0; b < kLargestElements / kMxElements; ++b) {
      largest = Max(largest, FloatOfBits(published[thread / kMxElements + b]));
    }
    tile.largest[thread / kLargestElements] = largest;
  }
}

class StepBody {
 public:
  static constexpr int kPhases = 6;

  // `elements`: how many of the tile there are.
  SHARDMESH_RULE StepBody(const StepPlan& plan, int64_t tile, BodyMemory* memory)
      : plan_(plan),
        context_(*plan.context),
        tile_(TileAt(plan, tile)),
        first_element_(plan.run->first_element + static_cast<uint64_t>(tile * kTileElements)),
        elements_(plan.run->num_elements - tile * kTileElements),
        memory_(memory) {}

  SHARDMESH_RULE void Phase(int phase, int thread) {
    if (phase == 0) Begin(thread);
    if (phase == 1) Update(thread);
    if (phase == 2) Store(thread);
    if (phase == 3) Pack(thread);
    if (phase == 4 && plan_.run->digests != nullptr) Digest(thread);
    if (phase == 5) Tell(thread);
  }

 private:
  SHARDMESH_RULE static void FillDraws(const DrawStream& stream, uint64_t first_element, int thread, TileDraws& draws) {
    const uint64_t number = DrawCounter(first_element + 64 * static_cast<uint64_t>(thread / 8)) + thread % 8;
    uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), stream.tensor,
                         stream.step};
    Philox4x32(stream.key, words);
    for (int w = 0; w < 4; ++w) draws.words[thread / 8][w][thread % 8] = words[w];
  }

  SHARDMESH_RULE void Begin(int thread) {
    if (thread < 3 * (kTileElements / 32))
      memory_->largest[thread / (kTileElements / 32)][thread % (kTileElements / 32)] = 0;
    if (thread < kTileElements / kMxElements) memory_->published[thread] = 0;
    if (thread == 0) memory_->changed = 0;
    if (thread < 4) memory_->digests[thread] = 0;
    const int stream = thread / 32;  // 32 threads fill one stream of draws
    if (stream == 0 && (NeedsDraws(context_.weights) || NeedsDraws(context_.states))) {
      FillDraws(plan_.weight_draws, first_element_, thread, memory_->draws[0]);
    } else if (stream >= 1 && stream <= plan_.num_states && context_.states == StateFormat::kBf16Sr) {
      FillDraws(plan_.state_draws[stream - 1], first_element_, thread % 32, memory_->draws[stream]);
    }
  }

  SHARDMESH_RULE float Gradient(int thread) const {
    const int64_t i = tile_.gradient_offset + thread;
    const float sum = TreeSum<float>(plan_.run->num_slots, [&](int slot) {
      const void* from = tile_.gradients[slot];
      return context_.gradients == Format::kFp32 ? static_cast<const float*>(from)[i]
                                                 : Bf16ToFloat(static_cast<const uint16_t*>(from)[i]);
    });
    return sum * plan_.run->divide_scale;
  }

  SHARDMESH_RULE void Update(int thread) {
    const bool there = thread < elements_;
    float weight = 0, gradient = 0, states[3] = {0, 0, 0};
    if (there) {
      WithFormat(context_.weights, [&](auto known) {
        weight = StoredWeights<float, decltype(known)::value>::Load(tile_.weights_in, thread);
      });
      gradient = Gradient(thread);
      for (int s = 0; s < plan_.num_states; ++s) states[s] = s == 0 ? State<true>(s, thread) : State<false>(s, thread);
    }
    memory_->gradient[thread] = gradient;
    gradient = gradient * plan_.gradient_scale;
    if (context_.scalars.coupled_decay != 0) gradient = MulAdd(context_.scalars.coupled_decay, weight, gradient);
    const StepConstants<float> constants(context_.scalars);
    WithOptimizer(context_.hyper, [&](auto rule) {
      memory_->weights[thread] = decltype(rule)::Update(constants, weight, gradient, states);
    });
    for (int s = 0; s < plan_.num_states; ++s) {
      memory_->states[s][thread] = states[s];
      if (plan_.states.extra.bytes == 0) continue;  // there are no blocks
      KeepLarger(&memory_->largest[s][thread / plan_.states.extra.elements], Abs(states[s]));
    }
  }

  template <bool kSigned>
  SHARDMESH_RULE float State(int s, int thread) const {
    const ConstStoredTile& from = tile_.states_in[s];
    if (context_.states == StateFormat::kFp32) return reinterpret_cast<const float*>(from.codes)[thread];
    if (context_.states == StateFormat::kBf16Sr)
      return Bf16ToFloat(reinterpret_cast<const uint16_t*>(from.codes)[thread]);
    float state = 0;
    WithCode<float, kSigned>(context_.states, [&](auto code) {
      using Code = decltype(code);
      state = Code::LoadRaw(from.codes, thread) * LoadScale<Code>(from.extra, thread / Code::kBlock);
    });
    return state;
  }

  SHARDMESH_RULE void Store(int thread) {
    if (thread < elements_) {
      const uint32_t before = CodeAt(tile_.weights_in.codes, thread);
      WithFormat(context_.weights, [&](auto known) {
        constexpr WeightFormat kFormat = decltype(known)::value;
        const uint32_t draw = NeedsDraws(kFormat) ? DrawsAt<float>(memory_->draws[0], thread) : 0;
        StoredWeights<float, kFormat>::Store(memory_->weights[thread], draw, tile_.weights_out, thread);
      });
      if (CodeAt(tile_.weights_out.codes, thread) != before) memory_->changed = 1;  // whoever writes, writes this
      if (IsPublished(tile_)) KeepLarger(&memory_->published[thread / kMxElements], Abs(Published(thread)));
    }
    if (tile_.square_sum != nullptr && thread < 8) {
      float sum = 0;
      for (int64_t i = thread; i < kTileElements; i += 8) sum = MulAdd(memory_->gradient[i], memory_->gradient[i], sum);
      memory_->square_sums[thread] = sum;
    }
    for (int s = 0; s < plan_.num_states; ++s) s == 0 ? StoreState<true>(s, thread) : StoreState<false>(s, thread);
  }

  SHARDMESH_RULE uint32_t CodeAt(const uint8_t* codes, int thread) const {
    return plan_.weights.codes.bytes == 4 ? reinterpret_cast<const uint32_t*>(codes)[thread]
                                          : reinterpret_cast<const uint16_t*>(codes)[thread];
  }

  template <bool kSigned>
  SHARDMESH_RULE void StoreState(int s, int thread) {
    const StoredTile& to = tile_.states_out[s];
    const float state = memory_->states[s][thread];
    const bool there = thread < elements_;
    if (context_.states == StateFormat::kFp32 && there) reinterpret_cast<float*>(to.codes)[thread] = state;
    if (context_.states == StateFormat::kBf16Sr && there) {
      const uint32_t draw = DrawsAt<float>(memory_->draws[s + 1], thread);
      reinterpret_cast<uint16_t*>(to.codes)[thread] = FloatToBf16Sr(state, draw);
    }
    WithCode<float, kSigned>(context_.states, [&](auto code) {
      using Code = decltype(code);
      const float scale = BlockScale<Code>(FloatOfBits(memory_->largest[s][thread / Code::kBlock]));
      const uint32_t draw = Code::kStochastic ? SecondMomentDrawsAt<float>(memory_->draws[0], thread) : 0;
      const auto byte = static_cast<uint8_t>(Code::Encode(state * Divide(1.0f, scale), draw));
      if (there && thread % Code::kBlock == 0) StoreScale<Code>(scale, to.extra, thread / Code::kBlock);
      if constexpr (std::is_same_v<Code, Dyn4<float, kSigned>>) {
        memory_->codes[s][thread] = byte;
      } else if (there) {
        to.codes[thread] = byte;
      }
    });
  }

  // A weight as readers get it.
  SHARDMESH_RULE float Published(int thread) const {
    const uint32_t code = CodeAt(tile_.weights_out.codes, thread);
    return FloatOfBits(plan_.weights.codes.bytes == 4 ? code : code << 16);
  }

  // Two 4-bit codes a byte, the copies of the weights and what is published of them.
  SHARDMESH_RULE void Pack(int thread) {
    if (thread >= elements_) return;
    for (int s = 0; s < plan_.num_states && context_.states == StateFormat::kDyn4 && thread % 2 == 0; ++s) {
      const uint8_t* codes = memory_->codes[s] + thread;
      tile_.states_out[s].codes[thread / 2] = static_cast<uint8_t>(codes[0] << 4 | codes[1]);
    }
    const int64_t bytes = plan_.weights.codes.bytes;
    for (int c = 0; c < plan_.run->num_copies; ++c) {
      for (int64_t b = 0; b < bytes; ++b)
        tile_.copies[c][thread * bytes + b] = tile_.weights_out.codes[thread * bytes + b];
    }
    PublishElement(tile_, memory_->published, Published(thread), thread);
  }

  // Of what lies in memory now: every thread its share of the words.
  SHARDMESH_RULE void Digest(int thread) {
    const int64_t elements = elements_ < kTileElements ? elements_ : kTileElements;
    for (int stream = 0; stream <= plan_.num_states; ++stream) {
      const bool weights = stream == 0;
      const uint64_t share =
          DigestTile(plan_.digests[stream], weights ? plan_.weights : plan_.states,
                     weights ? plan_.weights_tile : plan_.states_tile, first_element_, elements,
                     weights ? tile_.weights_out : tile_.states_out[stream - 1], thread, kTileElements);
      AddDigest(&memory_->digests[stream], share);
    }
  }

  // What the tile as a whole tells.
  SHARDMESH_RULE void Tell(int thread) {
    if (thread == 0 && tile_.changed != nullptr) *tile_.changed = memory_->changed != 0;
    if (thread == 0 && tile_.square_sum != nullptr) {
      *tile_.square_sum = TreeSumFixed<8>([&](int lane) { return memory_->square_sums[lane]; });
    }
    if (plan_.run->digests != nullptr && thread <= plan_.num_states) {
      AddDigest(plan_.run->digests + thread, memory_->digests[thread]);
    }
  }

  const StepPlan& plan_;
  const OptimizerContext& context_;
  const TileRun tile_;
  const uint64_t first_element_;
  const int64_t elements_;
  BodyMemory* const memory_;
};

}  // namespace shardmesh
