#include "client/cli/plan_file.h"

#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/layout_spec.h"
#include "core/layout_picture.h"
#include "core/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxFileBytes = size_t{256} << 20;
constexpr const char* kKinds[] = {"flat", "rows", "block", "whole"};

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read; give a file that is there"));
  std::string text;
  char block[1 << 16];
  while (file.read(block, sizeof(block)) || file.gcount() > 0) {
    text.append(block, file.gcount());
    if (text.size() <= kMaxFileBytes) continue;
    return absl::ResourceExhaustedError(absl::StrCat(path, ": longer than ", kMaxFileBytes, " bytes"));
  }
  return text;
}

absl::StatusOr<BucketLayout> LayoutOfFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  absl::StatusOr<LayoutSpec> spec = ParseLayoutSpec(text);
  if (!spec.ok()) return Annotate(spec.status(), path);
  absl::StatusOr<BucketLayout> layout = BucketLayout::Create(std::move(spec->tensors), spec->options);
  if (!layout.ok()) return Annotate(layout.status(), path);
  return layout;
}

}  // namespace

absl::StatusOr<std::string> PlanFile(const std::string& path, bool json) {
  ASSIGN_OR_RETURN(const BucketLayout layout, LayoutOfFile(path));
  return json ? JsonLine(LayoutToJson(layout)) : Picture(layout);
}

Json LayoutToJson(const BucketLayout& layout) {
  Json padding = Json::object(), buckets = Json::array(), placements = Json::array();
  for (const KindPadding& sum : layout.PaddingByKind()) {
    padding[kKinds[static_cast<int>(sum.kind)]] = {{"elements", sum.num_elements}, {"padding", sum.padding}};
  }
  for (const LayoutBucket& bucket : layout.buckets()) {
    buckets.push_back({{"format", bucket.space},
                       {"kind", kKinds[static_cast<int>(bucket.kind)]},
                       {"granule_elements", bucket.granule_elements},
                       {"elements", bucket.num_elements},
                       {"shard_elements", bucket.shard_elements},
                       {"padding", bucket.padding}});
  }
  for (size_t i = 0; i < layout.tensors().size(); ++i) {
    const LayoutTensor& tensor = layout.tensors()[i];
    const TensorPlace& place = layout.places()[i];
    const auto [first, last] = layout.ShardsOf(static_cast<int>(i));
    placements.push_back({{"name", tensor.name},
                          {"shape", tensor.shape},
                          {"granule", tensor.granule.ToString()},
                          {"bucket", place.bucket},
                          {"offset", place.offset},
                          {"elements", place.num_elements},
                          {"shards", {first, last}},
                          {"tied_to", tensor.tied_to}});
  }
  return {{"hash", layout.hash()},
          {"shards", layout.num_shards()},
          {"padding", std::move(padding)},
          {"buckets", std::move(buckets)},
          {"placements", std::move(placements)}};
}

}  // namespace shardmesh
