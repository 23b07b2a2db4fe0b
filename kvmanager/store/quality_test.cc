#include "kvmanager/store/quality.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/page_error.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/store/encode_executor.h"

namespace kvmanager {
namespace {

constexpr int kQueryHeads = 4, kDim = 64;
const PageLayout kLayout = {DType::kFloat16, 2, kDim, 64};
constexpr size_t kRow = size_t{kQueryHeads} * kDim;  // values of a query token

// Tasks wait until told to run.
class HeldExecutor final : public EncodeExecutor {
 public:
  void Encode(std::shared_ptr<const Codec>, std::vector<EncodeItem>, WorkerPool::Owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)>) override {
    ADD_FAILURE() << "nothing is encoded here";
  }
  void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) override {
    held_.push_back({std::move(tasks), std::move(done)});
  }
  void RunAll() {
    for (; !held_.empty(); held_.pop_front()) {
      for (auto& task : held_.front().tasks) task();
      held_.front().done();
    }
  }
  size_t held() const { return held_.size(); }

 private:
  struct Held {
    std::vector<absl::AnyInvocable<void()>> tasks;
    absl::AnyInvocable<void()> done;
  };
  std::deque<Held> held_;
};

// Copies when told to.
class HeldReader final : public DeviceReader {
 public:
  bool Read(absl::Span<const absl::Span<const uint8_t>> ranges, Then then) override {
    if (full) return false;
    std::vector<uint64_t> at;
    uint64_t bytes = 0;
    for (const auto& range : ranges) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(range.data()) % kAlign, 0u);
      EXPECT_EQ(range.size() % 16, 0u);
      at.push_back(bytes);
      bytes += Aligned(range.size());
    }
    held_.push_back({{ranges.begin(), ranges.end()}, at, bytes, std::move(then)});
    return true;
  }
  bool MayRead(uint64_t) const override { return !full; }
  void Finish(bool copied) {
    Held held = std::move(held_.front());
    held_.pop_front();
    if (!copied) return held.then(nullptr);
    auto staged = std::make_shared<AlignedBuffer>(held.bytes);
    for (size_t i = 0; i < held.ranges.size(); ++i) {
      std::memcpy(staged->data() + held.at[i], held.ranges[i].data(), held.ranges[i].size());
    }
    ++given;
    held.then(std::shared_ptr<const uint8_t>(staged->data(), [this, staged](const uint8_t*) { --given; }));
  }
  size_t held() const { return held_.size(); }
  bool full = false;
  int given = 0;  // copies that somebody has

 private:
  struct Held {
    std::vector<absl::Span<const uint8_t>> ranges;
    std::vector<uint64_t> at;
    uint64_t bytes;
    Then then;
  };
  std::deque<Held> held_;
};

class QualityTest : public ::testing::Test {
 protected:
  QualityTest() : raw_(kLayout.raw_bytes()) {
    RegisterBuiltinCodecs(registry_);
    codec_ = registry_.Create("hack:k_bits=3,v_bits=2", kLayout).value();
    encoded_ = AlignedBuffer(codec_->info().encoded_bytes);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) {
      StoreElement(raw_.data(), kLayout.dtype, i, normal(random));
    }
    const AlignedBuffer workspace(codec_->encode_workspace_bytes());
    EncodeItem item{raw_.data(), encoded_.data(), 0, 0};
    codec_->Encode(absl::MakeSpan(&item, 1), workspace.span());
    EXPECT_FALSE(item.declined);
    for (int i = 0; i < 64; ++i) {
      for (size_t c = 0; c < kRow; ++c) q_.push_back(normal(random));
    }
  }
  static CacheConfig Config(int layers, int query_heads = kQueryHeads) {
    CacheConfig config;
    config.layers = layers;
    config.query_heads = query_heads;
    config.layout = kLayout;
    return config;
  }
  static CacheDigest Digest(uint8_t first) {
    CacheDigest digest{};
    digest.bytes[0] = first;
    return digest;
  }
  PageSample Sample(CacheId cache, uint32_t layer, uint8_t digest = 0xab) const {
    return {cache, Digest(digest), layer, codec_, raw_.data(), encoded_.data()};
  }
  PageSample OnDevice(CacheId cache, uint32_t layer, int device = 0) const {
    PageSample sample = Sample(cache, layer);
    sample.device = device;
    return sample;
  }
  // A step of `tokens` tokens each, whose first is query row `row` of q_.
  void Note(QualityMonitor& monitor, CacheId cache, int layer, int row, const std::vector<int>& tokens,
            int layers = 2) {
    std::vector<AttendEntry> entries;
    for (const int n : tokens) entries.push_back({1, 0, n});
    monitor.NoteQueries(cache, Config(layers), layer, entries, DType::kFloat32, 0,
                        reinterpret_cast<const uint8_t*>(q_.data() + row * kRow));
  }
  double ErrorOf(const std::vector<int>& rows) const {
    std::vector<float> q;
    for (const int row : rows) q.insert(q.end(), q_.begin() + row * kRow, q_.begin() + (row + 1) * kRow);
    PageErrorTask task;
    task.codec = codec_.get();
    task.raw = raw_.data();
    task.encoded = encoded_.data();
    task.q = q.data();
    task.q_tokens = static_cast<int>(rows.size());
    task.query_heads = kQueryHeads;
    return RelativePageError(task);
  }
  // Of the histogram; -1: there is no such series.
  double Series(const std::string& part, const std::string& labels) {
    const std::string text = metrics_.Text(),
                      line = absl::StrCat("kvmanager_codec_relative_error_", part, "{", labels, "} ");
    const size_t at = text.find(line);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + line.size()));
  }
  static std::string Labels(const std::string& cache, const std::string& layer) {
    return absl::StrCat("cache=\"", cache, "\",codec=\"hack\",layer=\"", layer, "\"");
  }

  CodecRegistry registry_;
  std::shared_ptr<const Codec> codec_;
  AlignedBuffer raw_, encoded_;
  std::vector<float> q_;  // [64][kQueryHeads][kDim]
  Metrics metrics_;
  HeldExecutor executor_;
};

TEST_F(QualityTest, ComparesWithTheNewestRowsOfEntriesInTurn) {
  QualityMonitor monitor(&executor_, &metrics_, 1);
  EXPECT_FALSE(monitor.Wants(7, 1)) << "there are no queries yet";
  // Rows 2, 5 (of the second entry), 9 (of the first again), then 12, each the last token of its entry.
  Note(monitor, 7, 1, 0, {3});
  Note(monitor, 7, 1, 3, {1, 2});
  Note(monitor, 7, 1, 9, {1, 2});
  Note(monitor, 7, 1, 12, {1});
  // Four rows are there: the next is copied once 16 more tokens were seen.
  Note(monitor, 7, 1, 20, {14});
  EXPECT_FALSE(monitor.Wants(7, 0));
  ASSERT_TRUE(monitor.Wants(7, 1));
  int done = 0;
  monitor.Compare(Sample(7, 1), [&done] { ++done; });
  EXPECT_EQ(done, 0);
  executor_.RunAll();
  EXPECT_EQ(done, 1);
  const std::string labels = Labels("ab0000000000", "1");
  EXPECT_EQ(Series("count", labels), 1);
  const double first = ErrorOf({2, 5, 9, 12});
  EXPECT_GT(first, 0.01);
  EXPECT_NEAR(Series("sum", labels), first, 1e-6);
  // The sixteenth takes the place of the oldest.
  Note(monitor, 7, 1, 40, {2});
  ASSERT_TRUE(monitor.Wants(7, 1));
  monitor.Compare(Sample(7, 1), [&done] { ++done; });
  Note(monitor, 7, 1, 45, {16});  // too late for this one
  executor_.RunAll();
  EXPECT_EQ(Series("count", labels), 2);
  EXPECT_NEAR(Series("sum", labels), first + ErrorOf({41, 5, 9, 12}), 1e-6);
}

TEST_F(QualityTest, OfEachLayerOnePageInSoManyAndLayersTakeTurns) {
  QualityMonitor monitor(&executor_, &metrics_, 4);
  std::vector<std::vector<int>> wanted(6);
  for (int layer = 0; layer < 6; ++layer) Note(monitor, 1, layer, layer, {1}, 6);
  for (int page = 0; page < 12; ++page) {
    for (int layer = 0; layer < 6; ++layer) {
      if (monitor.Wants(1, layer)) wanted[layer].push_back(page);
    }
  }
  for (int layer = 0; layer < 6; ++layer) {
    EXPECT_EQ(wanted[layer], (std::vector<int>{layer % 4, layer % 4 + 4, layer % 4 + 8}));
  }
}

TEST_F(QualityTest, SoManyComparisonsAtOnce) {
  QualityMonitor monitor(&executor_, &metrics_, 1);
  Note(monitor, 1, 0, 0, {1});
  int done = 0;
  for (int i = 0; i < QualityMonitor::kComparisonsMax; ++i) {
    ASSERT_TRUE(monitor.Wants(1, 0));
    monitor.Compare(Sample(1, 0), [&done] { ++done; });
  }
  EXPECT_FALSE(monitor.Wants(1, 0));
  EXPECT_EQ(executor_.held(), size_t{QualityMonitor::kComparisonsMax});
  executor_.RunAll();
  EXPECT_EQ(done, QualityMonitor::kComparisonsMax);
  EXPECT_TRUE(monitor.Wants(1, 0));
}

TEST_F(QualityTest, QueriesTakeBoundedMemory) {
  QualityMonitor monitor(&executor_, &metrics_, 1);
  // Rows of 4 MiB: four layers of a cache are all there is room for.
  const int heads = 16384;
  const std::vector<float> wide(size_t{heads} * kDim, 1.0f);
  const AttendEntry entry{1, 0, 1};
  const auto note = [&](CacheId cache, int layer) {
    monitor.NoteQueries(cache, Config(8, heads), layer, {&entry, 1}, DType::kFloat32, 0,
                        reinterpret_cast<const uint8_t*>(wide.data()));
    EXPECT_LE(monitor.query_bytes(), QualityMonitor::kQueryBytesMax);
  };
  for (int layer = 0; layer < 8; ++layer) note(1, layer);
  EXPECT_EQ(monitor.query_bytes(), QualityMonitor::kQueryBytesMax);
  EXPECT_TRUE(monitor.Wants(1, 3));
  EXPECT_FALSE(monitor.Wants(1, 4));
  // Another cache's take their place.
  note(2, 0);
  EXPECT_EQ(monitor.query_bytes(), 16u << 20);
  EXPECT_FALSE(monitor.Wants(1, 3));
  EXPECT_TRUE(monitor.Wants(2, 0));
  // Queries of another kind begin anew, in as much memory as they need.
  monitor.NoteQueries(2, Config(8, heads), 0, {&entry, 1}, DType::kFloat16, 0,
                      reinterpret_cast<const uint8_t*>(wide.data()));
  EXPECT_EQ(monitor.query_bytes(), 8u << 20);
  // Caches come and go: the least recently used are forgotten.
  for (CacheId cache = 10; cache < 10 + 2 * QualityMonitor::kCachesMax; ++cache) Note(monitor, cache, 0, 0, {1});
  EXPECT_LE(monitor.query_bytes(), QualityMonitor::kCachesMax * QualityMonitor::kRows * kRow * sizeof(float));
  EXPECT_FALSE(monitor.Wants(10, 0));
  EXPECT_TRUE(monitor.Wants(9 + 2 * QualityMonitor::kCachesMax, 0));
}

TEST_F(QualityTest, PagesOfAGpuAreCopiedAndThenMayGo) {
  HeldReader reader;
  {
    QualityMonitor monitor(&executor_, &metrics_, 1);
    monitor.SetReader(0, &reader);
    Note(monitor, 1, 0, 5, {1});
    int done = 0;
    ASSERT_TRUE(monitor.Wants(1, 0));
    monitor.Compare(OnDevice(1, 0), [&done] { ++done; });
    EXPECT_EQ(done, 0);
    EXPECT_EQ(executor_.held(), 0u);
    reader.Finish(true);
    EXPECT_EQ(done, 1) << "both forms may go before they are compared";
    const AlignedBuffer kept(raw_.size());
    std::memcpy(kept.data(), raw_.data(), raw_.size());
    std::memset(raw_.data(), 0, raw_.size());
    executor_.RunAll();
    std::memcpy(raw_.data(), kept.data(), raw_.size());
    EXPECT_EQ(reader.given, 0);
    const std::string labels = Labels("ab0000000000", "0");
    EXPECT_EQ(Series("count", labels), 1);
    EXPECT_NEAR(Series("sum", labels), ErrorOf({5}), 1e-6);
    // Nothing is compared where the GPU failed, there is no room, or nobody who copies; what is not comes in no count.
    for (const int what : {0, 1, 2}) {
      ASSERT_TRUE(monitor.Wants(1, 0));
      reader.full = what == 1;
      monitor.Compare(OnDevice(1, 0, what == 2 ? 3 : 0), [&done] { ++done; });
      if (what == 0) reader.Finish(false);
      EXPECT_EQ(done, 2 + what);
    }
    reader.full = false;
    EXPECT_EQ(executor_.held(), 0u);
    // Those on their way count as comparisons.
    for (int i = 0; i < QualityMonitor::kComparisonsMax; ++i) {
      ASSERT_TRUE(monitor.Wants(1, 0));
      monitor.Compare(OnDevice(1, 0), [&done] { ++done; });
    }
    EXPECT_FALSE(monitor.Wants(1, 0));
    reader.Finish(false);
    EXPECT_TRUE(monitor.Wants(1, 0));
    while (reader.held() > 0) reader.Finish(true);
    executor_.RunAll();
    EXPECT_EQ(Series("count", labels), QualityMonitor::kComparisonsMax);
  }
  EXPECT_EQ(reader.given, 0);
}

// An engine that maps a GPU's pages can write anything there.
TEST_F(QualityTest, WhatAHostileEngineWroteIsNotComputedOn) {
  HeldReader reader;
  QualityMonitor monitor(&executor_, &metrics_, 1);
  monitor.SetReader(0, &reader);
  Note(monitor, 1, 0, 5, {1});
  const auto compare = [&] {
    ASSERT_TRUE(monitor.Wants(1, 0));
    monitor.Compare(OnDevice(1, 0), [] {});
    reader.Finish(true);
    executor_.RunAll();
  };
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    for (AlignedBuffer* page : {&raw_, &encoded_}) {
      for (size_t n = 0; n < page->size(); ++n) page->data()[n] = static_cast<uint8_t>(random());
    }
    ASSERT_NO_FATAL_FAILURE(compare());
  }
  std::memset(encoded_.data(), 0xff, encoded_.size());
  EXPECT_FALSE(codec_->Validate(0, encoded_.span()).ok());
  ASSERT_NO_FATAL_FAILURE(compare());
  EXPECT_EQ(Series("count", Labels("ab0000000000", "0")), -1);
}

TEST_F(QualityTest, RowsThatAreCopiedElsewhere) {
  QualityMonitor monitor(&executor_, &metrics_, 1);
  const AttendEntry entries[] = {{1, 0, 3}, {2, 0, 1}};
  const auto choose = [&](int layer) { return monitor.ChooseRow(1, 2, layer, entries, DType::kFloat32, 0, 1); };
  const auto note = [&](int layer, const float* row, size_t values = kRow) {
    monitor.NoteRow(1, 2, layer, DType::kFloat32, 0, {reinterpret_cast<const uint8_t*>(row), values * sizeof(float)});
  };
  // The first four at once, however long they take; then one in so many steps.
  for (int row = 0; row < QualityMonitor::kRows; ++row) EXPECT_EQ(choose(1), row % 2 == 0 ? 2u : 3u);
  for (int turn = 0; turn < 2; ++turn) {
    for (int step = 1; step < QualityMonitor::kTokensPerRow; ++step) ASSERT_EQ(choose(1), std::nullopt);
    EXPECT_EQ(choose(1), turn == 0 ? 2u : 3u);
  }
  EXPECT_FALSE(monitor.Wants(1, 1)) << "none has come";
  // One that is not finite is none, of a kind that nobody chose is one.
  std::vector<float> bad(q_.begin(), q_.begin() + kRow);
  bad[kRow - 1] = INFINITY;
  note(1, bad.data());
  EXPECT_FALSE(monitor.Wants(1, 1));
  note(1, q_.data() + 8 * kRow);
  note(0, q_.data());
  ASSERT_TRUE(monitor.Wants(1, 0));
  ASSERT_TRUE(monitor.Wants(1, 1));
  monitor.Compare(Sample(1, 1), [] {});
  executor_.RunAll();
  EXPECT_NEAR(Series("sum", Labels("ab0000000000", "1")), ErrorOf({8}), 1e-6);
}

// While workers compare, steps bring new queries.
TEST_F(QualityTest, WorkersCompareBesideSteps) {
  EncodeMetrics encode_metrics(&metrics_);
  const SteadyClock clock;
  MessageQueue queue;
  auto workers = std::make_unique<WorkerPool>(3);
  PoolEncodeExecutor executor(workers.get(), &queue, &encode_metrics, &clock);
  QualityMonitor monitor(&executor, &metrics_, 1);
  int compared = 0, done = 0;
  double sum = 0;
  for (int round = 0; round < 60; ++round) {
    const int first = round % 16;
    for (int row = first; row < first + 4; ++row) Note(monitor, 1, 0, row, {16});
    if (!monitor.Wants(1, 0)) {
      queue.RunSome();
      continue;
    }
    ++compared;
    sum += ErrorOf({first + 15, first + 16, first + 17, first + 18});
    monitor.Compare(Sample(1, 0), [&done] { ++done; });
  }
  workers.reset();  // joins: every completion is queued
  while (queue.RunSome()) {
  }
  EXPECT_GT(compared, 0);
  EXPECT_EQ(done, compared);
  EXPECT_EQ(Series("count", Labels("ab0000000000", "0")), compared);
  EXPECT_NEAR(Series("sum", Labels("ab0000000000", "0")), sum, 1e-5 * compared);
}

TEST_F(QualityTest, SeriesAreBounded) {
  QualityMonitor monitor(&executor_, &metrics_, 1);
  const int layers = static_cast<int>(QualityMonitor::kSeriesMax) + 3;
  for (int layer = 0; layer < layers; ++layer) {
    Note(monitor, 1, layer, 0, {1}, layers);
    ASSERT_TRUE(monitor.Wants(1, layer));
    PageSample sample = Sample(1, layer);
    monitor.Compare(sample, [] {});
    executor_.RunAll();
  }
  EXPECT_EQ(Series("count", Labels("ab0000000000", "1023")), 1);
  EXPECT_EQ(Series("count", Labels("ab0000000000", "1024")), -1);
  EXPECT_EQ(Series("count", Labels("other", "other")), 3);
}

}  // namespace
}  // namespace kvmanager
