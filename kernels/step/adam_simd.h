// The Adam and AdamW step of whole tiles with everything in registers that can be: what kernels/tile/step.h does in
// passes over the first-level cache, in one, for the formats that are worth a loop of their own. The same bits.
// Only for translation units compiled for AVX2 and FMA.
//
// fp32 states go straight from memory to memory; blocks wait in the first-level cache until their scale is known.
#pragma once

#include <xmmintrin.h>

#include "kernels/cpu/draws_simd.h"
#include "kernels/tile/run.h"
#include "kernels/tile/simd8_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh::simd8 {

using Lane = Lanes<F32x8>;

// How far ahead of its use memory is asked for, in elements. The processor's own prefetcher stops at page boundaries
// and loses track with this many streams; 1 KiB of fp32 was measured best, and running past a run's end is harmless.
// (Stores are ordinary ones everywhere: streaming stores made a pass with draws 5 to 15 % slower, which is bound by
// arithmetic and hides the reads for ownership.)
inline constexpr int64_t kAhead = 256;

// Asks for the bytes of elements [i, i + 64) of a stream.
template <class Element>
HWY_INLINE void Prefetch64(const Element* from, int64_t i) {
  for (size_t line = 0; line < sizeof(Element); ++line) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + i) + 64 * line, _MM_HINT_T0);
  }
}

// ---- Weights: Load one vector, Store two in a row; the draws are read where kDraws. ----

struct Fp32Weights {
  static constexpr bool kDraws = false;
  static HWY_INLINE F32x8 Load(const ConstStoredTile& t, int64_t i) {
    return Load8(reinterpret_cast<const float*>(t.codes) + i);
  }
  static HWY_INLINE void Store(const F32x8 (&x)[2], const U32x8 (&)[2], const StoredTile& t, int64_t i) {
    Store8(x[0], reinterpret_cast<float*>(t.codes) + i);
    Store8(x[1], reinterpret_cast<float*>(t.codes) + i + 8);
  }
  static HWY_INLINE void Prefetch(const ConstStoredTile& t, int64_t i) {
    Prefetch64(reinterpret_cast<const float*>(t.codes), i);
  }
};

// The low, or the upper, halves of 16 words.
HWY_INLINE void StoreLowHalves16(U32x8 a, U32x8 b, uint16_t* to) {
  const auto packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lanes.raw, b.lanes.raw), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
}
HWY_INLINE void StoreUpperHalves16(U32x8 a, U32x8 b, uint16_t* to) {
  StoreLowHalves16(ShiftRight<16>(a), ShiftRight<16>(b), to);
}

template <bool kStochastic>
struct Bf16Weights {
  static constexpr bool kDraws = kStochastic;
  static HWY_INLINE F32x8 Load(const ConstStoredTile& t, int64_t i) {
    return Load8(reinterpret_cast<const uint16_t*>(t.codes) + i);
  }
  static HWY_INLINE void Store(const F32x8 (&x)[2], const U32x8 (&draws)[2], const StoredTile& t, int64_t i) {
    U32x8 bits[2];
    for (int k = 0; k < 2; ++k) bits[k] = kStochastic ? Bf16BitsSr(x[k], draws[k]) : Bf16BitsRne(x[k]);
    StoreUpperHalves16(bits[0], bits[1], reinterpret_cast<uint16_t*>(t.codes) + i);
  }
  static HWY_INLINE void Prefetch(const ConstStoredTile& t, int64_t i) {
    Prefetch64(reinterpret_cast<const uint16_t*>(t.codes), i);
  }
};

struct SplitWeights8 {
  static constexpr bool kDraws = true;
  static HWY_INLINE F32x8 Load(const ConstStoredTile& t, int64_t i) {
    return StoredWeights<F32x8, WeightFormat::kBf16Plus8Sr>::Load(t, i);
  }
  static HWY_INLINE void Store(const F32x8 (&x)[2], const U32x8 (&draws)[2], const StoredTile& t, int64_t i) {
    SplitWeight<U32x8> split[2];
    for (int k = 0; k < 2; ++k) {
      split[k] = SplitStochastic(x[k], draws[k] & U32x8(0xFFu));
      StoreBytes8(split[k].remainder, t.extra + i + 8 * k);
    }
    StoreLowHalves16(split[0].upper, split[1].upper, reinterpret_cast<uint16_t*>(t.codes) + i);
  }
  static HWY_INLINE void Prefetch(const ConstStoredTile& t, int64_t i) {
    Prefetch64(reinterpret_cast<const uint16_t*>(t.codes), i);
    Prefetch64(t.extra, i);
  }
};

// ---- States: of vector `vector` of a tile; End reads the weights' draws where kDraws. ----

// fp32: from memory to memory.
class Fp32States {
 public:
  static constexpr bool kDraws = false;
  HWY_INLINE void Begin(const ConstStoredTile* in, const StoredTile* out) {
    for (int s = 0; s < 2; ++s) {
      in_[s] = reinterpret_cast<const float*>(in[s].codes);
      out_[s] = reinterpret_cast<float*>(out[s].codes);
    }
  }
  HWY_INLINE void Prefetch(int64_t i) const {
    Prefetch64(in_[0], i);
    Prefetch64(in_[1], i);
  }
  HWY_INLINE void Load(int64_t i, F32x8& m, F32x8& v) const {
    m = Load8(in_[0] + i);
    v = Load8(in_[1] + i);
  }
  HWY_INLINE void Store(int64_t i, F32x8 m, F32x8 v) {
    Store8(m, out_[0] + i);
    Store8(v, out_[1] + i);
  }
  HWY_INLINE void EndOf32(int64_t) {}
  HWY_INLINE void End(const TileDraws&) {}

 private:
  const float* in_[2];
  float* out_[2];
};

// Blocks of codes with a scale: a tile's new values wait in the first-level cache until their scales are known. M and
// V: codes of kernels/tile/states.h.
template <class M, class V>
class BlockStates {
 public:
  static constexpr bool kDraws = V::kStochastic;
  HWY_INLINE void Begin(const ConstStoredTile* in, const StoredTile* out) {
    for (int s = 0; s < 2; ++s) {
      in_[s] = in[s];
      out_[s] = out[s];
    }
    for (int64_t block = 0; block < kBlocks; ++block) {
      scales_[0][block] = LoadScale<M>(in[0].extra, block) * M::kRaw;
      scales_[1][block] = LoadScale<V>(in[1].extra, block) * V::kRaw;
    }
    running_[0] = running_[1] = F32x8(0.0f);
  }
  HWY_INLINE void Prefetch(int64_t i) const {
    Prefetch64(in_[0].codes, i);
    Prefetch64(in_[1].codes, i);
  }
  HWY_INLINE void Load(int64_t i, F32x8& m, F32x8& v) const {
    m = M::LoadRaw(in_[0].codes, i) * F32x8(scales_[0][i / kBlock]);
    v = V::LoadRaw(in_[1].codes, i) * F32x8(scales_[1][i / kBlock]);
  }
  HWY_INLINE void Store(int64_t i, F32x8 m, F32x8 v) {
    running_[0] = Max(running_[0], Abs(m));
    running_[1] = Max(running_[1], v);
    Store8(m, values_[0] + i);
    Store8(v, values_[1] + i);
  }
  // Elements [i, i + 32) were stored.
  HWY_INLINE void EndOf32(int64_t i) {
    if ((i + 32) % kBlock != 0) return;
    for (int s = 0; s < 2; ++s) {
      largest_[s][i / kBlock] = running_[s];
      running_[s] = F32x8(0.0f);
    }
  }
  HWY_INLINE void End(const TileDraws& weight_draws) {
    Encode<M>(0, weight_draws);
    Encode<V>(1, weight_draws);
  }

 private:
  static_assert(M::kBlock == V::kBlock, "both moments have blocks of one size");
  static constexpr int64_t kBlock = M::kBlock, kBlocks = kTileElements / kBlock;

  template <class Code>
  HWY_INLINE void Encode(int s, const TileDraws& weight_draws) {
    const F32x8 scales = BlockScale<Code>(Largest(largest_[s]));
    alignas(32) float inverses[8];
    Store8(scales, inverses);
    for (int64_t block = 0; block < kBlocks; ++block) StoreScale<Code>(inverses[block], out_[s].extra, block);
    Store8(Divide(F32x8(1.0f), scales), inverses);
    for (int64_t block = 0; block < kBlocks; ++block) {
      EncodeBlock<Code>(values_[s], F32x8(inverses[block]), weight_draws, out_[s].codes, block * kBlock);
    }
  }
  static HWY_INLINE F32x8 Largest(const F32x8 (&of)[kBlocks]) {
    if constexpr (kBlocks == 8) {
      return LargestOfEach(of);
    } else {
      alignas(32) float largest[8] = {};
      for (int64_t block = 0; block < kBlocks; ++block) largest[block] = LargestLane(of[block]);
      return Load8(largest);
    }
  }

  ConstStoredTile in_[2];
  StoredTile out_[2];
  float scales_[2][kBlocks];
  F32x8 running_[2];           // the largest magnitudes of the block at hand, in each lane
  F32x8 largest_[2][kBlocks];  // and of those before
  alignas(64) float values_[2][kTileElements];
};

// ---- Gradients of a tile: Load one vector, before it is divided unless kDivided. ----

// A few slots, summed as they are loaded.
template <class Element, int kSlots>
class SlotGradients {
 public:
  static constexpr bool kDivided = false;
  HWY_INLINE void Begin(const StepPlan&, const TileRun& tile) {
    for (int s = 0; s < kSlots; ++s) from_[s] = static_cast<const Element*>(tile.gradients[s]) + tile.gradient_offset;
  }
  HWY_INLINE void Prefetch(int64_t i) const {
    for (const Element* from : from_) Prefetch64(from, i);
  }
  HWY_INLINE F32x8 Load(int64_t i) const {
    return TreeSumFixed<kSlots>([&](int slot) HWY_ATTR { return Load8(from_[slot] + i); });
  }

 private:
  const Element* from_[kSlots];
};

// Any number of slots, summed and divided before the tile is stepped.
class SummedGradients {
 public:
  static constexpr bool kDivided = true;
  HWY_INLINE void Begin(const StepPlan& plan, const TileRun& tile) { SumGradients<F32x8>(plan, tile, sum_); }
  HWY_INLINE void Prefetch(int64_t) const {}
  HWY_INLINE F32x8 Load(int64_t i) const { return Load8(sum_ + i); }

 private:
  alignas(64) float sum_[kTileElements];
};

// ---- The step. ----

// SumSquares of a tile that is not yet divided.
template <class Gradients>
HWY_INLINE float SquaresOf(const Gradients& gradients, F32x8 divide) {
  alignas(64) float divided[kTileElements];
  for (int64_t i = 0; i < kTileElements; i += 8) Store8(gradients.Load(i) * divide, divided + i);
  return SumSquares<F32x8>(divided);
}

template <class Weights, class States, class Gradients>
HWY_NOINLINE void AdamTiles(const StepPlan& plan, int64_t num_tiles) {
  const OptimizerRun& run = *plan.run;
  const StepConstants<F32x8> constants(plan.context->scalars);
  const F32x8 divide(Gradients::kDivided ? 1.0f : run.divide_scale), clip(plan.gradient_scale);
  alignas(64) uint8_t codes[4 * kTileElements];  // of new weights that are compared with the old ones
  TileDraws kept;                                // for the states
  GroupDraws draws(plan.weight_draws.key, plan.weight_draws.tensor, plan.weight_draws.step);
  const bool emits = Emits(run);
  States states;
  Gradients gradients;
  for (int64_t index = 0; index < num_tiles; ++index) {
    const TileRun tile = TileAt(plan, index);
    gradients.Begin(plan, tile);
    const uint64_t first = run.first_element + static_cast<uint64_t>(index * kTileElements);
    // Copies whose address nobody has: they stay in registers, although vectors are stored in between.
    const ConstStoredTile weights_in = tile.weights_in;
    const StoredTile weights_out = {NewCodes(tile, codes), tile.weights_out.extra};
    if (tile.square_sum != nullptr) *tile.square_sum = SquaresOf(gradients, divide);
    states.Begin(tile.states_in, tile.states_out);
    for (int64_t group = 0; group < kTileElements; group += 64) {
      U32x8 words[4];
      if constexpr (Weights::kDraws || States::kDraws) draws.Fill(first + static_cast<uint64_t>(group), words);
      if constexpr (States::kDraws) KeepDraws(words, kept.words[group / 64]);
      gradients.Prefetch(group);
      Weights::Prefetch(weights_in, group);
      states.Prefetch(group);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const int64_t i = group + 16 * pair;
        F32x8 weights[2];
        U32x8 rounding[2];
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          F32x8 m, v;
          states.Load(i + 8 * k, m, v);
          const F32x8 g = gradients.Load(i + 8 * k) * divide * clip;
          weights[k] = AdamUpdate(constants, Weights::Load(weights_in, i + 8 * k), g, m, v);
          states.Store(i + 8 * k, m, v);
          if constexpr (Weights::kDraws) rounding[k] = GroupDraws::Of(words, 2 * pair + k);
        }
        Weights::Store(weights, rounding, weights_out, i);
        if (pair % 2 == 1) states.EndOf32(i - 16);
      }
    }
    states.End(kept);
    if (emits) EmitTile<F32x8>(plan, tile, first, kTileElements, weights_out.codes);
  }
}

}  // namespace shardmesh::simd8
HWY_AFTER_NAMESPACE();
