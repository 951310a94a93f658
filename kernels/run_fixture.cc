#include "kernels/run_fixture.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"

namespace shardmesh {

namespace {

constexpr int64_t kGuardBytes = 512;  // before and after every stream; two groups of fp32
constexpr uint8_t kGuardByte = 0xFF;  // a NaN in every format, so that a stray read shows
constexpr int64_t kAlignment = 64;

// A finite float of random bits whose magnitude is below `limit`.
float AnyFinite(std::mt19937_64& random, float limit) {
  while (true) {
    uint32_t bits = static_cast<uint32_t>(random());
    if (random() % 4 == 0) bits &= 0x807FFFFFu;   // subnormal
    if (random() % 16 == 0) bits &= 0x80000000u;  // zero
    const float x = FloatOfBits(bits);
    if (std::abs(x) < limit) return x;
  }
}

}  // namespace

std::string ToString(const RunCase& c) {
  return absl::StrCat("weights ", std::string(FormatName(c.weights)), ", gradients ",
                      std::string(FormatName(c.gradients)), ", slots ", c.num_slots, ", copies ", c.num_copies,
                      ", elements ", c.num_elements, " from ", c.first_element, ", misalign ", c.misalign,
                      c.placement == Placement::kInPlace ? ", in place" : "",
                      c.contents == Contents::kExtreme ? ", extreme" : "", ", step ", c.step);
}

RunFixture::Stream RunFixture::Add(Format format) {
  const int64_t bytes = BytesPerElement(format);
  const int64_t offset = static_cast<int64_t>(image_.size()) + kGuardBytes + num_streams_++ * case_.misalign * bytes;
  const int64_t end = offset + case_.num_elements * bytes + kGuardBytes;
  image_.resize((end + kAlignment - 1) / kAlignment * kAlignment, kGuardByte);
  return {offset, format};
}

template <class Generator>
void RunFixture::Fill(const Stream& stream, Generator generator) {
  for (int64_t i = 0; i < case_.num_elements; ++i) {
    const float x = generator();
    const uint32_t bits = FloatBits(x);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);  // towards zero: stays finite and below the limit
    const int64_t bytes = BytesPerElement(stream.format);
    memcpy(&image_[stream.offset + i * bytes], bytes == 4 ? static_cast<const void*>(&bits) : &half, bytes);
  }
}

RunFixture::RunFixture(const RunCase& c, uint64_t seed) : case_(c) {
  for (int slot = 0; slot < c.num_slots; ++slot) gradients.push_back(Add(c.gradients));
  weights_in = Add(c.weights);
  m_in = Add(Format::kFp32);
  v_in = Add(Format::kFp32);
  const bool in_place = c.placement == Placement::kInPlace;
  weights_out = in_place ? weights_in : Add(c.weights);
  m_out = in_place ? m_in : Add(Format::kFp32);
  v_out = in_place ? v_in : Add(Format::kFp32);
  for (int copy = 0; copy < c.num_copies; ++copy) copies.push_back(Add(c.weights));

  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const bool extreme = c.contents == Contents::kExtreme;
  const float limit = FLT_MAX / static_cast<float>(c.num_slots);
  const auto decade = [&] { return std::pow(10.0f, static_cast<float>(random() % 8) - 6); };
  for (const Stream& stream : gradients) {
    Fill(stream, [&] { return extreme ? AnyFinite(random, limit) : normal(random) * decade(); });
  }
  Fill(weights_in, [&] { return extreme ? AnyFinite(random, FLT_MAX) : normal(random) * 0.05f; });
  Fill(m_in, [&] { return extreme ? AnyFinite(random, FLT_MAX) : normal(random) * decade(); });
  Fill(v_in, [&] { return std::abs(extreme ? AnyFinite(random, FLT_MAX) : normal(random) * decade() * decade()); });

  context_.scalars = *ComputeAdamWScalars({3e-3, 0.9, 0.95, 1e-7, 0.1}, c.step);
  context_.weights = c.weights;
  context_.gradients = c.gradients;
  context_.key = MakePhiloxKey(0x123456789abcdef0u, DrawPurpose::kWeightRounding);
  context_.step = c.step;
}

std::vector<const void*> RunFixture::Gradients(uint8_t* base) const {
  std::vector<const void*> pointers;
  for (const Stream& stream : gradients) pointers.push_back(base + stream.offset);
  return pointers;
}

FusedRun RunFixture::Bind(uint8_t* base, const void* const* gradient_pointers) const {
  const auto floats = [&](const Stream& stream) { return reinterpret_cast<float*>(base + stream.offset); };
  FusedRun run;
  run.gradients = gradient_pointers;
  run.num_slots = case_.num_slots;
  run.divide_scale = 1.0f / static_cast<float>(case_.num_slots);
  run.weights_in = base + weights_in.offset;
  run.m_in = floats(m_in);
  run.v_in = floats(v_in);
  run.weights_out = base + weights_out.offset;
  run.m_out = floats(m_out);
  run.v_out = floats(v_out);
  for (int copy = 0; copy < case_.num_copies; ++copy) run.copies[copy] = base + copies[copy].offset;
  run.num_copies = case_.num_copies;
  run.num_elements = case_.num_elements;
  run.first_element = case_.first_element;
  run.tensor = 5;
  return run;
}

std::vector<uint8_t> RunFixture::Apply(FusedStepFn step) const {
  std::vector<uint8_t> memory(image_.size() + kAlignment);
  uint8_t* base = memory.data() + (kAlignment - reinterpret_cast<uintptr_t>(memory.data()) % kAlignment);
  memcpy(base, image_.data(), image_.size());
  const std::vector<const void*> pointers = Gradients(base);
  step(context_, Bind(base, pointers.data()));
  return std::vector<uint8_t>(base, base + image_.size());
}

uint16_t RunFixture::HalfAt(const std::vector<uint8_t>& image, const Stream& stream, int64_t i) const {
  uint16_t half;
  memcpy(&half, &image[stream.offset + 2 * i], 2);
  return half;
}

float RunFixture::At(const std::vector<uint8_t>& image, const Stream& stream, int64_t i) const {
  if (stream.format != Format::kFp32) return Bf16ToFloat(HalfAt(image, stream, i));
  float x;
  memcpy(&x, &image[stream.offset + 4 * i], 4);
  return x;
}

}  // namespace shardmesh
