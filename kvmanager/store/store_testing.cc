#include "kvmanager/store/store_testing.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "kvmanager/base/status.h"
#include "kvmanager/keep/kept_manifest.h"
#include "xxhash.h"

namespace kvmanager::testing {
namespace {

constexpr uint8_t kMagic = 0xc7;
constexpr size_t kMagicBytes = 64;
constexpr uint64_t kSinkTokens = 32;

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class NoAttention final : public PageAttention {
 public:
  size_t workspace_bytes(int) const override { return 0; }
  void Attend(const PageAttentionTask&, const SoftmaxRows&, absl::Span<uint8_t>) const override {}
};

// shrink: bytes of a raw page that become one.
class FakeCodec final : public Codec {
 public:
  FakeCodec(const CodecContext& context, std::string name, int shrink = 2)
      : layout_(context.layout), shrink_(shrink), declining_(name == "declining"), sinks_(name == "sinks") {
    const PageLayout& layout = context.layout;
    info_.name = name;
    info_.spec = name;
    info_.version = 1;
    info_.identity = name == "raw";
    if (sinks_) info_.sink_tokens = kSinkTokens;
    info_.encoded_bytes = info_.identity ? layout.raw_bytes() : layout.raw_bytes() / shrink_ + kMagicBytes;
    info_.payload_bytes = info_.encoded_bytes;
    if (name != "uneven") return;
    for (int layer = 0; layer < context.layers; ++layer) {
      info_.layer_bytes.push_back(static_cast<uint32_t>(info_.encoded_bytes + 1024 * (layer % 2) + 64 * layer));
    }
    info_.encoded_bytes = *std::max_element(info_.layer_bytes.begin(), info_.layer_bytes.end());
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
    KV_CHECK(!info_.identity);
    for (EncodeItem& item : items) {
      item.is_sink = sinks_ && item.first_token < kSinkTokens;
      item.declined = item.is_sink || (declining_ && Declines(item.raw));
      const uint8_t salt = static_cast<uint8_t>(item.layer * 31 + item.first_token);
      const size_t codes = layout_.raw_bytes() / shrink_;
      for (size_t i = 0; i < codes; ++i) {
        item.encoded[i] = static_cast<uint8_t>(item.raw[shrink_ * i] * 3 + item.raw[shrink_ * i + 1] + salt);
      }
      std::memset(item.encoded + codes, kMagic, info_.page_bytes(static_cast<int>(item.layer)) - codes);
    }
  }
  // Finite values.
  void Decode(absl::Span<const DecodeItem> items) const override {
    for (const DecodeItem& item : items) {
      for (size_t i = 0; i < layout_.raw_bytes(); ++i) item.raw[i] = item.encoded[i / shrink_] & 0x3f;
    }
  }
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    KV_CHECK(encoded.size() == info_.page_bytes(layer));
    if (info_.identity || encoded.back() == kMagic) return absl::OkStatus();
    return FieldError(absl::StatusCode::kDataLoss, "magic", absl::StrCat(int{encoded.back()}),
                      absl::StrCat(int{kMagic}));
  }
  const PageAttention& attention() const override { return attention_; }

 private:
  PageLayout layout_;
  size_t shrink_;
  bool declining_, sinks_;
  CodecInfo info_;
  NoAttention attention_;
};

// Pages of half the size, then of a quarter.
class FakeLadder final : public Codec {
 public:
  FakeLadder(const CodecContext& context, const std::string& name)
      : upper_(context, name == "ladder" ? "sinks" : "fake"),
        lower_(context, name == "ladder" ? "sinks" : "declining", 4) {
    info_ = upper_.info();
    info_.name = info_.spec = name;
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return upper_.layout(); }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    upper_.Encode(items, workspace);
  }
  void Decode(absl::Span<const DecodeItem> items) const override { upper_.Decode(items); }
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    return upper_.Validate(layer, encoded);
  }
  const PageAttention& attention() const override { return upper_.attention(); }
  int rungs() const override { return 2; }
  const Codec& rung(int i) const override { return i == 0 ? upper_ : lower_; }

 private:
  FakeCodec upper_, lower_;
  CodecInfo info_;
};

}  // namespace

bool Declines(const uint8_t* raw) { return raw[0] % 4 == 0; }

void RegisterTestCodecs(CodecRegistry* registry) {
  for (const std::string name : {"raw", "fake", "declining", "uneven", "sinks"}) {
    registry->Register(
        name, "a codec of the tests",
        [name](const CodecContext& context, const CodecParameters&) -> absl::StatusOr<std::unique_ptr<Codec>> {
          return std::make_unique<FakeCodec>(context, name);
        });
  }
  for (const std::string name : {"ladder", "declining_ladder"}) {
    registry->Register(
        name, "a ladder of the tests",
        [name](const CodecContext& context, const CodecParameters&) -> absl::StatusOr<std::unique_ptr<Codec>> {
          return std::make_unique<FakeLadder>(context, name);
        });
  }
}

void ManualExecutor::Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items, WorkerPool::Owner,
                            absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) {
  jobs_.push_back({std::move(codec), std::move(items), std::move(done), {}, nullptr});
  if (run_inline) FinishAll();
}

void ManualExecutor::Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) {
  jobs_.push_back({nullptr, {}, nullptr, std::move(tasks), std::move(done)});
  if (run_inline) FinishAll();
}

void ManualExecutor::Train(DeviceIndexJob job) {
  auto shared = std::make_shared<DeviceIndexJob>(std::move(job));  // by the tasks and their end
  std::vector<absl::AnyInvocable<void()>> tasks;
  for (int task = 0; task < shared->job->tasks(); ++task) {
    tasks.push_back([shared, task] { shared->job->RunTask(task, shared->pages); });
  }
  Run(std::move(tasks), [this, shared] {
    if (train_failure.ok()) shared->job->WriteImage(shared->image);
    shared->done(train_failure);
  });
}

void ManualExecutor::FinishOne(size_t index) {
  Job job = std::move(jobs_[index]);
  jobs_.erase(jobs_.begin() + index);
  if (job.codec == nullptr) {
    for (absl::AnyInvocable<void()>& task : job.tasks) task();
    return job.tasks_done();
  }
  job.codec->Encode(absl::MakeSpan(job.items), {});
  job.done(job.items);
}

void ManualExecutor::FinishAll() {
  while (!jobs_.empty()) FinishOne(0);
}

void Text::Add(uint32_t id) {
  chain.push_back(Mix((chain.empty() ? 1 : chain.back()) ^ (uint64_t{id} << 32)));
  ids.push_back(id);
}

void Text::Truncate(size_t tokens) {
  ids.resize(tokens);
  chain.resize(tokens);
}

namespace {

// Row `head` of token `chain`: finite float16 or bfloat16 values (the exponent's highest bit is clear).
void FillRow(uint64_t chain, int layer, int side, int head, int head_dim, uint8_t* to) {
  uint64_t state = Mix(chain ^ (uint64_t(layer) << 40) ^ (uint64_t(side) << 50) ^ (uint64_t(head) << 52));
  for (int i = 0; i < head_dim; i += 4) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t values = (state ^ (state >> 29)) & 0xbfffbfffbfffbfff;
    std::memcpy(to + 2 * i, &values, 8);
  }
}

}  // namespace

KeysValues MakeKeysValues(const PageLayout& layout, const Text& text, uint64_t first, int tokens, int layer) {
  const size_t row = layout.head_dim * 2;
  KeysValues kv;
  for (int side = 0; side < 2; ++side) {
    std::vector<uint8_t>& out = side == 0 ? kv.k : kv.v;
    out.resize(tokens * layout.kv_heads * row);
    for (int t = 0; t < tokens; ++t) {
      for (int head = 0; head < layout.kv_heads; ++head) {
        FillRow(text.chain[first + t], layer, side, head, layout.head_dim,
                out.data() + (t * layout.kv_heads + head) * row);
      }
    }
  }
  return kv;
}

std::vector<uint8_t> MakeActivations(int hidden, const Text& text, uint64_t first, int tokens, int layer) {
  std::vector<uint8_t> x(size_t(tokens) * hidden * 2);
  for (int t = 0; t < tokens; ++t)
    FillRow(text.chain[first + t], layer, 2, 0, hidden, x.data() + size_t(t) * hidden * 2);
  return x;
}

std::vector<uint8_t> MakeRawPage(const PageLayout& layout, const Text& text, uint32_t index, int tokens, int layer) {
  std::vector<uint8_t> page(layout.raw_bytes(), 0);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      for (int t = 0; t < tokens; ++t) {
        FillRow(text.chain[uint64_t{index} * layout.page_tokens + t], layer, side, head, layout.head_dim,
                page.data() + layout.raw_offset(side, head, t));
      }
    }
  }
  return page;
}

std::vector<uint8_t> MakeEncodedPage(const Codec& codec, const std::vector<uint8_t>& raw, uint32_t index, int layer) {
  if (codec.info().identity) return raw;
  std::vector<uint8_t> encoded(codec.info().page_bytes(layer));
  EncodeItem item;
  item.raw = raw.data();
  item.encoded = encoded.data();
  item.layer = static_cast<uint32_t>(layer);
  item.first_token = uint64_t{index} * codec.layout().page_tokens;
  codec.Encode({&item, 1}, {});
  if (item.declined) encoded.clear();
  return encoded;
}

bool RawPrefixEquals(const PageLayout& layout, const uint8_t* page, const std::vector<uint8_t>& expected, int tokens) {
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      const size_t offset = layout.raw_offset(side, head, 0);
      if (std::memcmp(page + offset, expected.data() + offset, tokens * layout.head_dim * 2) != 0) return false;
    }
  }
  return true;
}

uint64_t Checksum(const std::vector<uint8_t>& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::vector<SentPage> TakeAll(ExportLease& from) {
  std::vector<ExportedPage> ready = from.TakeReady();
  std::sort(ready.begin(), ready.end(), [](const auto& a, const auto& b) { return a.page < b.page; });
  KV_CHECK(from.trailer() != nullptr);
  const HandOffHeader& first = from.header();
  KV_CHECK(ready.size() + from.trailer()->withdrawn.size() == first.size());
  std::vector<SentPage> all;
  for (const ExportedPage& page : ready) {
    const bool activations = page.page >= first.pages.size();
    const HandOffPage& of = first.page(page.page);
    // Of an identity codec the forms are one.
    const bool kept_raw = of.bytes == first.config.layout.raw_bytes() && first.config.codec != "raw";
    all.push_back({of, !activations && !kept_raw, activations, page});
  }
  for (size_t i = 0; i < from.trailer()->pages.size(); ++i) {
    KV_CHECK(from.trailer_pages()[i].page == first.size() + i);
    all.push_back({from.trailer()->pages[i], false, false, from.trailer_pages()[i]});
  }
  return all;
}

absl::Status Deliver(ImportLease& to, const ExportedPage& page) {
  const absl::Span<uint8_t> target = to.target(page.page);
  if (target.empty()) return absl::OkStatus();
  KV_CHECK(target.size() == page.bytes.size());
  std::memcpy(target.data(), page.bytes.data(), target.size());
  KV_ASSIGN_OR_RETURN(const uint64_t checksum, to.Validate(page.page));
  KV_CHECK(checksum == page.checksum);
  const ArrivedPage arrived{page.page, checksum};
  return to.Arrived({&arrived, 1});
}

absl::Status Recompute(ImportLease& to, const CacheConfig& config, const Text& text) {
  const int page_tokens = config.layout.page_tokens;
  std::vector<ArrivedPage> done;
  for (const RecomputePage& page : to.TakeRecomputable()) {
    const int layer = static_cast<int>(page.layer);
    const std::vector<uint8_t> x = MakeActivations(config.hidden, text, page.first_token, page_tokens, layer);
    if (std::memcmp(page.activations, x.data(), x.size()) != 0) return absl::DataLossError("other activations");
    const auto block = static_cast<uint32_t>(page.first_token / page_tokens);
    const std::vector<uint8_t> raw = MakeRawPage(config.layout, text, block, page_tokens, layer);
    std::memcpy(page.raw, raw.data(), raw.size());
    done.push_back({page.page, Checksum(raw)});
  }
  return to.Recomputed(done);
}

absl::StatusOr<SequenceId> Receive(ImportLease& to, const HandOffTrailer& last, const std::vector<SentPage>& pages,
                                   const CacheConfig* config, const Text* text) {
  KV_RETURN_IF_ERROR(to.Extend(last));
  for (const SentPage& page : pages) KV_RETURN_IF_ERROR(Deliver(to, page.bytes));
  if (text != nullptr) KV_RETURN_IF_ERROR(Recompute(to, *config, *text));
  KV_ASSIGN_OR_RETURN(const SequenceId sequence, to.Show());
  KV_RETURN_IF_ERROR(to.Commit());
  return sequence;
}

CacheConfig MakeConfig(const std::string& codec, int lag_pages, const std::string& tenant, int layers) {
  CacheConfig config;
  config.model = "model";
  config.tenant = tenant;
  config.layers = layers;
  config.layout.kv_heads = 4;
  config.layout.head_dim = 32;
  config.layout.page_tokens = 16;
  config.query_heads = 8;
  config.codec = codec;
  config.lag_pages = lag_pages;
  return config;
}

namespace {

std::unique_ptr<PagePool> MakePool(uint64_t bytes, const Clock* clock) {
  PagePool::Options options;
  options.pool_bytes = bytes;
  options.slab_bytes = 2 << 20;
  options.huge_pages = false;
  options.clock = clock;
  auto pool = PagePool::Create(options);
  KV_CHECK(pool.ok());
  return *std::move(pool);
}

}  // namespace

void ManualMover::Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) {
  moves_.push_back({direction, std::move(copies), std::move(done)});
}

void ManualMover::FinishOne(bool moved) {
  Waiting move = std::move(moves_.front());
  moves_.pop_front();
  for (const PageCopy& copy : move.copies) {
    if (!moved) break;
    const bool fetch = move.direction == PageDirection::kFetch;
    std::memcpy(fetch ? copy.device : copy.host, fetch ? copy.host : copy.device, copy.bytes);
  }
  move.done(moved);
}

void ManualMover::FinishAll() {
  while (!moves_.empty()) FinishOne();
}

void LoadAll(DiskLoad& load, absl::FunctionRef<void()> wait) {
  for (;;) {
    while (load.DoPiece()) {
    }
    if (load.done()) return;
    bool more = false;
    load.OnMore([&more] { more = true; });
    if (!more) wait();
    KV_CHECK(more);
  }
}

Explained ExplainAll(PageStore& store, CacheId cache, std::vector<BlockName> names) {
  const auto explanation = store.report().BeginExplain(cache, std::move(names)).value();
  while (explanation->DoPiece()) {
  }
  return explanation->Take().value();
}

void TestKeeper::Forget() {
  for (const int fd : pool) close(fd);
  pool.clear();
  if (manifest >= 0) close(std::exchange(manifest, -1));
}

TestStore::TestStore(uint64_t pool_bytes, uint64_t device_bytes, bool moves, EvictionKind eviction, BlockDisk* disk,
                     TestKeeper* keeper)
    : store_metrics(&metrics) {
  RegisterTestCodecs(&registry);
  if (keeper == nullptr) {
    pool = MakePool(pool_bytes, &clock);
  } else {
    PagePool::Options options{.pool_bytes = pool_bytes, .huge_pages = false, .keep = true};
    for (const int fd : keeper->pool) options.kept.push_back(dup(fd));
    auto made = PagePool::Create(options);
    KV_CHECK(made.ok());
    pool = *std::move(made);
    const KeptManifest::Pool of{pool->capacity_bytes(), pool->slab_bytes()};
    auto recorded = keeper->manifest < 0 ? KeptManifest::Create(of) : KeptManifest::TakeOver(dup(keeper->manifest), of);
    KV_CHECK(recorded.ok());
    manifest = *std::move(recorded);
    if (keeper->manifest < 0) {
      for (const auto& region : pool->regions()) keeper->pool.push_back(dup(region->keeper_fd()));
      keeper->manifest = dup(manifest->keeper_fd());
    }
  }
  std::vector<StoreDevice> devices;
  if (device_bytes > 0) {
    device.pool = MakePool(device_bytes, &clock);
    devices.push_back(
        {TestDevice::kOrdinal, device.pool.get(), &device.epochs, &device.executor, moves ? &device.mover : nullptr});
  }
  store = PageStore::Make(pool.get(), &registry, &executor, &store_metrics, &clock, devices, eviction, disk,
                          manifest.get());
}

CacheId TestStore::Open(const CacheConfig& config) {
  const auto cache = store->caches().Open(config);
  KV_CHECK(cache.ok());
  return *cache;
}

absl::Status AppendInPieces(PageStore& store, CacheId cache, int layer, absl::Span<const AppendEntry> entries,
                            size_t pages_at_once, LetsGo lets_go) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<AppendLease> lease, store.appends().Begin(cache, layer, entries, pages_at_once));
  while (lease->ReserveNext()) {
  }
  while (lease->WriteNext()) {
  }
  if (lets_go == LetsGo::kWhileItCommits && lease->CommitNext()) {
    lease = nullptr;
    while (store.long_calls().ReleaseSome()) {
    }
    return absl::OkStatus();
  }
  while (lease->CommitNext()) {
  }
  return lease->status();
}

absl::Status TestStore::Append(CacheId cache, SequenceId sequence, const Text& text, uint64_t first, int tokens,
                               int layer, bool activations) {
  const CacheConfig config = store->caches().Describe(cache)->config;
  const KeysValues kv = MakeKeysValues(config.layout, text, first, tokens, layer);
  std::vector<uint8_t> x;
  if (activations && config.hidden > 0) x = MakeActivations(config.hidden, text, first, tokens, layer);
  AppendEntry entry;
  entry.sequence = sequence;
  entry.position = first;
  entry.tokens = tokens;
  entry.k = kv.k.data();
  entry.v = kv.v.data();
  entry.x = x.empty() ? nullptr : x.data();
  return store->Append(cache, layer, {&entry, 1});
}

absl::Status TestStore::AppendAll(CacheId cache, SequenceId sequence, const Text& text, uint64_t first, int tokens) {
  const int layers = store->caches().Describe(cache)->config.layers;
  for (int layer = 0; layer < layers; ++layer) KV_RETURN_IF_ERROR(Append(cache, sequence, text, first, tokens, layer));
  return absl::OkStatus();
}

std::vector<BlockName> TestStore::Names(CacheId cache, const Text& text) const {
  const CacheInfo info = *store->caches().Describe(cache);
  std::vector<BlockName> names;
  NameBlocks(info.digest, text.ids, info.config.layout.page_tokens, &names);
  return names;
}

}  // namespace kvmanager::testing
