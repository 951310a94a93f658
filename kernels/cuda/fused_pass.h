// The fused pass of a shard on a CUDA device, as values: what a launch reads. The kernels' bodies are in
// kernels/cuda/fused_pass_body.h, the launches in kernels/cuda/fused_pass_launch_cuda.h and fused_pass_cuda.cu; a test
// walks the bodies on the CPU (kernels/cuda/fused_pass_host.h).
//
// The shard lies in rotating storage (worker/memory/shard_storage.h), cut into ranges; a block takes a range and walks
// its chunks one after the other: it reads the gradients of all slots where they lie, sums them in tree order, steps
// the elements, stores weights and states where the last chunk lay, and the new weights into every place that gets
// them. Then it release-stores the range's progress word, before it stores anything of the next chunk; it reads of the
// next one meanwhile. A chunk that the word says is done is passed over, so that a launch can be repeated: the same
// bytes come out, whenever the one before was stopped.
//
// Tables of a bucket (PassRange, PassChunkRun, first runs) do not change while a job lives; PassStep is of one command.
// All pointers are the device's. Plain values, the same for g++ and nvcc.
#pragma once

#include <cstdint>

#include "kernels/cuda/step_list.h"

namespace shardmesh {

inline constexpr int kPassStreams = 8;  // codes of weights and three states, and behind them the other part of each
inline constexpr int kPassSlots = 128;
inline constexpr int kPassPlaces = 2;  // the window and a publication

// A range's progress word: the command's number and the chunks that are done.
inline constexpr int kPassChunkBits = 20;
SHARDMESH_RULE uint64_t PassWord(uint64_t seq, int64_t chunks) {
  return seq << kPassChunkBits | static_cast<uint64_t>(chunks);
}
SHARDMESH_RULE int64_t PassChunksDone(uint64_t word, uint64_t seq) {
  const uint64_t mask = (uint64_t{1} << kPassChunkBits) - 1;
  return word >> kPassChunkBits == (seq & (~uint64_t{0} >> kPassChunkBits)) ? static_cast<int64_t>(word & mask) : 0;
}

// A run of one tensor in one chunk.
struct PassChunkRun {
  int64_t first_element = 0;  // in the tensor
  int64_t offset = 0;         // elements from the range's begin
  int64_t num_elements = 0;
  int64_t scale_at = 0;  // of int8_row: bytes from the bucket's begin in a window to the scale of the run's first row
  uint32_t tensor = 0;
  int32_t group = 0;  // which of PassStep::groups
};

struct PassRange {
  int64_t bucket_begin = 0;  // its first element, from the bucket's start
  int64_t base[2] = {0, 0};  // by parity: the element of the streams where chunk 0 lies
  int32_t num_chunks = 0;
  int32_t first_chunk = 0;  // of first_runs: that of chunk 0
  uint8_t* streams[kPassStreams] = {};
  uint64_t* progress = nullptr;
  int64_t step_at = 0;  // of its bucket's PassStep: bytes from PassArgs::steps
};

// A parameter group's part of a step. The plan's pointers are null: they are set where it is used, as are its tensors.
struct PassOptimizer {
  OptimizerContext context;
  StepPlan plan;
};

// What one command says of one bucket.
struct PassStep {
  uint64_t seq = 0;
  int32_t parity = 0;
  int32_t num_slots = 0;
  float divide_scale = 1, clip = 1;
  int32_t share_index = 0, share_count = 1;  // of replicas that share the writing: this one writes chunks c = i mod n
  int32_t num_places = 0;
  int32_t num_states = 0;
  uint8_t* places[kPassPlaces] = {};      // where the bucket begins in what gets its weights
  const uint8_t* slots[kPassSlots] = {};  // where the bucket begins in each slot
  int64_t gradient_bytes = 0;             // of an element
  int64_t code_bytes = 0;                 // of an element in the places
  int64_t row_elements = 1;               // of int8_row
  int32_t has_scales = 0;                 // of int8_row: 1
  float* square_sums = nullptr;           // of a command that squares: where the bucket's first block's sum goes
  const PassOptimizer* groups = nullptr;
  PartLayout parts[kPassStreams];
};

// One launch: ranges of one or more buckets on this worker.
struct PassArgs {
  const uint8_t* steps = nullptr;
  const PassRange* ranges = nullptr;
  const PassChunkRun* runs = nullptr;
  const int32_t* first_runs = nullptr;  // of every chunk of every range, and the end
  int32_t num_ranges = 0;
  // The launch does nothing unless this word is `opened` (kernels/cuda/pass_gate.h). Null: it does not look.
  const uint64_t* verdict = nullptr;
  uint64_t opened = 0;
};

}  // namespace shardmesh
