// PlainText: what a peer said, for messages and logs of ours: at most `limit` characters, with a question mark for each
// byte that is not printable ASCII. Pure, thread-safe.
#pragma once

#include <algorithm>
#include <string>

#include "absl/strings/string_view.h"

namespace shardmesh {

inline std::string PlainText(absl::string_view text, size_t limit) {
  std::string plain(text.substr(0, limit));
  std::replace_if(
      plain.begin(), plain.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return plain;
}

}  // namespace shardmesh
