// What a step tells and hands on of a tile, once its new weights and states are stored and lie in the first-level
// cache: whether codes changed, copies, weights in mx8, largest magnitudes, digests. For every number type; the one
// place for it.
#pragma once

#include <cstring>

#include "kernels/rules/block_scales.h"
#include "kernels/tile/plan.h"
#include "kernels/tile/states.h"

namespace shardmesh {

// Modulo 2^64, whoever else adds at the same time.
SHARDMESH_RULE void AddDigest(uint64_t* to, uint64_t digest) {
#ifdef __CUDA_ARCH__
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(digest));
#else
  __atomic_fetch_add(to, digest, __ATOMIC_RELAXED);
#endif
}

// `elements`: of the tile, as in all of this file; a multiple of 256 but for the tensor's last.
SHARDMESH_RULE int64_t BytesInTile(const PartLayout& layout, int64_t whole, int64_t elements) {
  return elements == kTileElements ? whole : layout.BytesOf(elements);
}

// The digest of a stream's tile, or a lane's share of it.
SHARDMESH_RULE uint64_t DigestTile(const TileDigest (&parts)[2], const StoredLayout& layout, const TileBytes& bytes,
                                   uint64_t first_element, int64_t elements, const StoredTile& stored, int64_t lane = 0,
                                   int64_t lanes = 1) {
  const auto part = [&](const TileDigest& of, const PartLayout& part_layout, int64_t whole, const uint8_t* data) {
    const uint64_t first_word = first_element / kTileElements * of.words;
    return DigestWords(of.key, first_word, of.word_bytes, data, BytesInTile(part_layout, whole, elements), lane, lanes);
  };
  return part(parts[0], layout.codes, bytes.codes, stored.codes) +
         part(parts[1], layout.extra, bytes.extra, stored.extra);
}

// Where a tile's new codes of weights go before EmitCodes: to `memory` (4 * kTileElements bytes) when they would
// otherwise overwrite those that they are to be compared with.
SHARDMESH_RULE uint8_t* NewCodes(const TileRun& tile, uint8_t* memory) {
  const bool compared = tile.changed != nullptr && tile.weights_in.codes == tile.weights_out.codes;
  return compared ? memory : tile.weights_out.codes;
}

// mx8 and the largest magnitudes of a tile of weights as readers get them; what lies behind `elements` is 0.
template <class Number>
__attribute__((noinline)) void EmitPublished(const TileRun& tile, const float* weights, int64_t elements) {
  using Code = Fp8<Number, /*kSigned=*/true, kMxElements, /*kWide=*/true>;
  static constexpr TileDraws kNoDraws = {};  // its codes are the nearest
  for (int64_t i = 0; tile.mx8.codes != nullptr && i < elements; i += kMxElements) {
    const auto scale = MxScaleCeil(LargestMagnitude<Number>(weights + i, kMxElements));
    tile.mx8.extra[i / kMxElements] = static_cast<uint8_t>(scale.code);
    EncodeBlock<Code>(weights, Number(scale.multiplier), kNoDraws, tile.mx8.codes, i);
  }
  for (int64_t i = 0; tile.largest != nullptr && i < elements; i += kLargestElements) {
    tile.largest[i / kLargestElements] = LargestMagnitude<Number>(weights + i, kLargestElements);
  }
}

SHARDMESH_RULE bool IsPublished(const TileRun& tile) { return tile.mx8.codes != nullptr || tile.largest != nullptr; }

// Of the new codes of weights, which lie at `codes`: their own place, or memory from which they are moved there. What
// is published of row formats is not here: their scales are no tile's.
template <class Number>
void EmitCodes(const StepPlan& plan, const TileRun& tile, int64_t elements, const uint8_t* codes) {
  const auto bytes = static_cast<size_t>(BytesInTile(plan.weights.codes, plan.weights_tile.codes, elements));
  if (tile.changed != nullptr) *tile.changed = std::memcmp(codes, tile.weights_in.codes, bytes) != 0;
  if (codes != tile.weights_out.codes) std::memcpy(tile.weights_out.codes, codes, bytes);
  for (int copy = 0; copy < plan.run->num_copies; ++copy) std::memcpy(tile.copies[copy], codes, bytes);
  const WeightFormat format = plan.context->weights;
  if (!IsPublished(tile) || format == WeightFormat::kInt8Row) return;
  alignas(64) float weights[kTileElements];
  DecodeWeights<Number>(format == WeightFormat::kFp32 ? format : WeightFormat::kBf16, {codes, nullptr}, weights);
  for (int64_t i = elements; i < kTileElements; ++i) weights[i] = 0;
  EmitPublished<Number>(tile, weights, elements);
}

// The digest of stream `stream`: 0 the weights, 1 to 3 the states.
template <class Number>
__attribute__((noinline)) void EmitDigest(const StepPlan& plan, const TileRun& tile, int stream, uint64_t first_element,
                                          int64_t elements) {
  const StoredTile& stored = stream == 0 ? tile.weights_out : tile.states_out[stream - 1];
  AddDigest(plan.run->digests + stream,
            DigestTile(plan.digests[stream], stream == 0 ? plan.weights : plan.states,
                       stream == 0 ? plan.weights_tile : plan.states_tile, first_element, elements, stored));
}

// Whether a run asks for anything of this; else EmitTile has nothing to do.
SHARDMESH_RULE bool Emits(const OptimizerRun& run) {
  return run.changed != nullptr || run.num_copies > 0 || run.mx8.codes != nullptr || run.largest != nullptr ||
         run.digests != nullptr;
}

// All of a tile whose weights are `codes` (as EmitCodes has them) and whose other parts lie where they belong. Not for
// row formats, whose scales are no tile's.
template <class Number>
__attribute__((noinline)) void EmitTile(const StepPlan& plan, const TileRun& tile, uint64_t first_element,
                                        int64_t elements, const uint8_t* codes) {
  EmitCodes<Number>(plan, tile, elements, codes);
  for (int stream = 0; plan.run->digests != nullptr && stream <= plan.num_states; ++stream) {
    EmitDigest<Number>(plan, tile, stream, first_element, elements);
  }
}

}  // namespace shardmesh
