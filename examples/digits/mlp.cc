#include "examples/digits/mlp.h"

#include <array>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "examples/digits/exact_math.h"
#include "examples/digits/splitmix64.h"

namespace shardmesh::digits {
namespace {

constexpr int kLayers = 3;
constexpr std::array<int, kLayers + 1> kWidths = {kPixels, 128, 64, kClasses};
constexpr int kEvaluationBatch = 64;

// weight_OI of a layer and its transpose, as fp32: the loops below always run along contiguous memory.
struct Layer {
  int inputs, outputs;
  std::vector<float> weight_OI, weight_IO, bias_O;
};
using Model = std::array<Layer, kLayers>;
// activations[0] is the images; activations[l + 1] the output of layer l, after ReLU except for the last (logits).
using Activations = std::array<std::vector<float>, kLayers + 1>;

float FromBfloat16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t ToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Works for both kinds of views.
template <typename View>
absl::Status CheckViews(absl::Span<const View> views, absl::string_view what) {
  const std::vector<ParameterSpec>& specs = Parameters();
  if (views.size() != specs.size()) {
    return absl::InvalidArgumentError(absl::StrCat(views.size(), " views of ", what, ", expected ", specs.size()));
  }
  for (size_t p = 0; p < specs.size(); ++p) {
    if (views[p].data == nullptr || views[p].num_elements != specs[p].num_elements()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " of ", specs[p].name, ": ", views[p].data == nullptr ? "no memory" : "wrong length", ", ",
                       views[p].num_elements, " elements, expected ", specs[p].num_elements()));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBatch(const Dataset& set, absl::Span<const int> batch) {
  if (batch.empty()) return absl::InvalidArgumentError("the batch is empty: at least one image is needed");
  for (int index : batch) {
    if (index < 0 || index >= set.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("image ", index, " is not in the data set of ", set.size(), " images"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Model> ReadModel(absl::Span<const ConstTensorView> weights) {
  RETURN_IF_ERROR(CheckViews(weights, "weights"));
  Model model;
  for (int l = 0; l < kLayers; ++l) {
    Layer& layer = model[l];
    layer.inputs = kWidths[l];
    layer.outputs = kWidths[l + 1];
    ASSIGN_OR_RETURN(layer.weight_OI, Load(weights[2 * l]));
    ASSIGN_OR_RETURN(layer.bias_O, Load(weights[2 * l + 1]));
    layer.weight_IO.resize(layer.weight_OI.size());
    for (int o = 0; o < layer.outputs; ++o) {
      for (int i = 0; i < layer.inputs; ++i)
        layer.weight_IO[i * layer.outputs + o] = layer.weight_OI[o * layer.inputs + i];
    }
  }
  return model;
}

// out[b][o] = bias[o] + sum over i, ascending, of in[b][i] * weight[o][i]; then max(0, .) where `relu`.
void LayerForward(const Layer& layer, int batch, bool relu, const std::vector<float>& in_BI,
                  std::vector<float>& out_BO) {
  out_BO.resize(size_t(batch) * layer.outputs);
  for (int b = 0; b < batch; ++b) {
    float* out = &out_BO[size_t(b) * layer.outputs];
    std::memcpy(out, layer.bias_O.data(), layer.outputs * sizeof(float));
    for (int i = 0; i < layer.inputs; ++i) {
      const float x = in_BI[size_t(b) * layer.inputs + i];
      const float* row = &layer.weight_IO[size_t(i) * layer.outputs];
      for (int o = 0; o < layer.outputs; ++o) out[o] += x * row[o];
    }
    if (!relu) continue;
    for (int o = 0; o < layer.outputs; ++o) out[o] = out[o] < 0.0f ? 0.0f : out[o];  // NaN passes: the loss reports it
  }
}

void Forward(const Model& model, const Dataset& set, absl::Span<const int> batch, Activations& a) {
  a[0].resize(batch.size() * kPixels);
  for (size_t b = 0; b < batch.size(); ++b) {
    std::memcpy(&a[0][b * kPixels], set.image(batch[b]).data(), kPixels * sizeof(float));
  }
  for (int l = 0; l < kLayers; ++l)
    LayerForward(model[l], static_cast<int>(batch.size()), l + 1 < kLayers, a[l], a[l + 1]);
}

// The cross entropy of one image. `probabilities` become the softmax of `logits`; both have kClasses elements.
double Softmax(const float* logits, int label, double* probabilities) {
  double largest = logits[0];
  for (int c = 1; c < kClasses; ++c) largest = logits[c] > largest ? double{logits[c]} : largest;
  double sum = 0;
  for (int c = 0; c < kClasses; ++c) {
    const double shifted = logits[c] - largest;
    probabilities[c] = std::isfinite(shifted) ? ExactExp(shifted) : std::nan("");
    sum += probabilities[c];
  }
  if (!std::isfinite(sum)) return std::nan("");
  for (int c = 0; c < kClasses; ++c) probabilities[c] /= sum;
  return ExactLog(sum) - (logits[label] - largest);
}

absl::Status NotFinite(double loss) {
  return absl::FailedPreconditionError(
      absl::StrCat("the loss is ", loss, ": the weights have diverged or are damaged"));
}

// gradient of layer `l`'s weight and bias from `delta_BO`, the derivative by its output before ReLU.
void LayerGradients(const Layer& layer, int batch, const std::vector<float>& in_BI, const std::vector<float>& delta_BO,
                    std::vector<float>& weight_OI, std::vector<float>& bias_O) {
  weight_OI.assign(layer.weight_OI.size(), 0.0f);
  bias_O.assign(layer.outputs, 0.0f);
  for (int b = 0; b < batch; ++b) {
    const float* in = &in_BI[size_t(b) * layer.inputs];
    for (int o = 0; o < layer.outputs; ++o) {
      const float d = delta_BO[size_t(b) * layer.outputs + o];
      bias_O[o] += d;
      float* row = &weight_OI[size_t(o) * layer.inputs];
      for (int i = 0; i < layer.inputs; ++i) row[i] += d * in[i];
    }
  }
}

// The derivative by the layer's input, and so (input > 0 is where its ReLU passed) by the previous layer's output.
std::vector<float> LayerBackward(const Layer& layer, int batch, const std::vector<float>& in_BI,
                                 const std::vector<float>& delta_BO) {
  std::vector<float> back_BI(size_t(batch) * layer.inputs, 0.0f);
  for (int b = 0; b < batch; ++b) {
    float* back = &back_BI[size_t(b) * layer.inputs];
    for (int o = 0; o < layer.outputs; ++o) {
      const float d = delta_BO[size_t(b) * layer.outputs + o];
      const float* row = &layer.weight_OI[size_t(o) * layer.inputs];
      for (int i = 0; i < layer.inputs; ++i) back[i] += d * row[i];
    }
    for (int i = 0; i < layer.inputs; ++i) {
      if (!(in_BI[size_t(b) * layer.inputs + i] > 0.0f)) back[i] = 0.0f;
    }
  }
  return back_BI;
}

// The summed loss; delta_BO becomes (softmax - one-hot) / B.
double OutputDelta(const Dataset& set, absl::Span<const int> batch, const std::vector<float>& logits,
                   std::vector<float>& delta_BO) {
  delta_BO.resize(logits.size());
  double total = 0;
  for (size_t b = 0; b < batch.size(); ++b) {
    double probabilities[kClasses];
    const int label = set.label(batch[b]);
    total += Softmax(&logits[b * kClasses], label, probabilities);
    for (int c = 0; c < kClasses; ++c) {
      const double delta = probabilities[c] - (c == label ? 1.0 : 0.0);
      delta_BO[b * kClasses + c] = static_cast<float>(delta / static_cast<double>(batch.size()));
    }
  }
  return total;
}

}  // namespace

size_t ParameterSpec::num_elements() const {
  size_t product = 1;
  for (int64_t extent : shape) product *= static_cast<size_t>(extent);
  return product;
}

const std::vector<ParameterSpec>& Parameters() {
  static const auto* const specs = [] {
    auto* made = new std::vector<ParameterSpec>;
    for (int l = 0; l < kLayers; ++l) {
      made->push_back({absl::StrCat("layers.", l, ".weight"), {kWidths[l + 1], kWidths[l]}});
      made->push_back({absl::StrCat("layers.", l, ".bias"), {kWidths[l + 1]}});
    }
    return made;
  }();
  return *specs;
}

size_t ElementBytes(Element element) { return element == Element::kFloat32 ? 4 : 2; }

absl::StatusOr<std::vector<float>> InitialValues(uint64_t seed, int index) {
  const std::vector<ParameterSpec>& specs = Parameters();
  if (index < 0 || index >= static_cast<int>(specs.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", index, " does not exist, expected 0 to ", specs.size() - 1));
  }
  std::vector<float> values(specs[index].num_elements(), 0.0f);
  if (specs[index].shape.size() < 2) return values;
  const float bound = std::sqrt(6.0f / static_cast<float>(specs[index].shape[1]));  // IEEE: exactly rounded everywhere
  SplitMix64 random(seed, static_cast<uint64_t>(index));
  for (float& value : values) value = random.Symmetric() * bound;
  return values;
}

absl::Status Store(absl::Span<const float> values, const TensorView& view) {
  if (view.data == nullptr || view.num_elements != values.size()) {
    return absl::InvalidArgumentError(absl::StrCat("storing ", values.size(), " values in a view of ",
                                                   view.num_elements,
                                                   view.data == nullptr ? " elements without memory" : " elements"));
  }
  if (view.element == Element::kFloat32) {
    std::memcpy(view.data, values.data(), values.size() * sizeof(float));
    return absl::OkStatus();
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = ToBfloat16(values[i]);
    std::memcpy(static_cast<char*>(view.data) + 2 * i, &half, sizeof(half));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> Load(const ConstTensorView& view) {
  if (view.data == nullptr) return absl::InvalidArgumentError("loading from a view without memory");
  std::vector<float> values(view.num_elements);
  if (view.element == Element::kFloat32) {
    std::memcpy(values.data(), view.data, values.size() * sizeof(float));
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, static_cast<const char*>(view.data) + 2 * i, sizeof(half));
    values[i] = FromBfloat16(half);
  }
  return values;
}

absl::StatusOr<double> LossAndGradients(const Dataset& set, absl::Span<const int> batch,
                                        absl::Span<const ConstTensorView> weights,
                                        absl::Span<const TensorView> gradients) {
  RETURN_IF_ERROR(CheckBatch(set, batch));
  RETURN_IF_ERROR(CheckViews(gradients, "gradients"));
  ASSIGN_OR_RETURN(const Model model, ReadModel(weights));
  const int size = static_cast<int>(batch.size());
  Activations activations;
  Forward(model, set, batch, activations);
  std::vector<float> delta_BO;
  const double loss = OutputDelta(set, batch, activations[kLayers], delta_BO) / size;
  if (!std::isfinite(loss)) return NotFinite(loss);
  for (int l = kLayers - 1; l >= 0; --l) {
    std::vector<float> weight_OI, bias_O;
    LayerGradients(model[l], size, activations[l], delta_BO, weight_OI, bias_O);
    RETURN_IF_ERROR(Store(weight_OI, gradients[2 * l]));
    RETURN_IF_ERROR(Store(bias_O, gradients[2 * l + 1]));
    if (l > 0) delta_BO = LayerBackward(model[l], size, activations[l], delta_BO);
  }
  return loss;
}

absl::StatusOr<Evaluation> Evaluate(const Dataset& set, absl::Span<const int> indices,
                                    absl::Span<const ConstTensorView> weights) {
  RETURN_IF_ERROR(CheckBatch(set, indices));
  ASSIGN_OR_RETURN(const Model model, ReadModel(weights));
  Activations activations;
  Evaluation sum;
  for (size_t begin = 0; begin < indices.size(); begin += kEvaluationBatch) {
    const absl::Span<const int> batch = indices.subspan(begin, kEvaluationBatch);
    Forward(model, set, batch, activations);
    for (size_t b = 0; b < batch.size(); ++b) {
      const float* logits = &activations[kLayers][b * kClasses];
      double probabilities[kClasses];
      sum.loss += Softmax(logits, set.label(batch[b]), probabilities);
      int best = 0;
      for (int c = 1; c < kClasses; ++c) best = logits[c] > logits[best] ? c : best;
      sum.accuracy += best == set.label(batch[b]) ? 1 : 0;
    }
  }
  if (!std::isfinite(sum.loss)) return NotFinite(sum.loss);
  const double count = static_cast<double>(indices.size());
  return Evaluation{sum.loss / count, sum.accuracy / count};
}

}  // namespace shardmesh::digits
