// Progress: one rewritten line on standard error for what takes long; nothing where that is no terminal. Thread-safe if
// its calls are made one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace shardmesh {

class Progress {
 public:
  // `what`: "pulling", "saving".
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // So many bytes of all.
  void Show(int64_t done, int64_t total);
  // So many things of all.
  void ShowCount(int64_t done, int64_t total);

 private:
  bool IsTime();
  const std::string what_;
  const bool shown_;
  const absl::Time start_;
  absl::Time next_ = absl::InfinitePast();
  bool drawn_ = false;
};

}  // namespace shardmesh
