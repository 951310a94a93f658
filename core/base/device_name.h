// How people name the CUDA devices of --device. Pure, thread-safe.
#pragma once

#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace shardmesh {

// N of "cuda:N", as the CUDA driver counts; nullopt: it is something else.
inline std::optional<int> CudaDeviceOf(absl::string_view text) {
  int number = 0;
  if (!absl::ConsumePrefix(&text, "cuda:") || !absl::SimpleAtoi(text, &number) || number < 0) return std::nullopt;
  return number;
}

}  // namespace shardmesh
