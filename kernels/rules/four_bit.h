// 4-bit codes, once for every number type: sixteen levels by a table, found by comparison with the fifteen values at
// which the next level begins. Codes are words, 0 to 15, in the order of their levels. Pure functions, thread-safe.
//
//   nf4            the quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023), rounded to four decimals as
//                  torchao has them; a tie goes down
//   dyn4 signed    the dynamic map of 4 bits (Li, Chen, Zhu, "Memory efficient optimizers with 4-bit states", 2023; as
//                  torchao: create_dynamic_map(True, 3, 4)); a tie goes up
//   dyn4 unsigned  k/16, k = 1 .. 16: no zero, so that no second moment vanishes; a tie goes up
//
// The borders are the smallest floats that torchao's fp32 arithmetic gives the next code.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rules/number.h"

namespace shardmesh {

struct Nf4 {
  static constexpr float kLevels[16] = {-1.0f,   -0.6962f, -0.5251f, -0.3949f, -0.2844f, -0.1848f, -0.0911f, 0.0f,
                                        0.0796f, 0.1609f,  0.2461f,  0.3379f,  0.4407f,  0.5626f,  0.7230f,  1.0f};
  static constexpr float kBorders[15] = {-0.848099947f, -0.610649943f,  -0.459999979f, -0.339649975f, -0.234599978f,
                                         -0.137949988f, -0.0455499962f, 0.0398000032f, 0.120250002f,  0.203500003f,
                                         0.292000026f,  0.389300019f,   0.501650035f,  0.642800033f,  0.861500025f};
};

struct Dyn4Signed {
  static constexpr float kLevels[16] = {-0.887499988f,  -0.662500024f,  -0.4375f,        -0.212499991f,
                                        -0.0775000006f, -0.0325000025f, -0.00549999997f, 0.0f,
                                        0.00549999997f, 0.0325000025f,  0.0775000006f,   0.212499991f,
                                        0.4375f,        0.662500024f,   0.887499988f,    1.0f};
  static constexpr float kBorders[15] = {-0.774999976f,  -0.550000012f,   -0.324999988f,  -0.144999996f, -0.0549999997f,
                                         -0.0190000013f, -0.00274999999f, 0.00274999999f, 0.0190000013f, 0.0550000034f,
                                         0.144999996f,   0.325000018f,    0.550000012f,   0.775000036f,  0.943750024f};
};

struct Dyn4Unsigned {
  static constexpr float kLevels[16] = {0.0625f, 0.125f, 0.1875f, 0.25f, 0.3125f, 0.375f, 0.4375f, 0.5f,
                                        0.5625f, 0.625f, 0.6875f, 0.75f, 0.8125f, 0.875f, 0.9375f, 1.0f};
  static constexpr float kBorders[15] = {0.09375f, 0.15625f, 0.21875f, 0.28125f, 0.34375f, 0.40625f, 0.46875f, 0.53125f,
                                         0.59375f, 0.65625f, 0.71875f, 0.78125f, 0.84375f, 0.90625f, 0.96875f};
};

// A binary search, a bit of the code at a time. A NaN gets 0.
template <class Levels, class Number>
SHARDMESH_RULE auto EncodeFourBit(Number y) {
  using Word = std::decay_t<decltype(FloatBits(y))>;
  constexpr float kSecond[8] = {Levels::kBorders[3], Levels::kBorders[11]};
  constexpr float kThird[8] = {Levels::kBorders[1], Levels::kBorders[5], Levels::kBorders[9], Levels::kBorders[13]};
  constexpr float kFourth[8] = {Levels::kBorders[0], Levels::kBorders[2],  Levels::kBorders[4],  Levels::kBorders[6],
                                Levels::kBorders[8], Levels::kBorders[10], Levels::kBorders[12], Levels::kBorders[14]};
  Word code = AddWhere(Number(Levels::kBorders[7]) <= y, Word(0u));
  code = AddWhere(Lookup8(kSecond, code) <= y, code + code);
  code = AddWhere(Lookup8(kThird, code) <= y, code + code);
  return AddWhere(Lookup8(kFourth, code) <= y, code + code);
}

template <class Levels, class Number, class Word>
SHARDMESH_RULE Number DecodeFourBit(Word code) {
  constexpr float kLow[8] = {Levels::kLevels[0], Levels::kLevels[1], Levels::kLevels[2], Levels::kLevels[3],
                             Levels::kLevels[4], Levels::kLevels[5], Levels::kLevels[6], Levels::kLevels[7]};
  constexpr float kHigh[8] = {Levels::kLevels[8],  Levels::kLevels[9],  Levels::kLevels[10], Levels::kLevels[11],
                              Levels::kLevels[12], Levels::kLevels[13], Levels::kLevels[14], Levels::kLevels[15]};
  return Select(IntToFloat(code) < Number(8.0f), Lookup8(kLow, code), Lookup8(kHigh, code));
}

}  // namespace shardmesh
