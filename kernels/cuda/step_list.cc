#include "kernels/cuda/step_list.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/tile/walk.h"

namespace shardmesh {
namespace {

constexpr int64_t kAlignment = 16;

int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
template <class Value>
int64_t BytesOf(const std::vector<Value>& values) {
  return static_cast<int64_t>(values.size() * sizeof(Value));
}

}  // namespace

int64_t NumUnits(const OptimizerContext& context, const OptimizerRun& run) {
  const bool rows = context.weights == WeightFormat::kInt8Row;
  const int64_t elements = rows ? std::lcm(std::max<int64_t>(run.row_elements, 1), kTileElements) : kTileElements;
  return (run.num_elements + elements - 1) / elements;
}

StepTables::StepTables(absl::Span<const OptimizerContext> contexts, absl::Span<const OptimizerItem> items)
    : num_entries_(static_cast<int32_t>(items.size())) {
  std::vector<StepListEntry> entries(items.size());
  std::vector<int64_t> first_units(items.size() + 1);
  for (size_t i = 0; i < items.size(); ++i) {
    const OptimizerContext& context = contexts[items[i].context];
    entries[i] = {items[i].run, PlanStep(context, items[i].run), items[i].context};
    entries[i].plan.context = nullptr;
    entries[i].plan.run = nullptr;
    first_units[i + 1] = first_units[i] + NumUnits(context, items[i].run);
  }
  num_units_ = first_units.back();
  const auto context_bytes = static_cast<int64_t>(contexts.size() * sizeof(OptimizerContext));
  entries_at_ = RoundUp(context_bytes);
  first_units_at_ = RoundUp(entries_at_ + BytesOf(entries));
  bytes_.resize(first_units_at_ + BytesOf(first_units));
  std::memcpy(bytes_.data(), contexts.data(), context_bytes);
  std::memcpy(bytes_.data() + entries_at_, entries.data(), BytesOf(entries));
  std::memcpy(bytes_.data() + first_units_at_, first_units.data(), BytesOf(first_units));
}

StepList StepTables::At(const uint8_t* base) const {
  StepList list;
  list.contexts = reinterpret_cast<const OptimizerContext*>(base);
  list.entries = reinterpret_cast<const StepListEntry*>(base + entries_at_);
  list.first_units = reinterpret_cast<const int64_t*>(base + first_units_at_);
  list.num_entries = num_entries_;
  return list;
}

}  // namespace shardmesh
