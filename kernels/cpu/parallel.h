// Parallel: how a kernel of several phases uses the threads of its caller. What it computes never depends on how many
// there are. Borrows what runs the parts; holds no thread and no lock. Thread-safe if that is.
//
//   Parallel parallel(4, [&](int parts, Parallel::Body body) { team.ForEach(parts, body); });
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/fp_environment.h"

namespace shardmesh {

class Parallel {
 public:
  using Body = absl::FunctionRef<void(int part)>;
  // Calls body(part) once for every part in [0, parts), on any threads, and returns when all are done.
  using Run = absl::FunctionRef<void(int parts, Body body)>;

  // On the calling thread, in one part.
  Parallel() : Parallel(1, &RunHere) {}
  // REQUIRES: parts >= 1; what `run` refers to outlives this.
  Parallel(int parts, Run run) : parts_(parts), run_(run) {}

  int parts() const { return parts_; }

  // Cuts [0, items) into a range for each part, as equal as can be, and calls body(part, begin, end) for each, with the
  // floating-point environment set. The body's arithmetic lies in functions that are not inlined into it.
  void ForRanges(int64_t items, absl::FunctionRef<void(int part, int64_t begin, int64_t end)> body) const {
    run_(parts_, [&](int part) {
      const ScopedFpEnvironment environment;
      body(part, items * part / parts_, items * (part + 1) / parts_);
    });
  }

 private:
  static void RunHere(int parts, Body body) {
    for (int part = 0; part < parts; ++part) body(part);
  }

  const int parts_;
  const Run run_;
};

}  // namespace shardmesh
