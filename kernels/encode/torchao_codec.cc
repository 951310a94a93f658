#include "kernels/encode/torchao_codec.h"

#include <cmath>
#include <cstring>

#include "kernels/rules/four_bit.h"
#include "kernels/rules/minifloat.h"

namespace shardmesh {
namespace {

#include "kernels/encode/torchao_map.inc"

// Levels in ascending order, and where torchao's rounding goes from one to the next.
template <int kLevels>
class CodeMap {
 public:
  explicit CodeMap(const float (&levels)[kLevels]) : levels_(levels) {
    for (int i = 0; i + 1 < kLevels; ++i) borders_[i] = Border(levels[i], levels[i + 1]);
  }

  float Level(uint32_t code) const { return levels_[code]; }

  // The number of borders that are not above y; 0 for a NaN.
  uint32_t Code(float y) const {
    uint32_t code = 0;
    for (uint32_t step = kLevels / 2; step > 0; step /= 2) code += step * (borders_[code + step - 1] <= y);
    return code;
  }

 private:
  // The smallest float that becomes `high` and not `low`: next to the middle.
  static float Border(float low, float high) {
    const float half = (high - low) * 0.5f;
    const auto goes_up = [&](float y) { return y - low >= half; };
    float border = low + half;
    while (!goes_up(border)) border = std::nextafter(border, high);
    for (float below = border; goes_up(below); below = std::nextafter(below, low)) border = below;
    return border;
  }

  const float (&levels_)[kLevels];
  float borders_[kLevels - 1];
};

const CodeMap<256>& EightBitMap(bool is_signed) {
  static const CodeMap<256> first(kTorchaoSignedLevels), second(kTorchaoUnsignedLevels);
  return is_signed ? first : second;
}

const CodeMap<16>& FourBitMap(bool is_signed) {
  static const CodeMap<16> first(Dyn4Signed::kLevels), second(Dyn4Unsigned::kLevels);
  return is_signed ? first : second;
}

// NaN if there is one, whatever follows.
float LargestMagnitude(const float* from, int64_t elements) {
  float largest = 0;
  for (int64_t i = 0; i < elements; ++i) {
    const float magnitude = Abs(from[i]);
    if (!(magnitude <= largest) && largest == largest) largest = magnitude;
  }
  return largest;
}

// A NaN stays one.
float BlockScale(const float* from, int64_t elements) {
  const float largest = LargestMagnitude(from, elements);
  return largest < 1e-12f ? 1e-12f : largest;
}

uint32_t EncodeFp8(float y) { return y == y ? EncodeMinifloat<E4M3>(y) : 0x7Fu; }

template <class Level>
void DecodeBytes(const ConstStoredTile& from, float* to, const Level& level) {
  const float scale = *reinterpret_cast<const float*>(from.extra);
  for (int64_t i = 0; i < kTileElements; ++i) to[i] = level(from.codes[i]) * scale;
}

template <class Code>
void EncodeBytes(const float* from, const StoredTile& to, float scale, const Code& code) {
  *reinterpret_cast<float*>(to.extra) = scale;
  for (int64_t i = 0; i < kTileElements; ++i) to.codes[i] = static_cast<uint8_t>(code(from[i] / scale));
}

constexpr int64_t kFourBitBlock = 128;

void DecodeFourBits(const CodeMap<16>& map, const ConstStoredTile& from, float* to) {
  for (int64_t i = 0; i < kTileElements; i += 2) {
    const float scale = reinterpret_cast<const float*>(from.extra)[i / kFourBitBlock];
    to[i] = map.Level(from.codes[i / 2] >> 4) * scale;
    to[i + 1] = map.Level(from.codes[i / 2] & 15) * scale;
  }
}

void EncodeFourBits(const CodeMap<16>& map, const float* from, const StoredTile& to) {
  for (int64_t block = 0; block < kTileElements; block += kFourBitBlock) {
    const float scale = BlockScale(from + block, kFourBitBlock);
    reinterpret_cast<float*>(to.extra)[block / kFourBitBlock] = scale;
    for (int64_t i = block; i < block + kFourBitBlock; i += 2) {
      to.codes[i / 2] = static_cast<uint8_t>(map.Code(from[i] / scale) << 4 | map.Code(from[i + 1] / scale));
    }
  }
}

}  // namespace

bool TorchaoHasStates(StateFormat format) {
  return format == StateFormat::kFp32 || format == StateFormat::kDyn8 || format == StateFormat::kDyn4 ||
         format == StateFormat::kFp8;
}

void DecodeTorchaoStates(StateFormat format, bool is_signed, const ConstStoredTile& from, float* to) {
  switch (format) {
    case StateFormat::kDyn8: {
      const CodeMap<256>& map = EightBitMap(is_signed);
      return DecodeBytes(from, to, [&](uint32_t code) { return map.Level(code); });
    }
    case StateFormat::kDyn4:
      return DecodeFourBits(FourBitMap(is_signed), from, to);
    case StateFormat::kFp8:
      return DecodeBytes(from, to, [](uint32_t code) { return DecodeAnyMinifloat<E4M3, float>(code); });
    default:
      std::memcpy(to, from.codes, kTileElements * sizeof(float));
  }
}

void EncodeTorchaoStates(StateFormat format, bool is_signed, const float* from, const StoredTile& to) {
  switch (format) {
    case StateFormat::kDyn8: {
      const CodeMap<256>& map = EightBitMap(is_signed);
      return EncodeBytes(from, to, BlockScale(from, kTileElements), [&](float y) { return map.Code(y); });
    }
    case StateFormat::kDyn4:
      return EncodeFourBits(FourBitMap(is_signed), from, to);
    case StateFormat::kFp8:
      return EncodeBytes(from, to, BlockScale(from, kTileElements) / E4M3::kLargest, EncodeFp8);
    default:
      std::memcpy(to.codes, from, kTileElements * sizeof(float));
  }
}

}  // namespace shardmesh
