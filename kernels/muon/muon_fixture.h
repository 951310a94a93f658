// A matrix that Muon steps in tests: stored streams between guards at addresses that are no better aligned than their
// elements, in rotating storage (a step reads one half and writes the other). Tests only.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "core/base/matchers.h"
#include "core/format/format.h"
#include "core/format/stream_digest.h"
#include "kernels/muon/muon.h"

namespace shardmesh {

using Floats = std::vector<float>;

// Memory between guards that nothing may touch, at an address that is no better aligned than its elements.
class Guarded {
 public:
  Guarded(int64_t bytes, int64_t alignment) : bytes_(bytes), memory_(bytes + 2 * kGuard + 64, kFill) {
    offset_ = kGuard + (64 - reinterpret_cast<uintptr_t>(memory_.data() + kGuard) % 64) % 64 + alignment;
    std::fill(data(), data() + bytes, 0);
  }
  Guarded(const Guarded&) = delete;
  uint8_t* data() { return memory_.data() + offset_; }
  std::vector<uint8_t> Bytes() const { return {memory_.begin() + offset_, memory_.begin() + offset_ + bytes_}; }
  bool GuardsHold() const {
    for (int64_t i = 0; i < static_cast<int64_t>(memory_.size()); ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && memory_[i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 128;
  static constexpr uint8_t kFill = 0xFF;
  const int64_t bytes_;
  int64_t offset_ = 0;
  std::vector<uint8_t> memory_;
};

struct Stream {
  Stream(const StoredLayout& layout, int64_t n)
      : codes(layout.codes.BytesOf(n), layout.codes.elements == 1 ? layout.codes.bytes : 1),
        extra(layout.extra.BytesOf(n), std::max<int64_t>(layout.extra.bytes, 1)) {}
  StoredRun Run() { return {codes.data(), extra.data()}; }
  bool GuardsHold() const { return codes.GuardsHold() && extra.GuardsHold(); }
  Guarded codes, extra;
};

struct Settings {
  OptimizerHyper hyper = OptimizerHyper::Defaults(OptimizerKind::kMuon);
  MuonOptions options;
  WeightFormat weights = WeightFormat::kFp32;
  StateFormat states = StateFormat::kFp32;
  Format gradients = Format::kFp32;
};

inline Floats Normals(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Floats out(n);
  for (float& x : out) x = Bf16ToFloat(FloatToBf16Rne(normal(random)));
  return out;
}

inline Floats Transposed(const Floats& x, int64_t rows, int64_t columns) {
  Floats out(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[j * rows + i] = x[i * columns + j];
  }
  return out;
}

class Matrix {
 public:
  Matrix(const Settings& settings, int64_t rows, int64_t columns)
      : settings_(settings),
        rows_(rows),
        columns_(columns),
        weights_{{Layout(), n()}, {Layout(), n()}},
        states_{{LayoutOf(settings.states), n()}, {LayoutOf(settings.states), n()}},
        copy_(Layout().codes.BytesOf(n()), Layout().codes.bytes),
        square_sums_(4 * ((n() + 255) / 256), 4),
        changed_((n() + 255) / 256, 1),
        mx8_codes_(n(), 1),
        mx8_scales_(n() / 32, 1),
        largest_(4 * ((n() + 127) / 128), 4) {}

  int64_t n() const { return rows_ * columns_; }
  void Step(MuonStepFn step, const std::vector<Floats>& gradients, const Parallel& parallel = Parallel()) {
    OptimizerContext context;
    context.hyper = settings_.hyper;
    context.scalars = ComputeStepScalars(settings_.hyper, ++step_).value();
    context.weights = settings_.weights;
    context.states = settings_.states;
    context.gradients = settings_.gradients;
    context.seed = 7;
    context.step = step_;
    const int64_t bytes = settings_.gradients == Format::kFp32 ? 4 : 2;
    Guarded slots[2] = {{n() * bytes, bytes}, {n() * bytes, bytes}};
    const void* pointers[2] = {slots[0].data(), slots[1].data()};
    OptimizerRun run;
    run.gradients = pointers;
    run.num_slots = static_cast<int>(gradients.size());
    run.divide_scale = 1.0f / static_cast<float>(run.num_slots);
    for (int slot = 0; slot < run.num_slots; ++slot) Store(gradients[slot], slots[slot].data());
    run.weights_in = weights_[in_].Run();
    run.weights_out = weights_[1 - in_].Run();
    run.states_in[0] = states_[in_].Run();
    run.states_out[0] = states_[1 - in_].Run();
    run.copies[0] = copy_.data();
    run.num_copies = 1;
    run.square_sums = reinterpret_cast<float*>(square_sums_.data());
    run.changed = changed_.data();
    if (n() % 32 == 0) run.mx8 = {mx8_codes_.data(), mx8_scales_.data()};
    run.largest = reinterpret_cast<float*>(largest_.data());
    uint64_t digests[2] = {0, 0};
    run.digests = digests;
    run.num_elements = n();
    run.tensor = 3;
    const MuonMatrix matrix = {rows_, columns_,
                               ComputeMuonScalars(settings_.hyper, settings_.options, rows_, columns_).value()};
    MuonScratch scratch(parallel.parts());
    scratch.Reserve(rows_, columns_);
    ASSERT_OK(CheckMuon(context, matrix, run, scratch, parallel));
    step(context, matrix, run, scratch, parallel);
    in_ = 1 - in_;
    EXPECT_EQ(copy_.Bytes(), weights_[in_].codes.Bytes());
    for (int s = 0; s < 2; ++s) EXPECT_EQ(digests[s], StoredDigest(s)) << s;
    EXPECT_TRUE(square_sums_.GuardsHold() && changed_.GuardsHold() && mx8_codes_.GuardsHold() &&
                mx8_scales_.GuardsHold() && largest_.GuardsHold());
    EXPECT_TRUE(copy_.GuardsHold() && slots[0].GuardsHold() && slots[1].GuardsHold());
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(weights_[i].GuardsHold() && states_[i].GuardsHold());
  }

  void SetWeights(const Floats& values) { std::memcpy(weights_[in_].codes.data(), values.data(), n() * sizeof(float)); }
  void SetMomentum(const Floats& values) { std::memcpy(states_[in_].codes.data(), values.data(), n() * sizeof(float)); }
  void SetBf16Weights(const Floats& values) {
    for (int64_t i = 0; i < n(); ++i) {
      const uint16_t half = FloatToBf16Rne(values[i]);
      std::memcpy(weights_[in_].codes.data() + 2 * i, &half, 2);
    }
  }
  // Of fp32 and of bf16 formats.
  Floats Weights() { return Values(weights_[in_]); }
  Floats Momentum() { return Values(states_[in_]); }
  std::vector<std::vector<uint8_t>> Bytes() {
    return {weights_[in_].codes.Bytes(), weights_[in_].extra.Bytes(), states_[in_].codes.Bytes(),
            states_[in_].extra.Bytes()};
  }
  // What the last step told.
  std::vector<std::vector<uint8_t>> Told() {
    return {square_sums_.Bytes(), changed_.Bytes(), mx8_codes_.Bytes(), mx8_scales_.Bytes(), largest_.Bytes()};
  }

 private:
  StoredLayout Layout() const { return LayoutOf(settings_.weights); }
  uint64_t StoredDigest(int stream) {
    Stream& stored = stream == 0 ? weights_[in_] : states_[in_];
    return DigestStream(3, stream, stream == 0 ? Layout() : LayoutOf(settings_.states), 0, stored.codes.data(),
                        stored.extra.data(), n());
  }
  void Store(const Floats& from, uint8_t* to) const {
    for (int64_t i = 0; i < n(); ++i) {
      const uint32_t bits = FloatBits(from[i]);
      if (settings_.gradients == Format::kFp32) std::memcpy(to + 4 * i, &bits, 4);
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (settings_.gradients != Format::kFp32) std::memcpy(to + 2 * i, &half, 2);
    }
  }
  Floats Values(Stream& stream) const {
    const std::vector<uint8_t> bytes = stream.codes.Bytes();
    Floats out(n());
    const int64_t size = static_cast<int64_t>(bytes.size()) / n();
    for (int64_t i = 0; i < n(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, bytes.data() + size * i, size);
      out[i] = FloatOfBits(size == 2 ? bits << 16 : bits);
    }
    return out;
  }

  const Settings settings_;
  const int64_t rows_, columns_;
  int in_ = 0;
  int64_t step_ = 0;
  Stream weights_[2], states_[2];
  Guarded copy_, square_sums_, changed_, mx8_codes_, mx8_scales_, largest_;
};

}  // namespace shardmesh
