#include "kvmanager/store/page_check.h"

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/raw_page.h"

namespace kvmanager {

absl::Status CheckPageValues(const Cache& cache, uint32_t layer, bool raw, absl::Span<const uint8_t> bytes,
                             absl::string_view field) {
  if (!raw && !cache.identity()) return cache.codec->Validate(static_cast<int>(layer), bytes);
  NonFinite where;
  if (!FindNonFinite(cache.layout(layer), bytes.data(), 0, cache.page_tokens(), &where)) return absl::OkStatus();
  return InvalidField(absl::StrCat(field, where.side == 0 ? ".k" : ".v", "[head ", where.head, "][token ", where.token,
                                   "][channel ", where.channel, "]"),
                      "NaN or Inf", "finite");
}

absl::StatusOr<uint64_t> CheckPageBytes(const Cache& cache, uint32_t layer, bool raw, absl::Span<const uint8_t> bytes,
                                        absl::string_view field) {
  KV_RETURN_IF_ERROR(CheckPageValues(cache, layer, raw, bytes, field));
  return Checksum(bytes.data(), bytes.size());
}

}  // namespace kvmanager
