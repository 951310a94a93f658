// Philox4x32-10: a counter-based random generator, so that a draw belongs to a logical element of a logical step and
// not to whoever computes it. The same on every mesh, after every restart, on the CPU and on the GPU.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
// Pure functions, thread-safe.
//
// Which bits belong to element i of tensor `tensor` at step `step` (16 bits for each):
//
//   key      64 bits: job seed XOR Mix64(purpose) XOR Mix64(step with its low 32 bits cleared); word 0 = the low half
//   counter  word 0 = low 32 bits of c, word 1 = high 32 bits of c, where c = 8 * (i / 64) + i % 8
//            word 2 = tensor, word 3 = low 32 bits of the step
//   output   word (i % 64) / 8 % 4;  its low half when i % 64 < 32, else its high half
//
// So 64 consecutive elements take 8 consecutive counters, and a vector of 8 elements takes the same output word of all
// 8: a processor with 8 lanes needs no shuffle. Worked example: i = 70 lies in group 1, lane 6, vector 0: c = 14, low
// half of word 0. i = 64 + 37 lies in lane 5 of vector 4: c = 13, high half of word 0.
#pragma once

#include <cstdint>

#include "core/base/host_device.h"

namespace shardmesh {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u;  // added to key word 0 after every round
constexpr uint32_t kPhiloxKeyStep1 = 0xBB67AE85u;  // added to key word 1 after every round

// What a draw is for. Two purposes of one job never share their bits. Never renumber: results depend on it.
enum class DrawPurpose : uint32_t {
  kWeightRounding = 1,
  kFirstState = 2,  // the rounding of an optimizer's states, in their order
  kSecondState = 3,
  kThirdState = 4,
};

struct PhiloxKey {
  uint32_t words[2] = {0, 0};
};

// The finalizer of SplitMix64: a bijection of the 64-bit integers that keeps 0 and spreads every bit.
SHARDMESH_RULE uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The key of a job's draws for one purpose; the step is not in it yet.
SHARDMESH_HOST_DEVICE inline PhiloxKey MakePhiloxKey(uint64_t job_seed, DrawPurpose purpose) {
  const uint64_t key = job_seed ^ Mix64(static_cast<uint64_t>(purpose));
  return PhiloxKey{{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}};
}

// The key words as round 0 of `step` uses them. Below 2^32 steps this is `key` itself (Mix64 keeps 0).
SHARDMESH_HOST_DEVICE inline PhiloxKey KeyOfStep(PhiloxKey key, int64_t step) {
  const uint64_t mixed = Mix64(static_cast<uint64_t>(step) >> 32 << 32);
  return PhiloxKey{{key.words[0] ^ static_cast<uint32_t>(mixed), key.words[1] ^ static_cast<uint32_t>(mixed >> 32)}};
}

// The low 32 bits of every lane of x times a constant, as 64 bits. A SIMD number type brings its own overload.
SHARDMESH_RULE uint64_t MulLow32(uint64_t x, uint32_t multiplier) {
  return static_cast<uint64_t>(static_cast<uint32_t>(x)) * multiplier;
}

// One round, on words that lie in the low half of 64-bit lanes; the high halves may hold anything and are never read.
// Wide is uint64_t or a SIMD vector of it. (In this form a round costs no masking: the low half of a product stays
// where it is, and its high half comes down with one shift.)
template <class Wide>
SHARDMESH_RULE void PhiloxRound(Wide (&words)[4], Wide key0, Wide key1) {
  const Wide product0 = MulLow32(words[0], kPhiloxMultiplier0);
  const Wide product1 = MulLow32(words[2], kPhiloxMultiplier1);
  words[0] = ShiftRight<32>(product1) ^ (words[1] ^ key0);
  words[1] = product1;
  words[2] = ShiftRight<32>(product0) ^ (words[3] ^ key1);
  words[3] = product0;
}

// All ten rounds for one counter. `counter` becomes the output.
SHARDMESH_HOST_DEVICE inline void Philox4x32(PhiloxKey key, uint32_t (&counter)[4]) {
  uint64_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
  for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
    PhiloxRound<uint64_t>(words, key.words[0] + round * kPhiloxKeyStep0, key.words[1] + round * kPhiloxKeyStep1);
  }
  for (int i = 0; i < 4; ++i) counter[i] = static_cast<uint32_t>(words[i]);
}

// The counter number c of an element of a tensor, and where in the output its 16 bits lie.
SHARDMESH_HOST_DEVICE inline uint64_t DrawCounter(uint64_t element) { return 8 * (element / 64) + element % 8; }
SHARDMESH_HOST_DEVICE inline uint32_t DrawWord(uint64_t element) { return static_cast<uint32_t>(element % 64 / 8 % 4); }
SHARDMESH_HOST_DEVICE inline uint32_t DrawShift(uint64_t element) { return element % 64 < 32 ? 0 : 16; }

// The draw of one element, uniform in [0, 65536). `key` is the job's, from MakePhiloxKey. REQUIRES: step >= 0.
SHARDMESH_HOST_DEVICE inline uint32_t Draw16(PhiloxKey key, int64_t step, uint32_t tensor, uint64_t element) {
  const uint64_t number = DrawCounter(element);
  uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), tensor,
                       static_cast<uint32_t>(static_cast<uint64_t>(step))};
  Philox4x32(KeyOfStep(key, step), words);
  return (words[DrawWord(element)] >> DrawShift(element)) & 0xFFFFu;
}

}  // namespace shardmesh
