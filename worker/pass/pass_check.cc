// Of Pass: the search for silent corruption, of jobs with check_every (core/job/job.h).
//
// One of `check_every` chunks, drawn anew for each step, is looked at. It is stepped twice, from the same source to the
// same place, and both results compared: arithmetic that is wrong once is found. The digest of the result stays beside
// it (the guard), and is compared when the next step reads the chunk: memory that changed meanwhile is found. Chunks
// that nobody looks at have no guard, nor have frozen weights. The guards of the source are not touched while its step
// is under way, so a step that is executed again finds them as the first time.
//
// And the second look at gradients: slots are memory that trainers write, and a process that has lost its slot may
// write there still (ControlBlock::looks_again). All were finite when they were declared, so the sums of squares that a
// step tells of what it has read are numbers. To tell them takes a pass 4% more time (bench/step), so other steps do
// not.
#include <cmath>

#include "core/base/status.h"
#include "core/format/finite.h"
#include "worker/pass/check.h"
#include "worker/pass/pass.h"

namespace shardmesh {

absl::StatusOr<uint64_t> Pass::Run(const Command& command, uint64_t seq, const float* initial, BucketGate* gate) {
  const uint64_t digest = Execute(command, seq, initial, gate);
  RETURN_IF_ERROR(CheckDamage(job_, command.step, host_.control()->members[rank_.value()].damage));
  return digest;
}

uint64_t Pass::DigestChunk(int range, int parity, int64_t chunk) const {
  uint64_t digest = 0;
  for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
    digest += DigestRun(range, parity, storage_.runs(range)[i]);
  }
  return digest == 0 ? 1 : digest;
}

int64_t Pass::StepChecked(const Command& command, int range, int64_t chunk) {
  const int from = command.parity, to = 1 - from;
  if (const uint64_t guard = storage_.Guard(range, from, chunk);
      guard != 0 && DigestChunk(range, from, chunk) != guard) {
    Damaged(Damage::kMemory, range, chunk);
  }
  const int64_t written = StepChunk(command, range, chunk);
  uint64_t digest = 0;
  if (IsDrawn(job_, command.step, range, chunk)) {
    digest = DigestChunk(range, to, chunk);
    StepChunk(command, range, chunk);
    if (DigestChunk(range, to, chunk) != digest) Damaged(Damage::kArithmetic, range, chunk);
  }
  storage_.SetGuard(range, to, chunk, digest);
  return written;
}

// A sum of squares is infinite for numbers above 1.8e19, too.
void Pass::LookAgain(int range, int64_t chunk, const OptimizerRun& run) {
  const int64_t blocks = (run.num_elements + kBlockElements - 1) / kBlockElements;
  bool finite = true, numbers = true;
  for (int64_t block = 0; block < blocks; ++block) {
    finite = finite && std::isfinite(run.square_sums[block]);
    numbers = numbers && !std::isnan(run.square_sums[block]);
  }
  if (finite) return;
  const Format format = sums_ == nullptr ? job_.gradient_format : Format::kFp32;
  for (int slot = 0; slot < run.num_slots && numbers; ++slot) {
    numbers = AllFiniteBelow(run.gradients[slot], format, run.num_elements, run.num_slots);
  }
  if (!numbers) Damaged(Damage::kGradients, range, chunk);
}

void Pass::Damaged(Damage::What what, int range, int64_t chunk) {
  const int first = storage_.first_run(range, chunk);
  if (first == storage_.first_run(range, chunk + 1)) return;  // padding alone
  const ChunkRun& run = storage_.runs(range)[first];
  TellDamage({what, run.tensor, run.first_element}, host_.control()->members[rank_.value()].damage);
}

}  // namespace shardmesh
