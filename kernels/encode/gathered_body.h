// The loops of kernels/encode/gathered.h for every number type: Number is float, or a vector of them. REQUIRES: the
// floating-point environment is set.
#pragma once

#include <cstring>

#include "kernels/encode/gathered.h"
#include "kernels/rules/block_scales.h"
#include "kernels/rules/four_bit.h"
#include "kernels/rules/int8.h"
#include "kernels/tile/lanes.h"
#include "kernels/tile/states.h"

namespace shardmesh {

constexpr uint32_t kInfinityBits = 0x7F800000u, kNanBits = 0x7FC00000u;

// kWidth values.
template <class Number>
SHARDMESH_RULE Number LoadValues(const float* values) {
  return Lanes<Number>::Load(values);
}
template <class Number>
SHARDMESH_RULE Number LoadValues(const uint16_t* values) {
  return Lanes<Number>::LoadBf16(values);
}
template <class Number>
SHARDMESH_RULE Number LoadValues(const uint8_t* codes) {
  return DecodeInt8<Number>(Lanes<Number>::LoadBytes(codes));
}

// Calls visit(i, number) for elements [i, i + kWidth); what is beyond `n` is 0.
template <class Number, class Value, class Visit>
SHARDMESH_RULE void ForEachNumber(const Value* values, int64_t n, const Visit& visit) {
  constexpr int64_t kWidth = Lanes<Number>::kWidth;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) visit(i, LoadValues<Number>(values + i));
  if (kWidth == 1 || i >= n) return;
  Value rest[kWidth] = {};
  for (int64_t k = 0; k < kWidth && i + k < n; ++k) rest[k] = values[i + k];
  visit(i, LoadValues<Number>(rest));
}

// Bits of magnitudes are compared as integers: so a NaN is the largest.
template <class Number, class Value>
SHARDMESH_RULE uint32_t LargestBits(const Value* values, int64_t n) {
  using Word = typename Lanes<Number>::Word;
  Word most(0u);
  ForEachNumber<Number>(values, n, [&](int64_t, Number x) { most = MaxInt(most, FloatBits(x) & Word(0x7FFFFFFFu)); });
  float lanes[Lanes<Number>::kWidth];
  Lanes<Number>::Store(FloatOfBits(most), lanes);
  uint32_t largest = 0;
  for (const float lane : lanes) largest = MaxInt(largest, FloatBits(lane));
  return largest;
}

SHARDMESH_RULE void Raise(std::atomic<uint32_t>& maximum, uint32_t largest) {
  uint32_t seen = maximum.load(std::memory_order_relaxed);
  while (seen < largest && !maximum.compare_exchange_weak(seen, largest, std::memory_order_relaxed)) {
  }
}

template <class Number, class Value>
void RaiseMaximaAs(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  const auto* const values = static_cast<const Value*>(run.values);
  ForEachPiece(*run.blocks, run.first_element, run.num_elements, [&](int64_t at, int64_t n, int64_t block, bool) {
    Raise(maxima[block], LargestBits<Number>(values + at, n));
  });
}

// To the scales that are stored.
template <class Number>
void RaiseNf4(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  const int64_t first = run.first_element / kNf4BlockElements;
  ForEachPiece(*run.blocks, run.first_element, run.num_elements, [&](int64_t, int64_t, int64_t block, bool) {
    Raise(maxima[block], FloatBits(run.nf4_scales[block - first]) & 0x7FFFFFFFu);
  });
}

// The codes of a piece: code(number) of each.
template <class Number, class Value, class Code>
SHARDMESH_RULE void EncodePiece(const Value* values, int64_t n, const Code& code, uint8_t* codes) {
  constexpr int64_t kWidth = Lanes<Number>::kWidth;
  ForEachNumber<Number>(values, n, [&](int64_t i, Number x) {
    if (i + kWidth <= n) return Lanes<Number>::StoreBytes(code(x), codes + i);
    uint8_t rest[kWidth];
    Lanes<Number>::StoreBytes(code(x), rest);
    for (int64_t k = 0; k < kWidth && i + k < n; ++k) codes[i + k] = rest[k];
  });
}

// The scale of a block whose largest magnitude has these bits. Not of mx8.
SHARDMESH_RULE float GatheredScaleOf(GatherFormat gather, uint32_t largest) {
  if (largest >= kInfinityBits) return FloatOfBits(kNanBits);
  const float magnitude = FloatOfBits(largest);
  return gather == GatherFormat::kInt8Row ? Max(Divide(magnitude, kInt8Largest), kSmallestScale)
                                          : Float8Scale<E4M3>(magnitude);
}

// The factor of 256 scales of nf4, or of the tensor's last, from block `first` on.
SHARDMESH_RULE float Nf4FactorOf(const std::atomic<uint32_t>* maxima, int64_t first, int64_t num_blocks, float mean) {
  const int64_t end = first + kNf4FactorBlocks < num_blocks ? first + kNf4FactorBlocks : num_blocks;
  float largest = 0;
  for (int64_t b = first; b < end; ++b) {
    largest = Max(largest, Abs(FloatOfBits(maxima[b].load(std::memory_order_relaxed)) - mean));
  }
  return mean == mean && largest > 0 ? Divide(128.0f, largest) : 1.0f;
}

// Sixty-four elements, or the tensor's last, under their largest magnitude; two in a byte.
template <class Number, class Value>
SHARDMESH_RULE void EncodeNf4Block(const Value* values, int64_t n, float largest, uint8_t* codes) {
  constexpr uint8_t kZero = 7;
  uint8_t levels[kNf4BlockElements + 1];
  memset(levels, kZero, sizeof(levels));
  if (largest > 0) {
    const auto code = [m = Number(largest)](Number x) { return EncodeFourBit<Nf4>(Divide(x, m)); };
    EncodePiece<Number>(values, n, code, levels);
  }
  for (int64_t i = 0; i < n; i += 2) codes[i / 2] = static_cast<uint8_t>(levels[i] << 4 | levels[i + 1]);
}

// Calls code(at, n, largest) for a run's blocks, whose codes are not written here, and writes their scales.
template <class Number, class Code>
void ForEachNf4Block(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                     int count, const Code& code) {
  const int64_t num_blocks = run.blocks->num_blocks;
  float factor = 0;
  int64_t factor_of = -1;
  ForEachPiece(*run.blocks, run.first_element, run.num_elements, [&](int64_t at, int64_t n, int64_t block, bool) {
    const float largest = FloatOfBits(maxima[block].load(std::memory_order_relaxed));
    code(at, n, largest);
    if (const int64_t super = block / kNf4FactorBlocks; super != factor_of) {
      factor_of = super;
      factor = Nf4FactorOf(maxima, super * kNf4FactorBlocks, num_blocks, run.mean);
    }
    const auto scale = static_cast<int8_t>(run.mean == run.mean ? EncodeNf4Scale((largest - run.mean) * factor) : 0u);
    for (int i = 0; i < count; ++i) {
      auto* const scales = static_cast<uint8_t*>(places[i].scales);
      memcpy(scales + block, &scale, 1);
      if (block % kNf4FactorBlocks == 0) {
        memcpy(scales + Nf4FactorsOffset(num_blocks) + block / kNf4FactorBlocks * 4, &factor, 4);
      }
      if (block == 0) memcpy(scales + Nf4MeanOffset(num_blocks), &run.mean, 4);
    }
  });
}

template <class Number, class Value>
void EncodeNf4As(const GatheredRun& run, const std::atomic<uint32_t>* maxima, uint8_t* codes,
                 const GatheredPlace* places, int count) {
  const auto* const values = static_cast<const Value*>(run.values);
  ForEachNf4Block<Number>(run, maxima, places, count, [&](int64_t at, int64_t n, float largest) {
    EncodeNf4Block<Number>(values + at, n, largest, codes + at / 2);
  });
}

// Codes that are stored as they are gathered.
template <class Number>
void CopyNf4(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places, int count) {
  memcpy(places[0].codes, run.values, static_cast<size_t>((run.num_elements + 1) / 2));
  ForEachNf4Block<Number>(run, maxima, places, count, [](int64_t, int64_t, float) {});
}

template <class Number>
void StoreNf4As(const float* values, int64_t num_elements, uint8_t* codes, float* scales) {
  for (int64_t at = 0; at < num_elements; at += kNf4BlockElements) {
    const int64_t n = num_elements - at < kNf4BlockElements ? num_elements - at : kNf4BlockElements;
    const float largest = FloatOfBits(LargestBits<Number>(values + at, n));
    scales[at / kNf4BlockElements] = largest;
    EncodeNf4Block<Number>(values + at, n, largest, codes + at / 2);
  }
}

// The run's codes, at `codes` alone, and the scales of every place.
template <class Number, class Value>
void EncodeGatheredAs(const GatheredRun& run, const std::atomic<uint32_t>* maxima, uint8_t* codes,
                      const GatheredPlace* places, int count) {
  if (run.gather == GatherFormat::kNf4) return EncodeNf4As<Number, Value>(run, maxima, codes, places, count);
  const auto* const values = static_cast<const Value*>(run.values);
  ForEachPiece(*run.blocks, run.first_element, run.num_elements,
               [&](int64_t at, int64_t n, int64_t block, bool begins) {
                 const auto encode = [&](const auto& code) { EncodePiece<Number>(values + at, n, code, codes + at); };
                 if (run.gather == GatherFormat::kMx8) {
                   const uint32_t largest = LargestBits<Number>(values + at, n);
                   const auto mx = MxScaleCeil(FloatOfBits(largest));
                   const uint32_t scale = largest < kInfinityBits ? mx.code : 0xFFu;
                   for (int i = 0; i < count; ++i)
                     static_cast<uint8_t*>(places[i].scales)[block] = static_cast<uint8_t>(scale);
                   return encode([m = Number(mx.multiplier)](Number x) { return EncodeMinifloat<E4M3>(x * m); });
                 }
                 const float scale = GatheredScaleOf(run.gather, maxima[block].load(std::memory_order_relaxed));
                 for (int i = 0; begins && i < count; ++i) static_cast<float*>(places[i].scales)[block] = scale;
                 if (run.gather == GatherFormat::kInt8Row) {
                   encode([s = Number(scale)](Number x) { return EncodeInt8(Divide(x, s)); });
                 } else {
                   encode([s = Number(scale)](Number x) { return EncodeMinifloat<E4M3>(x * s); });
                 }
               });
}

// Elements [at, at + n) of a run of int8_row weights.
template <class Number>
SHARDMESH_RULE void DecodeRows(const GatheredRun& run, int64_t at, int64_t n, float* values) {
  using L = Lanes<Number>;
  const auto* const codes = static_cast<const uint8_t*>(run.values) + at;
  for (int64_t done = 0; done < n;) {
    const int64_t row = (at + done) / run.row_elements;
    const int64_t row_end = (row + 1) * run.row_elements - at, size = (row_end < n ? row_end : n) - done;
    float* const to = values + done;
    ForEachNumber<Number>(codes + done, size, [&, scale = Number(run.row_scales[row])](int64_t i, Number code) {
      if (i + L::kWidth <= size) return L::Store(code * scale, to + i);
      float rest[L::kWidth];
      L::Store(code * scale, rest);
      for (int64_t k = 0; k < L::kWidth && i + k < size; ++k) to[i + k] = rest[k];
    });
    done += size;
  }
}

// Calls visit(part, at) for parts of a run of int8_row weights, as runs of fp32: `at` counts from the run's start.
template <class Number, class Visit>
void ForEachDecoded(const GatheredRun& run, const Visit& visit) {
  constexpr int64_t kPart = 4096;  // whole blocks of mx8 and of nf4; stays in the first-level cache
  alignas(64) float values[kPart];
  for (int64_t at = 0; at < run.num_elements; at += kPart) {
    GatheredRun part = run;
    part.row_scales = nullptr;
    part.values = values;
    part.first_element += at;
    part.num_elements = run.num_elements - at < kPart ? run.num_elements - at : kPart;
    DecodeRows<Number>(run, at, part.num_elements, values);
    visit(part, at);
  }
}

template <class Number>
void RaiseMaximaOf(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  if (run.nf4_scales != nullptr) return RaiseNf4<Number>(run, maxima);
  if (run.row_scales != nullptr) {
    return ForEachDecoded<Number>(
        run, [&](const GatheredRun& part, int64_t) { RaiseMaximaAs<Number, float>(part, maxima); });
  }
  run.format == Format::kFp32 ? RaiseMaximaAs<Number, float>(run, maxima)
                              : RaiseMaximaAs<Number, uint16_t>(run, maxima);
}

template <class Number>
void EncodeGatheredOf(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                      int count) {
  uint8_t* const codes = places[0].codes;
  const auto bytes_of = [&](int64_t n) { return run.gather == GatherFormat::kNf4 ? (n + 1) / 2 : n; };
  if (run.nf4_scales != nullptr) {
    CopyNf4<Number>(run, maxima, places, count);
  } else if (run.row_scales != nullptr) {
    ForEachDecoded<Number>(run, [&](const GatheredRun& part, int64_t at) {
      EncodeGatheredAs<Number, float>(part, maxima, codes + bytes_of(at), places, count);
    });
  } else if (run.format == Format::kFp32) {
    EncodeGatheredAs<Number, float>(run, maxima, codes, places, count);
  } else {
    EncodeGatheredAs<Number, uint16_t>(run, maxima, codes, places, count);
  }
  const auto bytes = static_cast<size_t>(bytes_of(run.num_elements));
  for (int i = 1; i < count; ++i) std::memcpy(places[i].codes, places[0].codes, bytes);
}

}  // namespace shardmesh
