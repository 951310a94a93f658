#include "core/layout/layout_picture.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/layout/granule.h"

namespace shardmesh {
namespace {

constexpr int64_t kColumns = 48;
constexpr int64_t kMaxDrawn = 16;
constexpr size_t kMaxNamesBehindBar = 4;
constexpr absl::string_view kMarks = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
constexpr size_t kMaxRanksOfAShard = 4;
constexpr size_t kMaxListed = 8;

double Percent(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

// Text of any language as it is, control characters escaped.
std::string Shown(absl::string_view text) { return absl::Utf8SafeCHexEscape(text); }

// The bar of one shard, and the names of what it holds.
class Bar {
 public:
  Bar(const BucketLayout& layout, int bucket, int64_t shard)
      : layout_(layout),
        bucket_(layout.buckets()[bucket]),
        stretches_(layout.StretchesOf(bucket, shard)),
        columns_(std::min(kColumns, std::max<int64_t>(bucket_.shard_elements, 1))) {}

  std::string ToString() const {
    std::string bar = "|";
    size_t first = 0;
    for (int64_t c = 0; c < columns_; ++c) {
      const int64_t begin = Column(c), end = Column(c + 1);
      while (first < stretches_.size() && stretches_[first].shard_offset + Held(stretches_[first]) <= begin) ++first;
      bar.push_back(MarkIn(first, begin, end));
    }
    absl::StrAppend(&bar, "|  ");
    for (size_t i = 0; i < std::min(stretches_.size(), kMaxNamesBehindBar); ++i) {
      const std::string& name = layout_.tensors()[stretches_[i].tensor].name;
      absl::StrAppend(&bar, " ", std::string(1, Mark(i)), " ", Shown(name));
    }
    if (stretches_.size() > kMaxNamesBehindBar)
      absl::StrAppend(&bar, " and ", stretches_.size() - kMaxNamesBehindBar, " more");
    return bar;
  }

 private:
  int64_t Column(int64_t c) const {
    return bucket_.shard_elements / columns_ * c + bucket_.shard_elements % columns_ * c / columns_;
  }
  // Elements of the tensor itself, when what the tensor lacks to whole granules lies at its end.
  int64_t Held(const Stretch& s) const {
    const TensorPlace& place = layout_.places()[s.tensor];
    const bool at_end = layout_.tensors()[s.tensor].granule.kind != GranuleKind::kBlock;
    return at_end ? std::min(s.num_elements, std::max<int64_t>(place.num_elements - s.first_element, 0))
                  : s.num_elements;
  }
  char Mark(size_t i) const { return kMarks[static_cast<size_t>(stretches_[i].tensor) % kMarks.size()]; }
  char MarkIn(size_t first, int64_t begin, int64_t end) const {
    char mark = '.';
    int64_t most = 0;
    for (size_t i = first; i < stretches_.size() && stretches_[i].shard_offset < end; ++i) {
      const int64_t from = std::max(begin, stretches_[i].shard_offset);
      const int64_t to = std::min(end, stretches_[i].shard_offset + Held(stretches_[i]));
      if (to - from <= most) continue;
      most = to - from;
      mark = Mark(i);
    }
    return mark;
  }

  const BucketLayout& layout_;
  const LayoutBucket& bucket_;
  const std::vector<Stretch> stretches_;
  const int64_t columns_;
};

std::string BucketHeading(const LayoutBucket& bucket, size_t index, int64_t num_shards) {
  const std::string space = bucket.space.empty() ? "" : absl::StrCat("  ", Shown(bucket.space));
  if (bucket.owned) {
    return absl::StrCat("bucket ", index, space, "  whole matrices  ", bucket.num_elements,
                        " elements, the largest shard ", bucket.shard_elements, "\n");
  }
  return absl::StrFormat("bucket %d%s  %s granules of %d  %d x %d elements, padding %.2f%%\n", index, space,
                         GranuleKindName(bucket.kind), bucket.granule_elements, num_shards, bucket.shard_elements,
                         Percent(bucket.padding, bucket.num_elements - bucket.padding));
}

// "ranks 0,2", cut when there are many.
std::string RanksText(const StoredPlan& plan, int64_t shard) {
  const std::vector<Rank> ranks = plan.RanksOf(shard);
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMaxRanksOfAShard); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ",", ranks[i].value());
  }
  if (ranks.size() > kMaxRanksOfAShard) absl::StrAppend(&text, " and ", ranks.size() - kMaxRanksOfAShard, " more");
  return text;
}

std::string Totals(const BucketLayout& layout) {
  std::string out;
  absl::StrAppend(&out, layout.tensors().size(), " tensors in ", layout.buckets().size(), " buckets on ",
                  layout.num_shards(), " shards\n");
  for (const KindPadding& sum : layout.PaddingByKind()) {
    absl::StrAppendFormat(&out, "  %-5s granules: %d elements, padding %d (%.3f%%)\n", GranuleKindName(sum.kind),
                          sum.num_elements, sum.padding, Percent(sum.padding, sum.num_elements));
  }
  return out;
}

// "tied: head.w to embed.w, ...", and the tensors without elements.
std::string OtherTensors(const BucketLayout& layout) {
  std::vector<std::string> tied, empty;
  for (size_t i = 0; i < layout.tensors().size(); ++i) {
    const LayoutTensor& tensor = layout.tensors()[i];
    if (!tensor.tied_to.empty()) {
      tied.push_back(absl::StrCat(Shown(tensor.name), " to ", Shown(tensor.tied_to)));
    } else if (layout.places()[i].bucket < 0) {
      empty.push_back(Shown(tensor.name));
    }
  }
  std::string out;
  for (auto& [title, names] : {std::make_pair("tied", tied), std::make_pair("without elements", empty)}) {
    if (names.empty()) continue;
    const size_t shown = std::min(names.size(), kMaxListed);
    absl::StrAppend(&out, "  ", title, ": ", absl::StrJoin(names.begin(), names.begin() + shown, ", "));
    if (shown < names.size()) absl::StrAppend(&out, " and ", names.size() - shown, " more");
    absl::StrAppend(&out, "\n");
  }
  return out;
}

// `labels`: of the shards that are drawn.
std::string Buckets(const BucketLayout& layout, const std::vector<std::string>& labels) {
  std::string out;
  const auto num_buckets = static_cast<int64_t>(layout.buckets().size());
  const auto drawn = static_cast<int64_t>(labels.size());
  for (int64_t b = 0; b < std::min(num_buckets, kMaxDrawn); ++b) {
    absl::StrAppend(&out, "\n", BucketHeading(layout.buckets()[b], b, layout.num_shards()));
    for (int64_t shard = 0; shard < drawn; ++shard) {
      absl::StrAppend(&out, "  ", labels[shard], Bar(layout, static_cast<int>(b), shard).ToString(), "\n");
    }
    if (drawn < layout.num_shards()) absl::StrAppend(&out, "  and ", layout.num_shards() - drawn, " shards more\n");
  }
  if (num_buckets > kMaxDrawn) absl::StrAppend(&out, "\nand ", num_buckets - kMaxDrawn, " buckets more\n");
  return out;
}

// "shard N" with the ranks that hold it, all of one width.
std::vector<std::string> Labels(const StoredPlan& plan) {
  std::vector<std::string> labels;
  size_t width = 0;
  for (int64_t shard = 0; shard < std::min(plan.layout().num_shards(), kMaxDrawn); ++shard) {
    std::string label = absl::StrFormat("shard %-3d  %s  ", shard, RanksText(plan, shard));
    width = std::max(width, label.size());
    labels.push_back(std::move(label));
  }
  for (std::string& label : labels) label.resize(width, ' ');
  return labels;
}

}  // namespace

std::string Picture(const StoredPlan& plan) {
  const std::string mesh = absl::StrJoin(plan.mesh().Axes(), ",", [](std::string* out, const MeshAxis& axis) {
    absl::StrAppend(out, axis.name, "=", axis.size);
  });
  return absl::StrCat("plan ", plan.hash(), " on mesh ", mesh, "\n", Totals(plan.layout()), OtherTensors(plan.layout()),
                      Buckets(plan.layout(), Labels(plan)));
}

}  // namespace shardmesh
