#include "codecs/pq/pq_selects.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::pq {

void SetReads(const Parameters& parameters, uint64_t position, DeviceSelect* select) {
  const Parameters::Reads reads = parameters.ReadsOf(position);
  select->sinks = uint32_t(reads.sinks);
  select->middle = uint32_t(reads.local_begin - reads.sinks);
  select->chosen = uint32_t(reads.chosen);
  select->local = uint32_t(position + 1 - reads.local_begin);
}

absl::StatusOr<SelectSizes> PlaceSelects(const DeviceShape& shape, absl::Span<DeviceSelect> queries) {
  uint64_t rows = 0, runs = 0;
  SelectSizes sizes;
  for (DeviceSelect& query : queries) {
    const uint64_t page_tokens = uint64_t(shape.page_tokens);
    const uint64_t stride = (query.rows() + page_tokens - 1) / page_tokens * page_tokens;
    query.list = uint32_t(rows);
    query.list_stride = uint32_t(stride);
    query.first_run = uint32_t(runs);
    rows += stride * shape.kv_heads;
    runs += uint64_t{SelectRuns(query.middle)} * shape.kv_heads;
    if (rows > UINT32_MAX || runs > UINT32_MAX) {
      return FieldError(absl::StatusCode::kResourceExhausted, "rows that a batch reads", absl::StrCat(rows),
                        absl::StrCat("at most ", UINT32_MAX));
    }
    sizes.middle_max = std::max(sizes.middle_max, query.middle);
  }
  sizes.rows = uint32_t(rows);
  sizes.runs = uint32_t(runs);
  return sizes;
}

}  // namespace kvmanager::pq
