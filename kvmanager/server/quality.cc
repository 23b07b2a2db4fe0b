#include "kvmanager/server/quality.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/page_error.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kDigestBytes = 6;  // of a cache's, as kvctl shows it

}  // namespace

QualityMonitor::QualityMonitor(EncodeExecutor* executor, Metrics* metrics, uint32_t sample_pages)
    : executor_(executor), metrics_(metrics), sample_pages_(sample_pages) {
  KV_CHECK(sample_pages >= 1);
}

void QualityMonitor::NoteQueries(CacheId id, const CacheConfig& config, int layer_index,
                                 absl::Span<const AttendEntry> entries, DType q_dtype, float scale, const uint8_t* q) {
  if (!caches_.contains(id) && caches_.size() >= kCachesMax) Forget(Oldest(id));
  Cache& cache = caches_[id];
  if (cache.layers.empty()) cache.layers.resize(config.layers);
  cache.last_use = ++uses_;
  Layer& layer = cache.layers[layer_index];
  for (const AttendEntry& entry : entries) layer.tokens += entry.tokens;
  const bool same_kind = layer.dtype == q_dtype && layer.scale == scale;
  if (same_kind && layer.count == kRows && layer.tokens < kTokensPerRow) return;
  const size_t row_bytes = size_t(config.query_heads) * config.layout.head_dim * DTypeBytes(q_dtype);
  if (!same_kind || layer.rows.size() == 0) {
    query_bytes_ -= layer.rows.size();
    cache.bytes -= layer.rows.size();
    layer.rows = AlignedBuffer();
    layer.count = 0;
    layer.dtype = q_dtype;
    layer.scale = scale;
    if (!MakeRoom(id, kRows * row_bytes)) return;
    layer.rows = AlignedBuffer(kRows * row_bytes);
    query_bytes_ += layer.rows.size();
    cache.bytes += layer.rows.size();
  }
  // The last token of one entry, of another each time.
  const size_t chosen = layer.copies % entries.size();
  uint64_t row = 0;
  for (size_t i = 0; i <= chosen; ++i) row += entries[i].tokens;
  // `count` rows are there, in no order: of a layer that began anew they are the first ones.
  const int at = layer.count < kRows ? layer.count++ : static_cast<int>(layer.copies % kRows);
  std::memcpy(layer.rows.data() + at * row_bytes, q + (row - 1) * row_bytes, row_bytes);
  ++layer.copies;
  layer.tokens = 0;
}

QualityMonitor::Caches::iterator QualityMonitor::Oldest(CacheId but) {
  auto oldest = caches_.end();
  for (auto it = caches_.begin(); it != caches_.end(); ++it) {
    if (it->first == but) continue;
    if (oldest == caches_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
  }
  return oldest;
}

void QualityMonitor::Forget(Caches::iterator cache) {
  query_bytes_ -= cache->second.bytes;
  caches_.erase(cache);
}

bool QualityMonitor::MakeRoom(CacheId id, uint64_t bytes) {
  if (bytes > kQueryBytesMax) return false;
  while (query_bytes_ + bytes > kQueryBytesMax) {
    const auto oldest = Oldest(id);
    if (oldest == caches_.end()) return false;
    Forget(oldest);
  }
  return true;
}

bool QualityMonitor::Wants(CacheId id, uint32_t layer_index) {
  const auto found = caches_.find(id);
  if (found == caches_.end() || comparisons_ >= kComparisonsMax) return false;
  Layer& layer = found->second.layers[layer_index];
  if (layer.count == 0) return false;
  // Layers take turns.
  return layer.pages++ % sample_pages_ == layer_index % sample_pages_;
}

void QualityMonitor::Compare(const PageSample& page, absl::AnyInvocable<void()> done) {
  struct Job {
    PageSample page;
    AlignedBuffer q;
    PageErrorTask task;
    double error = NAN;
  };
  const Layer& layer = caches_.at(page.cache).layers[page.layer];
  auto job = std::make_shared<Job>();  // the task's, and then the completion's
  job->page = page;
  const size_t row_bytes = layer.rows.size() / kRows;
  job->q = AlignedBuffer(layer.count * row_bytes);
  std::memcpy(job->q.data(), layer.rows.data(), job->q.size());
  PageErrorTask& task = job->task;
  task.codec = job->page.codec.get();
  task.layer = static_cast<int>(page.layer);
  task.raw = page.raw;
  task.encoded = page.encoded;
  task.q = job->q.data();
  task.q_tokens = layer.count;
  task.query_heads = static_cast<int>(row_bytes / DTypeBytes(layer.dtype) / page.codec->layout().head_dim);
  task.q_dtype = layer.dtype;
  task.scale = layer.scale;
  ++comparisons_;
  std::vector<absl::AnyInvocable<void()>> tasks;
  tasks.push_back([job] { job->error = RelativePageError(job->task); });
  executor_->Run(std::move(tasks), [this, job, done = std::move(done)]() mutable {
    --comparisons_;
    if (std::isfinite(job->error)) SeriesOf(job->page).Observe(job->error);
    done();
  });
}

prometheus::Histogram& QualityMonitor::SeriesOf(const PageSample& page) {
  const std::string& codec = page.codec->info().name;
  std::tuple<std::string, std::string, uint32_t> key(page.digest.ToHex(kDigestBytes), codec, page.layer);
  if (const auto found = series_.find(key); found != series_.end()) return *found->second;
  const bool full = series_.size() >= kSeriesMax;
  prometheus::Histogram& made = metrics_->Histogram(
      "codec_relative_error",
      "Relative error of attention over a sampled page alone, encoded against raw, with recent queries",
      ExponentialBounds(1e-4, 2, 15),
      {{"cache", full ? "other" : std::get<0>(key)},
       {"codec", codec},
       {"layer", full ? "other" : absl::StrCat(page.layer)}});
  if (!full) series_[std::move(key)] = &made;
  return made;
}

}  // namespace kvmanager
