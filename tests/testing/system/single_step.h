// Single-stepping: a child process, stopped behind every instruction (ptrace(2)).
//
// An instruction that repeats itself (rep movsb) is stopped behind each repetition. A system call is one instruction.
// Linux alone. One thread.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"

namespace shardmesh::testing {

struct SingleStepOptions {
  std::function<void()> prepare;  // what the child does first, and is not stepped; may be empty
  std::function<void()> body;     // what it does then; starts at most one thread
  // Whether the body itself is stepped. The thread that it started is, from its first instruction, when it is over.
  bool step_body = false;
  std::function<bool()> after;  // called in this process behind each instruction; false: that is enough
  int64_t max_instructions = 0;
};

// Forks, steps, and kills the child with -9. Returns the number of instructions.
//   Unimplemented: this system does not permit it, and why.
//   Internal: the child ended by itself. DeadlineExceeded: there were more instructions.
// REQUIRES: this process has one thread.
absl::StatusOr<int64_t> SingleStep(const SingleStepOptions& options);

}  // namespace shardmesh::testing
