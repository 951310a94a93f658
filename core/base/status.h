// Status helpers: absl::Status is the only error type of the product, and its code says what the CALLER does next.
//
//   code                the caller ...
//   kInvalidArgument    has a bug or a typo: fix the value the message names, do not retry
//   kNotFound           named something that does not exist: the message lists what does
//   kAlreadyExists      asks for a second one of something unique: use the first, or another name
//   kFailedPrecondition is at the wrong step, epoch or state: read the current one (it is in the message), then decide
//   kOutOfRange         asks past the end (a version not yet made): wait, or ask for what exists
//   kAborted            is stale (an old incarnation or epoch), or lost a race: join or start again, with a new one
//   kUnavailable        met a peer that is gone or not ready: the same call may be repeated, after a pause
//   kDeadlineExceeded   waited as long as it said it would: repeat with more time, or look at who is slow (named)
//   kResourceExhausted  is over a limit (named, with its value): ask for less, or later
//   kPermissionDenied   may not do this: other credentials or another user
//   kDataLoss           holds or received bytes that are wrong: stop, keep the evidence, restore
//   kUnimplemented      was built without this: the message says which build has it
//   kInternal           found a bug in shardmesh: report it
//
// A message says what was wrong, with the value, and what would be right. Functions here are pure and thread-safe.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// `status` with "context: " put before its message; OK stays OK. Use once, at the boundary that knows the key and the
// verb.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

namespace status_internal {
inline absl::Status ToStatus(const absl::Status& status) { return status; }
template <typename T>
absl::Status ToStatus(const absl::StatusOr<T>& result) {
  return result.status();
}
}  // namespace status_internal

}  // namespace shardmesh

// Returns the status of `expr` from the enclosing function unless it is OK.
#define RETURN_IF_ERROR(expr)                                             \
  do {                                                                    \
    if (auto status_macro_result = (expr); !status_macro_result.ok())     \
      return ::shardmesh::status_internal::ToStatus(status_macro_result); \
  } while (false)

#define SHARDMESH_CONCAT_INNER(a, b) a##b
#define SHARDMESH_CONCAT(a, b) SHARDMESH_CONCAT_INNER(a, b)

// ASSIGN_OR_RETURN(auto x, StatusOrExpression): x is the value, or the enclosing function returns the error.
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL(SHARDMESH_CONCAT(status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                          \
  if (!result.ok()) return result.status();      \
  lhs = std::move(result).value()
