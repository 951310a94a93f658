#include "core/view/box_parts.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/view/box_index.h"

namespace shardmesh {
namespace {

std::string Describe(const NamedBox& part) {
  return absl::StrCat("\"", absl::CHexEscape(part.name), "\" ", part.box.ToString());
}

}  // namespace

absl::StatusOr<PackedParts> PackedParts::Create(Dims shape, std::vector<NamedBox> parts, Gaps gaps) {
  RETURN_IF_ERROR(ValidateShape(shape));
  if (parts.empty()) return absl::InvalidArgumentError("parts: there is none; give at least one");
  if (parts.size() > kMaxPackedParts) {
    return absl::ResourceExhaustedError(absl::StrCat("parts: there are ", parts.size(), "; one tensor has at most ",
                                                     kMaxPackedParts, ", so view those that you need"));
  }
  absl::flat_hash_map<absl::string_view, size_t> places;
  std::vector<Box> boxes;
  int64_t covered = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    RETURN_IF_ERROR(Annotate(ValidateBox(parts[i].box, shape), absl::StrCat("parts: ", Describe(parts[i]))));
    const auto [first, is_new] = places.emplace(parts[i].name, i);
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat("parts: ", Describe(parts[first->second]), " and ",
                                                     Describe(parts[i]), " have one name; give each its own"));
    }
    boxes.push_back(parts[i].box);
  }
  const BoxIndex index(std::move(boxes));
  if (const auto overlap = index.FirstOverlap()) {
    return absl::InvalidArgumentError(absl::StrCat("parts: ", Describe(parts[overlap->first]), " and ",
                                                   Describe(parts[overlap->second]),
                                                   " overlap; an element belongs to one part"));
  }
  for (const Box& box : index.boxes()) covered += box.NumElements();  // disjoint and inside: no more than the whole
  const int64_t all = Box::Whole(shape).NumElements();
  if (gaps == Gaps::kRefuse && covered != all) {
    return absl::InvalidArgumentError(absl::StrCat("parts: they cover ", covered, " of the ", all,
                                                   " elements of the shape [", absl::StrJoin(shape, ", "),
                                                   "]; name the rest, or allow gaps"));
  }
  return PackedParts(std::move(shape), std::move(parts));
}

absl::StatusOr<Box> PackedParts::Find(absl::string_view name) const {
  for (const NamedBox& part : parts_) {
    if (part.name == name) return part.box;
  }
  return absl::NotFoundError(
      absl::StrCat("parts: none is named \"", absl::CHexEscape(name), "\"; there are ",
                   absl::StrJoin(parts_, ", ", [](std::string* out, const NamedBox& p) { out->append(p.name); })));
}

}  // namespace shardmesh
