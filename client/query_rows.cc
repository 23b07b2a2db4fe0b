#include "client/query_rows.h"

#include <algorithm>
#include <bit>

#include "kvmanager/base/status.h"

namespace kvmanager::client {

void QueryRows::BeginStep(uint64_t tokens) {
  // What is saved up is spent by the next steps that may copy at all.
  tokens_ = std::min(tokens_ + std::max(tokens, kStepTokensMin), kTokensPerRow * kPlaces);
}

bool QueryRows::IsDue(int layer) const {
  return layer == next_layer_ && tokens_ >= kTokensPerRow && rows_.size() < kPlaces;
}

int QueryRows::Take() {
  KV_CHECK(rows_.size() < kPlaces);
  const int place = std::countr_one(taken_);
  taken_ |= 1u << place;
  rows_.push_back({{place, next_layer_}, std::nullopt});
  tokens_ -= kTokensPerRow;
  next_layer_ = (next_layer_ + 1) % layers_;
  return place;
}

void QueryRows::EndStep(uint64_t epoch) {
  for (auto row = rows_.rbegin(); row != rows_.rend() && !row->epoch.has_value(); ++row) row->epoch = epoch;
}

std::vector<QueryRows::Row> QueryRows::Arrived(uint64_t released) {
  std::vector<Row> arrived;
  while (!rows_.empty() && rows_.front().epoch.has_value() && *rows_.front().epoch <= released) {
    arrived.push_back(rows_.front().row);
    taken_ &= ~(1u << rows_.front().row.place);
    rows_.pop_front();
  }
  return arrived;
}

}  // namespace kvmanager::client
