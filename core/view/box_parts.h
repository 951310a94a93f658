// PackedParts: the named boxes that share one stored tensor, as qkv or gate-up projections are packed.
//
// It says where the parts are, not who holds them (core/view/view.h: TensorView::Part and TensorView::Packed do).
// Immutable after Create, thread-safe.
//
//   auto qkv = PackedParts::Create({768, 256}, {{"q", {{0, 0}, {256, 256}}}, {"k", ...}, {"v", ...}}, Gaps::kRefuse);
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/view/box.h"

namespace shardmesh {

inline constexpr size_t kMaxPackedParts = 4096;

struct NamedBox {
  std::string name;
  Box box;  // of the stored tensor
};

// Whether the stored tensor may have elements of no part.
enum class Gaps { kRefuse, kAllow };

class PackedParts {
 public:
  // InvalidArgument: no part, a part is not inside the shape (named), two parts overlap or have one name (both are
  //   named), or, with Gaps::kRefuse, elements of no part (counted).
  // ResourceExhausted: as ValidateShape; more than kMaxPackedParts parts.
  static absl::StatusOr<PackedParts> Create(Dims shape, std::vector<NamedBox> parts, Gaps gaps);

  const Dims& shape() const { return shape_; }
  const std::vector<NamedBox>& parts() const { return parts_; }

  // NotFound: no part has this name (the message lists them).
  absl::StatusOr<Box> Find(absl::string_view name) const;

 private:
  PackedParts(Dims shape, std::vector<NamedBox> parts) : shape_(std::move(shape)), parts_(std::move(parts)) {}

  Dims shape_;
  std::vector<NamedBox> parts_;
};

}  // namespace shardmesh
