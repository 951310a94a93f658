// Pieces: four elements in a row of a stream, as a thread of kernels/cuda/warp_step_body.h moves them: in one load or
// store where there are all four and their address allows it, else one by one. Elements that are not there (the last of
// a tensor) are neither read nor written. Pure functions, thread-safe.
#pragma once

#include <cstring>

#include "core/base/reduction.h"
#include "kernels/tile/states.h"

namespace shardmesh {

struct Four {
  float x[4];
  SHARDMESH_RULE friend Four operator+(const Four& a, const Four& b) {
    return {{a.x[0] + b.x[0], a.x[1] + b.x[1], a.x[2] + b.x[2], a.x[3] + b.x[3]}};
  }
};

// A load or store of 4, 8 or 16 bytes, of whatever lies there.
template <int kBytes>
struct __attribute__((may_alias, aligned(kBytes))) WideWords {
  uint32_t words[kBytes / 4];
};

// `there`: how many of the four there are.
template <class Element>
SHARDMESH_RULE void LoadFour(const Element* from, int there, Element (&to)[4]) {
  using Wide = WideWords<4 * sizeof(Element)>;
  if (there == 4 && reinterpret_cast<uintptr_t>(from) % sizeof(Wide) == 0) {
    const Wide wide = *reinterpret_cast<const Wide*>(from);
    memcpy(to, &wide, sizeof(wide));
  } else {
    for (int k = 0; k < 4; ++k) to[k] = k < there ? from[k] : Element(0);
  }
}

template <class Element>
SHARDMESH_RULE void StoreFour(const Element (&from)[4], Element* to, int there) {
  using Wide = WideWords<4 * sizeof(Element)>;
  if (there == 4 && reinterpret_cast<uintptr_t>(to) % sizeof(Wide) == 0) {
    Wide wide;
    memcpy(&wide, from, sizeof(wide));
    *reinterpret_cast<Wide*>(to) = wide;
  } else {
    for (int k = 0; k < 4; ++k) {
      if (k < there) to[k] = from[k];
    }
  }
}

SHARDMESH_RULE Four LoadFloats(const float* from, int there) {
  Four four;
  LoadFour(from, there, four.x);
  return four;
}
SHARDMESH_RULE Four LoadBf16s(const uint16_t* from, int there) {
  uint16_t codes[4];
  LoadFour(from, there, codes);
  return {{Bf16ToFloat(codes[0]), Bf16ToFloat(codes[1]), Bf16ToFloat(codes[2]), Bf16ToFloat(codes[3])}};
}

// Elements [first, first + there) of a gradient in fp32 (`wide`) or bf16.
SHARDMESH_RULE Four LoadSlot(const void* slot, bool wide, int64_t first, int there) {
  return wide ? LoadFloats(static_cast<const float*>(slot) + first, there)
              : LoadBf16s(static_cast<const uint16_t*>(slot) + first, there);
}
// The slots' tree sum. A call, because it is long and the same for all formats.
SHARDMESH_HOST_DEVICE inline __attribute__((noinline)) Four SumSlots(const void* const* slots, int num_slots, bool wide,
                                                                     int64_t first, int there) {
  return TreeSum<Four>(num_slots, [=](int slot) { return LoadSlot(slots[slot], wide, first, there); });
}

SHARDMESH_RULE void LoadBytes(const uint8_t* from, int there, uint8_t (&to)[4]) { LoadFour(from, there, to); }

// Two elements a byte, the even one in the upper half.
SHARDMESH_RULE void LoadNibbles(const uint8_t* from, int there, uint8_t (&to)[4]) {
  for (int k = 0; k < 4; ++k) {
    const uint8_t byte = k / 2 * 2 < there ? from[k / 2] : uint8_t{0};
    to[k] = k % 2 == 0 ? byte >> 4 : byte & 15;
  }
}
SHARDMESH_RULE void StoreNibbles(const uint8_t (&from)[4], uint8_t* to, int there) {
  if (there > 0) to[0] = static_cast<uint8_t>(from[0] << 4 | from[1]);
  if (there > 2) to[1] = static_cast<uint8_t>(from[2] << 4 | from[3]);
}

// Bytes of an element's code and of its remainder.
template <WeightFormat kFormat>
inline constexpr int kCodeBytes = kFormat == WeightFormat::kFp32 ? 4 : 2;
template <WeightFormat kFormat>
inline constexpr int kExtraBytes = kFormat == WeightFormat::kBf16Plus16    ? 2
                                   : kFormat == WeightFormat::kBf16Plus8Sr ? 1
                                                                           : 0;

template <int kBytes>
struct ElementOf;
template <>
struct ElementOf<1> {
  using Type = uint8_t;
};
template <>
struct ElementOf<2> {
  using Type = uint16_t;
};
template <>
struct ElementOf<4> {
  using Type = uint32_t;
};

// Four elements as they are stored, to be read and written by the rules of kernels/tile/weights.h.
template <int kBytes>
struct Piece {
  using Element = typename ElementOf<kBytes>::Type;
  alignas(16) uint8_t bytes[4 * kBytes];

  // `first`: the element of the stream that the piece begins with.
  SHARDMESH_RULE void Load(const uint8_t* stream, int first, int there) {
    Element four[4];
    LoadFour(reinterpret_cast<const Element*>(stream) + first, there, four);
    memcpy(bytes, four, sizeof(four));
  }
  SHARDMESH_RULE void Store(uint8_t* stream, int first, int there) const {
    Element four[4];
    memcpy(four, bytes, sizeof(four));
    StoreFour(four, reinterpret_cast<Element*>(stream) + first, there);
  }
  SHARDMESH_RULE bool SameAs(const Piece& other, int there) const {
    bool same = true;
    for (int i = 0; i < 4 * kBytes; ++i) same = same && (i / kBytes >= there || bytes[i] == other.bytes[i]);
    return same;
  }
};

template <>
struct Piece<0> {
  uint8_t* bytes = nullptr;
  SHARDMESH_RULE void Load(const uint8_t*, int, int) {}
  SHARDMESH_RULE void Store(uint8_t*, int, int) const {}
};

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
