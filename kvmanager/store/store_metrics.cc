#include "kvmanager/store/store_metrics.h"

namespace kvmanager {
namespace {

constexpr char kLeaseHelp[] = "Leases on pages by kind";

}  // namespace

const char* MissReasonName(MissReason reason) {
  static constexpr const char* kNames[kMissReasons] = {"none", "not_found", "token_mismatch", "checksum", "incomplete"};
  return kNames[static_cast<size_t>(reason)];
}

const char* HitTierName(HitTier tier) {
  static constexpr const char* kNames[kHitTiers] = {"host", "device", "disk"};
  return kNames[static_cast<size_t>(tier)];
}

StoreMetrics::StoreMetrics(Metrics* m)
    : prefix_asked_blocks(
          m->Counter("prefix_asked_blocks_total", "Blocks that new sequences, and reads of blocks, asked for by name")),
      prefix_hit_blocks(m->Counter("prefix_hit_blocks_total", "Blocks that new sequences, and reads of blocks, found")),
      prefix_hit_tiers(),
      prefix_misses(),
      checksum_failures(
          m->Counter("checksum_failures_total", "Published blocks found with changed bytes, and dropped")),
      evicted_blocks(m->Counter("evicted_blocks_total", "Published blocks evicted to make room")),
      evicted_bytes(m->Counter("evicted_bytes_total", "Bytes of evicted blocks")),
      evicted_idle_seconds(m->Histogram("evicted_idle_seconds",
                                        "Time since the last use of a block when it was evicted",
                                        ExponentialBounds(0.1, 4, 10))),
      purged_blocks(m->Counter("purged_blocks_total", "Published blocks dropped on an operator's request")),
      demoted_blocks(m->Counter("demoted_blocks_total", "Published blocks copied from a GPU to the host's pool")),
      demoted_bytes(m->Counter("demoted_bytes_total", "Bytes of blocks copied from a GPU to the host's pool")),
      prefetched_blocks(
          m->Counter("prefetched_blocks_total", "Blocks read from the disk before a call waited for them")),
      fetched_blocks(m->Counter("fetched_blocks_total", "Blocks copied from the host's pool to a GPU")),
      fetched_bytes(m->Counter("fetched_bytes_total", "Bytes of blocks copied from the host's pool to a GPU")),
      lost_moves(m->Counter("lost_moves_total",
                            "Blocks copied between a GPU and the host that did not arrive, or not as they should be")),
      moving_bytes(m->Gauge("moving_bytes", "Bytes on their way between GPUs and the host's pool")),
      exhausted(m->Counter("pool_exhausted_total", "Requests refused because a pool was full of pages in use")),
      appended_tokens(m->Counter("appended_tokens_total", "Tokens appended, counted once per layer")),
      refused_appends(m->Counter("refused_appends_total", "Append calls refused with an error")),
      encoded_pages(m->Counter("encoded_pages_total", "Pages encoded")),
      encoded_bytes(m->Counter("encoded_bytes_total", "Bytes of encoded pages made, padding included")),
      declined_pages(m->Counter("declined_pages_total", "Pages that the codec declined, kept raw")),
      sink_pages(m->Counter("sink_pages_total", "Pages kept raw because the cache's policy names them sinks")),
      attend_waits(m->Counter("attend_waits_total", "Attend calls that waited for a page's encoding or an index")),
      index_trainings(m->Counter("index_trainings_total", "Trainings of a layer's index ended")),
      index_selections(
          m->Counter("index_selections_total", "Choices of what to read, one per query token, layer and KV head")),
      index_cache_hits(
          m->Counter("index_cache_hits_total", "Chosen tokens that were read from the cache of hot blocks")),
      index_cache_misses(m->Counter("index_cache_misses_total", "Chosen tokens that the cache of hot blocks had not")),
      index_cache_evictions(m->Counter("index_cache_evictions_total", "Blocks evicted from caches of hot blocks")),
      published(m->Counter("published_blocks_total", "Blocks named by a publish or a hand-off")),
      published_shared(
          m->Counter("published_shared_blocks_total", "Blocks replaced by an equal one published earlier")),
      forks(m->Counter("forks_total", "Sequences forked")),
      exports(m->Counter("exports_total", "Sequences pinned for sending")),
      imports(m->Counter("imports_total", "Received sequences that became visible")),
      caches(m->Gauge("caches", "Open caches")),
      sequences(m->Gauge("sequences", "Open sequences")),
      index_bytes(m->Gauge("index_bytes", "Memory of sequences' indexes, outside the pool, shared parts in full")),
      published_blocks(m->Gauge("published_blocks", "Blocks that can be found by name")),
      unwritten_blocks(m->Gauge("disk_unwritten_blocks",
                                "Blocks of host memory that are being written to the disk, or wait for that")),
      unwritten_evictions(
          m->Counter("disk_unwritten_evictions_total", "Blocks evicted from host memory before the disk had them")),
      recorded_blocks(m->Gauge("recorded_blocks", "Published blocks that a restart would find in host memory")),
      unclaimed_blocks(m->Gauge("unclaimed_blocks", "Blocks of an earlier process whose cache is not open")),
      unrecorded_blocks(
          m->Counter("unrecorded_blocks_total", "Blocks that a restart will not find: no room to record them")),
      recovered_blocks(
          m->Counter("recovered_blocks_total", "Blocks of an earlier process that were found in host memory")),
      unrecovered_blocks(
          m->Counter("unrecovered_blocks_total", "Recorded blocks of an earlier process that could not be used")),
      unclaimed_lost_blocks(m->Counter("unclaimed_lost_blocks_total",
                                       "Unclaimed blocks that were given up: for room, by a purge, as no cache's")),
      evictable_bytes(
          m->Gauge("evictable_bytes", "Bytes of published blocks that nothing pins, unclaimed ones among them")),
      lowering_bytes(
          m->Gauge("lowering_bytes", "Bytes of the host pool's slots that ladders' blocks are encoded into")),
      pool_capacity_bytes(m->Gauge("pool_capacity_bytes", "Bytes of the host pool")),
      pool_used_bytes(m->Gauge("pool_used_bytes", "Bytes of the host pool's slots in use")),
      attend_leases(m->Gauge("leases", kLeaseHelp, {{"kind", "attend"}})),
      export_leases(m->Gauge("leases", kLeaseHelp, {{"kind", "export"}})),
      import_leases(m->Gauge("leases", kLeaseHelp, {{"kind", "import"}})),
      metrics_(m) {
  for (size_t i = 0; i < kHitTiers; ++i) {
    prefix_hit_tiers[i] = &m->Counter("prefix_hit_tier_blocks_total",
                                      "Blocks that new sequences took from a prefix hit, by where they were",
                                      {{"tier", HitTierName(static_cast<HitTier>(i))}});
  }
  for (size_t i = 1; i < kMissReasons; ++i) {
    prefix_misses[i] = &m->Counter("prefix_misses_total", "Prefix matches that ended before the last name, by reason",
                                   {{"reason", MissReasonName(static_cast<MissReason>(i))}});
  }
}

PageGauges& StoreMetrics::PagesOf(const std::string& codec, const std::string& tier) {
  const auto [it, is_new] = pages_.try_emplace({codec, tier});
  if (!is_new) return it->second;
  for (size_t i = 0; i < kPageStates; ++i) {
    const auto state = static_cast<PageState>(i);
    if (state == PageState::kFree) continue;
    MetricLabels labels = {{"codec", codec}, {"state", PageStateName(state)}, {"tier", tier}};
    it->second.pages[i] = &metrics_->Gauge("pages", "Pages by state", labels);
    labels["form"] = "raw";
    it->second.raw_bytes[i] =
        &metrics_->Gauge("page_bytes", "Bytes of pages' slots by state and form, shared ones once", labels);
    labels["form"] = "encoded";
    it->second.encoded_bytes[i] =
        &metrics_->Gauge("page_bytes", "Bytes of pages' slots by state and form, shared ones once", labels);
  }
  return it->second;
}

RetainedGauges& StoreMetrics::RetainedIn(const std::string& tier) {
  const auto [it, is_new] = retained_.try_emplace(tier);
  if (!is_new) return it->second;
  const MetricLabels labels = {{"tier", tier}};
  it->second.blocks = &metrics_->Gauge("retained_blocks",
                                       "Published blocks that nothing pins and that clients want kept longer", labels);
  it->second.bytes = &metrics_->Gauge("retained_bytes", "Bytes of these blocks", labels);
  return it->second;
}

RungMetrics& StoreMetrics::Rung(int rung) {
  const auto [it, is_new] = rungs_.try_emplace(rung);
  if (!is_new) return it->second;
  const MetricLabels labels = {{"rung", std::to_string(rung)}};
  RungMetrics& of = it->second;
  of.pages = &metrics_->Gauge("rung_pages", "Encoded pages of ladders by rung", labels);
  of.bytes = &metrics_->Gauge("rung_bytes", "Bytes of their slots", labels);
  of.hit_blocks = &metrics_->Counter("rung_hit_blocks_total",
                                     "Blocks of ladders that were taken, by the rung they were on", labels);
  of.lowered_blocks = &metrics_->Counter("lowered_blocks_total",
                                         "Blocks of ladders that were encoded again, by the rung they came to", labels);
  of.unlowered_blocks = &metrics_->Counter(
      "unlowered_blocks_total",
      "Blocks that were to come to a rung and did not: taken meanwhile, or declined by its codec", labels);
  of.lowered_freed_bytes =
      &metrics_->Counter("lowered_freed_bytes_total", "Bytes that lowering to a rung has freed", labels);
  of.lowering_error = &metrics_->Histogram(
      "lowering_error", "Relative error of K and V of a page that came to a rung, against what it was made of",
      ExponentialBounds(1.0 / 1024, 2, 11), labels);
  return of;
}

}  // namespace kvmanager
