// The optimizer step as CUDA kernels: warps that take a tile each where there is a body for their formats
// (kernels/cuda/warp_step_body.h), else blocks of 256 threads (kernels/cuda/optimizer_step_body.h,
// for int8_row kernels/cuda/row_step_body.h). Either finds its run in the
// list by binary search, a unit at a time.
#include <cuda_runtime.h>

#include "kernels/cuda/optimizer_step_body.h"
#include "kernels/cuda/optimizer_step_kernel_cuda.h"
#include "kernels/cuda/row_step_body.h"
#include "kernels/cuda/warp_step_body.h"

namespace shardmesh {
namespace {

constexpr int64_t kMaxBlocks = 1 << 16;  // beyond it a block goes on with the next unit
constexpr int kWarps = 4;                // of a block
constexpr int kBlocks = 8;               // of a multiprocessor: at most 64 registers a thread
constexpr int kUnits = 4;                // of a warp

struct StepUnit {
  const OptimizerContext& context;
  const StepListEntry& entry;
  int64_t index;
};

__device__ StepUnit UnitOf(const StepSource& source, int64_t unit) {
  if (source.list.entries == nullptr) return {source.context, source.entry, unit};
  const StepPlace place = PlaceOf(source.list, unit);
  const StepListEntry& entry = source.list.entries[place.entry];
  return {source.list.contexts[entry.context], entry, place.index};
}

// A block has kWarps * kUnits units in a row, which its warps take in turns: they look for a run only where one ends.
//
// Budget: 128 threads, 8 blocks; 64 registers, 736 bytes of stack, 180 of spills, 12480 of shared memory.
template <class Body>
__global__ void __launch_bounds__(kWarps* Body::kLanes, kBlocks) WarpKernel(const __grid_constant__ StepSource source) {
  __shared__ typename Body::Memory memory[kWarps];
  const int warp = threadIdx.x / Body::kLanes, lane = threadIdx.x % Body::kLanes;
  const StepListEntry* entry = &source.entry;
  const OptimizerContext* context = &source.context;
  int64_t begin = 0, end = source.list.entries == nullptr ? source.num_units : 0;  // of the entry's units
#pragma unroll 1
  for (int u = 0; u < kUnits; ++u) {
    const int64_t unit = (int64_t{blockIdx.x} * kUnits + u) * kWarps + warp;
    if (unit >= source.num_units) return;
    if (unit >= end) {
      const int32_t place = PlaceOf(source.list, unit).entry;
      begin = source.list.first_units[place];
      end = source.list.first_units[place + 1];
      entry = source.list.entries + place;
      context = source.list.contexts + entry->context;
    }
    Body body(*context, entry->run, entry->plan, unit - begin, &memory[warp], lane);
#pragma unroll
    for (int phase = 0; phase < Body::kPhases; ++phase) {
      body.Phase(phase);
      __syncwarp();
    }
  }
}

template <class Body>
__device__ void WalkPhases(Body& body, int64_t num_phases) {
  for (int64_t phase = 0; phase < num_phases; ++phase) {
    body.Phase(phase, static_cast<int>(threadIdx.x));
    __syncthreads();
  }
}

// Budget: 256 threads, 2 blocks; 127 registers, 896 bytes of stack, 328 of spills, 11072 of shared memory.
__global__ void __launch_bounds__(kTileElements) BlockKernel(const __grid_constant__ StepSource source) {
  alignas(RowMemory) __shared__ uint8_t bytes[sizeof(RowMemory)];  // shared memory has no constructors
  RowMemory& memory = *reinterpret_cast<RowMemory*>(bytes);
  for (int64_t i = blockIdx.x; i < source.num_units; i += gridDim.x) {
    const StepUnit unit = UnitOf(source, i);
    if (unit.context.weights == WeightFormat::kInt8Row) {
      RowBody body(unit.context, unit.entry.run, unit.entry.plan, unit.index, &memory);
      WalkPhases(body, body.num_phases());
      continue;
    }
    if (threadIdx.x == 0) {
      memory.plan = unit.entry.plan;
      memory.plan.context = &unit.context;
      memory.plan.run = &unit.entry.run;
    }
    __syncthreads();
    StepBody body(memory.plan, unit.index, &memory.tile);
    WalkPhases(body, StepBody::kPhases);
  }
}

int BlocksFor(int64_t units) { return static_cast<int>(units < kMaxBlocks ? units : kMaxBlocks); }

}  // namespace

const char* LaunchOptimizerStep(const StepSource& source, const OptimizerContext* warp, void* stream) {
  if (source.num_units == 0) return nullptr;
  const auto in = static_cast<cudaStream_t>(stream);
  if (warp == nullptr) {
    BlockKernel<<<BlocksFor(source.num_units), kTileElements, 0, in>>>(source);
  } else {
    WithWarpBody(*warp, [&](auto tag) {
      using Body = typename decltype(tag)::Type;
      const auto blocks = static_cast<unsigned>((source.num_units + kWarps * kUnits - 1) / (kWarps * kUnits));
      WarpKernel<Body><<<blocks, kWarps * Body::kLanes, 0, in>>>(source);
    });
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace shardmesh
