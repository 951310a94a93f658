// What a thread of kernels/cuda/warp_step_body.h moves of a stream: eight elements, in one or two loads or stores where
// the tile is whole and its address allows it, else one by one. Elements that are not there (behind the last of a
// tensor) are neither read nor written. Loads do not wait for each other: whether a tile is whole is asked once.
// And Four, the number type that the threads compute with. Pure functions, thread-safe.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/base/reduction.h"
#include "kernels/rules/number.h"
#include "kernels/tile/plan.h"
#include "kernels/tile/states.h"

// Before a loop over registers: arrays must not be indexed by what is known at run time only. And before a loop that
// is short where it counts.
#ifdef __CUDACC__
#define SHARDMESH_UNROLL_WHOLE _Pragma("unroll")
#define SHARDMESH_UNROLL_NOT _Pragma("unroll 1")
#else
#define SHARDMESH_UNROLL_WHOLE
#define SHARDMESH_UNROLL_NOT
#endif

namespace shardmesh {

// Four floats as a number type of the element rules (kernels/rules/number.h): for those of AdamW.
struct Four {
  float x[4];

  Four() = default;
  SHARDMESH_RULE explicit Four(float value) : x{value, value, value, value} {}
  SHARDMESH_RULE Four(float a, float b, float c, float d) : x{a, b, c, d} {}

  template <class Rule>
  SHARDMESH_RULE static Four Each(const Rule& rule) {
    return Four(rule(0), rule(1), rule(2), rule(3));
  }
  SHARDMESH_RULE friend Four operator+(const Four& a, const Four& b) {
    return Each([&](int k) { return a.x[k] + b.x[k]; });
  }
  SHARDMESH_RULE friend Four operator*(const Four& a, const Four& b) {
    return Each([&](int k) { return a.x[k] * b.x[k]; });
  }
};

SHARDMESH_RULE Four MulAdd(const Four& a, const Four& b, const Four& c) {
  return Four::Each([&](int k) { return MulAdd(a.x[k], b.x[k], c.x[k]); });
}

// On a device: the instructions that the compiler has for a square root, for four at once, so that they do not wait for
// each other. Where one of the four needs another way, which shows in its result, all take the compiler's.
SHARDMESH_RULE Four Sqrt(const Four& a) {
#ifdef __CUDA_ARCH__
  bool right = true;
  Four root;
  SHARDMESH_UNROLL_WHOLE
  for (int k = 0; k < 4; ++k) {
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a.x[k]));
    const float near = a.x[k] * fabsf(inverse);  // a negative number too small for the inverse becomes a NaN below
    root.x[k] = __fmaf_rn(__fmaf_rn(-near, near, a.x[k]), inverse * 0.5f, near);
    right &= root.x[k] >= 0x1p-50f;  // the remainder was exact; neither NaN nor infinity came of the inverse
  }
  if (right) return root;
#endif
  return Four::Each([&](int k) { return Sqrt(a.x[k]); });
}

// As Sqrt: two corrections by exact remainders. They are exact where divisor and quotient are far from the smallest
// numbers.
SHARDMESH_RULE Four Divide(const Four& a, const Four& b) {
#ifdef __CUDA_ARCH__
  bool right = true;
  float inverses = 0;
  Four quotient;
  SHARDMESH_UNROLL_WHOLE
  for (int k = 0; k < 4; ++k) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b.x[k]));
    inverses += fabsf(inverse);
    inverse = __fmaf_rn(inverse, __fmaf_rn(-b.x[k], inverse, 1.0f), inverse);
    float q = a.x[k] * inverse;
    q = __fmaf_rn(inverse, __fmaf_rn(-b.x[k], q, a.x[k]), q);
    quotient.x[k] = __fmaf_rn(inverse, __fmaf_rn(-b.x[k], q, a.x[k]), q);
    right &= fabsf(quotient.x[k]) >= 0x1p-60f;  // what is too large becomes a NaN on the way
  }
  right &= inverses <= 0x1p40f;
  if (right) return quotient;
#endif
  return Four::Each([&](int k) { return Divide(a.x[k], b.x[k]); });
}

// The larger of `largest` and a magnitude; a NaN does not count.
SHARDMESH_RULE float LargerMagnitude(float largest, float x) {
#ifdef __CUDA_ARCH__
  return fmaxf(largest, fabsf(x));
#else
  return Max(largest, Abs(x));
#endif
}

// A load or store of 4, 8 or 16 bytes of a stream, of whatever lies there. Hints that a stream passes by once made it
// slower.
template <int kBytes>
struct __attribute__((may_alias, aligned(kBytes))) WideWords {
  uint32_t words[kBytes / 4];
};
template <int kBytes>
SHARDMESH_RULE WideWords<kBytes> LoadWide(const uint8_t* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#ifdef __CUDA_ARCH__
  if constexpr (kBytes == 4) return {{__ldca(reinterpret_cast<const uint32_t*>(from))}};
  if constexpr (kBytes == 8) {
    const uint2 wide = __ldca(reinterpret_cast<const uint2*>(from));
    return {{wide.x, wide.y}};
  }
  if constexpr (kBytes == 16) {
    const uint4 wide = __ldca(reinterpret_cast<const uint4*>(from));
    return {{wide.x, wide.y, wide.z, wide.w}};
  }
#else
  return *reinterpret_cast<const WideWords<kBytes>*>(from);
#endif
}
template <int kBytes>
SHARDMESH_RULE void StoreWide(const WideWords<kBytes>& wide, uint8_t* to) {
#ifdef __CUDA_ARCH__
  if constexpr (kBytes == 4) __stwb(reinterpret_cast<uint32_t*>(to), wide.words[0]);
  if constexpr (kBytes == 8) __stwb(reinterpret_cast<uint2*>(to), make_uint2(wide.words[0], wide.words[1]));
  if constexpr (kBytes == 16) {
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(wide.words[0], wide.words[1], wide.words[2], wide.words[3]));
  }
#else
  *reinterpret_cast<WideWords<kBytes>*>(to) = wide;
#endif
}

// Four words of memory that threads share, at a multiple of 16 bytes.
template <class Word>
SHARDMESH_RULE void LoadShared(const Word* from, Word (&to)[4]) {
  const auto wide = *reinterpret_cast<const WideWords<16>*>(from);
  memcpy(to, &wide, sizeof(to));
}
template <class Word>
SHARDMESH_RULE void StoreShared(const Word (&from)[4], Word* to) {
  WideWords<16> wide;
  memcpy(&wide, from, sizeof(from));
  *reinterpret_cast<WideWords<16>*>(to) = wide;
}

// 8 or 16 bytes of a stream into memory that threads share, which the thread does not wait for. AwaitCopies before they are read,
// by the same thread.
template <int kBytes>
SHARDMESH_RULE void CopyWide(const uint8_t* from, uint8_t* to) {
#ifdef __CUDA_ARCH__
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const auto global = __cvta_generic_to_global(from);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(shared), "l"(global), "n"(kBytes) : "memory");
  }
#else
  memcpy(to, from, kBytes);
#endif
}
SHARDMESH_RULE void AwaitCopies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

// Asks for some bytes, a line each of 32 threads, which are read later.
SHARDMESH_RULE void AskFor(const void* from, int bytes, int lane) {
#ifdef __CUDA_ARCH__
  constexpr int kLine = 128;
  const auto* line = static_cast<const uint8_t*>(from) + lane * kLine;
  if (lane * kLine < bytes) asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(line)));
#endif
}

// A compiler that knows what a condition is made of asks for all of it again wherever it is used.
SHARDMESH_RULE bool Opaque(bool condition) {
#ifdef __CUDA_ARCH__
  int value = condition ? 1 : 0;
  asm("" : "+r"(value));
  return value != 0;
#else
  return condition;
#endif
}

// Four bytes of two words in one. A digit of the selector for each: which of the eight, those of `first` below; 8 more:
// that one's sign, eight times.
template <uint32_t kSelector>
SHARDMESH_RULE uint32_t Bytes(uint32_t first, uint32_t second) {
#ifdef __CUDA_ARCH__
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(first), "r"(second), "n"(kSelector));
  return word;
#else
  const uint64_t both = first | uint64_t{second} << 32;
  uint32_t word = 0;
  for (int b = 0; b < 4; ++b) {
    const uint32_t digit = kSelector >> (4 * b) & 15u;
    const auto byte = static_cast<uint8_t>(both >> (8 * (digit & 7u)));
    word |= uint32_t{digit < 8 ? byte : byte < 0x80 ? uint8_t{0} : uint8_t{0xFF}} << (8 * b);
  }
  return word;
#endif
}
// The same by one of two selectors, for the lower or the upper half of a word.
template <uint32_t kLower, uint32_t kUpper>
SHARDMESH_RULE uint32_t BytesOfHalf(uint32_t word, bool upper, uint32_t second) {
#ifdef __CUDA_ARCH__
  return __byte_perm(word, second, upper ? kUpper : kLower);
#else
  return upper ? Bytes<kUpper>(word, second) : Bytes<kLower>(word, second);
#endif
}

// The upper halves of two words in one, the first word's below.
SHARDMESH_RULE uint32_t UpperHalves(uint32_t first, uint32_t second) { return Bytes<0x7632>(first, second); }
// The lower or the upper half of a word, below `above`, whose lower half is 0.
SHARDMESH_RULE uint32_t HalfBelow(uint32_t word, bool upper, uint32_t above) {
  return BytesOfHalf<0x7610, 0x7632>(word, upper, above);
}
// The lower or the upper half of a word, between the lowest and the highest byte of `around`.
SHARDMESH_RULE uint32_t HalfWithin(uint32_t word, bool upper, uint32_t around) {
  return BytesOfHalf<0x7104, 0x7324>(word, upper, around);
}
// The lowest byte of the lower or the upper half of a word.
SHARDMESH_RULE uint32_t ByteOfHalf(uint32_t word, bool upper) { return BytesOfHalf<0x4440, 0x4442>(word, upper, 0); }
// Byte `kByte` of each of four words.
template <uint32_t kByte>
SHARDMESH_RULE uint32_t BytesOfFour(const uint32_t (&words)[4]) {
  constexpr uint32_t kTwo = (kByte + 4) << 4 | kByte;
  return Bytes<0x5410>(Bytes<kTwo>(words[0], words[1]), Bytes<kTwo>(words[2], words[3]));
}
// The bf16 numbers of two words.
SHARDMESH_RULE Four Bf16sOf(const uint32_t (&pairs)[2]) {
  return Four::Each([&](int k) { return FloatOfBits(k % 2 == 0 ? pairs[k / 2] << 16 : pairs[k / 2] & 0xFFFF0000u); });
}

// Bytes of an element's code and of its remainder.
template <WeightFormat kFormat>
inline constexpr int kCodeBytes = kFormat == WeightFormat::kFp32 ? 4 : 2;
template <WeightFormat kFormat>
inline constexpr int kExtraBytes = kFormat == WeightFormat::kBf16Plus16    ? 2
                                   : kFormat == WeightFormat::kBf16Plus8Sr ? 1
                                                                           : 0;

// Which eight elements of a tile are a thread's: all in a row, or two rows of four, one in each half of the tile.
template <bool kInARow>
struct Places {
  SHARDMESH_RULE static int At(int lane, int k) { return kInARow ? 8 * lane + k : 128 * (k / 4) + 4 * lane + k % 4; }
};

// The words of a part of a stream, as they were loaded: nothing of them is looked at before this.
template <int kBytes>
SHARDMESH_RULE void Settle(const uint8_t (&from)[kBytes], uint8_t (&to)[kBytes]) {
  static_assert(kBytes % 4 == 0);
  uint32_t words[kBytes / 4];
  memcpy(words, from, kBytes);
#ifdef __CUDA_ARCH__
  SHARDMESH_UNROLL_WHOLE
  for (int i = 0; i < kBytes / 4; ++i) asm volatile("" : "+r"(words[i]));
#endif
  memcpy(to, words, kBytes);
}

// Eight elements as they are stored, to be read and written by the rules of kernels/tile/weights.h.
template <int kBytes, bool kInARow>
struct Eight {
  static constexpr int kWide = (kInARow ? 8 : 4) * kBytes < 16 ? (kInARow ? 8 : 4) * kBytes : 16;
  static constexpr int kElements = kWide / kBytes;  // of a load
  alignas(16) uint8_t bytes[8 * kBytes];

  SHARDMESH_RULE Eight Settled() const {
    Eight settled;
    Settle(bytes, settled.bytes);
    return settled;
  }
  // `tile`: where the stream's tile begins, a multiple of 16.
  SHARDMESH_RULE void LoadWhole(const uint8_t* tile, int lane) {
    const uint8_t* const from = tile + Places<kInARow>::At(lane, 0) * kBytes;
    SHARDMESH_UNROLL_WHOLE
    for (int k = 0; k < 8; k += kElements) {
      const auto wide = LoadWide<kWide>(from + Places<kInARow>::At(0, k) * kBytes);
      memcpy(bytes + k * kBytes, &wide, kWide);
    }
  }
  SHARDMESH_RULE void StoreWhole(uint8_t* tile, int lane) const {
    uint8_t* const to = tile + Places<kInARow>::At(lane, 0) * kBytes;
    SHARDMESH_UNROLL_WHOLE
    for (int k = 0; k < 8; k += kElements) {
      WideWords<kWide> wide;
      memcpy(&wide, bytes + k * kBytes, kWide);
      StoreWide(wide, to + Places<kInARow>::At(0, k) * kBytes);
    }
  }
  // `elements`: how many of the tile there are; what is not there becomes 0.
  SHARDMESH_RULE void LoadPart(const uint8_t* tile, int lane, int elements) {
    Element eight[8];
    SHARDMESH_UNROLL_NOT
    for (int k = 0; k < 8; ++k) {
      const int at = Places<kInARow>::At(lane, k);
      eight[k] = at < elements ? reinterpret_cast<const Element*>(tile)[at] : Element(0);
    }
    memcpy(bytes, eight, sizeof(bytes));
  }
  SHARDMESH_RULE void StorePart(uint8_t* tile, int lane, int elements) const {
    Element eight[8];
    memcpy(eight, bytes, sizeof(bytes));
    SHARDMESH_UNROLL_NOT
    for (int k = 0; k < 8; ++k) {
      const int at = Places<kInARow>::At(lane, k);
      if (at < elements) reinterpret_cast<Element*>(tile)[at] = eight[k];
    }
  }
  // Whether the tile has these elements.
  SHARDMESH_RULE bool IsIn(const uint8_t* tile, int lane, int elements) const {
    Element eight[8];
    memcpy(eight, bytes, sizeof(bytes));
    bool same = true;
    SHARDMESH_UNROLL_NOT
    for (int k = 0; k < 8; ++k) {
      const int at = Places<kInARow>::At(lane, k);
      if (at < elements) same = same && reinterpret_cast<const Element*>(tile)[at] == eight[k];
    }
    return same;
  }

 private:
  using Element = std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
};

template <bool kInARow>
struct Eight<0, kInARow> {
  uint8_t* bytes = nullptr;
  SHARDMESH_RULE Eight Settled() const { return *this; }
  SHARDMESH_RULE void LoadWhole(const uint8_t*, int) {}
  SHARDMESH_RULE void StoreWhole(uint8_t*, int) const {}
  SHARDMESH_RULE void LoadPart(const uint8_t*, int, int) {}
  SHARDMESH_RULE void StorePart(uint8_t*, int, int) const {}
};

// The eight codes of 4 bits that are a thread's, two a byte, the even element in the upper half. In a row.
struct EightNibbles {
  alignas(4) uint8_t bytes[4];
  SHARDMESH_RULE EightNibbles Settled() const {
    EightNibbles settled;
    Settle(bytes, settled.bytes);
    return settled;
  }
  SHARDMESH_RULE void LoadWhole(const uint8_t* tile, int lane) {
    const auto wide = LoadWide<4>(tile + 4 * lane);
    memcpy(bytes, &wide, 4);
  }
  SHARDMESH_RULE void StoreWhole(uint8_t* tile, int lane) const {
    WideWords<4> wide;
    memcpy(&wide, bytes, 4);
    StoreWide(wide, tile + 4 * lane);
  }
  SHARDMESH_RULE void LoadPart(const uint8_t* tile, int lane, int elements) {
    uint8_t four[4];
    SHARDMESH_UNROLL_NOT
    for (int b = 0; b < 4; ++b) four[b] = 8 * lane + 2 * b < elements ? tile[4 * lane + b] : uint8_t{0};
    memcpy(bytes, four, sizeof(bytes));
  }
  SHARDMESH_RULE void StorePart(uint8_t* tile, int lane, int elements) const {
    uint8_t four[4];
    memcpy(four, bytes, sizeof(bytes));
    SHARDMESH_UNROLL_NOT
    for (int b = 0; b < 4; ++b) {
      if (8 * lane + 2 * b < elements) tile[4 * lane + b] = four[b];
    }
  }
};

// Elements [first, first + there) of a slot, in fp32 (`wide`) or bf16. `whole`: there are all four, at a multiple of what
// one load takes.
SHARDMESH_RULE Four LoadSlot(const void* slot, bool wide, int64_t first, bool whole, int there) {
  const auto* from = static_cast<const uint8_t*>(slot) + first * (wide ? 4 : 2);
  Four four;
  uint16_t codes[4] = {};
  if (wide && whole) {
    const auto loaded = LoadWide<16>(from);
    memcpy(four.x, &loaded, sizeof(four.x));
    return four;
  }
  if (wide) return Four::Each([&](int k) { return k < there ? reinterpret_cast<const float*>(from)[k] : 0.0f; });
  if (whole) {
    const auto loaded = LoadWide<8>(from);
    memcpy(codes, &loaded, sizeof(codes));
  } else {
    SHARDMESH_UNROLL_WHOLE
    for (int k = 0; k < 4; ++k) {
      if (k < there) codes[k] = reinterpret_cast<const uint16_t*>(from)[k];
    }
  }
  return Four::Each([&](int k) { return Bf16ToFloat(codes[k]); });
}

// Whether elements [first, ...) of every slot begin at a multiple of 16.
SHARDMESH_RULE bool SlotsAreAligned(const void* const* slots, int num_slots, bool wide, int64_t first) {
  auto bits = static_cast<uint32_t>(first * (wide ? 4 : 2));
  SHARDMESH_UNROLL_NOT
  for (int s = 0; s < num_slots; ++s) bits |= static_cast<uint32_t>(reinterpret_cast<uintptr_t>(slots[s]));
  return bits % 16 == 0;
}

// The tree sum (core/base/reduction.h) of a thread's eight elements of several slots, from the sums of every four slots,
// whose loads do not wait for each other. `first`: where the tile begins in the slots. `to`: the tile's, in memory that
// threads share; elements that are not there become 0. A call, because it is long and the same for all formats: before
// there is much in registers.
template <bool kInARow>
SHARDMESH_HOST_DEVICE inline __attribute__((noinline)) void SumSlots(const void* const* slots, int num_slots, bool wide,
                                                                     int64_t first, int elements, int lane, float* to) {
  constexpr int kGroup = 4;
  const bool whole = elements == kTileElements && SlotsAreAligned(slots, num_slots, wide, first);
  SHARDMESH_UNROLL_NOT
  for (int p = 0; p < 2; ++p) {
    const int at = Places<kInARow>::At(lane, 4 * p), left = elements - at;
    const int there = left < 0 ? 0 : left < 4 ? left : 4;
    const auto group = [&](int g) {
      const int begin = kGroup * g, count = num_slots - begin;
      Four leaves[kGroup];
      SHARDMESH_UNROLL_WHOLE
      for (int s = 0; s < kGroup; ++s) {
        // Behind the last slot the last one again, which nobody adds.
        leaves[s] = LoadSlot(slots[begin + (s < count ? s : count - 1)], wide, first + at, whole, there);
      }
      if (count == 1) return leaves[0];
      const Four two = leaves[0] + leaves[1];
      if (count == 2) return two;
      return count == 3 ? two + leaves[2] : two + (leaves[2] + leaves[3]);
    };
    StoreShared(TreeSum<Four>((num_slots + kGroup - 1) / kGroup, group).x, to + at);
  }
}

// Words of Philox's rounds (core/base/philox.h) without the halves that nobody reads.
struct PhiloxWord {
  uint32_t low, high;
  PhiloxWord() = default;
  SHARDMESH_RULE PhiloxWord(uint32_t word) : low(word), high(0) {}
  SHARDMESH_RULE PhiloxWord(uint32_t low_word, uint32_t high_word) : low(low_word), high(high_word) {}
  SHARDMESH_RULE friend PhiloxWord operator^(PhiloxWord a, PhiloxWord b) { return a.low ^ b.low; }
};
SHARDMESH_RULE PhiloxWord MulLow32(PhiloxWord x, uint32_t multiplier) {
#ifdef __CUDA_ARCH__
  PhiloxWord product;
  asm("{\n .reg .u64 wide;\n mul.wide.u32 wide, %2, %3;\n mov.b64 {%0, %1}, wide;\n}"
      : "=r"(product.low), "=r"(product.high)
      : "r"(x.low), "r"(multiplier));
  return product;
#else
  const uint64_t product = uint64_t{x.low} * multiplier;
  return {static_cast<uint32_t>(product), static_cast<uint32_t>(product >> 32)};
#endif
}
template <int kBits>
SHARDMESH_RULE PhiloxWord ShiftRight(PhiloxWord x) {
  static_assert(kBits == 32);
  return x.high;
}

// Philox4x32.
SHARDMESH_RULE void WarpPhilox(PhiloxKey key, uint32_t (&counter)[4]) {
  PhiloxWord words[4] = {counter[0], counter[1], counter[2], counter[3]};
  SHARDMESH_UNROLL_WHOLE
  for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
    PhiloxRound<PhiloxWord>(words, key.words[0] + round * kPhiloxKeyStep0, key.words[1] + round * kPhiloxKeyStep1);
  }
  for (int i = 0; i < 4; ++i) counter[i] = words[i].low;
}

// Calls visit(std::integral_constant<StateFormat, format>()).
template <class Visit>
void WithStateFormat(StateFormat format, const Visit& visit) {
  switch (format) {
    case StateFormat::kFp32:
      return visit(std::integral_constant<StateFormat, StateFormat::kFp32>());
    case StateFormat::kBf16Sr:
      return visit(std::integral_constant<StateFormat, StateFormat::kBf16Sr>());
    case StateFormat::kDyn8:
      return visit(std::integral_constant<StateFormat, StateFormat::kDyn8>());
    case StateFormat::kDyn4:
      return visit(std::integral_constant<StateFormat, StateFormat::kDyn4>());
    case StateFormat::kFp8:
      return visit(std::integral_constant<StateFormat, StateFormat::kFp8>());
    case StateFormat::kFp8x32:
      return visit(std::integral_constant<StateFormat, StateFormat::kFp8x32>());
  }
}

}  // namespace shardmesh
