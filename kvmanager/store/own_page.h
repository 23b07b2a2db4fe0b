// The page of its own that a query reads in part.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

/// Only a raw page can be read in part: a query whose own page is kept encoded alone must be that page's last token.
/// The error of entry `entry`, at `position`, where it is not; page_end: the first token behind the page.
inline absl::Status OwnPageIsEncoded(size_t entry, uint64_t position, uint64_t page_end) {
  return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("entries[", entry, "].position"),
                    absl::StrCat(position),
                    absl::StrCat(page_end - 1, " or more: earlier tokens of its page are kept encoded, as a whole"));
}

}  // namespace kvmanager
