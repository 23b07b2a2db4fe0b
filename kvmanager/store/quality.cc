#include "kvmanager/store/quality.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/page_error.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kDigestBytes = 6;  // of a cache's, as kvctl shows it

}  // namespace

QualityMonitor::QualityMonitor(EncodeExecutor* executor, Metrics* metrics, uint32_t sample_pages)
    : executor_(executor), metrics_(metrics), sample_pages_(sample_pages) {
  KV_CHECK(sample_pages >= 1);
}

// Queries of another kind begin anew.
QualityMonitor::Layer& QualityMonitor::LayerOf(CacheId id, int layers, int index, DType dtype, float scale) {
  if (!caches_.contains(id) && caches_.size() >= kCachesMax) Forget(Oldest(id));
  Cache& cache = caches_[id];
  if (cache.layers.empty()) cache.layers.resize(layers);
  cache.last_use = ++uses_;
  Layer& layer = cache.layers[index];
  if (layer.dtype == dtype && layer.scale == scale) return layer;
  query_bytes_ -= layer.rows.size();
  cache.bytes -= layer.rows.size();
  layer.rows = AlignedBuffer();
  layer.count = 0;
  layer.chosen = 0;
  layer.dtype = dtype;
  layer.scale = scale;
  return layer;
}

std::optional<uint64_t> QualityMonitor::ChooseRow(CacheId id, int layers, int layer_index,
                                                  absl::Span<const AttendEntry> entries, DType dtype, float scale,
                                                  uint64_t tokens) {
  Layer& layer = LayerOf(id, layers, layer_index, dtype, scale);
  layer.tokens += tokens;
  if (layer.chosen >= kRows && layer.tokens < kTokensPerRow) return std::nullopt;
  // The last token of one entry, of another each time.
  const size_t entry = layer.chosen++ % entries.size();
  layer.tokens = 0;
  uint64_t rows = 0;
  for (size_t i = 0; i <= entry; ++i) rows += entries[i].tokens;
  return rows - 1;
}

void QualityMonitor::NoteRow(CacheId id, int layers, int layer_index, DType dtype, float scale,
                             absl::Span<const uint8_t> row) {
  const size_t values = row.size() / DTypeBytes(dtype);
  if (FindNonFinite(dtype, row.data(), values) != values) return;
  Layer& layer = LayerOf(id, layers, layer_index, dtype, scale);
  if (layer.rows.size() == 0) {
    if (!MakeRoom(id, kRows * row.size())) return;
    layer.rows = AlignedBuffer(kRows * row.size());
    query_bytes_ += layer.rows.size();
    caches_.at(id).bytes += layer.rows.size();
  }
  KV_CHECK(layer.rows.size() == kRows * row.size());
  // `count` rows are there, in no order: of a layer that began anew they are the first ones.
  const int at = layer.count < kRows ? layer.count++ : static_cast<int>(layer.copies % kRows);
  std::memcpy(layer.rows.data() + at * row.size(), row.data(), row.size());
  ++layer.copies;
}

void QualityMonitor::NoteQueries(CacheId id, const CacheConfig& config, int layer,
                                 absl::Span<const AttendEntry> entries, DType q_dtype, float scale, const uint8_t* q) {
  uint64_t tokens = 0;
  for (const AttendEntry& entry : entries) tokens += entry.tokens;
  const std::optional<uint64_t> row = ChooseRow(id, config.layers, layer, entries, q_dtype, scale, tokens);
  if (!row.has_value()) return;
  const size_t row_bytes = size_t(config.query_heads) * config.layout.head_dim * DTypeBytes(q_dtype);
  NoteRow(id, config.layers, layer, q_dtype, scale, {q + *row * row_bytes, row_bytes});
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

struct QualityMonitor::Comparison {
  PageSample page;
  AlignedBuffer q;
  std::shared_ptr<const uint8_t> copies;  // of both forms, where the page is on a GPU
  PageErrorTask task;
  double error = NAN;

  void Compare() {
    // Its engine may write over a GPU's page, which is what nobody has looked at before.
    const absl::Span<const uint8_t> encoded(task.encoded, page.codec->info().page_bytes(task.layer));
    if (copies == nullptr || page.codec->Validate(task.layer, encoded).ok()) error = RelativePageError(task);
  }
};

void QualityMonitor::Compare(const PageSample& page, absl::AnyInvocable<void()> done) {
  // Its comparison would have the executor's workers wait.
  if (WaitingWorkers(*page.codec) != nullptr) return done();
  const Layer& layer = caches_.at(page.cache).layers[page.layer];
  auto made = std::make_shared<Comparison>();  // the task's, and then the completion's
  made->page = page;
  const size_t row_bytes = layer.rows.size() / kRows;
  made->q = AlignedBuffer(layer.count * row_bytes);
  std::memcpy(made->q.data(), layer.rows.data(), made->q.size());
  PageErrorTask& task = made->task;
  task.codec = made->page.codec.get();
  task.layer = static_cast<int>(page.layer);
  task.raw = page.raw;
  task.encoded = page.encoded;
  task.q = made->q.data();
  task.q_tokens = layer.count;
  task.query_heads = static_cast<int>(row_bytes / DTypeBytes(layer.dtype) / page.codec->layout().head_dim);
  task.q_dtype = layer.dtype;
  task.scale = layer.scale;
  ++comparisons_;
  if (page.device == CacheConfig::kHost) return Run(std::move(made), std::move(done));

  // Slots are of multiples of DeviceReader::kAlign.
  const size_t raw_bytes = DeviceReader::Aligned(page.codec->layout().raw_bytes());
  const absl::Span<const uint8_t> forms[] = {
      {page.raw, raw_bytes}, {page.encoded, DeviceReader::Aligned(page.codec->info().page_bytes(task.layer))}};
  // Shared, since it is called here where there is no room.
  auto copied = std::make_shared<absl::AnyInvocable<void()>>(std::move(done));
  const auto reader = readers_.find(page.device);
  const bool reads =
      reader != readers_.end() &&
      reader->second->Read(forms, [this, made, copied, raw_bytes](std::shared_ptr<const uint8_t> bytes) mutable {
        (*copied)();
        if (bytes == nullptr) {
          --comparisons_;
          return;
        }
        made->task.raw = bytes.get();
        made->task.encoded = bytes.get() + raw_bytes;
        made->copies = std::move(bytes);
        Run(std::move(made), nullptr);
      });
  if (reads) return;
  --comparisons_;
  (*copied)();
}

void QualityMonitor::Run(std::shared_ptr<Comparison> comparison, absl::AnyInvocable<void()> done) {
  std::vector<absl::AnyInvocable<void()>> tasks;
  tasks.push_back([comparison] { comparison->Compare(); });
  executor_->Run(std::move(tasks), [this, comparison = std::move(comparison), done = std::move(done)]() mutable {
    --comparisons_;
    if (std::isfinite(comparison->error)) SeriesOf(comparison->page).Observe(comparison->error);
    if (done != nullptr) done();
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
