#include "bench/optimizer/table_step.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/rules/dynamic_map.h"
#include "kernels/rules/optimizers.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kBlock = 256;
constexpr float kSmallestScale = 0x1p-100f;

using Levels = std::array<float, 256>;

Levels MakeLevels(bool is_signed) {
  Levels levels;
  for (uint32_t code = 0; code < levels.size(); ++code) {
    levels[code] = is_signed ? DecodeDynamicSigned<float>(code) : DecodeDynamicUnsigned<float>(code);
  }
  return levels;
}

uint8_t NearestLevel(const Levels& levels, float y) {
  const float* above = std::lower_bound(levels.begin() + 1, levels.end() - 1, y);
  return static_cast<uint8_t>(above - levels.begin() - (y - above[-1] <= *above - y ? 1 : 0));
}

void Encode(const Levels& levels, const float* values, int64_t n, uint8_t* codes, float* scale) {
  float largest = kSmallestScale;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(values[i]));
  *scale = largest;
  const float inverse = 1 / largest;
  for (int64_t i = 0; i < n; ++i) codes[i] = NearestLevel(levels, std::min(1.0f, values[i] * inverse));
}

}  // namespace

void TableStep(const OptimizerContext& context, const OptimizerRun& run) {
  static const Levels signed_levels = MakeLevels(true), unsigned_levels = MakeLevels(false);
  const StepConstants<float> constants(context.scalars);
  const auto* gradients = static_cast<const float*>(run.gradients[0]);
  auto* weights = static_cast<float*>(run.weights_out.codes);
  auto* m_codes = static_cast<uint8_t*>(run.states_out[0].codes);
  auto* v_codes = static_cast<uint8_t*>(run.states_out[1].codes);
  auto* m_scales = static_cast<float*>(run.states_out[0].extra);
  auto* v_scales = static_cast<float*>(run.states_out[1].extra);
  for (int64_t block = 0; block < run.num_elements; block += kBlock, ++m_scales, ++v_scales) {
    const int64_t n = std::min(kBlock, run.num_elements - block);
    float m[kBlock], v[kBlock];
    for (int64_t i = 0; i < n; ++i) {
      m[i] = signed_levels[m_codes[block + i]] * *m_scales;
      v[i] = unsigned_levels[v_codes[block + i]] * *v_scales;
      weights[block + i] = AdamUpdate(constants, weights[block + i], gradients[block + i], m[i], v[i]);
    }
    Encode(signed_levels, m, n, m_codes + block, m_scales);
    Encode(unsigned_levels, v, n, v_codes + block, v_scales);
    for (int64_t i = 0; i < n; ++i) v_codes[block + i] |= static_cast<uint8_t>(v[i] > 0 && v_codes[block + i] == 0);
  }
}

}  // namespace shardmesh::bench
