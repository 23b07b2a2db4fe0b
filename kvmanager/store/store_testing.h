// What the store's tests share: codecs whose bytes are easy to predict, an executor that ends jobs when told to,
// contents that are a function of the tokens before them, and a store with everything it needs.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codecs/registry.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/keep/kept_manifest.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager::testing {

/// "fake": half the size, each byte mixes two of the raw page with the layer; "declining" also declines pages whose
/// first value is a multiple of 4; "uneven" has pages of another size in
/// every layer; "sinks" keeps the first 32 tokens raw. "raw": identity. "ladder": "sinks", then a quarter of the size;
/// "declining_ladder": "fake", then a quarter, whose codec declines as "declining" does.
void RegisterTestCodecs(CodecRegistry* registry);
/// Does "declining" decline this raw page?
bool Declines(const uint8_t* raw);

/// Jobs wait until told to end; or, inline, end at once.
class ManualExecutor final : public EncodeExecutor {
 public:
  void Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items, WorkerPool::Owner owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) override;
  void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) override;
  void Train(DeviceIndexJob job) override;  // on slots in host memory
  void FinishOne(size_t index);
  void FinishAll();
  size_t jobs() const { return jobs_.size(); }
  bool run_inline = false;
  absl::Status train_failure;  // of trainings that end from now on

 private:
  struct Job {
    std::shared_ptr<const Codec> codec;
    std::vector<EncodeItem> items;
    absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done;
    std::vector<absl::AnyInvocable<void()>> tasks;  // of Run; then there is no codec
    absl::AnyInvocable<void()> tasks_done;
  };
  std::vector<Job> jobs_;
};

/// A text: token ids, and for each position a hash of everything up to it, which its K and V are made of.
struct Text {
  std::vector<uint32_t> ids;
  std::vector<uint64_t> chain;
  void Add(uint32_t id);
  void Truncate(size_t tokens);
};

/// K and V of `tokens` tokens of `text` from `first` on, for one layer: [tokens][kv_heads][head_dim] finite 16-bit
/// values.
struct KeysValues {
  std::vector<uint8_t> k, v;
};
KeysValues MakeKeysValues(const PageLayout& layout, const Text& text, uint64_t first, int tokens, int layer);
/// Activations of the same tokens: [tokens][hidden].
std::vector<uint8_t> MakeActivations(int hidden, const Text& text, uint64_t first, int tokens, int layer);
/// The raw page `index` of `text`, its first `tokens` tokens; the rest zero. 64-byte aligned.
std::vector<uint8_t> MakeRawPage(const PageLayout& layout, const Text& text, uint32_t index, int tokens, int layer);
/// Its encoded form; empty if the codec declines.
std::vector<uint8_t> MakeEncodedPage(const Codec& codec, const std::vector<uint8_t>& raw, uint32_t index, int layer);

/// One head of the raw layout against what a page's first `tokens` tokens must be.
bool RawPrefixEquals(const PageLayout& layout, const uint8_t* page, const std::vector<uint8_t>& expected, int tokens);

/// XXH3-64.
uint64_t Checksum(const std::vector<uint8_t>& bytes);

/// Every page of a hand-off, in order: what is sent encoded, activations, and what is sent raw, as the receiver's pages
/// are numbered. Takes what is ready; all must be.
struct SentPage {
  HandOffPage page;
  bool encoded = false;
  bool activations = false;
  ExportedPage bytes;
};
std::vector<SentPage> TakeAll(ExportLease& from);
/// Writes a page's bytes to its target, validates and delivers it; nothing if it is not wanted.
absl::Status Deliver(ImportLease& to, const ExportedPage& page);
/// Recomputes the K and V of pages whose activations have arrived: those of `text`, which the activations must be of.
absl::Status Recompute(ImportLease& to, const CacheConfig& config, const Text& text);
/// Extend, every page, Recompute, Show and Commit. text: nullptr where nothing is recomputed.
absl::StatusOr<SequenceId> Receive(ImportLease& to, const HandOffTrailer& last, const std::vector<SentPage>& pages,
                                   const CacheConfig* config = nullptr, const Text* text = nullptr);

CacheConfig MakeConfig(const std::string& codec, int lag_pages, const std::string& tenant = "a", int layers = 2);

/// Moves wait until told to end, in their order.
class ManualMover final : public PageMover {
 public:
  bool ready() const override { return is_ready; }
  absl::Status status() const override {
    return is_ready ? absl::OkStatus() : absl::UnavailableError("not pinned yet");
  }
  void Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) override;
  /// moved: else no byte is touched.
  void FinishOne(bool moved = true);
  void FinishAll();
  size_t moves() const { return moves_.size(); }
  bool is_ready = true;

 private:
  struct Waiting {
    PageDirection direction;
    std::vector<PageCopy> copies;
    absl::AnyInvocable<void(bool)> done;
  };
  std::deque<Waiting> moves_;
};

/// Plays a GPU's part: its slots are in host memory, its kernels what a test does with them.
struct TestDevice {
  static constexpr int kOrdinal = 0;
  ManualMover mover;
  std::unique_ptr<PagePool> pool;
  ReleaseEpochs epochs;
  ManualExecutor executor;
};

/// Appends::Begin, and all of what follows at once.
enum class LetsGo : uint8_t { kAtTheEnd, kWhileItCommits };
absl::Status AppendInPieces(PageStore& store, CacheId cache, int layer, absl::Span<const AppendEntry> entries,
                            size_t pages_at_once = Appends::kPagesAtOnce, LetsGo lets_go = LetsGo::kAtTheEnd);

/// Pieces until it is done; wait: ends what the load waits for.
void LoadAll(DiskLoad& load, absl::FunctionRef<void()> wait);

/// What the store says of each of `names`. Not for names that it refuses.
Explained ExplainAll(PageStore& store, CacheId cache, std::vector<BlockName> names);

/// A store with its pool, codecs, executor, metrics and clock.
/// Host memory that outlives a TestStore, as a keeper has it.
struct TestKeeper {
  std::vector<int> pool;  // descriptors
  int manifest = -1;
  void Forget();
  ~TestKeeper() { Forget(); }
};

struct TestStore {
  /// device_bytes: 0 without a device. moves: its pages move to the host and back. disk: outlives it; nullptr: none.
  /// keeper: likewise; the store is of what it has.
  explicit TestStore(uint64_t pool_bytes = 64 << 20, uint64_t device_bytes = 0, bool moves = false,
                     EvictionKind eviction = EvictionKind::kLru, BlockDisk* disk = nullptr,
                     TestKeeper* keeper = nullptr);

  CodecRegistry registry;
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<KeptManifest> manifest;  // with a keeper
  ManualExecutor executor;
  TestDevice device;
  Metrics metrics;
  StoreMetrics store_metrics;
  ManualClock clock;
  std::unique_ptr<PageStore> store;

  /// Opens a cache; aborts on errors.
  CacheId Open(const CacheConfig& config);
  /// activations: with those, if the cache keeps any.
  absl::Status Append(CacheId cache, SequenceId sequence, const Text& text, uint64_t first, int tokens, int layer,
                      bool activations = true);
  /// To every layer.
  absl::Status AppendAll(CacheId cache, SequenceId sequence, const Text& text, uint64_t first, int tokens);
  std::vector<BlockName> Names(CacheId cache, const Text& text) const;
};

}  // namespace kvmanager::testing
