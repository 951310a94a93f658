#include <algorithm>
#include <limits>
#include <optional>

#include "core/base/status.h"
#include "core/job/muon.h"
#include "kernels/cpu/processor.h"
#include "kernels/muon/blas.h"
#include "kernels/muon/muon.h"
#include "kernels/optimizer_step.h"
#include "kernels/step/step_values.h"
#include "kernels/step/torchao_step.h"
#include "python/binding/memory.h"

namespace shardmesh::python {
namespace {

// Everything of a step but the arrays and its number.
struct BoundStep {
  OptimizerContext context;
  bool torchao = false;
  OptimizerStepFn function = nullptr;
  MuonOptions muon;
  MuonStepFn muon_function = nullptr;  // of Muon alone
  bool fast = false;
};

}  // namespace
}  // namespace shardmesh::python

namespace pybind11::detail {

template <>
struct type_caster<shardmesh::python::BoundStep> : ConstructedCaster<shardmesh::python::BoundStep> {};

}  // namespace pybind11::detail

namespace shardmesh::python {
namespace {

using Hyper = std::vector<std::pair<Text, double>>;

// A field by torch.optim's name (the betas as beta1 and beta2, Muon's coefficients as ns_a, ns_b and ns_c).
// InvalidArgument: there is none.
void Set(BoundStep& step, const std::string& name, double value) {
  OptimizerHyper& hyper = step.context.hyper;
  MuonOptions& muon = step.muon;
  const std::pair<const char*, double*> coefficients[] = {{"ns_a", &muon.a}, {"ns_b", &muon.b}, {"ns_c", &muon.c}};
  for (const auto& [known, field] : coefficients) {
    if (name == known) return void(*field = value);
  }
  if (name == "ns_steps") return void(muon.iterations = static_cast<int>(std::clamp(value, -1e9, 1e9)));
  if (name == "match_rms_adamw") {
    return void(muon.lr_adjust = value != 0 ? MuonLrAdjust::kMatchRmsAdamW : MuonLrAdjust::kOriginal);
  }
  const std::pair<const char*, double OptimizerHyper::*> numbers[] = {{"lr", &OptimizerHyper::lr},
                                                                      {"beta1", &OptimizerHyper::beta1},
                                                                      {"beta2", &OptimizerHyper::beta2},
                                                                      {"eps", &OptimizerHyper::eps},
                                                                      {"weight_decay", &OptimizerHyper::weight_decay},
                                                                      {"momentum", &OptimizerHyper::momentum},
                                                                      {"dampening", &OptimizerHyper::dampening}};
  const std::pair<const char*, bool OptimizerHyper::*> flags[] = {{"nesterov", &OptimizerHyper::nesterov},
                                                                  {"maximize", &OptimizerHyper::maximize},
                                                                  {"amsgrad", &OptimizerHyper::amsgrad}};
  for (const auto& [known, field] : numbers) {
    if (name == known) return void(hyper.*field = value);
  }
  for (const auto& [known, field] : flags) {
    if (name == known) return void(hyper.*field = value != 0);
  }
  throw StatusError(absl::InvalidArgumentError(absl::StrCat("there is no hyper-parameter ", name)));
}

OptimizerStepFn FunctionOf(bool torchao, const std::string& implementation) {
  if (torchao && implementation.empty()) return TorchaoStep;
  if (torchao) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("implementation is \"", implementation, "\"; compat \"torchao\" has one, so give None")));
  }
  if (implementation.empty()) return BestOptimizerStep();
  if (implementation == "reference") return OptimizerStepReference;
  if (implementation != "simd") {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("implementation is \"", implementation, "\"; it is reference or simd, or None for the best")));
  }
  if (!SimdSupported()) throw StatusError(absl::UnimplementedError("this processor has no AVX2 and FMA"));
  return OptimizerStepSimd;
}

void SetFast(BoundStep& step, const std::string& implementation) {
  if (step.muon_function == nullptr) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat(std::string(OptimizerName(step.context.hyper.kind)), " has no fast mode; muon has")));
  }
  if (!implementation.empty()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("implementation is \"", implementation, "\"; the fast mode has one, so give None")));
  }
  step.muon_function = OrThrow(FastMuonStep());
  step.fast = true;
}

BoundStep CreateStep(const Text& optimizer, const Hyper& hyper, const Text& weights, const Text& states, bool torchao,
                     const py::int_& seed, const Text& implementation, bool fast) {
  BoundStep step;
  OptimizerContext& context = step.context;
  context.hyper = OptimizerHyper::Defaults(OrThrow(ParseOptimizer(optimizer.value)));
  for (const auto& [name, value] : hyper) Set(step, name.value, value);
  if (const absl::Status status = Validate(context.hyper); !status.ok()) throw StatusError(status);
  context.weights = OrThrow(ParseWeightFormat(weights.value));
  if (context.weights == WeightFormat::kNf4) {
    throw StatusError(absl::InvalidArgumentError("no step writes nf4 weights: they are frozen; take int8_row"));
  }
  context.states = OrThrow(ParseStateFormat(states.value));
  context.seed = Unsigned64(seed, "seed");
  step.torchao = torchao;
  step.function = FunctionOf(torchao, implementation.value);
  if (context.hyper.kind == OptimizerKind::kMuon) {
    OrThrow(ComputeMuonScalars(context.hyper, step.muon, 1, 1));  // its checks, before there is a matrix
    step.muon_function = step.function == OptimizerStepReference ? MuonStepReference : MuonStepSimd;
  }
  if (fast) SetFast(step, implementation.value);
  return step;
}

// Of the fast mode: the file of its BLAS.
std::optional<std::string> BlasOf(const BoundStep& step) {
  if (!step.fast) return std::nullopt;
  return OrThrow(Blas::Find())->name();
}

py::tuple StateNames(const BoundStep& step) {
  py::list names;
  for (int s = 0; s < NumStates(step.context.hyper); ++s) names.append(std::string(StateName(step.context.hyper, s)));
  return py::tuple(names);
}

// The arrays of one call, and the run that they make.
class BoundRun {
 public:
  BoundRun(const OptimizerContext& context, int64_t elements, int64_t row_elements) : context_(context) {
    run_.num_elements = elements;
    run_.row_elements = std::max<int64_t>(row_elements, 1);  // of an empty array: rows of any size
  }

  StoredRun Stored(absl::string_view name, const StoredLayout& layout, const py::list& parts) {
    if (run_.num_elements == 0) return {};  // though rows without elements have scales
    const auto codes = Borrow(parts, 0, layout.codes, absl::StrCat(name, ".codes"));
    const auto extra = layout.extra.bytes == 0 ? nullptr : Borrow(parts, 1, layout.extra, absl::StrCat(name, ".extra"));
    return {codes, extra};
  }

  void AddGradient(const py::handle& gradient) {
    const int64_t bytes = context_.gradients == Format::kFp32 ? 4 : 2;
    memory_.emplace_back(gradient, run_.num_elements * bytes, false, absl::StrCat("gradient ", gradients_.size()));
    gradients_.push_back(memory_.back().data());
  }

  OptimizerRun& run() {
    run_.gradients = gradients_.data();
    run_.num_slots = static_cast<int>(gradients_.size());
    return run_;
  }

 private:
  void* Borrow(const py::list& parts, size_t index, const PartLayout& layout, absl::string_view name) {
    if (index >= parts.size()) throw StatusError(absl::InvalidArgumentError(absl::StrCat(name, " is missing")));
    memory_.emplace_back(parts[index], layout.BytesOf(run_.num_elements), true, name);
    return memory_.back().data();
  }

  const OptimizerContext& context_;
  OptimizerRun run_;
  std::vector<Memory> memory_;
  std::vector<const void*> gradients_;
};

// The whole matrix: the run's rows.
absl::Status ApplyMuon(const BoundStep& step, const OptimizerContext& context, const OptimizerRun& run) {
  MuonMatrix matrix;
  matrix.columns = run.row_elements;
  matrix.rows = run.num_elements / run.row_elements;
  ASSIGN_OR_RETURN(matrix.scalars, ComputeMuonScalars(context.hyper, step.muon, matrix.rows, matrix.columns));
  if (step.fast && std::max(matrix.rows, matrix.columns) > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("muon's fast mode: a matrix of ", matrix.rows, " x ", matrix.columns,
                                                   " elements; sides are below 2^31"));
  }
  MuonScratch scratch(1);
  scratch.Reserve(matrix.rows, matrix.columns);
  RETURN_IF_ERROR(CheckMuon(context, matrix, run, scratch, Parallel()));
  step.muon_function(context, matrix, run, scratch, Parallel());
  return absl::OkStatus();
}

absl::Status CheckBound(const BoundStep& step, const OptimizerContext& context, const OptimizerRun& run) {
  if (step.torchao) return CheckTorchaoRun(context, run);
  if (step.muon_function == nullptr) return CheckRun(context, run);
  OptimizerContext with_state = context;  // as a run with one state; the rest is CheckMuon's
  with_state.hyper = OptimizerHyper::Defaults(OptimizerKind::kLion);
  return CheckRun(with_state, run);
}

// Not OK: nothing was changed; *refused says whether it was for a gradient.
absl::Status Apply(const BoundStep& step, const OptimizerContext& context, const OptimizerRun& run, bool* refused) {
  RETURN_IF_ERROR(CheckBound(step, context, run));
  RETURN_IF_ERROR(CheckStepValues(context, run, step.torchao));
  const std::optional<RefusedGradient> first = FindRefusedGradient(context, run);
  *refused = first.has_value();
  if (first.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("gradient ", first->slot, ": element ", first->element, " is ",
                                                   first->value, "; gradients are finite, and below FLT_MAX / ",
                                                   run.num_slots));
  }
  if (run.num_elements == 0) return absl::OkStatus();
  if (step.muon_function != nullptr) return ApplyMuon(step, context, run);
  step.function(context, run);
  return absl::OkStatus();
}

bool CallApply(const BoundStep& step, Integer elements, Integer row_elements, const py::list& weights,
               const std::vector<py::list>& states, const py::list& gradients, bool bf16, Integer number,
               Integer tensor, const py::int_& first_element, double clip, double divide, bool skip) {
  OptimizerContext context = step.context;
  context.step = number.value;
  context.scalars = OrThrow(ComputeStepScalars(context.hyper, number.value));
  context.gradients = bf16 ? Format::kBf16 : Format::kFp32;
  BoundRun bound(context, elements.value, row_elements.value);
  OptimizerRun& run = bound.run();
  run.tensor = TensorNumber(tensor);
  run.first_element = Unsigned64(first_element, "first_element");
  run.clip = static_cast<float>(clip);
  run.divide_scale = static_cast<float>(1 / divide);
  const StoredLayout layout = LayoutOf(context.weights, run.row_elements);
  run.weights_in = run.weights_out = bound.Stored("weights", layout, weights);
  for (int s = 0; s < NumStates(context.hyper); ++s) {
    if (s >= static_cast<int>(states.size())) throw StatusError(absl::InvalidArgumentError("a state is missing"));
    run.states_in[s] = run.states_out[s] =
        bound.Stored(StateName(context.hyper, s), LayoutOf(context.states), states[s]);
  }
  for (const py::handle gradient : gradients) bound.AddGradient(gradient);
  bool refused = false;
  absl::Status status;
  {
    const py::gil_scoped_release release;
    status = Apply(step, context, bound.run(), &refused);
  }
  if (refused && skip) return false;
  if (!status.ok()) throw StatusError(status);
  return true;
}

}  // namespace

void BindStep(py::module_& module) {
  py::class_<BoundStep>(module, "OptimizerStep")
      .def(py::init(&CreateStep), py::arg("optimizer"), py::arg("hyper"), py::arg("weights"), py::arg("states"),
           py::arg("torchao"), py::arg("seed"), py::arg("implementation"), py::arg("fast"))
      .def_property_readonly("states", &StateNames)
      .def_property_readonly("blas", &BlasOf)
      .def("apply", &CallApply, py::arg("elements"), py::arg("row_elements"), py::arg("weights"), py::arg("states"),
           py::arg("gradients"), py::arg("bf16"), py::kw_only(), py::arg("step"), py::arg("tensor"),
           py::arg("first_element"), py::arg("clip"), py::arg("divide"), py::arg("skip"));
}

}  // namespace shardmesh::python
