// ExactExp, ExactLog: exp and log made of IEEE additions, multiplications and divisions alone.
//
// The C library's functions differ in the last bit between versions and processors; these give the same bits on every
// machine, so that a training run can be repeated elsewhere. Accuracy: relative error below 1e-12. Pure, thread-safe.
#pragma once

#include <cstdint>
#include <cstring>

namespace shardmesh::digits {

// e^x for x in [-700, 0]; below -700 the result is 0, above 0 the argument is taken as 0 (softmax never asks for it).
// x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series up to r^13 (the remainder is below 5e-18).
inline double ExactExp(double x) {
  if (!(x >= -700.0)) return 0.0;
  if (x > 0.0) x = 0.0;
  const int64_t n = static_cast<int64_t>(x * 1.4426950408889634 - 0.5);  // rounds to nearest: x is not positive
  const double r =
      (x - static_cast<double>(n) * 0.693147180369123816490) - static_cast<double>(n) * 1.90821492927058770002e-10;
  double sum = 1.0;
  for (int k = 13; k >= 1; --k) sum = 1.0 + sum * r / k;
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return sum * scale;
}

// ln(x) for finite normal x > 0. x = m 2^e with m in [0.75, 1.5); ln m = 2 atanh(s), s = (m-1)/(m+1), |s| <= 0.2.
inline double ExactLog(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &bits, sizeof(m));
  if (m >= 1.5) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0);
  double sum = 0.0;
  for (int k = 23; k >= 1; k -= 2) sum = sum * (s * s) + 1.0 / k;
  return 2.0 * s * sum + static_cast<double>(exponent) * 0.69314718055994530942;
}

}  // namespace shardmesh::digits
