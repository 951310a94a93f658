// SlotSumFixture: slots of random finite numbers for the tests of slot sums, one after the other in one array, so that
// slots of odd lengths begin anywhere. Reproducible from the seed.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/sum/slot_sum.h"

namespace shardmesh {

struct SlotSumCase {
  Format format = Format::kFp32;
  int num_slots = 1;
  int64_t elements = 64;
  bool extreme = false;  // random bits: subnormals, zeros of both signs, numbers whose sum is just finite

  std::string ToString() const {
    return std::string(FormatName(format)) + ", " + std::to_string(num_slots) + " slots of " +
           std::to_string(elements) + (extreme ? ", extreme" : "");
  }
};

// Calls check(case) for both formats, ordinary and extreme, many numbers of slots, and each of `lengths`.
template <class Check>
void ForEachSlotSum(const std::vector<int64_t>& lengths, const Check& check) {
  for (const Format format : {Format::kFp32, Format::kBf16}) {
    for (const int slots : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21}) {
      for (const int64_t elements : lengths) {
        for (const bool extreme : {false, true}) check(SlotSumCase{format, slots, elements, extreme});
      }
    }
  }
}

class SlotSumFixture {
 public:
  SlotSumFixture(const SlotSumCase& c, uint64_t seed) : case_(c), random_(seed) {
    slots_.resize(c.num_slots * c.elements * BytesPerElement(c.format));
    for (int64_t i = 0; i < c.num_slots * c.elements; ++i) {
      const uint32_t bits = FloatBits(NextNumber());
      const auto half = static_cast<uint16_t>(bits >> 16);  // towards zero: stays finite
      const int64_t bytes = BytesPerElement(c.format);
      memcpy(&slots_[i * bytes], bytes == 4 ? static_cast<const void*>(&bits) : &half, bytes);
    }
  }

  const std::vector<uint8_t>& slots() const { return slots_; }
  // In fp32.
  float At(int slot, int64_t i) const {
    const uint8_t* at = &slots_[(slot * case_.elements + i) * BytesPerElement(case_.format)];
    uint32_t bits = 0;
    memcpy(reinterpret_cast<uint8_t*>(&bits) + 4 - BytesPerElement(case_.format), at, BytesPerElement(case_.format));
    return FloatOfBits(bits);
  }

  // What `sum` writes `offset` elements after a multiple of 64 bytes, between guards of 16 elements.
  static constexpr int64_t kGuard = 16;
  static constexpr uint32_t kGuardBits = 0xFFFFFFFFu;
  std::vector<uint32_t> Sum(SlotSumFn sum, float scale, int64_t offset = 0, bool streamed = false) const {
    std::vector<uint32_t> memory(case_.elements + 2 * kGuard + 32, kGuardBits);
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data()) % 64 / 4);
    const int64_t begin = kGuard + (16 - misaligned) % 16 + offset;
    std::vector<const void*> slots;
    for (int s = 0; s < case_.num_slots; ++s) {
      slots.push_back(slots_.data() + s * case_.elements * BytesPerElement(case_.format));
    }
    sum(case_.format,
        {slots.data(), case_.num_slots, scale, reinterpret_cast<float*>(&memory[begin]), case_.elements, streamed});
    return {memory.begin() + begin - kGuard, memory.begin() + begin + case_.elements + kGuard};
  }

 private:
  float NextNumber() {
    if (!case_.extreme) return normal_(random_) * std::pow(10.0f, static_cast<float>(random_() % 8) - 6);
    while (true) {
      auto bits = static_cast<uint32_t>(random_());
      if (random_() % 4 == 0) bits &= 0x807FFFFFu;   // subnormal
      if (random_() % 16 == 0) bits &= 0x80000000u;  // zero
      const float x = FloatOfBits(bits);
      if (std::abs(x) < FLT_MAX / static_cast<float>(case_.num_slots)) return x;
    }
  }

  const SlotSumCase case_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  std::vector<uint8_t> slots_;
};

}  // namespace shardmesh
