#include "client/cli/plan/plan_file.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/base/command.h"
#include "client/cli/base/table.h"
#include "client/cli/files/text_file.h"
#include "client/cli/plan/layout_spec.h"
#include "core/base/status.h"
#include "core/layout/layout_boxes.h"
#include "core/layout/layout_picture.h"
#include "core/layout/layout_reshard.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<StoredPlan> ReadPlan(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  absl::StatusOr<LayoutSpec> spec = ParseLayoutSpec(text);
  if (!spec.ok()) return Annotate(spec.status(), path);
  absl::StatusOr<StoredPlan> plan = PlanOf(*std::move(spec));
  if (!plan.ok()) return Annotate(plan.status(), path);
  return plan;
}

std::string Listed(const std::vector<int64_t>& numbers) { return absl::StrCat("[", absl::StrJoin(numbers, ","), "]"); }

// {rank, shard, boxes: {name: [{offsets, sizes}]}}: what a rank holds.
absl::StatusOr<std::string> BoxesOfRank(const StoredPlan& plan, Rank rank, bool json) {
  ASSIGN_OR_RETURN(const int64_t shard, plan.ShardOf(rank));
  ASSIGN_OR_RETURN(const std::vector<ShardBox> boxes, BoxesOfShard(plan.layout(), shard));
  Json by_name = Json::object();
  Table table({"tensor", "bucket", "offsets", "sizes"});
  for (const ShardBox& held : boxes) {
    const std::string& name = plan.layout().tensors()[held.tensor].name;
    const std::vector<int64_t> offsets(held.local.box.offsets.begin(), held.local.box.offsets.end());
    const std::vector<int64_t> sizes(held.local.box.sizes.begin(), held.local.box.sizes.end());
    if (json) by_name[name].push_back({{"offsets", offsets}, {"sizes", sizes}});
    if (!json) table.AddRow({name, absl::StrCat(held.bucket), Listed(offsets), Listed(sizes)});
  }
  if (json) return JsonLine({{"rank", rank.value()}, {"shard", shard}, {"boxes", std::move(by_name)}});
  return absl::StrCat("rank ", rank.value(), " holds shard ", shard, " of ", plan.layout().num_shards(), "\n\n",
                      table.ToString());
}

// {rank, elements, copies: [...]}: what a rank of `to` copies from ranks of `from`.
absl::StatusOr<std::string> CopiesOfRank(const StoredPlan& from, const StoredPlan& to, Rank rank, bool json) {
  RETURN_IF_ERROR(CheckReshard(from.layout(), to.layout()));
  ASSIGN_OR_RETURN(const std::vector<RankCopy> copies, CopiesOf(from, to, rank));
  Json list = Json::array();
  Table table({"from rank", "bucket", "offset", "to bucket", "offset", "elements"});
  int64_t elements = 0;
  for (const RankCopy& each : copies) {
    const ShardCopy& copy = each.copy;
    elements += copy.num_elements;
    if (json) {
      list.push_back({{"source", each.source.value()},
                      {"source_bucket", copy.source_bucket},
                      {"source_offset", copy.source_offset},
                      {"destination_bucket", copy.destination_bucket},
                      {"destination_offset", copy.destination_offset},
                      {"elements", copy.num_elements}});
    } else {
      table.AddRow({absl::StrCat(each.source.value()), absl::StrCat(copy.source_bucket),
                    absl::StrCat(copy.source_offset), absl::StrCat(copy.destination_bucket),
                    absl::StrCat(copy.destination_offset), absl::StrCat(copy.num_elements)});
    }
  }
  if (json) return JsonLine({{"rank", rank.value()}, {"elements", elements}, {"copies", std::move(list)}});
  return absl::StrCat("rank ", rank.value(), " copies ", elements, " elements in ", copies.size(), " runs\n\n",
                      table.ToString());
}

}  // namespace

absl::StatusOr<std::string> PlanFile(const std::string& path, const PlanFileOptions& options) {
  ASSIGN_OR_RETURN(const StoredPlan plan, ReadPlan(path));
  if (!options.reshard_from.empty()) {
    ASSIGN_OR_RETURN(const StoredPlan from, ReadPlan(options.reshard_from));
    return CopiesOfRank(from, plan, *options.rank, options.json);
  }
  if (options.rank.has_value()) return BoxesOfRank(plan, *options.rank, options.json);
  return options.json ? JsonLine(PlanToJson(plan)) : Picture(plan);
}

Json PlanToJson(const StoredPlan& plan) {
  const BucketLayout& layout = plan.layout();
  Json padding = Json::object(), buckets = Json::array(), placements = Json::array(), ranks = Json::array();
  for (int64_t shard = 0; shard < layout.num_shards(); ++shard) {
    Json& holders = ranks.emplace_back(Json::array());
    for (const Rank rank : plan.RanksOf(shard)) holders.push_back(rank.value());
  }
  for (const KindPadding& sum : layout.PaddingByKind()) {
    padding[std::string(GranuleKindName(sum.kind))] = {{"elements", sum.num_elements}, {"padding", sum.padding}};
  }
  for (const LayoutBucket& bucket : layout.buckets()) {
    buckets.push_back({{"format", bucket.space},
                       {"kind", std::string(GranuleKindName(bucket.kind))},
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
  return {{"hash", plan.hash()},
          {"mesh", {{"names", plan.mesh().Names()}, {"sizes", plan.mesh().Sizes()}}},
          {"shards", layout.num_shards()},
          {"ranks", std::move(ranks)},
          {"padding", std::move(padding)},
          {"buckets", std::move(buckets)},
          {"placements", std::move(placements)}};
}

}  // namespace shardmesh
