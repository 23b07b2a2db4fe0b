// What encoding costs in accuracy, measured while the daemon serves: of each layer of a cache, one encoded page in so
// many is attended to with recent queries in both forms, before its raw form goes (codecs/page_error.h). Pages of a GPU
// are copied to the host for that, and their raw form goes once they were.
//
// Owned by the Server; the loop's thread alone, but for the comparison itself, which runs as an encode task: behind
// attention. A step costs it a count, and once in kTokensPerRow query tokens of a layer the copy of one row; on a GPU
// once in as many steps, or at the rate of the engine whose kernels attend (NoteRow). Memory is bounded by
// kQueryBytesMax and by kComparisonsMax pages whose raw form stays a little longer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/memory/device_reader.h"
#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class QualityMonitor final : public PageSampler {
 public:
  static constexpr int kRows = 4;           // query tokens that a page is compared with, all heads of each
  static constexpr int kTokensPerRow = 16;  // query tokens of a layer (ChooseRow's), in all sequences, between copies
  static constexpr uint64_t kQueryBytesMax = 64 << 20;
  static constexpr size_t kCachesMax = 64;    // whose queries are kept
  static constexpr int kComparisonsMax = 16;  // under way; pages that come meanwhile are not sampled
  /// Histograms; what comes later is counted with cache and layer "other", by codec.
  static constexpr size_t kSeriesMax = 1024;

  /// sample_pages: of each layer one page in so many, at least 1. Everything given outlives it.
  QualityMonitor(EncodeExecutor* executor, Metrics* metrics, uint32_t sample_pages);
  QualityMonitor(const QualityMonitor&) = delete;
  QualityMonitor& operator=(const QualityMonitor&) = delete;

  /// Of pages of this GPU: who copies them. None are sampled of one that has none. It outlives this.
  void SetReader(int device, DeviceReader* reader) { readers_[device] = reader; }

  /// Counts a layer's step as so many query tokens, and says which row of its queries should be noted, if one should:
  /// by NoteRow, soon or never. dtype, scale: as NoteQueries'.
  std::optional<uint64_t> ChooseRow(CacheId cache, int layers, int layer, absl::Span<const AttendEntry> entries,
                                    DType dtype, float scale, uint64_t tokens);
  /// One row of queries, [query_heads][head_dim]. One that is not finite is left out.
  void NoteRow(CacheId cache, int layers, int layer, DType dtype, float scale, absl::Span<const uint8_t> row);

  /// Queries of one layer's step, [tokens of all entries][query_heads][head_dim] of q_dtype; scale as StepRequest's.
  /// Another process may write to q meanwhile: what is copied is then of some mixture.
  void NoteQueries(CacheId cache, const CacheConfig& config, int layer, absl::Span<const AttendEntry> entries,
                   DType q_dtype, float scale, const uint8_t* q);

  bool Wants(CacheId cache, uint32_t layer) override;
  void Compare(const PageSample& page, absl::AnyInvocable<void()> done) override;

  uint64_t query_bytes() const { return query_bytes_; }

 private:
  struct Layer {
    AlignedBuffer rows;  // [kRows][query_heads][head_dim] of dtype; empty before the first
    DType dtype = DType::kFloat32;
    float scale = 0;
    int count = 0;        // rows that are there
    uint64_t copies = 0;  // so far: the next goes to copies % kRows
    uint64_t chosen = 0;  // so far: the next is of entry chosen % entries
    uint64_t tokens = 0;  // of queries since the last was chosen
    uint64_t pages = 0;   // asked about
  };
  struct Cache {
    std::vector<Layer> layers;
    uint64_t bytes = 0;
    uint64_t last_use = 0;
  };
  struct Comparison;
  using Caches = absl::flat_hash_map<CacheId, Cache>;
  Layer& LayerOf(CacheId cache, int layers, int layer, DType dtype, float scale);
  Caches::iterator Oldest(CacheId but);
  void Forget(Caches::iterator cache);
  bool MakeRoom(CacheId cache, uint64_t bytes);  // false: there is none
  /// done: nullptr where both forms may go already.
  void Run(std::shared_ptr<Comparison> comparison, absl::AnyInvocable<void()> done);
  prometheus::Histogram& SeriesOf(const PageSample& page);

  EncodeExecutor* const executor_;
  Metrics* const metrics_;
  const uint32_t sample_pages_;
  std::map<int, DeviceReader*> readers_;  // by device
  Caches caches_;                         // at most kCachesMax; the least recently used goes when room is needed
  uint64_t uses_ = 0;
  uint64_t query_bytes_ = 0;
  int comparisons_ = 0;
  std::map<std::tuple<std::string, std::string, uint32_t>, prometheus::Histogram*> series_;  // cache, codec, layer
};

}  // namespace kvmanager
