// A published page whose bytes were changed is a counted miss, never an answer; computing it again heals the cache.
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_metrics.h"
#include "monitoring/metrics.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

/// Encodes when it is told to, on the test's thread.
class ManualExecutor final : public EncodeExecutor {
 public:
  void Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items, WorkerPool::Owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) override {
    jobs_.push_back({std::move(codec), std::move(items), std::move(done)});
  }
  void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) override {
    for (auto& task : tasks) task();
    done();
  }
  void RunAll() {
    while (!jobs_.empty()) {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      std::vector<uint8_t> store(job.codec->encode_workspace_bytes() + 64);
      uint8_t* const workspace = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(store.data()) + 63) / 64 * 64);
      job.codec->Encode(absl::MakeSpan(job.items), absl::MakeSpan(workspace, job.codec->encode_workspace_bytes()));
      job.done(job.items);
    }
  }

 private:
  struct Job {
    std::shared_ptr<const Codec> codec;
    std::vector<EncodeItem> items;
    absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done;
  };
  std::deque<Job> jobs_;
};

class CorruptionTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    PagePool::Options options;
    options.pool_bytes = 16 << 20;
    ASSERT_OK_AND_ASSIGN(pool_, PagePool::Create(options));
    store_ = PageStore::Make(pool_.get(), &AllCodecs(), &executor_, &store_metrics_, &clock_);
    shape_ = SmallCache(GetParam(), 0);
    config_.model = shape_.model;
    config_.layers = shape_.layers;
    config_.query_heads = shape_.query_heads;
    config_.layout.kv_heads = static_cast<uint16_t>(shape_.kv_heads);
    config_.layout.head_dim = static_cast<uint16_t>(shape_.head_dim);
    config_.codec = shape_.codec;
    config_.lag_pages = 0;
    ASSERT_OK_AND_ASSIGN(cache_, store_->caches().Open(config_));
    ASSERT_OK_AND_ASSIGN(const CacheInfo info, store_->caches().Describe(cache_));
    NameBlocks(info.digest, Source{1, Kind::kNormal, shape_}.TokenIds(0, kBlocks * 64), 64, &names_);
  }
  void Append(SequenceId sequence, uint64_t first, int tokens) {
    const Source source{1, Kind::kNormal, shape_};
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const std::vector<uint8_t> k = source.K(layer, first, tokens), v = source.V(layer, first, tokens);
      const AppendEntry entry{sequence, first, tokens, k.data(), v.data()};
      ASSERT_OK(store_->Append(cache_, layer, absl::MakeConstSpan(&entry, 1)));
    }
    executor_.RunAll();
  }
  /// The bytes that a later reader of `block` in `layer` would be given.
  uint8_t* Bytes(SequenceId sequence, int layer, int block) {
    const AttendEntry entry{sequence, kBlocks * 64, 1};
    absl::StatusOr<std::unique_ptr<AttendLease>> lease = store_->Attend(cache_, layer, absl::MakeConstSpan(&entry, 1));
    EXPECT_OK(lease);
    executor_.RunAll();
    EXPECT_TRUE((*lease)->ready());
    const AttentionPage& page = (*lease)->pages(0)[block];
    return const_cast<uint8_t*>(page.encoded != nullptr ? page.encoded : page.raw);
  }

  static constexpr int kBlocks = 4;
  SteadyClock clock_;
  Metrics metrics_;
  StoreMetrics store_metrics_{&metrics_};
  ManualExecutor executor_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PageStore> store_;
  client::CacheOptions shape_;
  CacheConfig config_;
  CacheId cache_ = 0;
  std::vector<BlockName> names_;
};

TEST_P(CorruptionTest, AFlippedBitIsACountedMissAndTheBlockIsComputedAgain) {
  for (const int damaged : {0, 2, 3}) {
    for (const size_t byte : {size_t{0}, size_t{777}}) {
      SCOPED_TRACE(::testing::Message() << "block " << damaged << " byte " << byte);
      ASSERT_OK_AND_ASSIGN(const CreateResult made, store_->Create(cache_, {}));
      Append(made.sequence, 0, kBlocks * 64);
      Append(made.sequence, kBlocks * 64, 1);
      ASSERT_OK(store_->Publish(made.sequence, names_));
      ASSERT_OK_AND_ASSIGN(const MatchResult whole, store_->caches().Match(cache_, names_));
      ASSERT_EQ(whole.hit_blocks, kBlocks);
      Bytes(made.sequence, damaged % 2, damaged)[byte] ^= 0x10;
      store_->Drop(made.sequence);

      const double before = store_metrics_.checksum_failures.Value();
      const double misses = store_metrics_.prefix_misses[static_cast<size_t>(MissReason::kChecksum)]->Value();
      ASSERT_OK_AND_ASSIGN(const CreateResult again, store_->Create(cache_, names_));
      EXPECT_EQ(again.match.hit_blocks, damaged);
      EXPECT_EQ(again.match.reason, MissReason::kChecksum);
      EXPECT_EQ(store_metrics_.checksum_failures.Value(), before + 1);
      EXPECT_EQ(store_metrics_.prefix_misses[static_cast<size_t>(MissReason::kChecksum)]->Value(), misses + 1);
      store_->report().CheckInvariants();
      // The engine computes what was missed, publishes it, and the prefix is whole.
      Append(again.sequence, damaged * 64, (kBlocks - damaged) * 64);
      Append(again.sequence, kBlocks * 64, 1);
      ASSERT_OK(store_->Publish(again.sequence, names_));
      ASSERT_OK_AND_ASSIGN(const MatchResult healed, store_->caches().Match(cache_, names_));
      EXPECT_EQ(healed.hit_blocks, kBlocks);
      store_->Drop(again.sequence);
      store_->report().CheckInvariants();
      ASSERT_OK(store_->caches().Purge(cache_));
      EXPECT_EQ(pool_->used_bytes(), 0u);
      ASSERT_OK_AND_ASSIGN(cache_, store_->caches().Open(config_));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, CorruptionTest, ::testing::Values("raw", "hack:k_bits=3,v_bits=2"));

}  // namespace
}  // namespace kvmanager::testing
