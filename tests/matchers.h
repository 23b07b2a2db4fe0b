// Assertions on absl::Status and StatusOr.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager::testing {

inline absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}

/// An error of `code` that names `field`, a value and a bound.
inline ::testing::AssertionResult NamesField(const absl::Status& status, absl::StatusCode code,
                                             absl::string_view field) {
  const ErrorDetail detail = DetailOf(status);
  if (status.code() != code || detail.field.find(std::string(field)) == std::string::npos || detail.bound.empty()) {
    return ::testing::AssertionFailure() << status.ToString() << " with field \"" << detail.field << "\", value \""
                                         << detail.value << "\", bound \"" << detail.bound << "\", expected "
                                         << absl::StatusCodeToString(code) << " about " << std::string(field);
  }
  return ::testing::AssertionSuccess();
}

}  // namespace kvmanager::testing

#define ASSERT_OK(expr) ASSERT_EQ(::kvmanager::testing::StatusOf(expr), absl::OkStatus())
#define EXPECT_OK(expr) EXPECT_EQ(::kvmanager::testing::StatusOf(expr), absl::OkStatus())
#define ASSERT_OK_AND_ASSIGN(lhs, expr) KV_ASSERT_ASSIGN_(KV_CONCAT(kv_or_, __LINE__), lhs, expr)
#define KV_ASSERT_ASSIGN_(tmp, lhs, expr)           \
  auto tmp = (expr);                                \
  ASSERT_TRUE(tmp.ok()) << tmp.status().ToString(); \
  lhs = std::move(tmp).value()
#define EXPECT_CODE(expr, expected)                                                                  \
  do {                                                                                               \
    const absl::Status kv_status = ::kvmanager::testing::StatusOf(expr);                             \
    EXPECT_EQ(kv_status.code(), absl::StatusCode::expected) << kv_status.ToString() << " of " #expr; \
  } while (0)
