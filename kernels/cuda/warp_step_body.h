// The Adam and AdamW step of one tile as 32 threads (a warp) do it together: each steps two pieces of four elements in
// a row in registers, moves them with one load and one store a stream, and shares with the others only the largest
// magnitudes of quantized states and the random draws. Formats are known when it is compiled. The bits are those of the
// other implementations: rules and formats are the same code (kernels/rules/, kernels/tile/). Compiled for the CPU too,
// where a test walks the phases thread by thread.
//
//   WarpBody<...> body(context, run, plan, tile, memory, lane) in each of kLanes threads, then
//   for each phase p of kPhases: every thread calls Phase(p), then all wait for each other
#pragma once

#include "core/base/reduction.h"
#include "kernels/cuda/step_list.h"
#include "kernels/cuda/warp_pieces.h"
#include "kernels/rules/optimizers.h"
#include "kernels/tile/states.h"

namespace shardmesh {

// Before a loop over registers: arrays must not be indexed by what is known at run time only.
#ifdef __CUDACC__
#define SHARDMESH_UNROLL_WHOLE _Pragma("unroll")
#else
#define SHARDMESH_UNROLL_WHOLE
#endif

// Whether a run can be stepped by a WarpBody, and asks for nothing that only StepBody writes.
inline bool HasWarpBody(const OptimizerContext& context, const OptimizerRun& run) {
  static_assert(sizeof(OptimizerRun) == 256 && sizeof(OptimizerContext) == 168,
                "there is more that a step can be asked for: write it in WarpBody, or say here that it cannot; see "
                "RowBody::Begin, too");
  if (run.mx8.codes != nullptr || run.largest != nullptr || run.digests != nullptr) return false;
  const OptimizerKind kind = context.hyper.kind;
  return (kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdamW) && !context.hyper.amsgrad &&
         context.weights != WeightFormat::kInt8Row;
}

// The context whose WarpBody steps every item of a list; null where there is no such one: not all have one, or their
// formats differ.
inline const OptimizerContext* SharedWarpContext(absl::Span<const OptimizerContext> contexts,
                                                 absl::Span<const OptimizerItem> items) {
  const OptimizerContext* shared = nullptr;
  for (const OptimizerItem& item : items) {
    const OptimizerContext& context = contexts[item.context];
    if (shared == nullptr) shared = &context;
    if (!HasWarpBody(context, item.run)) return nullptr;
    if (context.weights != shared->weights || context.states != shared->states) return nullptr;
  }
  return shared;
}

// What the threads of a warp share.
template <int kDraws>
struct WarpMemory {
  union {
    alignas(16) float gradient[kTileElements];  // before clipping; read before the draws are made
    alignas(16) uint32_t draws[kDraws][kTileElements / 64][4][8];
  };
  float largest[2][2][32];       // [state][piece][lane]
  float group_largest[2][2][4];  // the same of 8 lanes, 32 elements
  float square_sums[8];
  uint32_t changed;
};

template <WeightFormat kWeights, StateFormat kStates>
class WarpBody {
 public:
  static constexpr int kLanes = 32, kPhases = 5;
  static constexpr int kStateDraws = kStates == StateFormat::kBf16Sr ? 2 : 0;
  using Memory = WarpMemory<1 + kStateDraws>;

  SHARDMESH_RULE WarpBody(const OptimizerContext& context, const OptimizerRun& run, const StepPlan& plan, int64_t tile,
                          Memory* memory, int lane)
      : context_(context), run_(run), plan_(plan), memory_(memory), tile_(tile), lane_(lane) {
    const int64_t left = run.num_elements - tile * kTileElements;
    elements_ = static_cast<int>(left < kTileElements ? left : kTileElements);
  }

  SHARDMESH_RULE void Phase(int phase) {
    if (phase == 0) Update();
    if (phase == 1) Gather();
    if (phase == 2) Draw();
    if (phase == 3) Store();
    if (phase == 4 && lane_ == 0 && run_.changed != nullptr) run_.changed[tile_] = memory_->changed != 0;
  }

 private:
  template <bool kSigned>
  using Code = typename StateCode<float, kStates, kSigned>::Type;
  static constexpr bool kQuantized = kStates != StateFormat::kFp32 && kStates != StateFormat::kBf16Sr;
  static constexpr bool kNibbles = kStates == StateFormat::kDyn4;
  static constexpr bool kDraws = NeedsDraws(kWeights) || NeedsDraws(kStates);

  // Where piece p begins in the tile, and how many of its elements there are.
  SHARDMESH_RULE int First(int p) const { return 128 * p + 4 * lane_; }
  SHARDMESH_RULE int There(int p) const {
    const int left = elements_ - First(p);
    return left < 0 ? 0 : left < 4 ? left : 4;
  }
  SHARDMESH_RULE uint64_t FirstElement() const {
    return run_.first_element + static_cast<uint64_t>(tile_) * kTileElements;
  }

  SHARDMESH_RULE void Update() {
    if (lane_ == 0) memory_->changed = 0;
    const StepConstants<float> constants(context_.scalars);
    SHARDMESH_UNROLL_WHOLE
    for (int p = 0; p < 2; ++p) {
      Four gradient = LoadGradient(p);
      LoadWeights(p);
      LoadState<true>(p);
      LoadState<false>(p);
      if (run_.square_sums != nullptr) {
        for (int k = 0; k < 4; ++k) memory_->gradient[First(p) + k] = gradient.x[k];
      }
      float largest[2] = {0, 0};
      SHARDMESH_UNROLL_WHOLE
      for (int k = 0; k < 4; ++k) {
        float g = gradient.x[k] * plan_.gradient_scale;
        if (context_.scalars.coupled_decay != 0) g = MulAdd(context_.scalars.coupled_decay, weights_[p].x[k], g);
        weights_[p].x[k] = AdamUpdate(constants, weights_[p].x[k], g, states_[0][p].x[k], states_[1][p].x[k]);
        for (int s = 0; s < 2; ++s) largest[s] = Max(largest[s], Abs(states_[s][p].x[k]));
      }
      if constexpr (kQuantized) {
        for (int s = 0; s < 2; ++s) memory_->largest[s][p][lane_] = largest[s];
      }
    }
  }

  SHARDMESH_RULE Four LoadGradient(int p) const {
    const int64_t first = tile_ * kTileElements + First(p);
    const bool wide = context_.gradients == Format::kFp32;
    Four sum = run_.num_slots == 1 ? LoadSlot(run_.gradients[0], wide, first, There(p))
                                   : SumSlots(run_.gradients, run_.num_slots, wide, first, There(p));
    for (int k = 0; k < 4; ++k) sum.x[k] = k < There(p) ? sum.x[k] * run_.divide_scale : 0.0f;
    return sum;
  }

  SHARDMESH_RULE void LoadWeights(int p) {
    const auto from = StreamAt<ConstStoredTile>(run_.weights_in, plan_.weights_tile, tile_);
    Piece<kCodeBytes<kWeights>> codes;
    Piece<kExtraBytes<kWeights>> extra;
    codes.Load(from.codes, First(p), There(p));
    extra.Load(from.extra, First(p), There(p));
    for (int k = 0; k < 4; ++k) {
      weights_[p].x[k] = k < There(p) ? StoredWeights<float, kWeights>::Load({codes.bytes, extra.bytes}, k) : 0.0f;
    }
  }

  template <bool kSigned>
  SHARDMESH_RULE void LoadState(int p) {
    constexpr int s = kSigned ? 0 : 1;
    const auto from = StreamAt<ConstStoredTile>(run_.states_in[s], plan_.states_tile, tile_);
    Four& to = states_[s][p];
    if constexpr (kStates == StateFormat::kFp32) {
      to = LoadFloats(reinterpret_cast<const float*>(from.codes) + First(p), There(p));
    } else if constexpr (kStates == StateFormat::kBf16Sr) {
      to = LoadBf16s(reinterpret_cast<const uint16_t*>(from.codes) + First(p), There(p));
    } else {
      uint8_t codes[4];
      if constexpr (kNibbles) LoadNibbles(from.codes + First(p) / 2, There(p), codes);
      if constexpr (!kNibbles) LoadBytes(from.codes + First(p), There(p), codes);
      const float scale = There(p) > 0 ? LoadScale<Code<kSigned>>(from.extra, First(p) / Code<kSigned>::kBlock) : 0.0f;
      for (int k = 0; k < 4; ++k) to.x[k] = k < There(p) ? Code<kSigned>::Decode(codes[k]) * scale : 0.0f;
    }
  }

  // Largest magnitudes of 32 elements each, and the sums of squares (kernels/tile/gradients.h).
  SHARDMESH_RULE void Gather() {
    if constexpr (kQuantized) {
      if (lane_ < 16) {
        const int s = lane_ / 8, p = lane_ / 4 % 2, group = lane_ % 4;
        float largest = 0;
        for (int i = 0; i < 8; ++i) largest = Max(largest, memory_->largest[s][p][8 * group + i]);
        memory_->group_largest[s][p][group] = largest;
      }
    }
    if (run_.square_sums == nullptr || lane_ >= 8) return;
    float sum = 0;
    for (int i = lane_; i < kTileElements; i += 8) sum = MulAdd(memory_->gradient[i], memory_->gradient[i], sum);
    memory_->square_sums[lane_] = sum;
  }

  SHARDMESH_RULE void Draw() {
    if constexpr (kDraws) FillDraws(plan_.weight_draws, 0);
    if constexpr (kStateDraws > 0) {
      FillDraws(plan_.state_draws[0], 1);
      FillDraws(plan_.state_draws[1], 2);
    }
    if (lane_ == 0 && run_.square_sums != nullptr) {
      run_.square_sums[tile_] = TreeSumFixed<8>([&](int i) { return memory_->square_sums[i]; });
    }
  }

  // Lane l makes those of counter l % 8 of group l / 8 (kernels/tile/draws.h).
  SHARDMESH_RULE void FillDraws(const DrawStream& stream, int of) {
    const uint64_t number = DrawCounter(FirstElement() + 64 * static_cast<uint64_t>(lane_ / 8)) + lane_ % 8;
    uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), stream.tensor,
                         stream.step};
    Philox4x32(stream.key, words);
    for (int w = 0; w < 4; ++w) memory_->draws[of][lane_ / 8][w][lane_ % 8] = words[w];
  }
  SHARDMESH_RULE uint32_t DrawAt(int of, int p, int k) const { return DrawOf(of, First(p) + k); }
  SHARDMESH_RULE uint32_t DrawOf(int of, int i) const {
    const uint32_t word = memory_->draws[of][i / 64][i % 64 / 8 % 4][i % 8];
    return i % 64 < 32 ? word & 0xFFFFu : word >> 16;
  }

  SHARDMESH_RULE void Store() {
    SHARDMESH_UNROLL_WHOLE
    for (int p = 0; p < 2; ++p) {
      if (There(p) == 0) continue;
      StoreWeights(p);
      StoreState<true>(p);
      StoreState<false>(p);
    }
  }

  SHARDMESH_RULE void StoreWeights(int p) {
    constexpr int kBytes = kCodeBytes<kWeights>;
    const auto to = StreamAt<StoredTile>(run_.weights_out, plan_.weights_tile, tile_);
    Piece<kBytes> codes;
    Piece<kExtraBytes<kWeights>> extra;
    for (int k = 0; k < 4; ++k) {
      uint32_t draw = 0;
      if constexpr (NeedsDraws(kWeights)) draw = DrawAt(0, p, k);
      StoredWeights<float, kWeights>::Store(weights_[p].x[k], draw, {codes.bytes, extra.bytes}, k);
    }
    if (run_.changed != nullptr) {
      Piece<kBytes> before;
      before.Load(StreamAt<ConstStoredTile>(run_.weights_in, plan_.weights_tile, tile_).codes, First(p), There(p));
      if (!before.SameAs(codes, There(p))) memory_->changed = 1;  // whoever writes, writes this
    }
    codes.Store(to.codes, First(p), There(p));
    extra.Store(to.extra, First(p), There(p));
    for (int c = 0; c < run_.num_copies; ++c) {
      codes.Store(static_cast<uint8_t*>(run_.copies[c]) + plan_.weights_tile.codes * tile_, First(p), There(p));
    }
  }

  template <bool kSigned>
  SHARDMESH_RULE void StoreState(int p) {
    constexpr int s = kSigned ? 0 : 1;
    const auto to = StreamAt<StoredTile>(run_.states_out[s], plan_.states_tile, tile_);
    const Four& state = states_[s][p];
    if constexpr (kStates == StateFormat::kFp32) {
      StoreFour(state.x, reinterpret_cast<float*>(to.codes) + First(p), There(p));
    } else if constexpr (kStates == StateFormat::kBf16Sr) {
      uint16_t codes[4];
      for (int k = 0; k < 4; ++k) codes[k] = FloatToBf16Sr(state.x[k], DrawAt(1 + s, p, k));
      StoreFour(codes, reinterpret_cast<uint16_t*>(to.codes) + First(p), There(p));
    } else {
      using C = Code<kSigned>;
      const float scale = BlockScale<C>(Largest<C>(s, p));
      const float inverse = Divide(1.0f, scale);
      uint8_t codes[4];
      for (int k = 0; k < 4; ++k) {
        uint32_t draw = 0;
        if constexpr (C::kStochastic) draw = DrawOf(0, (First(p) + k) ^ 32);
        codes[k] = static_cast<uint8_t>(C::Encode(state.x[k] * inverse, draw));
      }
      if (First(p) % C::kBlock == 0) StoreScale<C>(scale, to.extra, First(p) / C::kBlock);
      if constexpr (kNibbles) StoreNibbles(codes, to.codes + First(p) / 2, There(p));
      if constexpr (!kNibbles) StoreFour(codes, to.codes + First(p), There(p));
    }
  }

  // The largest magnitude of the block that piece p lies in.
  template <class C>
  SHARDMESH_RULE float Largest(int s, int p) const {
    if constexpr (C::kBlock == 32) return memory_->group_largest[s][p][lane_ / 8];
    float largest = 0;
    for (int half = 0; half < 2; ++half) {
      if (C::kBlock == 128 && half != p) continue;
      for (int group = 0; group < 4; ++group) largest = Max(largest, memory_->group_largest[s][half][group]);
    }
    return largest;
  }

  const OptimizerContext& context_;
  const OptimizerRun& run_;
  const StepPlan& plan_;
  Memory* const memory_;
  const int64_t tile_;
  const int lane_;
  int elements_;  // of the tile
  Four weights_[2], states_[2][2];
};

// Calls visit(WarpBodyTag<WarpBody<weights, states>>()) for the formats of `context`. REQUIRES: HasWarpBody.
template <class Body>
struct WarpBodyTag {
  using Type = Body;
};
template <class Visit>
void WithWarpBody(const OptimizerContext& context, const Visit& visit) {
  WithFormat(context.weights, [&](auto weights) {
    WithStateFormat(context.states, [&](auto states) {
      visit(WarpBodyTag<WarpBody<decltype(weights)::value, decltype(states)::value>>());
    });
  });
}

}  // namespace shardmesh
