// Numbers in messages between ranks: little-endian, whatever the machine is. Pure, thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace shardmesh {

template <class Number>
void AppendNumber(Number number, std::string& to) {
  for (size_t i = 0; i < sizeof(Number); ++i) to.push_back(static_cast<char>(static_cast<uint64_t>(number) >> 8 * i));
}

// Takes the number that `from` begins with. REQUIRES: it is that long.
template <class Number>
Number TakeNumber(absl::string_view& from) {
  uint64_t number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) number |= uint64_t{static_cast<unsigned char>(from[i])} << 8 * i;
  from.remove_prefix(sizeof(Number));
  return static_cast<Number>(number);
}

}  // namespace shardmesh
