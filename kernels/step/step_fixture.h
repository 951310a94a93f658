// Tensors of every optimizer and format, stepped a few times, for the suites of the step's implementations.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "kernels/optimizer_step.h"

namespace shardmesh {

// Memory between guards that nothing may touch, at an address that is no better aligned than its elements.
class Guarded {
 public:
  Guarded(int64_t bytes, int64_t alignment);
  uint8_t* data() { return memory_.data() + offset_; }
  int64_t size() const { return bytes_; }
  std::vector<uint8_t> Bytes() const { return {memory_.begin() + offset_, memory_.begin() + offset_ + bytes_}; }
  bool GuardsHold() const;

 private:
  int64_t bytes_, offset_ = 0;
  std::vector<uint8_t> memory_;
};

// One combination of what can be combined.
struct StepCase {
  OptimizerHyper hyper;
  WeightFormat weights = WeightFormat::kFp32;
  StateFormat states = StateFormat::kFp32;
  Format gradients = Format::kFp32;
  int num_slots = 1;

  std::string ToString() const;
  OptimizerContext Context(int64_t step) const;
};

// Every optimizer, twice (plain; Nesterov, AMSGrad, maximize), all hyper-parameters set and different, times every
// weight format times every state format. Gradient formats and numbers of slots take turns.
std::vector<StepCase> AllStepCases();

// All streams of a tensor, as stored: weights that are not 0, states as they begin.
class StepTensor {
 public:
  StepTensor(const StepCase& step_case, int64_t num_elements);

  // Takes steps 1 to `steps`; the tensor is cut in two at `cut`, if that is above 0.
  void Step(OptimizerStepFn step, int steps, int64_t cut = 0);
  // The run of elements [begin, end) at step `step`: its streams are those of this tensor. The pointer array is valid
  // until the next call.
  OptimizerRun RunOf(int64_t step, int64_t begin, int64_t end);

  const StepCase& step_case() const { return case_; }
  std::vector<Guarded>& parts() { return parts_; }  // codes and extra of the weights, then of each state
  std::vector<Guarded>& gradients() { return gradients_; }
  // What the last step told of each tile: the sums of squares, and whether the weights changed.
  Guarded& square_sums() { return square_sums_; }
  Guarded& changed() { return changed_; }
  // What the runs of the last step added up: of the weights and each state.
  Guarded& digests() { return digests_; }
  // mx8 (of runs of a multiple of 32 elements) and the largest magnitudes.
  Guarded& mx8_codes() { return mx8_codes_; }
  Guarded& mx8_scales() { return mx8_scales_; }
  Guarded& largest() { return largest_; }
  // The weights as readers get them.
  std::vector<float> PublishedWeights();
  // The digests of what is stored now.
  std::vector<uint64_t> StoredDigests();
  bool GuardsHold() const;
  bool operator==(const StepTensor& other) const;

 private:
  void Add(const StoredLayout& layout);
  void FillGradients(int64_t step);

  const StepCase case_;
  const int64_t num_elements_;
  const int64_t row_elements_;  // of int8_row: 12, or all where they are no rows of 12
  std::vector<Guarded> parts_, gradients_;
  Guarded square_sums_, changed_, digests_, mx8_codes_, mx8_scales_, largest_;
  std::vector<const void*> slots_;
  int64_t filled_step_ = 0;  // whose gradients there are
};

}  // namespace shardmesh
