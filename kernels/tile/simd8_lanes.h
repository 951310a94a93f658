// Lanes and draws of 8 floats at a time (kernels/cpu/simd8.h). Only for translation units compiled for AVX2 and FMA.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/cpu/draws_simd.h"
#include "kernels/cpu/simd8.h"
#include "kernels/rules/minifloat.h"
#include "kernels/tile/draws.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh {

template <>
struct Lanes<simd8::F32x8> {
  using Number = simd8::F32x8;
  using Word = simd8::U32x8;
  static constexpr int kWidth = 8;
  static constexpr bool kHasMinifloats = true;

  static HWY_INLINE Number Load(const float* from) { return simd8::Load8(from); }
  static HWY_INLINE void Store(Number x, float* to) { simd8::Store8(x, to); }
  static HWY_INLINE Number LoadBf16(const uint16_t* from) { return simd8::Load8(from); }
  static HWY_INLINE Word LoadBytes(const uint8_t* from) { return simd8::LoadWords8(from); }
  static HWY_INLINE Word LoadHalves(const uint16_t* from) { return simd8::LoadWords8(from); }
  static HWY_INLINE Word LoadWords(const uint32_t* from) { return simd8::LoadWords8(from); }
  static HWY_INLINE void StoreBytes(Word x, uint8_t* to) { simd8::StoreBytes8(x, to); }
  static HWY_INLINE void StoreHalves(Word x, uint16_t* to) { simd8::StoreHalves8(x, to); }
  static HWY_INLINE float Largest(Number x) { return simd8::LargestLane(x); }
  static HWY_INLINE void Prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }
  static HWY_INLINE Word LoadNibbles(const uint8_t* from, int64_t i) {
    int32_t eight;
    std::memcpy(&eight, from + i / 2, sizeof(eight));
    const __m256i shifts = _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24);
    return Word(WordVec{_mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts)}) & Word(15u);
  }
  static HWY_INLINE void StoreNibbles4(const Word (&x)[4], uint8_t* to, int64_t i) {
    const __m256i pairs = _mm256_maddubs_epi16(simd8::PackBytes(x), _mm256_set1_epi16(0x0110));  // 16 * even + odd
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i / 2), _mm256_castsi256_si128(bytes));
  }
  static HWY_INLINE void StoreBytes4(const Word (&x)[4], uint8_t* to) { simd8::StoreBytes32(x, to); }

  // DecodeMinifloat, over kMinifloatRaw, and EncodeMinifloat between memory and registers; with kGuard, what is above 0
  // gets code 1 or more. Half floats have the exponent bits of both formats, E4M3's shifted by 8: the processor
  // converts them exactly.
  template <class Mini>
  static constexpr float kMinifloatRaw = std::is_same_v<Mini, E4M3> ? 256 : 1;
  template <class Mini, bool kSigned>  // not kSigned: the magnitude
  static HWY_INLINE Number LoadMinifloat(const uint8_t* from) {
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    if constexpr (std::is_same_v<Mini, UE5M3>) {
      bytes = _mm_min_epu8(bytes, _mm_set1_epi8(static_cast<char>(0xF7)));
      return Number(Vec{_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7))});
    }
    const __m128i codes = _mm_cvtepu8_epi16(bytes);
    static_assert(std::is_same_v<Mini, UE5M3> || std::is_same_v<Mini, E4M3>);
    const __m128i halves =
        _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(codes, 8), 1), _mm_set1_epi16(kSigned ? -0x4080 : 0x3F80));
    return Number(Vec{_mm256_cvtph_ps(halves)});
  }

  // EncodeMinifloatSr of a format without a sign, with the guard.
  template <class Mini>
  static HWY_INLINE void StoreMinifloatSr4(const Number (&x)[4], const Word (&draws)[4], uint8_t* to) {
    __m256i codes[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i halves =
          _mm256_set_m128i(HalfSr<Mini>(x[2 * i + 1], draws[2 * i + 1]), HalfSr<Mini>(x[2 * i], draws[2 * i]));
      codes[i] = _mm256_srli_epi16(_mm256_min_epu16(halves, _mm256_set1_epi16(kLargestHalf<Mini>)), 7);
    }
    const __m256i bytes = _mm256_packus_epi16(codes[0], codes[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(bytes, 0xD8));
  }

  template <class Mini, bool kGuard>
  static HWY_INLINE void StoreMinifloat4(const Number (&x)[4], uint8_t* to) {
    const __m256i low = Halves<Mini, kGuard>(x[0], x[1]), high = Halves<Mini, kGuard>(x[2], x[3]);
    const __m256i bytes = _mm256_packus_epi16(low, high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(bytes, 0xD8));
  }

 private:
  using Vec = simd8::hn::Vec<simd8::Floats>;
  using WordVec = simd8::hn::Vec<simd8::Words>;

  // x rounded to a number of the format (or, beyond the largest, more than that) by adding and taking off 1.5 times a
  // power of two whose last place is the format's; as a half float, exactly.
  template <class Mini, bool kGuard>
  static HWY_INLINE __m128i Half(Number x) {
    constexpr int kCut = 23 - Mini::kMantissa;
    const Number kept = Mini::kSigned ? Min(Number(Mini::kLargest), x) : x;  // a NaN has no sign
    const Word power = (FloatBits(kept) & Word(0x7F800000u)) + Word((uint32_t{kCut} << 23) | 0x400000u);
    const Number magic = Max(FloatOfBits(power), Number(1.5f * PowerOfTwo(1 - Mini::kBias + kCut)));
    Number rounded = (kept + magic) - magic;
    if constexpr (Mini::kSigned) {
      rounded = FloatOfBits(FloatBits(rounded) | (FloatBits(kept) & Word(0x80000000u)));
    }
    if constexpr (kGuard) {
      const Number least =
          Select(Number(0.0f) < x, Number(PowerOfTwo(1 - Mini::kBias - Mini::kMantissa)), Number(0.0f));
      rounded = Max(least, rounded);
    }
    if constexpr (Mini::kBias == 7) rounded = rounded * Number(1.0f / 256);
    return _mm256_cvtps_ph(rounded.lanes.raw, _MM_FROUND_TO_NEAREST_INT);
  }

  // The half float at or below x moved up by a draw's part of a step: its upper bits are the code.
  template <class Mini>
  static HWY_INLINE __m128i HalfSr(Number x, Word draw) {
    static_assert(std::is_same_v<Mini, UE5M3>);
    const Number moved = MulAdd(IntToFloat(draw), StepOfMinifloat<Mini>(x) * Number(PowerOfTwo(-16)), x);
    const Number least = Select(Number(0.0f) < x, Number(PowerOfTwo(1 - Mini::kBias - Mini::kMantissa)), Number(0.0f));
    return _mm256_cvtps_ph(Max(least, moved).lanes.raw, _MM_FROUND_TO_ZERO);
  }
  template <class Mini>
  static constexpr uint16_t kLargestHalf = Mini::kSigned ? 0x3F00 : 0x7B80;

  // The codes of 16 numbers, as words of 16 bits.
  template <class Mini, bool kGuard>
  static HWY_INLINE __m256i Halves(Number first, Number second) {
    const __m256i halves = _mm256_set_m128i(Half<Mini, kGuard>(second), Half<Mini, kGuard>(first));
    const __m256i absolute = Mini::kSigned ? _mm256_and_si256(halves, _mm256_set1_epi16(0x7FFF)) : halves;
    const __m256i codes = _mm256_srli_epi16(_mm256_min_epu16(absolute, _mm256_set1_epi16(kLargestHalf<Mini>)), 7);
    if constexpr (!Mini::kSigned) return codes;
    return _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi16(halves, 8), _mm256_set1_epi16(0x80)));
  }
};

template <>
struct DrawFiller<simd8::F32x8> {
  static HWY_INLINE void Fill(const DrawStream& stream, uint64_t first_element, TileDraws& draws) {
    simd8::GroupDraws group_draws(stream.key, stream.tensor, stream.step);
    for (int group = 0; group < kTileElements / 64; ++group) {
      simd8::U32x8 words[4];
      group_draws.Fill(first_element + 64 * static_cast<uint64_t>(group), words);
      simd8::KeepDraws(words, draws.words[group]);
    }
  }
};

}  // namespace shardmesh
HWY_AFTER_NAMESPACE();
