// RunFixture: a fused run with random contents for tests. All its streams lie in one arena with guard bands between
// them, so that comparing two arenas compares every output, every untouched input and every guard. The arena is an
// image that can be placed anywhere, on a device too. Not thread-safe; reproducible from the seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/fused_step.h"

namespace shardmesh {

enum class Contents {
  kOrdinary,  // weights and states as training has them; gradients over eight decades
  kExtreme,   // random finite bit patterns: subnormals, zeros of both signs, huge numbers
};

enum class Placement { kSeparate, kInPlace };  // where weights, m and v are written

struct RunCase {
  Format weights = Format::kBf16Sr;
  Format gradients = Format::kBf16;
  int num_slots = 1;
  int num_copies = 0;
  int64_t num_elements = 128;
  uint64_t first_element = 0;
  int misalign = 0;  // stream k starts k * misalign elements after a multiple of 64 bytes
  Placement placement = Placement::kSeparate;
  Contents contents = Contents::kOrdinary;
  int64_t step = 7;
};

std::string ToString(const RunCase& c);

class RunFixture {
 public:
  RunFixture(const RunCase& c, uint64_t seed);

  const StepContext& context() const { return context_; }
  // The bytes of all streams and guards before the step. Place them at a multiple of 64 bytes.
  const std::vector<uint8_t>& image() const { return image_; }
  // The gradient pointers, and the run itself, of an arena placed at `base`. `gradients` outlives the use of the run.
  std::vector<const void*> Gradients(uint8_t* base) const;
  FusedRun Bind(uint8_t* base, const void* const* gradients) const;

  // The image after `step` ran on a copy of it.
  std::vector<uint8_t> Apply(FusedStepFn step) const;

  // Elements of a stream of an image in fp32. m and v: kFp32.
  struct Stream {
    int64_t offset = 0;  // bytes
    Format format = Format::kFp32;
  };
  float At(const std::vector<uint8_t>& image, const Stream& stream, int64_t i) const;
  uint16_t HalfAt(const std::vector<uint8_t>& image, const Stream& stream, int64_t i) const;

  std::vector<Stream> gradients;
  Stream weights_in, m_in, v_in, weights_out, m_out, v_out;
  std::vector<Stream> copies;

 private:
  Stream Add(Format format);
  template <class Generator>
  void Fill(const Stream& stream, Generator generator);

  const RunCase case_;
  int num_streams_ = 0;
  StepContext context_;
  std::vector<uint8_t> image_;
};

}  // namespace shardmesh
