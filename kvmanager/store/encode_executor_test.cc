#include "kvmanager/store/encode_executor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "codecs/builtin.h"
#include "codecs/raw/raw.h"

namespace kvmanager {
namespace {

// Batches of every size are encoded in full, and completed once, on the thread that runs the queue.
TEST(EncodeExecutorTest, EncodesEveryItemOnce) {
  CodecRegistry registry;
  RegisterRaw(registry);
  const PageLayout layout = {DType::kFloat16, 1, 16, 16};
  const std::shared_ptr<const Codec> codec = registry.Create("raw", layout).value();
  const size_t bytes = layout.raw_bytes();

  Metrics metrics;
  EncodeMetrics encode_metrics(&metrics);
  const SteadyClock clock;
  MessageQueue queue;
  auto workers = std::make_unique<WorkerPool>(3);
  PoolEncodeExecutor executor(workers.get(), &queue, &encode_metrics, &clock);
  const std::thread::id loop = std::this_thread::get_id();
  int completed = 0, batches = 0;
  std::vector<std::unique_ptr<AlignedBuffer>> pages;
  std::vector<EncodeItem> all;
  for (const size_t count : {1, 2, 3, 7, 50}) {
    std::vector<EncodeItem> items;
    for (size_t i = 0; i < count; ++i) {
      pages.push_back(std::make_unique<AlignedBuffer>(bytes));
      std::memset(pages.back()->data(), int(pages.size()), bytes);
      EncodeItem item;
      item.raw = pages.back()->data();
      pages.push_back(std::make_unique<AlignedBuffer>(codec->info().encoded_bytes));
      item.encoded = pages.back()->data();
      items.push_back(item);
    }
    all.insert(all.end(), items.begin(), items.end());
    ++batches;
    executor.Encode(codec, items, WorkerPool::kDaemon, [&, count](absl::Span<const EncodeItem> done) {
      EXPECT_EQ(std::this_thread::get_id(), loop);
      EXPECT_EQ(done.size(), count);
      ++completed;
    });
  }
  workers.reset();  // joins: every completion is queued
  while (queue.RunSome()) {
  }
  EXPECT_EQ(completed, batches);
  for (const EncodeItem& item : all) EXPECT_EQ(std::memcmp(item.raw, item.encoded, bytes), 0);
}

// What a page costs to encode is measured of pages that are encoded.
TEST(EncodeExecutorTest, SinksAreNotAmongThePagesMeasured) {
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  CodecContext context;
  context.layout = {DType::kFloat16, 1, 16, 64};
  const std::shared_ptr<const Codec> codec = registry.CreateForCache("hack", context).value();

  Metrics metrics;
  EncodeMetrics encode_metrics(&metrics);
  const SteadyClock clock;
  MessageQueue queue;
  auto workers = std::make_unique<WorkerPool>(1);
  PoolEncodeExecutor executor(workers.get(), &queue, &encode_metrics, &clock);
  AlignedBuffer raw(context.layout.raw_bytes()), encoded(3 * codec->info().encoded_bytes);
  std::memset(raw.data(), 0, raw.size());
  for (const uint64_t first_page : {0, 0, 1}) {
    std::vector<EncodeItem> items(first_page == 1 ? 3 : 1);
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].raw = raw.data();
      items[i].encoded = encoded.data() + i * codec->info().encoded_bytes;
      items[i].first_token = 64 * (first_page + i);
    }
    executor.Encode(codec, items, WorkerPool::kDaemon, [&](absl::Span<const EncodeItem> done) {
      for (const EncodeItem& item : done) EXPECT_EQ(item.is_sink, item.first_token == 0);
    });
  }
  workers.reset();
  while (queue.RunSome()) {
  }
  EXPECT_EQ(encode_metrics.input_bytes.Value(), 3.0 * double(context.layout.raw_bytes()));
}

}  // namespace
}  // namespace kvmanager
