#include "kvmanager/base/exit_code.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace kvmanager {
namespace {

constexpr absl::string_view kMisuseUrl = "kvmanager/misuse";

}  // namespace

absl::Status Misuse(absl::Status status) {
  if (!status.ok()) status.SetPayload(kMisuseUrl, absl::Cord());
  return status;
}

bool IsMisuse(const absl::Status& status) { return status.GetPayload(kMisuseUrl).has_value(); }

int ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kExitDone;
  return IsMisuse(status) ? kExitMisused : kExitFailed;
}

}  // namespace kvmanager
