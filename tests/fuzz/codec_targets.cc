// Targets that need every codec: codec specs and policies, a hand-off's manifest and what the store makes of it.
#include "codecs/codec.h"
#include "codecs/registry.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/manifest.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_metrics.h"
#include "monitoring/metrics.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"
#include "tests/model.h"

namespace kvmanager::fuzz {
namespace {

/// Runs nothing: a manifest's pages never get as far as encoding.
class NoExecutor final : public EncodeExecutor {
 public:
  void Encode(std::shared_ptr<const Codec>, std::vector<EncodeItem> items, WorkerPool::Owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) override {
    held.push_back({std::move(items), std::move(done)});
  }
  void Run(std::vector<absl::AnyInvocable<void()>>, absl::AnyInvocable<void()>) override {}
  struct Job {
    std::vector<EncodeItem> items;
    absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done;
  };
  std::vector<Job> held;
};

class ManifestTarget final : public FuzzTarget {
 public:
  ManifestTarget() {
    PagePool::Options options;
    options.pool_bytes = 16 << 20;
    absl::StatusOr<std::unique_ptr<PagePool>> pool = PagePool::Create(options);
    KV_CHECK(pool.ok());
    pool_ = std::move(*pool);
    store_ = PageStore::Make(pool_.get(), &testing::AllCodecs(), &executor_, &store_metrics_, &clock_);
  }
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    for (const char* const codec : {"raw", "hack:k_bits=3,v_bits=2"}) {
      for (const uint64_t tokens : {0, 10, 64, 200}) {
        HandOffHeader first;
        const auto made = testing::AllCodecs().Create(codec, SmallConfig(codec).layout);
        KV_CHECK(made.ok());
        const bool raw = (*made)->info().identity;
        // Pages of one size: sinks have another.
        first.config = SmallConfig(raw ? codec : absl::StrCat(codec, ";sinks=0"));
        first.codec_version = (*made)->info().version;
        first.tokens = tokens;
        first.blocks.resize(tokens / 64);
        first.aged.assign(2, uint32_t(tokens / 128));
        HandOffTrailer last;
        last.blocks.resize(tokens / 64);
        for (size_t i = 0; i < first.blocks.size(); ++i) {
          HandOffBlock& block = i % 2 == 0 ? first.blocks[i] : last.blocks[i];
          block.named = true;
          block.name.key.bytes[0] = uint8_t(i + 1);
        }
        for (uint32_t layer = 0; layer < 2; ++layer) {
          for (uint32_t block = 0; block * 64 < tokens; ++block) {
            (block < first.aged[layer] ? first.pages : last.pages).push_back({block, layer, 0});
          }
        }
        const std::string head = WriteHandOffHeader(first);
        const size_t units = raw ? 0 : (*made)->info().page_bytes(0) / 64;
        seeds.push_back(Header(head.size(), first.pages.size(), last.pages.size(), units) + head +
                        WriteHandOffTrailer(last, "blob"));
      }
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.size() < kHeaderBytes) return;
    const absl::string_view bytes(reinterpret_cast<const char*>(input.data()), input.size());
    // The parts' sizes: those of a raw or encoded page, or hostile.
    const uint32_t raw = 2 * 2 * 64 * 32 * 2;
    PageSizes first_bytes, last_bytes;
    first_bytes.Append(input[2], input[4] == 0 ? raw : input[4] * 64);
    last_bytes.Append(input[3], input[5] == 0 ? raw : input[5] * 64);
    std::vector<uint32_t> withdrawn;
    for (uint32_t page = 0; page < 8; ++page) {
      if (input[6] >> page & 1) withdrawn.push_back(page);
    }
    const size_t split = std::min<size_t>(input.size(), kHeaderBytes + input[0] + size_t(input[1]) * 256);
    const auto first = ParseHandOffHeader(bytes.substr(kHeaderBytes, split - kHeaderBytes), first_bytes);
    const auto last = ParseHandOffTrailer(bytes.substr(split), last_bytes, withdrawn);
    MustExplain(first.status());
    MustExplain(last.status());
    if (last.ok()) KV_CHECK(last->trailer.pages.size() == last_bytes.size());
    if (!first.ok()) return;
    KV_CHECK(first->pages.size() == first_bytes.size());
    KV_CHECK(first->aged.size() == static_cast<size_t>(first->config.layers));
    const uint64_t used = pool_->used_bytes();
    {
      const absl::StatusOr<std::unique_ptr<ImportLease>> lease = store_->imports().Import(*first);
      MustExplain(lease.status());
      if (lease.ok()) {
        const size_t early = input[7] % (first_bytes.size() + 1);
        for (uint32_t page = 0; page < early; ++page) Receive(**lease, page, input);
        const absl::Status extended = last.ok() ? (*lease)->Extend(last->trailer) : last.status();
        MustExplain(extended);
        if (extended.ok()) {
          for (size_t page = early; page < first_bytes.size() + last_bytes.size(); ++page) {
            Receive(**lease, uint32_t(page), input);
          }
        }
        if ((*lease)->can_show()) {
          const absl::StatusOr<SequenceId> sequence = (*lease)->Show();
          KV_CHECK(sequence.ok());
          if ((*lease)->complete()) KV_CHECK((*lease)->Commit().ok());
          store_->report().CheckInvariants();
          store_->Drop(*sequence);
        }
      }
    }
    for (NoExecutor::Job& job : std::exchange(executor_.held, {})) {
      for (EncodeItem& item : job.items) item.declined = true;
      job.done(job.items);
    }
    if (++runs_ % 64 == 0) store_->report().CheckInvariants();
    store_->caches().PurgeAll();
    KV_CHECK(pool_->used_bytes() == used && used == 0);
  }

 private:
  // The header's length, the parts' page counts and page sizes in units of 64 bytes (0: of a raw page), which
  // of the first pages are withdrawn, how many come before the trailer.
  static constexpr size_t kHeaderBytes = 8;
  static std::string Header(size_t bytes, size_t first_pages, size_t last_pages, size_t units) {
    std::string header(kHeaderBytes, '\0');
    header[0] = char(bytes);
    header[1] = char(bytes >> 8);
    header[2] = char(first_pages);
    header[3] = char(last_pages);
    header[4] = char(units);
    return header;
  }
  // What a hostile peer may write, with a matching checksum: here the input itself, over and over.
  static void Receive(ImportLease& lease, uint32_t page, absl::Span<const uint8_t> input) {
    const absl::Span<uint8_t> target = lease.target(page);
    for (size_t b = 0; b < target.size(); ++b) target[b] = input[b % input.size()];
    const absl::StatusOr<uint64_t> checksum = lease.Validate(page);
    MustExplain(checksum.status());
    if (!checksum.ok()) return;
    const ArrivedPage arrived{page, *checksum};
    MustExplain(lease.Arrived({&arrived, 1}));
  }

  SteadyClock clock_;
  Metrics metrics_;
  StoreMetrics store_metrics_{&metrics_};
  NoExecutor executor_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PageStore> store_;
  uint64_t runs_ = 0;
};

class CodecSpecTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    return {"raw",
            "hack",
            "hack:k_bits=3,v_bits=2",
            "hack:k_axis=channel,k_bits=3,v_bits=2,meta=8,part=64,k_range=minmax,v_range=minmax,rounding=nearest,"
            "q=symmetric,sums=0,rotation=hadamard,v_norm=1",
            "hack:k_axis=token,k_bits=8,v_bits=8,meta=16,part=128,q=asymmetric,sums=1,rotation=none,v_norm=0",
            "hack:v_bits=1,v_range=least_squares,rounding=stochastic",
            "name:a=b,c=d,e=,=f,:,=="};
  }
  void Run(absl::Span<const uint8_t> input) override {
    const absl::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
    MustExplain(ParseCodecSpec(text).status());
    for (const int head_dim : {16, 96, 128}) {
      PageLayout layout;
      layout.kv_heads = 1;
      layout.head_dim = static_cast<uint16_t>(head_dim);
      layout.page_tokens = head_dim == 96 ? 128 : 64;
      const absl::StatusOr<std::unique_ptr<Codec>> codec = testing::AllCodecs().Create(text, layout);
      MustExplain(codec.status());
      if (!codec.ok()) continue;
      // The canonical form is its own canonical form.
      const CodecInfo& info = (*codec)->info();
      KV_CHECK(info.encoded_bytes % 64 == 0 && info.payload_bytes <= info.encoded_bytes);
      const absl::StatusOr<std::unique_ptr<Codec>> again = testing::AllCodecs().Create(info.spec, layout);
      KV_CHECK(again.ok());
      KV_CHECK((*again)->info().spec == info.spec && (*again)->info().encoded_bytes == info.encoded_bytes);
    }
  }
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeManifestTarget() { return std::make_unique<ManifestTarget>(); }
std::unique_ptr<FuzzTarget> MakeCodecSpecTarget() { return std::make_unique<CodecSpecTarget>(); }

}  // namespace kvmanager::fuzz
