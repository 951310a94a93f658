// The fused pass as CUDA kernels: a block a range, of warps that take a tile each where there is a body for the
// bucket's formats (kernels/cuda/warp_step_body.h), else of 256 threads that take a tile together
// (kernels/cuda/optimizer_step_body.h, for int8_row kernels/cuda/row_step_body.h).
#include <cuda_runtime.h>

#include <cuda/atomic>

#include "kernels/cuda/fused_pass_body.h"
#include "kernels/cuda/fused_pass_launch_cuda.h"
#include "kernels/cuda/row_step_body.h"
#include "kernels/cuda/warp_step_body.h"

namespace shardmesh {
namespace {

// Of a block: those that step tiles, and one more that tells progress and looks for the next run meanwhile.
constexpr int kWarps = 4, kThreads = 32 * (kWarps + 1);
constexpr int kBlocks = 6;  // of a multiprocessor: at most 64 registers a thread

struct DeviceMachine {
  using Word = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
  __host__ __device__ uint64_t LoadAcquire(const uint64_t* word) const {
    return Word(*const_cast<uint64_t*>(word)).load(cuda::memory_order_acquire);
  }
  __host__ __device__ void StoreRelease(uint64_t* word, uint64_t value) const {
    Word(*word).store(value, cuda::memory_order_release);
  }
  __host__ __device__ uint64_t Nanos() const {
    uint64_t nanos = 0;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanos));
#endif
    return nanos;
  }
  // The words may lie behind PCIe: a look takes a microsecond.
  __host__ __device__ void Pause() const {
#ifdef __CUDA_ARCH__
    __nanosleep(500);
#endif
  }
};

// What the blocks of all kinds have. `kFirst`: the first thread of OneWarp.
template <int kFirst, int kTells>
struct DeviceBlock : DeviceMachine {
  static constexpr int kTeller = kTells;
  __host__ __device__ bool Opened(const PassArgs& args) const {
    return args.verdict == nullptr || LoadAcquire(args.verdict) == args.opened;
  }
  __host__ __device__ bool GoesOn() const { return true; }
  __host__ __device__ static void Ask(const void* address) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(address)));
#endif
  }
  __host__ __device__ static void Barrier() {
#ifdef __CUDA_ARCH__
    __syncthreads();
#endif
  }
  template <class Body>
  __host__ __device__ void Each(const Body& body) const {
#ifdef __CUDA_ARCH__
    body(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
#endif
  }
  template <class Body>
  __host__ __device__ void Threads(const Body& body) const {
    Each(body);
    Barrier();
  }
  template <class Body>
  __host__ __device__ void OneWarp(const Body& body) const {
#ifdef __CUDA_ARCH__
    if (threadIdx.x / 32 != kFirst / 32) return;
    body(static_cast<int>(threadIdx.x) - kFirst);
    __syncwarp();
#endif
  }
};

// A tile a warp, but for the last warp.
template <class Body>
struct WarpBlock : DeviceBlock<kWarps * 32, kWarps * 32> {
  static_assert(Body::kLanes == 32);
  typename Body::Memory* warps;

  template <class Tell, class Next>
  __host__ __device__ void StepRun(PassMemory* memory, const Tell& tell, const Next& next) const {
#ifdef __CUDA_ARCH__
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == kWarps) {
      tell();
      __syncwarp();
      asm volatile("bar.arrive 1, %0;" : : "n"(kThreads) : "memory");
      next();
    } else {
      const int tiles = static_cast<int>((memory->run.num_elements + kTileElements - 1) / kTileElements);
      int first = 0;
      do {
        // A warp behind the last tile finds no elements that are there: it reads nothing.
        Body body(memory->context, memory->run, memory->plan, first + warp, &warps[warp], lane);
        Phases(body, 0, Body::kStorePhase);
        if (first == 0) asm volatile("bar.sync 1, %0;" : : "n"(kThreads) : "memory");
        if (first + warp < tiles) Phases(body, Body::kStorePhase, Body::kPhases);
        first += kWarps;
      } while (first < tiles);
    }
#endif
    Barrier();
  }

 private:
  __host__ __device__ static void Phases(Body& body, int begin, int end) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int phase = begin; phase < end; ++phase) {
      body.Phase(phase);
      __syncwarp();
    }
#endif
  }
};

// A tile the block.
struct TileBlock : DeviceBlock<0, 32> {  // the first warp has more to do than to tell
  RowMemory* rows;

  template <class Tell, class Next>
  __host__ __device__ void StepRun(PassMemory* memory, const Tell& tell, const Next& next) const {
    tell();
    next();
    Barrier();
#ifdef __CUDA_ARCH__
    if (memory->context.weights == WeightFormat::kInt8Row) {
      for (int64_t unit = 0; unit < RowUnits(memory->run); ++unit) {
        RowBody body(memory->context, memory->run, memory->plan, unit, rows);
        for (int64_t phase = 0; phase < body.num_phases(); ++phase) {
          body.Phase(phase, static_cast<int>(threadIdx.x));
          Barrier();
        }
      }
      return;
    }
    const int64_t tiles = (memory->run.num_elements + kTileElements - 1) / kTileElements;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      StepBody body(memory->plan, tile, &rows->tile);
      for (int phase = 0; phase < StepBody::kPhases; ++phase) {
        body.Phase(phase, static_cast<int>(threadIdx.x));
        Barrier();
      }
    }
#endif
  }
};

// Shared memory has no constructors.
template <class Value>
struct Bytes {
  alignas(alignof(Value) > 16 ? alignof(Value) : 16) uint8_t bytes[sizeof(Value)];
  __device__ Value* get() { return reinterpret_cast<Value*>(bytes); }
};

// Budget: 160 threads, 6 blocks; 64 registers, 736 bytes of stack, 152 of spills, 16192 of shared memory.
template <class Body>
__global__ void __launch_bounds__(kThreads, kBlocks) PassWarpKernel(const __grid_constant__ PassArgs args) {
  __shared__ Bytes<PassMemory[2]> memories;
  __shared__ typename Body::Memory warps[kWarps];
  WarpBlock<Body> block;
  block.warps = warps;
  StepPassRange(args, static_cast<int>(blockIdx.x), *memories.get(), block);
}

// Budget: 256 threads, 2 blocks; 128 registers, 1024 bytes of stack, 172 of spills, 14784 of shared memory.
__global__ void __launch_bounds__(kTileElements) PassTileKernel(const __grid_constant__ PassArgs args) {
  __shared__ Bytes<PassMemory[2]> memories;
  __shared__ Bytes<RowMemory> rows;
  TileBlock block;
  block.rows = rows.get();
  StepPassRange(args, static_cast<int>(blockIdx.x), *memories.get(), block);
}

// Budget: 160 threads, 7 blocks; 56 registers, 528 bytes of stack, 12 of spills, 6080 of shared memory.
__global__ void __launch_bounds__(kThreads) PassSquaresKernel(const __grid_constant__ PassArgs args) {
  __shared__ Bytes<PassMemory> memory;
  __shared__ typename SquaresBody::Memory warps[kWarps];
  WarpBlock<SquaresBody> block;
  block.warps = warps;
  SquarePassRange(args, static_cast<int>(blockIdx.x), memory.get(), block);
}

// Budget: 1 threads, 1 blocks; 10 registers, 0 bytes of stack, 0 of spills, 0 of shared memory.
__global__ void PassGateKernel(PassGate gate) {
  DeviceMachine machine;
  AwaitGate(gate, machine);
}

// Budget: 1 threads, 1 blocks; 8 registers, 0 bytes of stack, 0 of spills, 0 of shared memory.
__global__ void PassArrivalKernel(PassArrival arrival) {
  DeviceMachine machine;
  Arrive(arrival, machine);
}

const char* LastError() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* LaunchPassGate(const PassGate& gate, void* stream) {
  PassGateKernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(gate);
  return LastError();
}

const char* LaunchPassStep(const PassArgs& args, const OptimizerContext* warp, void* stream) {
  if (args.num_ranges == 0) return nullptr;
  const auto in = static_cast<cudaStream_t>(stream);
  if (warp == nullptr) {
    PassTileKernel<<<args.num_ranges, kTileElements, 0, in>>>(args);
  } else {
    WithWarpBody(*warp, [&](auto tag) {
      using Body = typename decltype(tag)::Type;
      PassWarpKernel<Body><<<args.num_ranges, kThreads, 0, in>>>(args);
    });
  }
  return LastError();
}

const char* LaunchPassSquares(const PassArgs& args, void* stream) {
  if (args.num_ranges == 0) return nullptr;
  PassSquaresKernel<<<args.num_ranges, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return LastError();
}

const char* LaunchPassArrival(const PassArrival& arrival, void* stream) {
  PassArrivalKernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(arrival);
  return LastError();
}

}  // namespace shardmesh
