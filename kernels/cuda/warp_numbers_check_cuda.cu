#include <cuda_runtime.h>

#include "kernels/cuda/warp_codes.h"
#include "kernels/cuda/warp_numbers_check_cuda.h"
#include "kernels/cuda/warp_pieces.h"

namespace shardmesh {
namespace {

using First = Fp8<float, /*kSigned=*/true, 32, /*kWide=*/true>;
using Second = Fp8<float, /*kSigned=*/false, 32, /*kWide=*/true>;

__device__ bool Same(float a, float b) { return (a != a && b != b) || FloatBits(a) == FloatBits(b); }

// Four numbers in a row, with `which` of 0 to 2^30 - 1.
__device__ Four FloatsOf(uint32_t which) {
  return Four::Each([&](int k) { return FloatOfBits(4 * which + k); });
}

// Any sign and mantissa, and an exponent around `middle`, or any.
__device__ float AnyFloat(uint64_t bits, uint32_t middle) {
  const uint32_t exponent = bits >> 60 == 0 ? bits >> 32 & 0xFF : middle + (bits >> 32) % 40;
  return FloatOfBits((static_cast<uint32_t>(bits) & 0x807FFFFFu) | exponent << 23);
}

__device__ int Differences(WarpNumbers numbers, uint32_t which) {
  int differences = 0;
  const auto expect = [&](bool same) { differences += same ? 0 : 1; };
  if (numbers == WarpNumbers::kSqrt) {
    const Four x = FloatsOf(which), root = Sqrt(x);
    for (int k = 0; k < 4; ++k) expect(Same(root.x[k], Sqrt(x.x[k])));
  }
  if (numbers == WarpNumbers::kDivide) {
    const Four a = Four::Each([&](int k) { return AnyFloat(Mix64(8 * uint64_t{which} + k + 1), 100); });
    const Four b = Four::Each([&](int k) { return Abs(AnyFloat(Mix64(8 * uint64_t{which} + k + 5), 90)); });
    const Four quotient = Divide(a, b);
    for (int k = 0; k < 4; ++k) expect(Same(quotient.x[k], Divide(a.x[k], b.x[k])));
  }
  if (numbers == WarpNumbers::kEncodeFirst) {
    const Four x = FloatsOf(which);
    const uint32_t word = EncodeFp8<First>(x.x);
    for (int k = 0; k < 4; ++k) expect((word >> (8 * k) & 0xFF) == First::Encode(x.x[k], 0));
  }
  if (numbers == WarpNumbers::kEncodeSecond && which < 1u << 29) {
    const Four x = FloatsOf(which);
    const auto draw = static_cast<uint32_t>(Mix64(which + 1) >> 48);
    for (int k = 0; k < 4; ++k) {
      const uint32_t each = (draw + 0x4000 * k) & 0xFFFF;
      expect(EncodeFp8Sr<UE5M3>(x.x[k], IntToFloat(each)) == Second::Encode(x.x[k], each));
    }
  }
  if (numbers == WarpNumbers::kDecode && which < 256) {
    const uint32_t word = which * 0x01010101u;
    float first[4], second[4];
    DecodeFp8<First, true>(word, first);
    DecodeFp8<Second, false>(word, second);
    for (int k = 0; k < 4; ++k) {
      expect((which & 0x7F) == 0x7F || Same(first[k], First::Decode(which)));  // the encoder gives no such code
      expect(Same(second[k], Second::Decode(which)));
    }
  }
  return differences;
}

__global__ void CheckKernel(WarpNumbers numbers, unsigned long long* differences) {
  unsigned long long sum = 0;
  for (uint32_t which = blockIdx.x * blockDim.x + threadIdx.x; which < 1u << 30; which += gridDim.x * blockDim.x) {
    sum += Differences(numbers, which);
  }
  if (sum > 0) atomicAdd(differences, sum);
}

const char* Describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

const char* CountWarpDifferences(WarpNumbers numbers, uint64_t* differences) {
  unsigned long long* there = nullptr;
  cudaError_t error = cudaMalloc(&there, sizeof(*there));
  if (error != cudaSuccess) return Describe(error);
  error = cudaMemset(there, 0, sizeof(*there));
  if (error == cudaSuccess) {
    CheckKernel<<<2048, 256>>>(numbers, there);
    error = cudaMemcpy(differences, there, sizeof(*differences), cudaMemcpyDeviceToHost);
  }
  cudaFree(there);
  return Describe(error);
}

}  // namespace shardmesh
