// Test helpers for Status: IsOk(), StatusIs(code, message matcher), ASSERT_OK, EXPECT_OK, ASSERT_OK_AND_ASSIGN. Tests
// only.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/status.h"

namespace shardmesh {

MATCHER(IsOk, "is OK") {
  *result_listener << status_internal::ToStatus(arg);
  return arg.ok();
}

MATCHER_P2(StatusIs, code, message, "") {
  const absl::Status status = status_internal::ToStatus(arg);
  *result_listener << status;
  return status.code() == code &&
         ::testing::ExplainMatchResult(message, std::string(status.message()), result_listener);
}

}  // namespace shardmesh

#define ASSERT_OK(expr) ASSERT_THAT((expr), ::shardmesh::IsOk())
#define EXPECT_OK(expr) EXPECT_THAT((expr), ::shardmesh::IsOk())
#define ASSERT_OK_AND_ASSIGN(lhs, expr) ASSERT_OK_AND_ASSIGN_IMPL(SHARDMESH_CONCAT(assert_ok_, __LINE__), lhs, expr)
#define ASSERT_OK_AND_ASSIGN_IMPL(result, lhs, expr) \
  auto result = (expr);                              \
  ASSERT_THAT(result, ::shardmesh::IsOk());          \
  lhs = std::move(result).value()
