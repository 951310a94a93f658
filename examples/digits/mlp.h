// A small perceptron for the digits: 64 pixels -> 128 -> 64 -> 10 classes, ReLU between, softmax cross entropy.
//
// The caller owns every weight and every gradient and hands them over as views, fp32 or bf16 each, so that they may lie
// in memory that somebody else shares (a service's windows). The model itself holds nothing and knows no service.
// Determinism: the same bytes in give the same bytes out on every machine: arithmetic is IEEE fp32 in a fixed order
// (sums over inputs, over outputs and over the batch ascend), exp and log are our own (exact_math.h), nothing is
// contracted
// (-ffp-contract=off), there are no threads.
// Thread-safety: the functions are pure but for the gradients they write; calls with different gradients may run at
// once.
//
// Shapes: B = images of a batch, I = inputs of a layer, O = its outputs. A weight is [O, I], row-major.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/digits/dataset.h"

namespace shardmesh::digits {

struct ParameterSpec {
  std::string name;            // "layers.0.weight", "layers.0.bias", "layers.1.weight", ...
  std::vector<int64_t> shape;  // weight: [O, I]; bias: [O]
  size_t num_elements() const;
};

// The six parameters. Every list of views below is in this order.
const std::vector<ParameterSpec>& Parameters();

// How the elements of a view are stored: IEEE binary32, or its upper 16 bits (rounded to nearest even when written).
enum class Element { kFloat32, kBfloat16 };
size_t ElementBytes(Element element);

// Memory of one parameter. Never owns; any alignment.
struct ConstTensorView {
  Element element = Element::kFloat32;
  const void* data = nullptr;
  size_t num_elements = 0;
};
struct TensorView {
  Element element = Element::kFloat32;
  void* data = nullptr;
  size_t num_elements = 0;
};

// Parameter `index`'s starting values: weights uniform in (-b, b) with b = sqrt(6 / I) (He et al. 2015), biases zero. A
// function of (seed, index) alone.  InvalidArgument: index is not 0 .. 5.
absl::StatusOr<std::vector<float>> InitialValues(uint64_t seed, int index);

// Writes `values` in the view's element type. InvalidArgument: the lengths differ or the view has no memory.
absl::Status Store(absl::Span<const float> values, const TensorView& view);
// The view's elements as fp32 (exact). InvalidArgument: the view has no memory.
absl::StatusOr<std::vector<float>> Load(const ConstTensorView& view);

// Overwrites `gradients` with the derivative of the mean loss over `batch` (indices into `set`), and returns that loss.
// On error no gradient was written.
//   InvalidArgument: the batch is empty, an index is not in the data set, a view is missing or has the wrong length
//   (named). FailedPrecondition: the loss is not finite: the weights have diverged or are damaged.
absl::StatusOr<double> LossAndGradients(const Dataset& set, absl::Span<const int> batch,
                                        absl::Span<const ConstTensorView> weights,
                                        absl::Span<const TensorView> gradients);

struct Evaluation {
  double loss = 0;      // mean cross entropy, nats
  double accuracy = 0;  // share of images whose largest logit (the first of equals) is the label
};
// Over the images `indices`. Errors as LossAndGradients.
absl::StatusOr<Evaluation> Evaluate(const Dataset& set, absl::Span<const int> indices,
                                    absl::Span<const ConstTensorView> weights);

}  // namespace shardmesh::digits
