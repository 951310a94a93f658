// Formats of weights and states, by the tiles of the optimizer steps: the project's and torchao's.
#include <algorithm>
#include <cstring>

#include "kernels/encode/encode_arrays.h"
#include "kernels/encode/torchao_codec.h"
#include "kernels/tile/states.h"

namespace shardmesh::encode_internal {
namespace {

struct Stored {
  bool weights;
  WeightFormat weight = WeightFormat::kFp32;
  StateFormat state = StateFormat::kFp32;

  StoredLayout Layout() const { return weights ? LayoutOf(weight) : LayoutOf(state); }
};

Stored StoredOf(CodeFormat format) {
  switch (format) {
    case CodeFormat::kBf16:
      return {true, WeightFormat::kBf16};
    case CodeFormat::kBf16Sr:
      return {true, WeightFormat::kBf16Sr};
    case CodeFormat::kBf16Plus16:
      return {true, WeightFormat::kBf16Plus16};
    case CodeFormat::kBf16Plus8Sr:
      return {true, WeightFormat::kBf16Plus8Sr};
    case CodeFormat::kDyn8:
      return {false, {}, StateFormat::kDyn8};
    case CodeFormat::kDyn4:
      return {false, {}, StateFormat::kDyn4};
    case CodeFormat::kFp8:
      return {false, {}, StateFormat::kFp8};
    case CodeFormat::kFp8x32:
      return {false, {}, StateFormat::kFp8x32};
    default:
      return {true, WeightFormat::kFp32};
  }
}

// Two draws with which stochastic rounding rounds to nearest, ties up.
constexpr uint32_t kHalfDraws = 0x80008000u;

bool DrawsForStored(const CodeSpec& spec) {
  return spec.format == CodeFormat::kBf16Sr || spec.format == CodeFormat::kBf16Plus8Sr ||
         (spec.format == CodeFormat::kFp8x32 && spec.stochastic);
}

bool Torchao(const CodeSpec& spec, const Stored& stored) {
  return spec.torchao && !stored.weights && TorchaoHasStates(stored.state);
}

void EncodeTile(const CodeSpec& spec, const Stored& stored, const float* from, const TileDraws& draws,
                const StoredTile& to) {
  if (stored.weights) return EncodeWeights<float>(stored.weight, from, draws, to);
  if (Torchao(spec, stored)) return EncodeTorchaoStates(stored.state, spec.is_signed, from, to);
  if (spec.is_signed) return EncodeStates<float, true>(stored.state, from, draws, to);
  float positive[kTileElements];  // there is no code for -0
  for (int64_t i = 0; i < kTileElements; ++i) positive[i] = Abs(from[i]);
  EncodeStates<float, false>(stored.state, positive, draws, to);
}

void DecodeTile(const CodeSpec& spec, const Stored& stored, const ConstStoredTile& from, float* to) {
  if (stored.weights) return DecodeWeights<float>(stored.weight, from, to);
  if (Torchao(spec, stored)) return DecodeTorchaoStates(stored.state, spec.is_signed, from, to);
  if (spec.is_signed) return DecodeStates<float, true>(stored.state, from, to);
  DecodeStates<float, false>(stored.state, from, to);
}

// A tile in memory of its own, zeros behind its end.
struct ShortStored {
  alignas(64) uint8_t codes[4 * kTileElements] = {};
  alignas(64) uint8_t extra[4 * kTileElements] = {};
  alignas(64) float values[kTileElements] = {};
};

}  // namespace

void EncodeStored(const CodeSpec& spec, int64_t elements, const float* array, void* codes, void* extra) {
  const Stored stored = StoredOf(spec.format);
  const StoredLayout layout = stored.Layout();
  const bool draw = DrawsForStored(spec);
  const PhiloxKey key = KeyOfStep(MakePhiloxKey(spec.seed, spec.purpose), spec.step);
  const DrawStream stream = {key, static_cast<uint32_t>(spec.step), spec.tensor};
  TileDraws draws;
  std::fill_n(&draws.words[0][0][0], sizeof(draws.words) / sizeof(uint32_t), kHalfDraws);
  for (int64_t begin = 0; begin < elements; begin += kTileElements) {
    const int64_t size = std::min(kTileElements, elements - begin);
    if (draw) DrawFiller<float>::Fill(stream, spec.first_element + begin, draws);
    const StoredTile to = {static_cast<uint8_t*>(codes) + layout.codes.BytesOf(begin),
                           static_cast<uint8_t*>(extra) + layout.extra.BytesOf(begin)};
    if (size == kTileElements) {
      EncodeTile(spec, stored, array + begin, draws, to);
      continue;
    }
    ShortStored last;
    std::copy_n(array + begin, size, last.values);
    EncodeTile(spec, stored, last.values, draws, {last.codes, last.extra});
    std::memcpy(to.codes, last.codes, layout.codes.BytesOf(size));
    if (layout.extra.bytes > 0) std::memcpy(to.extra, last.extra, layout.extra.BytesOf(size));
  }
}

void DecodeStored(const CodeSpec& spec, int64_t elements, const void* codes, const void* extra, float* array) {
  const Stored stored = StoredOf(spec.format);
  const StoredLayout layout = stored.Layout();
  for (int64_t begin = 0; begin < elements; begin += kTileElements) {
    const int64_t size = std::min(kTileElements, elements - begin);
    const ConstStoredTile from = {static_cast<const uint8_t*>(codes) + layout.codes.BytesOf(begin),
                                  static_cast<const uint8_t*>(extra) + layout.extra.BytesOf(begin)};
    if (size == kTileElements) {
      DecodeTile(spec, stored, from, array + begin);
      continue;
    }
    ShortStored last;
    std::memcpy(last.codes, from.codes, layout.codes.BytesOf(size));
    if (layout.extra.bytes > 0) std::memcpy(last.extra, from.extra, layout.extra.BytesOf(size));
    DecodeTile(spec, stored, {last.codes, last.extra}, last.values);
    std::copy_n(last.values, size, array + begin);
  }
}

}  // namespace shardmesh::encode_internal
