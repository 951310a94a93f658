// What a block does in a fused pass (kernels/cuda/fused_pass.h), once for g++ and nvcc: a device's block of threads, or
// one that a test walks thread by thread.
//
// A `Block` has: Opened(args), whether the gate let it through; Threads(f), f(thread, num_threads) by every thread and
// then a barrier; StepRun(memory), the tiles of memory->run by all its threads and then a barrier; LoadAcquire and
// StoreRelease of a word, at system scope; GoesOn(), always true on a device. Everything outside Threads is the same
// for all threads.
#pragma once

#include "kernels/cuda/fused_pass.h"
#include "kernels/cuda/optimizer_step_body.h"
#include "kernels/cuda/warp_pieces.h"

namespace shardmesh {

// What the threads of a block share.
struct PassMemory {
  OptimizerContext context;
  OptimizerRun run;
  StepPlan plan;
  const void* gradients[kPassSlots];
};

namespace fused_pass {

using Word = uint64_t __attribute__((may_alias));

// A value of plain words, copied by all threads together.
template <class Value>
SHARDMESH_RULE void CopyWords(const Value& from, Value* to, int thread, int num_threads) {
  static_assert(sizeof(Value) % sizeof(uint64_t) == 0 && alignof(Value) % alignof(uint64_t) == 0);
  for (int i = thread; i < static_cast<int>(sizeof(Value) / sizeof(uint64_t)); i += num_threads) {
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&from)[i];
  }
}

// Where a run's part of a stream lies, as placed by `parity`. Parts that do not exist are null.
SHARDMESH_RULE StoredRun StoredAt(const PassStep& step, const PassRange& range, int state_plus_one, int parity,
                                  int64_t offset) {
  const int64_t element = range.base[parity] + offset;
  StoredRun at;
  const int codes = state_plus_one, extra = state_plus_one + kPassStreams / 2;
  if (step.parts[codes].bytes > 0) at.codes = range.streams[codes] + step.parts[codes].BytesOf(element);
  if (step.parts[extra].bytes > 0) at.extra = range.streams[extra] + step.parts[extra].BytesOf(element);
  return at;
}

// The gradients of a run, by all threads.
SHARDMESH_RULE void SetGradients(const PassStep& step, const PassRange& range, const PassChunkRun& run,
                                 PassMemory* memory, int thread, int num_threads) {
  const int64_t at = (range.bucket_begin + run.offset) * step.gradient_bytes;
  for (int s = thread; s < step.num_slots; s += num_threads) memory->gradients[s] = step.slots[s] + at;
}

// What every kind of run has; by one thread.
SHARDMESH_RULE void SetRun(const PassStep& step, const PassChunkRun& from, PassMemory* memory) {
  OptimizerRun& run = memory->run;
  run = OptimizerRun();
  run.gradients = memory->gradients;
  run.num_slots = step.num_slots;
  run.divide_scale = step.divide_scale;
  run.clip = step.clip;
  run.num_elements = from.num_elements;
  run.first_element = static_cast<uint64_t>(from.first_element);
  run.tensor = from.tensor;
  run.row_elements = step.row_elements;
}

// A run of a step; by one thread, when the group is there.
SHARDMESH_RULE void SetStepRun(const PassStep& step, const PassRange& range, const PassChunkRun& from, bool writes,
                               PassMemory* memory) {
  SetRun(step, from, memory);
  OptimizerRun& run = memory->run;
  const int to = 1 - step.parity;
  run.weights_in = StoredAt(step, range, 0, step.parity, from.offset);
  run.weights_out = StoredAt(step, range, 0, to, from.offset);
  for (int s = 0; s < step.num_states; ++s) {
    run.states_in[s] = StoredAt(step, range, s + 1, step.parity, from.offset);
    run.states_out[s] = StoredAt(step, range, s + 1, to, from.offset);
  }
  run.num_copies = writes ? step.num_places : 0;
  for (int c = 0; c < run.num_copies; ++c) {
    run.copies[c] = step.places[c] + (range.bucket_begin + from.offset) * step.code_bytes;
  }
  StepPlan& plan = memory->plan;
  plan.context = &memory->context;
  plan.run = &memory->run;
  plan.weight_draws.tensor = from.tensor;
  for (DrawStream& draws : plan.state_draws) draws.tensor = from.tensor;
}

// The scales of int8_row weights that were just stepped, into the places.
SHARDMESH_RULE void CopyScales(const PassStep& step, const PassChunkRun& from, const PassMemory& memory, int thread,
                               int num_threads) {
  const auto* scales = static_cast<const float*>(memory.run.weights_out.extra);
  const auto rows = static_cast<int>(from.num_elements / step.row_elements);
  for (int place = 0; place < step.num_places; ++place) {
    auto* to = reinterpret_cast<float*>(step.places[place] + from.scale_at);
    for (int row = thread; row < rows; row += num_threads) to[row] = scales[row];
  }
}

}  // namespace fused_pass

// Steps range `index`.
template <class Block>
SHARDMESH_RULE void StepPassRange(const PassArgs& args, int index, PassMemory* memory, Block& block) {
  if (!block.Opened(args)) return;
  const PassStep& step = *args.step;
  const PassRange& range = args.ranges[index];
  int group = -1;
  int64_t done = PassChunksDone(block.LoadAcquire(range.progress), step.seq);
  block.Threads([](int, int) {});  // all have read the word before one of them writes it
  for (; done < range.num_chunks && block.GoesOn(); ++done) {
    const int64_t chunk = step.parity == 0 ? done : range.num_chunks - 1 - done;
    const bool writes = chunk % step.share_count == step.share_index;
    const int32_t* const first = args.first_runs + range.first_chunk + chunk;
    for (int32_t r = first[0]; r < first[1]; ++r) {
      const PassChunkRun& run = args.runs[r];
      block.Threads([&](int thread, int num_threads) {
        if (run.group != group) {
          fused_pass::CopyWords(step.groups[run.group].context, &memory->context, thread, num_threads);
          fused_pass::CopyWords(step.groups[run.group].plan, &memory->plan, thread, num_threads);
        }
        fused_pass::SetGradients(step, range, run, memory, thread, num_threads);
      });
      group = run.group;
      block.Threads([&](int thread, int) {
        if (thread == 0) fused_pass::SetStepRun(step, range, run, writes, memory);
      });
      block.StepRun(memory);
      if (step.has_scales == 0 || !writes) continue;
      block.Threads(
          [&](int thread, int num_threads) { fused_pass::CopyScales(step, run, *memory, thread, num_threads); });
    }
    block.Threads([&](int thread, int) {
      if (thread == 0) block.StoreRelease(range.progress, PassWord(step.seq, done + 1));
    });
  }
}

// The sums of squares of a range's gradients. Replicas share the chunks.
template <class Block>
SHARDMESH_RULE void SquarePassRange(const PassArgs& args, int index, PassMemory* memory, Block& block) {
  if (!block.Opened(args)) return;
  const PassStep& step = *args.step;
  const PassRange& range = args.ranges[index];
  block.Threads([&](int thread, int num_threads) {
    fused_pass::CopyWords(step.groups[0].context, &memory->context, thread, num_threads);
  });
  for (int64_t chunk = step.share_index; chunk < range.num_chunks; chunk += step.share_count) {
    const int32_t* const first = args.first_runs + range.first_chunk + chunk;
    for (int32_t r = first[0]; r < first[1]; ++r) {
      const PassChunkRun& run = args.runs[r];
      block.Threads([&](int thread, int num_threads) {
        fused_pass::SetGradients(step, range, run, memory, thread, num_threads);
        if (thread != 0) return;
        fused_pass::SetRun(step, run, memory);
        memory->run.square_sums = step.square_sums + (range.bucket_begin + run.offset) / kTileElements;
      });
      block.StepRun(memory);
    }
  }
}

// Of one tile: OptimizerRun::square_sums alone (kernels/tile/gradients.h), by a warp, as WarpBody.
class SquaresBody {
 public:
  static constexpr int kLanes = 32, kPhases = 3;
  struct Memory {
    alignas(16) float gradient[kTileElements];
    float sums[8];
  };

  SHARDMESH_RULE SquaresBody(const OptimizerContext& context, const OptimizerRun& run, const StepPlan&, int64_t tile,
                             Memory* memory, int lane)
      : context_(context), run_(run), memory_(memory), tile_(tile), lane_(lane) {}

  SHARDMESH_RULE void Phase(int phase) {
    if (phase == 0) Load();
    if (phase == 1 && lane_ < 8) {
      float sum = 0;
      for (int i = lane_; i < kTileElements; i += 8) sum = MulAdd(memory_->gradient[i], memory_->gradient[i], sum);
      memory_->sums[lane_] = sum;
    }
    if (phase == 2 && lane_ == 0) {
      run_.square_sums[tile_] = TreeSumFixed<8>([&](int i) { return memory_->sums[i]; });
    }
  }

 private:
  SHARDMESH_RULE void Load() {
    const bool wide = context_.gradients == Format::kFp32;
    const int64_t first = tile_ * kTileElements, left = run_.num_elements - first;
    const int elements = static_cast<int>(left < kTileElements ? left : kTileElements);
    SumSlots<false>(run_.gradients, run_.num_slots, wide, first, elements, lane_, memory_->gradient);
    for (int k = 0; k < 8; ++k) {
      const int at = Places<false>::At(lane_, k);
      if (at < elements) memory_->gradient[at] = memory_->gradient[at] * run_.divide_scale;
    }
  }

  const OptimizerContext& context_;
  const OptimizerRun& run_;
  Memory* const memory_;
  const int64_t tile_;
  const int lane_;
};

// Units of a run of int8_row weights: as many rows as fill whole tiles (kernels/cuda/row_step_body.h).
SHARDMESH_RULE int64_t RowUnits(const OptimizerRun& run) {
  int64_t divisor = kTileElements;
  while (run.row_elements % divisor != 0) divisor /= 2;
  const int64_t unit = run.row_elements * (kTileElements / divisor);
  return (run.num_elements + unit - 1) / unit;
}

}  // namespace shardmesh
