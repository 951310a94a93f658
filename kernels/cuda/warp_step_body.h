// The Adam and AdamW step of one tile as 32 threads (a warp) do it together: each steps eight elements in registers and
// shares with the others only the largest magnitudes of quantized states and the random draws. It asks for all that it
// reads at once, makes the draws meanwhile, and writes nothing before kStorePhase. Formats are known when it is
// compiled. The bits are those of the other implementations: rules and formats are the same code (kernels/rules/,
// kernels/tile/) but for 8-bit floats (kernels/cuda/warp_codes.h). Compiled for the CPU too, where a test walks the
// phases thread by thread.
//
//   WarpBody<...> body(context, run, plan, tile, memory, lane) in each of kLanes threads, then
//   for each phase p of kPhases: every thread calls Phase(p), then all wait for each other
#pragma once

#include "core/base/reduction.h"
#include "kernels/cuda/step_list.h"
#include "kernels/cuda/warp_codes.h"
#include "kernels/cuda/warp_pieces.h"
#include "kernels/rules/optimizers.h"
#include "kernels/tile/states.h"

namespace shardmesh {

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
  // Of 64 elements: 32 words, and four that keep the groups' words in different banks.
  alignas(16) uint32_t draws[kDraws][kTileElements / 64][36];
  // As it was copied or summed; then, where sums of squares are told, before clipping.
  alignas(16) float gradient[kTileElements];
  alignas(16) float largest[2][32];       // [state][lane]
  alignas(16) float group_largest[2][8];  // the same of 4 lanes, 32 elements
  float square_sums[8];
  uint32_t changed;
};

template <WeightFormat kWeights, StateFormat kStates>
class WarpBody {
 public:
  static constexpr int kLanes = 32, kPhases = 5, kStorePhase = 3;
  static constexpr int kStateDraws = kStates == StateFormat::kBf16Sr ? 2 : 0;
  using Memory = WarpMemory<1 + kStateDraws>;

  SHARDMESH_RULE WarpBody(const OptimizerContext& context, const OptimizerRun& run, const StepPlan& plan, int64_t tile,
                          Memory* memory, int lane)
      : context_(context), run_(run), plan_(plan), memory_(memory), tile_(tile), lane_(lane) {
    const int64_t left = run.num_elements - tile * kTileElements;
    elements_ = static_cast<int>(left < kTileElements ? left : kTileElements);
  }

  SHARDMESH_RULE void Phase(int phase) {
    if (phase == 0) Load();
    if (phase == 1) Update();
    if (phase == 2) Gather();
    if (phase == 3) Store();
    if (phase == 4 && lane_ == 0 && run_.changed != nullptr) run_.changed[tile_] = memory_->changed != 0;
  }

 private:
  template <bool kSigned>
  using Code = typename StateCode<float, kStates, kSigned>::Type;
  static constexpr bool kQuantized = kStates != StateFormat::kFp32 && kStates != StateFormat::kBf16Sr;
  static constexpr bool kNibbles = kStates == StateFormat::kDyn4;
  static constexpr bool kDraws = NeedsDraws(kWeights) || NeedsDraws(kStates);
  // In a row where that makes fewer loads, and a block's largest magnitude is the business of few threads.
  static constexpr bool kInARow = kQuantized;
  static constexpr int kStateBytes = kStates == StateFormat::kFp32 ? 4 : kStates == StateFormat::kBf16Sr ? 2 : 1;
  using WeightCodes = Eight<kCodeBytes<kWeights>, kInARow>;
  using WeightExtra = Eight<kExtraBytes<kWeights>, kInARow>;
  using StateCodes = std::conditional_t<kNibbles, EightNibbles, Eight<kStateBytes, kInARow>>;
  static constexpr bool kHasExtra = kExtraBytes<kWeights> != 0;
  static constexpr int64_t kStateTile = kNibbles ? kTileElements / 2 : kStateBytes * kTileElements;

  SHARDMESH_RULE static int At(int lane, int k) { return Places<kInARow>::At(lane, k); }

  // Where the tile's part of a stream begins, of which a tile has so many bytes.
  SHARDMESH_RULE uint8_t* TileOf(void* stream, int64_t tile_bytes) const {
    return static_cast<uint8_t*>(stream) + tile_bytes * tile_;
  }
  SHARDMESH_RULE uint8_t* CodesOf(void* weights) const { return TileOf(weights, kCodeBytes<kWeights> * kTileElements); }
  SHARDMESH_RULE uint8_t* ExtraOf(void* extra) const { return TileOf(extra, kExtraBytes<kWeights> * kTileElements); }
  SHARDMESH_RULE uint8_t* StateOf(void* codes) const { return TileOf(codes, kStateTile); }
  template <class C>
  SHARDMESH_RULE uint8_t* ScalesOf(void* scales) const {
    return TileOf(scales, (kShortScales<C> ? 2 : 4) * (kTileElements / C::kBlock));
  }

  SHARDMESH_RULE int64_t FirstGradient() const { return tile_ * kTileElements; }
  SHARDMESH_RULE bool WideGradients() const { return context_.gradients == Format::kFp32; }

  // Asks for everything; then makes the draws.
  SHARDMESH_RULE void Load() {
    const bool wide = WideGradients();
    const auto* const slot = static_cast<const uint8_t*>(run_.gradients[0]) + FirstGradient() * (wide ? 4 : 2);
    const bool direct = Opaque((static_cast<uint32_t>(run_.num_slots ^ 1) | Missing() | Low(slot) % 16) == 0);
    if (!direct) {
      // The sum takes its time: what it does not read at once, and what is read behind it, is on its way meanwhile.
      if (Missing() == 0) {
        SHARDMESH_UNROLL_NOT
        for (int g = 0; g < run_.num_slots; ++g) {
          const auto* const tile = static_cast<const uint8_t*>(run_.gradients[g]) + FirstGradient() * (wide ? 4 : 2);
          AskFor(tile, (wide ? 4 : 2) * kTileElements, lane_);
        }
        AskFor(CodesOf(run_.weights_in.codes), kCodeBytes<kWeights> * kTileElements, lane_);
        for (int s = 0; s < 2; ++s) AskFor(StateOf(run_.states_in[s].codes), kStateTile, lane_);
      }
      SumSlots<kInARow>(run_.gradients, run_.num_slots, wide, FirstGradient(), elements_, lane_, memory_->gradient);
    }
    halves_ = direct && !wide;

    const StoredRun weights = run_.weights_in, states[2] = {run_.states_in[0], run_.states_in[1]};
    // All elements are there, and every stream begins at a multiple of 16: so do their tiles.
    uint32_t bits = Low(weights.codes) | Low(run_.weights_out.codes);
    if (kHasExtra) bits |= Low(weights.extra) | Low(run_.weights_out.extra);
    for (int s = 0; s < 2; ++s) bits |= Low(states[s].codes) | Low(run_.states_out[s].codes) | Low(run_.copies[s]);
    whole_ = Opaque((bits % 16 | Missing()) == 0);
    if (direct) CopyGradient(slot, wide);
    if (whole_) {
      codes_.LoadWhole(CodesOf(weights.codes), lane_);
      extra_.LoadWhole(ExtraOf(weights.extra), lane_);
      for (int s = 0; s < 2; ++s) stored_[s].LoadWhole(StateOf(states[s].codes), lane_);
    } else {
      codes_.LoadPart(CodesOf(weights.codes), lane_, elements_);
      extra_.LoadPart(ExtraOf(weights.extra), lane_, elements_);
      for (int s = 0; s < 2; ++s) stored_[s].LoadPart(StateOf(states[s].codes), lane_, elements_);
    }
    if constexpr (kQuantized) {
      scales_[0] = LoadScaleBits<true>(states[0].extra);
      scales_[1] = LoadScaleBits<false>(states[1].extra);
    }
    if (lane_ == 0) memory_->changed = 0;
    if constexpr (kDraws) FillDraws(plan_.weight_draws, 0);
    if constexpr (kStateDraws > 0) {
      FillDraws(plan_.state_draws[0], 1);
      FillDraws(plan_.state_draws[1], 2);
    }
  }
  // How many elements are not there.
  SHARDMESH_RULE uint32_t Missing() const { return static_cast<uint32_t>(kTileElements - elements_); }
  SHARDMESH_RULE static uint32_t Low(const void* pointer) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer));
  }

  // Into a thread's own elements of the shared gradient: floats where they belong, halves in the upper ends of pieces,
  // where nobody overwrites them before they are read.
  SHARDMESH_RULE uint8_t* Piece(int p) const {
    return reinterpret_cast<uint8_t*>(memory_->gradient + At(lane_, 4 * p));
  }
  SHARDMESH_RULE uint8_t* Halves(int p) const { return kInARow ? Piece(1) + 8 * p : Piece(p) + 8; }
  SHARDMESH_RULE void CopyGradient(const uint8_t* slot, bool wide) const {
    if (wide) {
      for (int p = 0; p < 2; ++p) CopyWide<16>(slot + 4 * At(lane_, 4 * p), Piece(p));
    } else if (kInARow) {
      CopyWide<16>(slot + 2 * At(lane_, 0), Halves(0));
    } else {
      for (int p = 0; p < 2; ++p) CopyWide<8>(slot + 2 * At(lane_, 4 * p), Halves(p));
    }
  }
  // Elements [4 p, 4 p + 4), before they are divided.
  SHARDMESH_RULE Four GradientOf(int p) const {
    Four sum;
    if (halves_) {
      const auto pairs = *reinterpret_cast<const WideWords<8>*>(Halves(p));
      return Bf16sOf(pairs.words);
    }
    LoadShared(memory_->gradient + At(lane_, 4 * p), sum.x);
    return sum;
  }

  // As they are stored. Of elements that are not there: 0.
  template <bool kSigned>
  SHARDMESH_RULE uint32_t LoadScaleBits(void* scales) const {
    using C = Code<kSigned>;
    using Stored = std::conditional_t<kShortScales<C>, uint16_t, uint32_t>;
    const int block = static_cast<int>(At(lane_, 0) / C::kBlock);
    return At(lane_, 0) < elements_ ? reinterpret_cast<const Stored*>(ScalesOf<C>(scales))[block] : 0;
  }
  template <bool kSigned>
  SHARDMESH_RULE float ScaleOf() const {
    uint32_t bits = scales_[kSigned ? 0 : 1];
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(bits));
#endif
    return FloatOfBits(kShortScales<Code<kSigned>> ? bits << 16 : bits);
  }

  // Lane l makes those of counter l % 8 of group l / 8 (kernels/tile/draws.h).
  SHARDMESH_RULE void FillDraws(const DrawStream& stream, int of) {
    const uint64_t first = run_.first_element + static_cast<uint64_t>(tile_) * kTileElements;
    const uint64_t number = DrawCounter(first + 64 * static_cast<uint64_t>(lane_ / 8)) + lane_ % 8;
    uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), stream.tensor,
                         stream.step};
    WarpPhilox(stream.key, words);
    for (int w = 0; w < 4; ++w) memory_->draws[of][lane_ / 8][8 * w + lane_ % 8] = words[w];
  }

  SHARDMESH_RULE void Update() {
    AwaitCopies();
    const StepConstants<Four> constants(context_.scalars);
    const WeightCodes codes = codes_.Settled();
    const WeightExtra extra = extra_.Settled();
    const StateCodes stored[2] = {stored_[0].Settled(), stored_[1].Settled()};
    float scales[2] = {1, 1}, largest[2] = {0, 0};
    if constexpr (kQuantized) {
      scales[0] = ScaleOf<true>();
      scales[1] = ScaleOf<false>();
    }
    SHARDMESH_UNROLL_WHOLE
    for (int p = 0; p < 2; ++p) {
      Four gradient = GradientOf(p) * Four(run_.divide_scale);
      weights_[p] = WeightsOf(codes, extra, p);
      states_[0][p] = Decoded<true>(stored[0].bytes, scales[0], p);
      states_[1][p] = Decoded<false>(stored[1].bytes, scales[1], p);
      if (run_.square_sums != nullptr) {
        for (int k = 0; k < 4; ++k) memory_->gradient[At(lane_, 4 * p + k)] = gradient.x[k];
      }
      gradient = gradient * Four(plan_.gradient_scale);
      if (context_.scalars.coupled_decay != 0) {
        gradient = MulAdd(Four(context_.scalars.coupled_decay), weights_[p], gradient);
      }
      weights_[p] = AdamUpdate(constants, weights_[p], gradient, states_[0][p], states_[1][p]);
      for (int s = 0; s < 2; ++s) {
        for (int k = 0; k < 4; ++k) largest[s] = LargerMagnitude(largest[s], states_[s][p].x[k]);
      }
    }
    if constexpr (kQuantized) {
      for (int s = 0; s < 2; ++s) memory_->largest[s][lane_] = largest[s];
    }
  }

  // Elements [4 p, 4 p + 4) of the weights: those of kernels/tile/weights.h, from words.
  SHARDMESH_RULE static Four WeightsOf(const WeightCodes& codes, const WeightExtra& extra, int p) {
    if constexpr (kWeights == WeightFormat::kFp32 || kWeights == WeightFormat::kBf16Plus16) {
      return Four::Each(
          [&](int k) { return StoredWeights<float, kWeights>::Load({codes.bytes, extra.bytes}, 4 * p + k); });
    } else {
      uint32_t pairs[2];
      memcpy(pairs, codes.bytes + 8 * p, sizeof(pairs));
      const Four upper = Bf16sOf(pairs);
      if constexpr (kWeights != WeightFormat::kBf16Plus8Sr) return upper;
      if constexpr (kWeights == WeightFormat::kBf16Plus8Sr) {
        uint32_t bytes;
        memcpy(&bytes, extra.bytes + 4 * p, sizeof(bytes));
        // A byte and its sign above zeros.
        const uint32_t remainders[4] = {Bytes<0x8804>(bytes, 0), Bytes<0x9914>(bytes, 0), Bytes<0xAA24>(bytes, 0),
                                        Bytes<0xBB34>(bytes, 0)};
        return Four::Each([&](int k) { return FloatOfBits(FloatBits(upper.x[k]) + remainders[k]); });
      }
    }
  }

  SHARDMESH_RULE bool IsThere(int p, int k) const { return At(lane_, 4 * p + k) < elements_; }

  // Elements [4 p, 4 p + 4) of a state.
  template <bool kSigned>
  SHARDMESH_RULE Four Decoded(const uint8_t* bytes, float scale, int p) const {
    Four four;
    if constexpr (kStates == StateFormat::kFp32) {
      memcpy(four.x, bytes + 16 * p, sizeof(four.x));
    } else if constexpr (kStates == StateFormat::kBf16Sr) {
      uint16_t codes[4];
      memcpy(codes, bytes + 8 * p, sizeof(codes));
      four = Four::Each([&](int k) { return Bf16ToFloat(codes[k]); });
    } else {
      using C = Code<kSigned>;
      if constexpr (kIsFp8<C>) {
        uint32_t word;
        memcpy(&word, bytes + 4 * p, sizeof(word));
        DecodeFp8<C, kSigned>(word, four.x);
      } else if constexpr (kNibbles) {
        four = Four::Each([&](int k) {
          const uint8_t byte = bytes[2 * p + k / 2];
          return C::Decode(uint32_t{byte} >> (k % 2 == 0 ? 4 : 0) & 15u);
        });
      } else {
        four = Four::Each([&](int k) { return C::Decode(uint32_t{bytes[4 * p + k]}); });
      }
      four = four * Four(scale);
      // A code of 0 is a level of other formats.
      if (!kIsFp8<C> && !whole_) four = Four::Each([&](int k) { return IsThere(p, k) ? four.x[k] : 0.0f; });
    }
    return four;
  }

  // Largest magnitudes of 32 elements each, and the sums of squares (kernels/tile/gradients.h).
  SHARDMESH_RULE void Gather() {
    if constexpr (kQuantized) {
      if (Code<true>::kBlock > 32 && lane_ < 16) {
        const int s = lane_ / 8, group = lane_ % 8;
        memory_->group_largest[s][group] = LargestOf<4>(memory_->largest[s] + 4 * group);
      }
    }
    if (run_.square_sums == nullptr || lane_ >= 8) return;
    float sum = 0;
    for (int i = lane_; i < kTileElements; i += 8) sum = MulAdd(memory_->gradient[i], memory_->gradient[i], sum);
    memory_->square_sums[lane_] = sum;
  }

  // `from`: a multiple of 16 bytes.
  template <int kCount>
  SHARDMESH_RULE static float LargestOf(const float* from) {
    float largest = 0;
    SHARDMESH_UNROLL_WHOLE
    for (int i = 0; i < kCount; i += 4) {
      float values[4];
      LoadShared(from + i, values);
      for (int k = 0; k < 4; ++k) largest = LargerMagnitude(largest, values[k]);
    }
    return largest;
  }

  SHARDMESH_RULE void Store() {
    if (lane_ == 0 && run_.square_sums != nullptr) {
      run_.square_sums[tile_] = TreeSumFixed<8>([&](int i) { return memory_->square_sums[i]; });
    }
    StoreWeights();
    StoreState<true>();
    StoreState<false>();
  }

  // Of elements [4 p, 4 p + 4): the words that have their draws, in one of their halves.
  struct DrawWords {
    alignas(16) uint32_t words[4];
  };
  SHARDMESH_RULE DrawWords WordsOf(int of, int p) const {
    const int i = At(lane_, 4 * p);
    DrawWords four;
    LoadShared(memory_->draws[of][i / 64] + i % 32, four.words);
    return four;
  }
  SHARDMESH_RULE bool IsUpper() const { return At(lane_, 0) % 64 >= 32; }  // the same for all eight
  SHARDMESH_RULE uint32_t DrawOf(uint32_t word) const { return HalfBelow(word, IsUpper(), 0); }
  // Of element i ^ 32, as a float: the bits of 2^23 + draw, less 2^23.
  SHARDMESH_RULE float OtherDrawOf(uint32_t word) const {
    return FloatOfBits(HalfBelow(word, !IsUpper(), 0x4B000000u)) - 0x1p23f;
  }
  // Elements [4 p, 4 p + 4) in bf16, rounded by the draws of a purpose.
  SHARDMESH_RULE void RoundBf16(const Four& x, int of, int p, uint8_t* to) const {
    const DrawWords draws = WordsOf(of, p);
    uint32_t pairs[2];
    for (int i = 0; i < 2; ++i) {
      pairs[i] = UpperHalves(Bf16BitsSr(x.x[2 * i], DrawOf(draws.words[2 * i])),
                             Bf16BitsSr(x.x[2 * i + 1], DrawOf(draws.words[2 * i + 1])));
    }
    memcpy(to, pairs, sizeof(pairs));
  }

  template <class Pieces>
  SHARDMESH_RULE void Put(const Pieces& pieces, uint8_t* tile) const {
    whole_ ? pieces.StoreWhole(tile, lane_) : pieces.StorePart(tile, lane_, elements_);
  }

  SHARDMESH_RULE void StoreWeights() {
    WeightCodes codes;
    WeightExtra extra;
    SHARDMESH_UNROLL_WHOLE
    for (int p = 0; p < 2; ++p) {
      if constexpr (kWeights == WeightFormat::kBf16Sr) {
        RoundBf16(weights_[p], 0, p, codes.bytes + 8 * p);
      } else if constexpr (kWeights == WeightFormat::kBf16Plus8Sr) {
        Split(weights_[p], p, codes, extra);
      } else {
        SHARDMESH_UNROLL_WHOLE
        for (int k = 0; k < 4; ++k) {
          StoredWeights<float, kWeights>::Store(weights_[p].x[k], 0u, {codes.bytes, extra.bytes}, 4 * p + k);
        }
      }
    }
    if (run_.changed != nullptr && !codes.IsIn(CodesOf(run_.weights_in.codes), lane_, elements_)) {
      memory_->changed = 1;  // whoever writes, writes this
    }
    Put(codes, CodesOf(run_.weights_out.codes));
    Put(extra, ExtraOf(run_.weights_out.extra));
    for (int c = 0; c < run_.num_copies; ++c) Put(codes, CodesOf(run_.copies[c]));
  }

  // SplitStochastic of elements [4 p, 4 p + 4). If all are finite the draw's carry is the one into the upper part.
  SHARDMESH_RULE void Split(const Four& x, int p, WeightCodes& codes, WeightExtra& extra) const {
    const DrawWords draws = WordsOf(0, p);
    uint32_t sums[4], upper[4];  // the parts: the second byte, the upper half
    bool finite = true;
    SHARDMESH_UNROLL_WHOLE
    for (int k = 0; k < 4; ++k) {
      finite &= Abs(x.x[k]) < FloatOfBits(0x7F800000u);
      sums[k] = FloatBits(x.x[k]) + ByteOfHalf(draws.words[k], IsUpper());
      upper[k] = sums[k] + 0x8000u;
    }
    if (!finite) {
      SHARDMESH_UNROLL_WHOLE
      for (int k = 0; k < 4; ++k) {
        const auto split = SplitStochastic(x.x[k], ByteOfHalf(draws.words[k], IsUpper()));
        sums[k] = split.remainder << 8;
        upper[k] = split.upper << 16;
      }
    }
    const uint32_t bytes = BytesOfFour<1>(sums);
    const uint32_t pairs[2] = {UpperHalves(upper[0], upper[1]), UpperHalves(upper[2], upper[3])};
    memcpy(extra.bytes + 4 * p, &bytes, sizeof(bytes));
    memcpy(codes.bytes + 8 * p, pairs, sizeof(pairs));
  }

  template <bool kSigned>
  SHARDMESH_RULE void StoreState() {
    constexpr int s = kSigned ? 0 : 1;
    StateCodes codes;
    if constexpr (kStates == StateFormat::kFp32) {
      for (int p = 0; p < 2; ++p) memcpy(codes.bytes + 16 * p, states_[s][p].x, 16);
    } else if constexpr (kStates == StateFormat::kBf16Sr) {
      SHARDMESH_UNROLL_WHOLE
      for (int p = 0; p < 2; ++p) RoundBf16(states_[s][p], 1 + s, p, codes.bytes + 8 * p);
    } else {
      using C = Code<kSigned>;
      const float largest = Largest<C>(s), scale = BlockScale<C>(largest);
      const float inverse = InverseOfScale<C>(scale);
      if (At(lane_, 0) % C::kBlock == 0 && At(lane_, 0) < elements_) {
        StoreScale<C>(scale, ScalesOf<C>(run_.states_out[s].extra), At(lane_, 0) / C::kBlock);
      }
      SHARDMESH_UNROLL_WHOLE
      for (int p = 0; p < 2; ++p) {
        if constexpr (C::kStochastic) {
          using Mini = typename C::Mini;
          if (largest <= scale * Mini::kLargest && AreNormal<Mini>(states_[s][p].x, scale)) {
            const uint32_t word = EncodeNormalSr<Mini>(states_[s][p].x, inverse, WordsOf(0, p).words, !IsUpper());
            memcpy(codes.bytes + 4 * p, &word, sizeof(word));
            continue;
          }
        }
        Encode<C>(states_[s][p] * Four(inverse), p, codes);
      }
    }
    Put(codes, StateOf(run_.states_out[s].codes));
  }

  // Elements [4 p, 4 p + 4), over their scale.
  template <class C>
  SHARDMESH_RULE void Encode(const Four& y, int p, StateCodes& codes) const {
    uint32_t words[4] = {};
    if constexpr (C::kStochastic) {
      const DrawWords draws = WordsOf(0, p);
      for (int k = 0; k < 4; ++k) words[k] = EncodeFp8Sr<typename C::Mini>(y.x[k], OtherDrawOf(draws.words[k]));
    } else if constexpr (kIsFp8<C>) {
      const uint32_t word = EncodeFp8<C>(y.x);
      memcpy(codes.bytes + 4 * p, &word, sizeof(word));
      return;
    } else {
      for (int k = 0; k < 4; ++k) words[k] = C::Encode(y.x[k], 0u);
    }
    if constexpr (kNibbles) {
      for (int b = 0; b < 2; ++b) codes.bytes[2 * p + b] = static_cast<uint8_t>(words[2 * b] << 4 | words[2 * b + 1]);
    } else {
      const uint32_t word = BytesOfFour<0>(words);
      memcpy(codes.bytes + 4 * p, &word, sizeof(word));
    }
  }

  // The largest magnitude of the block that the thread's elements lie in.
  template <class C>
  SHARDMESH_RULE float Largest(int s) const {
    if constexpr (C::kBlock == 32) return LargestOf<4>(memory_->largest[s] + lane_ / 4 * 4);
    if constexpr (C::kBlock == 128) return LargestOf<4>(memory_->group_largest[s] + lane_ / 16 * 4);
    if constexpr (C::kBlock == 256) return LargestOf<8>(memory_->group_largest[s]);
  }

  const OptimizerContext& context_;
  const OptimizerRun& run_;
  const StepPlan& plan_;
  Memory* const memory_;
  const int64_t tile_;
  const int lane_;
  int elements_;  // of the tile
  bool whole_ = false, halves_ = false;
  // As they are stored, from Load to Update.
  WeightCodes codes_;
  WeightExtra extra_;
  StateCodes stored_[2];
  uint32_t scales_[2];
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
