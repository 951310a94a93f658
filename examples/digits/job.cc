#include "examples/digits/job.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"

namespace shardmesh::digits {
namespace {

Element ElementOf(Format format) { return format == Format::kFp32 ? Element::kFloat32 : Element::kBfloat16; }

}  // namespace

absl::StatusOr<shardmesh::JobSpec> SpecOf(const JobFlags& flags, const std::string& prefix) {
  shardmesh::JobSpec spec;
  spec.name = flags.job;
  if (!flags.mesh.empty()) {
    ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(flags.mesh));
  }
  spec.num_slots = flags.slots;
  ASSIGN_OR_RETURN(const WeightFormat format, ParseWeightFormat(flags.weights));
  for (const ParameterSpec& parameter : Parameters()) {
    spec.parameters.push_back({prefix + parameter.name, parameter.shape, format, ""});
  }
  spec.optimizer.lr = flags.learning_rate;
  spec.optimizer.weight_decay = 0.01;
  spec.seed = flags.seed;
  spec.publish_every = flags.publish_every;
  spec.check_every = flags.check_every;
  spec.bucket_elements = flags.bucket_elements;
  return spec;
}

absl::StatusOr<std::vector<Slot>> ParseSlots(absl::string_view text) {
  std::vector<Slot> slots;
  for (const absl::string_view word : absl::StrSplit(text, ',')) {
    int slot;
    if (!absl::SimpleAtoi(word, &slot)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--my-slots \"", text, "\": \"", word, "\" is no slot; give at least one, like 0,1"));
    }
    slots.push_back(Slot(slot));
  }
  return slots;
}

int64_t LastVersion(int64_t steps, int64_t publish_every) { return steps - steps % publish_every; }

double LearningRateOf(const JobFlags& flags, int64_t step) {
  const double done = flags.steps > 1 ? static_cast<double>(step - 1) / (flags.steps - 1) : 0;
  return flags.learning_rate * (1.0 - 0.9 * done);
}

ConstTensorView ViewOf(const shardmesh::ConstTensorView& view) {
  if (view.gather != GatherFormat::kStored) return {};  // codes, which nothing here reads
  return {ElementOf(view.format), view.data, static_cast<size_t>(view.num_elements)};
}

TensorView ViewOf(const shardmesh::TensorView& view) {
  return {ElementOf(view.format), view.data, static_cast<size_t>(view.num_elements)};
}

}  // namespace shardmesh::digits
