#include "bench/harness/step_formats.h"

#include "absl/strings/str_cat.h"

namespace shardmesh::bench {
namespace {

double BytesAnElement(const PartLayout& part) {
  return static_cast<double>(part.bytes) / static_cast<double>(part.elements);
}
double BytesAnElement(const StoredLayout& layout) {
  return BytesAnElement(layout.codes) + BytesAnElement(layout.extra);
}

}  // namespace

std::string StepFormats::ToString() const {
  return absl::StrCat(WeightFormatName(weights), " + ", StateFormatName(states));
}
double StepFormats::StoredBytes() const {
  return BytesAnElement(LayoutOf(weights)) + 2 * BytesAnElement(LayoutOf(states));
}
double StepFormats::MovedBytes() const { return 2 * StoredBytes() + static_cast<double>(BytesPerElement(gradients)); }

}  // namespace shardmesh::bench
