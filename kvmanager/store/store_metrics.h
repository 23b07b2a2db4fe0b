// The store's metrics: references to series, made once and given to its constructor. One per store, since the page
// gauges are the store's own sums.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>

#include "kvmanager/store/hit_tier.h"
#include "kvmanager/store/miss_reason.h"
#include "kvmanager/store/page_state.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// Of blocks that clients want kept longer; looked at once a second.
struct RetainedGauges {
  prometheus::Gauge* blocks = nullptr;
  prometheus::Gauge* bytes = nullptr;
};

/// Of blocks of ladders that are on a rung, or come to it.
struct RungMetrics {
  prometheus::Gauge* pages = nullptr;
  prometheus::Gauge* bytes = nullptr;
  prometheus::Counter* hit_blocks = nullptr;
  prometheus::Counter* lowered_blocks = nullptr;
  prometheus::Counter* unlowered_blocks = nullptr;
  prometheus::Counter* lowered_freed_bytes = nullptr;
  prometheus::Histogram* lowering_error = nullptr;
};

struct StoreMetrics {
  explicit StoreMetrics(Metrics* metrics);

  /// Gauges of pages and bytes of a codec by state, in a tier ("host", or "gpu" and its number); made on first use.
  /// `codec`: a registered codec's name.
  PageGauges& PagesOf(const std::string& codec, const std::string& tier = "host");

  /// In a tier, named so; made on first use.
  RetainedGauges& RetainedIn(const std::string& tier);

  /// Of a rung (Codec::rung), in host memory; made on first use.
  RungMetrics& Rung(int rung);

  prometheus::Counter& prefix_asked_blocks;
  prometheus::Counter& prefix_hit_blocks;
  std::array<prometheus::Counter*, kHitTiers> prefix_hit_tiers;  // by HitTier
  std::array<prometheus::Counter*, kMissReasons> prefix_misses;  // by MissReason; kNone is nullptr
  prometheus::Counter& checksum_failures;
  prometheus::Counter& evicted_blocks;
  prometheus::Counter& evicted_bytes;
  prometheus::Histogram& evicted_idle_seconds;
  prometheus::Counter& purged_blocks;
  prometheus::Counter& demoted_blocks;
  prometheus::Counter& demoted_bytes;
  prometheus::Counter& prefetched_blocks;
  prometheus::Counter& fetched_blocks;
  prometheus::Counter& fetched_bytes;
  prometheus::Counter& lost_moves;
  prometheus::Gauge& moving_bytes;
  prometheus::Counter& exhausted;
  prometheus::Counter& appended_tokens;  // tokens times layers
  prometheus::Counter& refused_appends;
  prometheus::Counter& encoded_pages;
  prometheus::Counter& encoded_bytes;
  prometheus::Counter& declined_pages;
  prometheus::Counter& sink_pages;
  prometheus::Counter& attend_waits;
  prometheus::Counter& index_trainings;
  prometheus::Counter& index_selections;
  prometheus::Counter& index_cache_hits;
  prometheus::Counter& index_cache_misses;
  prometheus::Counter& index_cache_evictions;
  prometheus::Counter& published;
  prometheus::Counter& published_shared;
  prometheus::Counter& forks;
  prometheus::Counter& exports;
  prometheus::Counter& imports;
  prometheus::Gauge& caches;
  prometheus::Gauge& sequences;
  prometheus::Gauge& index_bytes;
  prometheus::Gauge& published_blocks;
  prometheus::Gauge& unwritten_blocks;
  prometheus::Counter& unwritten_evictions;
  prometheus::Gauge& recorded_blocks;
  prometheus::Gauge& unclaimed_blocks;
  prometheus::Counter& unrecorded_blocks;
  prometheus::Counter& recovered_blocks;
  prometheus::Counter& unrecovered_blocks;
  prometheus::Counter& unclaimed_lost_blocks;
  prometheus::Gauge& evictable_bytes;
  prometheus::Gauge& lowering_bytes;
  prometheus::Gauge& pool_capacity_bytes;
  prometheus::Gauge& pool_used_bytes;
  prometheus::Gauge& attend_leases;
  prometheus::Gauge& export_leases;
  prometheus::Gauge& import_leases;

 private:
  Metrics* metrics_;
  std::map<std::pair<std::string, std::string>, PageGauges> pages_;  // by codec and tier
  std::map<std::string, RetainedGauges> retained_;                   // by tier
  std::map<int, RungMetrics> rungs_;
};

}  // namespace kvmanager
