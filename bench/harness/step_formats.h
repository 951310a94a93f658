// What an optimizer benchmark steps: formats, and the values that streams begin with. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/host_device.h"
#include "core/format/format.h"
#include "core/format/numeric_formats.h"

namespace shardmesh::bench {

struct StepFormats {
  WeightFormat weights = WeightFormat::kFp32;
  StateFormat states = StateFormat::kFp32;
  Format gradients = Format::kFp32;

  std::string ToString() const;  // "bf16_sr + dyn8"
  double StoredBytes() const;    // of weights and states, an element
  double MovedBytes() const;     // read and written by a step in place, an element
};

// A whole number in [-32768, 32767], from the upper half of the product (Knuth's multiplicative hashing).
SHARDMESH_RULE float StartHash(uint32_t element, uint32_t factor) {
  return static_cast<float>(static_cast<int32_t>((element * factor) >> 16) - 32768);
}

// Uniform in [-1/32, 1/32) and [-1/1024, 1/1024), of the element's place in the list; exact in fp32.
SHARDMESH_RULE float StartWeight(uint32_t element) { return StartHash(element, 2654435761u) * (1.0f / (1 << 20)); }
SHARDMESH_RULE float StartGradient(uint32_t element) { return StartHash(element, 2246822519u) * (1.0f / (1 << 25)); }

}  // namespace shardmesh::bench
