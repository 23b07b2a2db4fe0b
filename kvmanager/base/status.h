// Errors that name the field, its value and the bound. They travel as absl::Status with three payloads, cross the wire
// as api/kvmanager.capnp's Status, and come out of the client as the same absl::Status.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// What an error is about; empty strings where the error has no such part.
struct ErrorDetail {
  std::string field;
  std::string value;
  std::string bound;
};

/// A status whose message reads "<field> is <value>, must be <bound>" and which carries the three as payloads.
absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view value,
                        absl::string_view bound);

/// INVALID_ARGUMENT for `field`: FieldError with numbers or strings.
template <typename V>
absl::Status InvalidField(absl::string_view field, const V& value, absl::string_view bound) {
  return FieldError(absl::StatusCode::kInvalidArgument, field, absl::StrCat(value), bound);
}

/// `status` with the three payloads set from `detail` (empty ones are left out); the message stays.
absl::Status WithDetail(absl::Status status, const ErrorDetail& detail);

/// The payloads of `status`, as FieldError and WithDetail set them.
ErrorDetail DetailOf(const absl::Status& status);

#define KV_RETURN_IF_ERROR(expr)                             \
  do {                                                       \
    if (absl::Status kv_s = (expr); !kv_s.ok()) return kv_s; \
  } while (0)
#define KV_CONCAT_(a, b) a##b
#define KV_CONCAT(a, b) KV_CONCAT_(a, b)
#define KV_ASSIGN_OR_RETURN(lhs, expr) KV_ASSIGN_OR_RETURN_(KV_CONCAT(kv_so_, __LINE__), lhs, expr)
#define KV_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                         \
  if (!tmp.ok()) return tmp.status();        \
  lhs = std::move(tmp).value()

/// Aborts with a message if `condition` does not hold: for broken invariants, never for input.
#define KV_CHECK(condition) \
  (__builtin_expect(!!(condition), 1) ? (void)0 : ::kvmanager::CheckFailed(#condition, __FILE__, __LINE__))
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line);

}  // namespace kvmanager
