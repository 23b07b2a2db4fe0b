#include "kvmanager/base/status.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/cord.h"

namespace kvmanager {
namespace {

constexpr absl::string_view kFieldUrl = "kvmanager/field";
constexpr absl::string_view kValueUrl = "kvmanager/value";
constexpr absl::string_view kBoundUrl = "kvmanager/bound";

std::string PayloadOf(const absl::Status& status, absl::string_view url) {
  const auto payload = status.GetPayload(url);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace

absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view value,
                        absl::string_view bound) {
  return WithDetail(absl::Status(code, absl::StrCat(field, " is ", value, ", must be ", bound)),
                    {std::string(field), std::string(value), std::string(bound)});
}

absl::Status WithDetail(absl::Status status, const ErrorDetail& detail) {
  if (!detail.field.empty()) status.SetPayload(kFieldUrl, absl::Cord(detail.field));
  if (!detail.value.empty()) status.SetPayload(kValueUrl, absl::Cord(detail.value));
  if (!detail.bound.empty()) status.SetPayload(kBoundUrl, absl::Cord(detail.bound));
  return status;
}

ErrorDetail DetailOf(const absl::Status& status) {
  return {PayloadOf(status, kFieldUrl), PayloadOf(status, kValueUrl), PayloadOf(status, kBoundUrl)};
}

void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, condition);
  std::abort();
}

}  // namespace kvmanager
