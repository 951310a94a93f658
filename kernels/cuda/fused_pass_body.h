// What a block does in a fused pass (kernels/cuda/fused_pass.h), once for g++ and nvcc: a device's block of threads, or
// one that a test walks thread by thread.
//
// A `Block` has: Opened(args), whether the gate let it through; Each(f), f(thread, num_threads) by every thread;
// Threads(f), the same and then a barrier; OneWarp(f), f(thread) by 32 of the threads, which then wait for each other;
// kTeller, the thread that writes progress words; Ask(address), which is about to be read; StepRun(memory, tell, next),
// the tiles of memory->run by all its threads and then a barrier; LoadAcquire and StoreRelease of a word, at system
// scope; GoesOn(), always true on a device. Everything outside Each, Threads and OneWarp is the same for all threads.
//
// StepRun calls tell() and then next() beside the tiles, perhaps by some threads alone, with those of OneWarp and
// kTeller among them. There is a barrier between tell() and the first write to what others than the block see.
#pragma once

#include "kernels/cuda/fused_pass.h"
#include "kernels/cuda/optimizer_step_body.h"
#include "kernels/cuda/warp_pieces.h"

namespace shardmesh {

// What the threads of a block share: a run, and where in the range it is.
struct PassMemory {
  OptimizerContext context;
  OptimizerRun run;
  StepPlan plan;
  const void* gradients[kPassSlots];
  int32_t group;       // that context and plan are of; less than 0: none
  int32_t there;       // whether there is a run
  int32_t done;        // chunks before the run's
  int32_t index, end;  // of PassArgs::runs: the run, and the end of its chunk
  int32_t told;        // how many chunks the progress word says before the run is written, where that is news; else 0
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

// PartLayout::BytesOf, without a division where it can be.
SHARDMESH_RULE int64_t BytesAt(const PartLayout& part, int64_t element) {
  const auto elements = static_cast<uint64_t>(part.elements);
  if ((elements & (elements - 1)) != 0) return part.BytesOf(element);
#ifdef __CUDA_ARCH__
  const int power = __ffsll(static_cast<long long>(elements)) - 1;
#else
  const int power = __builtin_ctzll(elements);
#endif
  return ((element + part.elements - 1) >> power) * part.bytes;
}

// Where a run's part of a stream lies, as placed by `parity`. Parts that do not exist are null.
SHARDMESH_RULE StoredRun StoredAt(const PassStep& step, const PassRange& range, int state_plus_one, int parity,
                                  int64_t offset) {
  const int64_t element = range.base[parity] + offset;
  StoredRun at;
  const int codes = state_plus_one, extra = state_plus_one + kPassStreams / 2;
  if (step.parts[codes].bytes > 0) at.codes = range.streams[codes] + BytesAt(step.parts[codes], element);
  if (step.parts[extra].bytes > 0) at.extra = range.streams[extra] + BytesAt(step.parts[extra], element);
  return at;
}

SHARDMESH_RULE const PassStep* StepOf(const PassArgs& args, const PassRange& range) {
  return reinterpret_cast<const PassStep*>(args.steps + range.step_at);
}

// What no run of a range changes; by one thread.
SHARDMESH_RULE void SetFixed(const PassStep& step, PassMemory* memory) {
  OptimizerRun& run = memory->run;
  run = OptimizerRun();
  run.gradients = memory->gradients;
  run.num_slots = step.num_slots;
  run.divide_scale = step.divide_scale;
  run.clip = step.clip;
  run.row_elements = step.row_elements;
}

// What every kind of run has; by `num_threads` threads.
SHARDMESH_RULE void SetRun(const PassStep& step, const PassRange& range, const PassChunkRun& from, PassMemory* memory,
                           int thread, int num_threads) {
  const int64_t at = (range.bucket_begin + from.offset) * step.gradient_bytes;
  for (int s = thread; s < step.num_slots; s += num_threads) memory->gradients[s] = step.slots[s] + at;
  if (thread != 0) return;
  memory->run.num_elements = from.num_elements;
  memory->run.first_element = static_cast<uint64_t>(from.first_element);
  memory->run.tensor = from.tensor;
}

// A run of a step; by a warp, when the group is there: a stream or a place a thread.
SHARDMESH_RULE void SetStepRun(const PassStep& step, const PassRange& range, const PassChunkRun& from, bool writes,
                               PassMemory* memory, int thread) {
  SetRun(step, range, from, memory, thread, 32);
  OptimizerRun& run = memory->run;
  const int stream = thread / 2, place = thread - kPassStreams;
  if (stream <= step.num_states) {
    const bool out = thread % 2 == 1;
    StoredRun* const weights = out ? &run.weights_out : &run.weights_in;
    StoredRun* const states = out ? run.states_out : run.states_in;
    *(stream == 0 ? weights : states + (stream - 1)) =
        StoredAt(step, range, stream, out ? 1 - step.parity : step.parity, from.offset);
  } else if (place >= 0 && place < kPassPlaces) {
    uint8_t* const begin = writes && place < step.num_places ? step.places[place] : nullptr;
    run.copies[place] = begin == nullptr ? nullptr : begin + (range.bucket_begin + from.offset) * step.code_bytes;
  } else if (place == kPassPlaces) {
    run.num_copies = writes ? step.num_places : 0;
    StepPlan& plan = memory->plan;
    plan.context = &memory->context;
    plan.run = &memory->run;
    plan.weight_draws.tensor = from.tensor;
    for (DrawStream& draws : plan.state_draws) draws.tensor = from.tensor;
  }
}

// The chunk that is stepped behind `done` others.
SHARDMESH_RULE int32_t ChunkBehind(const PassStep& step, const PassRange& range, int32_t done) {
  return step.parity == 0 ? done : range.num_chunks - 1 - done;
}

// From one run to the next, that of the next chunk that has one; by one thread.
SHARDMESH_RULE void GoOn(const PassArgs& args, const PassStep& step, const PassRange& range, const PassMemory& from,
                         PassMemory* to) {
  int32_t done = from.done, index = from.index + 1, end = from.end;
  while (index >= end && ++done < range.num_chunks) {
    const int32_t* const first = args.first_runs + range.first_chunk + ChunkBehind(step, range, done);
    index = first[0];
    end = first[1];
  }
  to->there = index < end ? 1 : 0;
  to->told = from.there != 0 && done > from.done ? done : 0;
  to->done = done;
  to->index = index;
  to->end = end;
}

// The run behind that of `from`; by one warp.
template <class Block>
SHARDMESH_RULE void SetNext(const PassArgs& args, const PassRange& range, const PassMemory& from, PassMemory* to,
                            Block& block) {
  block.OneWarp([&](int thread) {
    if (thread == 0) GoOn(args, *StepOf(args, range), range, from, to);
  });
  block.OneWarp([&](int thread) {
    if (to->there == 0) return;
    const PassOptimizer* const groups = StepOf(args, range)->groups;
    const int32_t group = args.runs[to->index].group;
    if (group == to->group) return;
    CopyWords(groups[group].context, &to->context, thread, 32);
    CopyWords(groups[group].plan, &to->plan, thread, 32);
  });
  block.OneWarp([&](int thread) {
    if (to->there == 0) return;
    const PassStep& step = *StepOf(args, range);
    const PassChunkRun& run = args.runs[to->index];
    if (thread == 31) to->group = run.group;
    const bool writes = ChunkBehind(step, range, to->done) % step.share_count == step.share_index;
    SetStepRun(step, range, run, writes, to, thread);
  });
}

// Asks for a range's runs; by one warp.
template <class Block>
SHARDMESH_RULE void AskForRuns(const PassArgs& args, const PassRange& range, Block& block) {
  block.OneWarp([&](int thread) {
    const int32_t* const first = args.first_runs + range.first_chunk;
    const auto* const begin = reinterpret_cast<const uint8_t*>(args.runs + first[0]);
    const auto* const end = reinterpret_cast<const uint8_t*>(args.runs + first[range.num_chunks]);
    constexpr int kLine = 128;
    for (const uint8_t* at = begin + thread * kLine; at < end; at += 32 * kLine) block.Ask(at);
  });
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

// Steps range `index`. `memories`: of the run that is stepped, and of the next one.
template <class Block>
SHARDMESH_RULE void StepPassRange(const PassArgs& args, int index, PassMemory (&memories)[2], Block& block) {
  if (!block.Opened(args)) return;
  const PassRange& range = args.ranges[index];
  const uint64_t seq = fused_pass::StepOf(args, range)->seq;
  const auto done = static_cast<int32_t>(PassChunksDone(block.LoadAcquire(range.progress), seq));
  if (done >= range.num_chunks) return;
  block.Threads([&](int thread, int) {  // and all have read the word before one of them writes it
    if (thread >= 2) return;
    PassMemory& memory = memories[thread];
    fused_pass::SetFixed(*fused_pass::StepOf(args, range), &memory);
    memory.group = -1;
    memory.there = memory.index = memory.end = 0;
    memory.done = done - 1;
  });
  fused_pass::SetNext(args, range, memories[1], &memories[0], block);
  block.Threads([](int, int) {});
  fused_pass::AskForRuns(args, range, block);
  const auto tell = [&](int32_t chunks) {
    block.Each([&](int thread, int) {
      if (thread == block.kTeller) block.StoreRelease(range.progress, PassWord(seq, chunks));
    });
  };
  for (int now = 0; memories[now].there != 0 && block.GoesOn(); now = 1 - now) {
    PassMemory& memory = memories[now];
    const auto tell_last = [&] {
      if (memory.told > 0) tell(memory.told);
    };
    block.StepRun(&memory, tell_last, [&] { fused_pass::SetNext(args, range, memory, &memories[1 - now], block); });
    if (fused_pass::StepOf(args, range)->has_scales == 0 || memory.run.num_copies == 0) continue;
    block.Threads([&](int thread, int num_threads) {
      fused_pass::CopyScales(*fused_pass::StepOf(args, range), args.runs[memory.index], memory, thread, num_threads);
    });
  }
  tell(range.num_chunks);
}

// The sums of squares of a range's gradients. Replicas share the chunks.
template <class Block>
SHARDMESH_RULE void SquarePassRange(const PassArgs& args, int index, PassMemory* memory, Block& block) {
  if (!block.Opened(args)) return;
  const PassRange& range = args.ranges[index];
  const PassStep& step = *fused_pass::StepOf(args, range);
  block.Threads([&](int thread, int num_threads) {
    fused_pass::CopyWords(step.groups[0].context, &memory->context, thread, num_threads);
    if (thread == 0) fused_pass::SetFixed(step, memory);
  });
  for (int32_t chunk = step.share_index; chunk < range.num_chunks; chunk += step.share_count) {
    const int32_t* const first = args.first_runs + range.first_chunk + chunk;
    for (int32_t r = first[0]; r < first[1]; ++r) {
      const PassChunkRun& run = args.runs[r];
      block.Threads([&](int thread, int num_threads) {
        fused_pass::SetRun(step, range, run, memory, thread, num_threads);
        if (thread == 0) {
          memory->run.square_sums = step.square_sums + (range.bucket_begin + run.offset) / kTileElements;
        }
      });
      block.StepRun(memory, [] {}, [] {});
    }
  }
}

// Of one tile: OptimizerRun::square_sums alone (kernels/tile/gradients.h), by a warp, as WarpBody.
class SquaresBody {
 public:
  static constexpr int kLanes = 32, kPhases = 3, kStorePhase = 2;
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
