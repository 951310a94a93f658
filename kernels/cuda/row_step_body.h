// The step of int8_row weights (kernels/tile/rows.h) as 256 threads do it together: as many rows as fill whole tiles, a
// tile after the other. A row's new scale is known when all of it was stepped, and fp32 weights are kept nowhere; so
// every tile is stepped twice, first for the rows' largest magnitudes alone, then to store. Each time StepBody steps
// it, with weights in fp32 that lie in shared memory. Compiled for the CPU too, where a test walks the phases thread by
// thread.
//
//   for each phase p below num_phases(): every thread calls Phase(p, thread), then all wait for each other
#pragma once

#include "kernels/cuda/optimizer_step_body.h"
#include "kernels/rules/int8.h"

namespace shardmesh {

// What the threads of a block share.
struct RowMemory {
  BodyMemory tile;
  float weights[kTileElements];     // of the tile, in fp32
  uint32_t largest[kTileElements];  // of each row of the unit, the bits of its largest new magnitude
  uint32_t changed;                 // whether a code of the tile did
  uint64_t digests[4];              // of the unit's weights and states; the first: of fp32 ones, which nobody wants
  uint64_t weights_digest;
  // StepBody's: the run with `weights` for its weights.
  OptimizerContext context;
  OptimizerRun run;
  StepPlan plan;
};

class RowBody {
 public:
  // `context`, `run`, `plan`: of weights in int8_row. `unit`: which rows of the run (kernels/cuda/step_list.h).
  SHARDMESH_RULE RowBody(const OptimizerContext& context, const OptimizerRun& run, const StepPlan& plan, int64_t unit,
                         RowMemory* memory)
      : context_(context), run_(run), plan_(plan), memory_(memory) {
    int64_t divisor = kTileElements;  // the greatest that a row has in common with a tile: a power of two
    while (run.row_elements % divisor != 0) divisor /= 2;
    first_row_ = unit * (kTileElements / divisor);
    first_tile_ = unit * (run.row_elements / divisor);
    const int64_t rows_left = run.num_elements / run.row_elements - first_row_;
    rows_ = rows_left < kTileElements / divisor ? rows_left : kTileElements / divisor;
    tiles_ = (rows_ * run.row_elements + kTileElements - 1) / kTileElements;
  }

  SHARDMESH_RULE int64_t num_phases() const { return 4 + tiles_ * (kMeasure + kStore); }

  SHARDMESH_RULE void Phase(int64_t phase, int thread) {
    if (phase == 0) return Begin(thread);
    if (phase == num_phases() - 3) return StoreScales(thread);
    if (phase == num_phases() - 2) return Digest(thread);
    if (phase == num_phases() - 1) return TellDigests(thread);
    --phase;
    if (phase < tiles_ * kMeasure) {
      Measure(first_tile_ + phase / kMeasure, static_cast<int>(phase % kMeasure), thread);
    } else {
      phase -= tiles_ * kMeasure;
      Store(first_tile_ + phase / kStore, static_cast<int>(phase % kStore), thread);
    }
  }

 private:
  static constexpr int kMeasure = 2, kStore = StepBody::kPhases + 2;  // phases of a tile

  SHARDMESH_RULE void Begin(int thread) {
    memory_->largest[thread] = 0;
    if (thread != 0) return;
    memory_->context = context_;
    memory_->context.weights = WeightFormat::kFp32;
    OptimizerRun& run = memory_->run;
    run = run_;
    run.weights_in = run.weights_out = {memory_->weights, nullptr};
    run.num_copies = 0;
    run.changed = nullptr;
    run.mx8 = {};
    run.largest = nullptr;
    if (run.digests != nullptr) run.digests = memory_->digests;
    for (uint64_t& digest : memory_->digests) digest = 0;
    memory_->weights_digest = 0;
    StepPlan& plan = memory_->plan;
    plan = plan_;
    plan.context = &memory_->context;
    plan.run = &run;
    plan.weights = {{4, 1}, {0, 1}};
    plan.weights_tile = {0, 0};  // every tile's weights lie in the same place
  }

  SHARDMESH_RULE void Measure(int64_t tile, int phase, int thread) {
    if (phase == 0) Decode(tile, thread);
    StepBody(memory_->plan, tile, &memory_->tile).Phase(phase, thread);
    if (phase == 1 && Has(tile, thread)) {
      KeepLarger(&memory_->largest[RowOf(tile, thread) - first_row_], Abs(memory_->tile.weights[thread]));
    }
  }

  SHARDMESH_RULE void Store(int64_t tile, int phase, int thread) {
    if (phase == 0) Decode(tile, thread);
    if (phase < StepBody::kPhases) return StepBody(memory_->plan, tile, &memory_->tile).Phase(phase, thread);
    if (phase == StepBody::kPhases) return Encode(tile, thread);
    if (thread == 0 && run_.changed != nullptr) run_.changed[tile] = memory_->changed != 0;
    if (!Has(tile, thread)) return;
    TileRun published;
    SetPublished(run_, tile, published);
    PublishElement(published, memory_->tile.published, memory_->weights[thread], thread);
  }

  SHARDMESH_RULE bool Has(int64_t tile, int thread) const { return tile * kTileElements + thread < run_.num_elements; }
  SHARDMESH_RULE int64_t RowOf(int64_t tile, int thread) const {
    return (tile * kTileElements + thread) / run_.row_elements;
  }

  SHARDMESH_RULE void Decode(int64_t tile, int thread) {
    if (thread == 0) memory_->changed = 0;
    float weight = 0;
    if (Has(tile, thread)) {
      const uint32_t code = static_cast<const uint8_t*>(run_.weights_in.codes)[tile * kTileElements + thread];
      weight = DecodeInt8<float>(code) * static_cast<const float*>(run_.weights_in.extra)[RowOf(tile, thread)];
    }
    memory_->weights[thread] = weight;
  }

  SHARDMESH_RULE float NewScale(int64_t row) const {
    return Max(Divide(FloatOfBits(memory_->largest[row - first_row_]), kInt8Largest), kSmallestScale);
  }

  // What is stored stands for takes the weight's place. The old scales stay where they are until no tile is decoded any
  // more.
  SHARDMESH_RULE void Encode(int64_t tile, int thread) {
    if (!Has(tile, thread)) return;
    const int64_t i = tile * kTileElements + thread;
    const float scale = NewScale(RowOf(tile, thread)), y = Divide(memory_->weights[thread], scale);
    const uint32_t word = EncodeInt8Stochastic(y, Draw(run_.first_element + static_cast<uint64_t>(i)));
    const auto code = static_cast<uint8_t>(word);
    memory_->weights[thread] = IntToFloat(word) * scale;
    KeepLarger(&memory_->tile.published[thread / kMxElements], Abs(memory_->weights[thread]));
    if (code != static_cast<const uint8_t*>(run_.weights_in.codes)[i]) memory_->changed = 1;
    static_cast<uint8_t*>(run_.weights_out.codes)[i] = code;
    for (int c = 0; c < run_.num_copies; ++c) static_cast<uint8_t*>(run_.copies[c])[i] = code;
  }

  SHARDMESH_RULE uint32_t Draw(uint64_t element) const {
    const DrawStream& stream = plan_.weight_draws;
    const uint64_t number = DrawCounter(element);
    uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), stream.tensor,
                         stream.step};
    Philox4x32(stream.key, words);
    return (words[DrawWord(element)] >> DrawShift(element)) & 0xFFFFu;
  }

  SHARDMESH_RULE void StoreScales(int thread) {
    if (thread < rows_)
      static_cast<float*>(run_.weights_out.extra)[first_row_ + thread] = NewScale(first_row_ + thread);
  }

  // Every thread its share of the unit's codes and scales.
  SHARDMESH_RULE void Digest(int thread) {
    if (run_.digests == nullptr) return;
    const int64_t first = first_row_ * run_.row_elements,
                  rows_before = static_cast<int64_t>(run_.first_element) / run_.row_elements;
    const auto share = [&](const TileDigest& of, const PartLayout& layout, int64_t first_entry, const uint8_t* data,
                           int64_t bytes) {
      const uint64_t first_word = static_cast<uint64_t>(first_entry * layout.bytes / of.word_bytes);
      return DigestWords(of.key, first_word, of.word_bytes, data, bytes, thread, kTileElements);
    };
    const auto* codes = static_cast<const uint8_t*>(run_.weights_out.codes) + first;
    const auto* scales = static_cast<const uint8_t*>(run_.weights_out.extra) + first_row_ * plan_.weights.extra.bytes;
    AddDigest(&memory_->weights_digest,
              share(plan_.digests[0][0], plan_.weights.codes, static_cast<int64_t>(run_.first_element) + first, codes,
                    rows_ * run_.row_elements) +
                  share(plan_.digests[0][1], plan_.weights.extra, rows_before + first_row_, scales,
                        rows_ * plan_.weights.extra.bytes));
  }
  SHARDMESH_RULE void TellDigests(int thread) {
    if (run_.digests == nullptr || thread > plan_.num_states) return;
    AddDigest(run_.digests + thread, thread == 0 ? memory_->weights_digest : memory_->digests[thread]);
  }

  const OptimizerContext& context_;
  const OptimizerRun& run_;
  const StepPlan& plan_;
  RowMemory* const memory_;
  int64_t first_row_ = 0, first_tile_ = 0, rows_ = 0, tiles_ = 0;  // of the unit, in the run
};

}  // namespace shardmesh
