// Targets that are pure functions of bytes: frames, manifests, step requests, codec specs.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <cstring>

#include "codecs/codec.h"
#include "codecs/registry.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/manifest.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_metrics.h"
#include "monitoring/metrics.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/model.h"
#include "transport/tcp/peer_key.h"
#include "transport/tcp/wire.h"
#include "transport/tcp/wire_testing.h"

namespace kvmanager::fuzz {
namespace {

std::string Flat(capnp::MessageBuilder& message) {
  const kj::Array<capnp::word> words = capnp::messageToFlatArray(message);
  return std::string(words.asChars().begin(), words.asChars().size());
}

CacheConfig SmallConfig(const std::string& codec) {
  CacheConfig config;
  config.model = "fuzz";
  config.layers = 2;
  config.query_heads = 4;
  config.layout.kv_heads = 2;
  config.layout.head_dim = 32;
  config.codec = codec;
  return config;
}

/// An error says what it is about.
void MustExplain(const absl::Status& status) {
  if (!status.ok()) KV_CHECK(!status.message().empty());
}

class PeerWireTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    HandOffPart part;
    part.manifest = "manifest";
    part.page_bytes.Append(20, 64);
    HandOffPart last = part;
    last.withdrawn = {3, 7};
    tcp::PageBitmap pages(20);
    for (const uint32_t page : {0, 9, 19}) pages.Add(page);
    const tcp::PageRecord records[] = {{7, 64}, {8, 1}};
    std::string frame(tcp::kHeaderBytes + 2 * tcp::kPageRecordBytes, 0);
    tcp::PutPagesHead(records, reinterpret_cast<uint8_t*>(frame.data()));
    return {tcp::EncodeHello({}),
            tcp::EncodeOffer({}, 7, part),
            tcp::EncodeJoin({{}, 1}),
            tcp::EncodeAccept({1 << 20, 4, "ticket", pages}),
            tcp::EncodeLast(last),
            tcp::EncodeExtended({pages}),
            frame,
            tcp::EncodeGot(1 << 20, {1, 2, 3}),
            tcp::EncodeJoined({true, pages}),
            tcp::EncodeEmpty(tcp::FrameType::kDone),
            tcp::EncodeError(InvalidField("field", 7, "less")),
            tcp::EncodeWaiting(InvalidField("field", 7, "less")),
            tcp::EncodeMemory({1, "described"}),
            tcp::EncodeLoad({1, 2, 3, 4, 5})};
  }
  void Run(absl::Span<const uint8_t> input) override {
    Parse(input);
    const std::string good = tcp::WithGoodCheck({input.begin(), input.end()});
    Parse({reinterpret_cast<const uint8_t*>(good.data()), good.size()});
  }

 private:
  static void Parse(absl::Span<const uint8_t> input) {
    const absl::StatusOr<tcp::Frame> frame = tcp::ParseFrame(input);
    MustExplain(frame.status());
    if (input.size() >= tcp::kHeaderBytes) MustExplain(tcp::ParseHeader(input.subspan(0, tcp::kHeaderBytes)).status());
    if (!frame.ok()) return;
    if (const auto* offer = std::get_if<tcp::OfferFrame>(&*frame)) KV_CHECK(tcp::CheckPart(offer->part, 0).ok());
    if (const auto* last = std::get_if<tcp::LastFrame>(&*frame)) MustExplain(tcp::CheckPart(last->part, 20));
    if (const auto* accept = std::get_if<tcp::AcceptFrame>(&*frame)) MustFit(accept->wanted);
    if (const auto* joined = std::get_if<tcp::JoinedFrame>(&*frame)) MustFit(joined->arrived);
    if (const auto* error = std::get_if<tcp::ErrorFrame>(&*frame)) KV_CHECK(!error->status.ok());
    if (const auto* hello = std::get_if<tcp::HelloFrame>(&*frame)) MustExplain(tcp::CheckVersion(*hello));
  }
  static void MustFit(const tcp::PageBitmap& bitmap) {
    KV_CHECK(bitmap.bits.size() == (size_t{bitmap.count} + 7) / 8);
    KV_CHECK(!bitmap.has(bitmap.count));
  }
};

/// The first byte says which side hears the rest. Nobody who has not the key passes: the nonces are others each time.
class PeerAuthTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    const tcp::Nonce one = {1}, two = {2};
    const tcp::Proof proof = tcp::ProofOf(key_, tcp::AuthRole::kDialer, one, two);
    return {"a" + tcp::EncodeChallenge(one) + std::string(proof.begin(), proof.end()),
            "d" + tcp::EncodeAnswer(two, tcp::ProofOf(key_, tcp::AuthRole::kAcceptor, one, two)),
            "d" + tcp::EncodeRefusal(), "d" + tcp::EncodeHello({}), "a" + tcp::EncodeHello({})};
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    tcp::AuthExchange exchange(key_, input[0] % 2 == 0 ? tcp::AuthRole::kDialer : tcp::AuthRole::kAcceptor);
    input.remove_prefix(1);
    while (input.size() >= exchange.wants()) {
      const size_t wanted = exchange.wants();
      const absl::StatusOr<std::string> next = exchange.Read(input.first(wanted));
      MustExplain(next.status());
      if (!next.ok()) return KV_CHECK(absl::IsUnauthenticated(next.status()));
      KV_CHECK(exchange.wants() > 0);
      KV_CHECK(next->empty() || next->size() == tcp::kAnswerBytes);
      input.remove_prefix(wanted);
    }
  }

 private:
  const std::string key_ = std::string(tcp::kPeerKeyBytesMin, 'k');
};

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
        const std::string head = WriteFirstManifest(first);
        const size_t units = raw ? 0 : (*made)->info().page_bytes(0) / 64;
        seeds.push_back(Header(head.size(), first.pages.size(), last.pages.size(), units) + head +
                        WriteLastManifest(last, "blob"));
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
    const auto first = ParseFirstManifest(bytes.substr(kHeaderBytes, split - kHeaderBytes), first_bytes);
    const auto last = ParseLastManifest(bytes.substr(split), last_bytes, withdrawn);
    MustExplain(first.status());
    MustExplain(last.status());
    if (last.ok()) KV_CHECK(last->last.pages.size() == last_bytes.size());
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
        const absl::Status extended = last.ok() ? (*lease)->Extend(last->last) : last.status();
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
  // The first manifest's length, the parts' page counts and page sizes in units of 64 bytes (0: of a raw page), which
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

class StepTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    for (const bool arena : {false, true}) {
      for (const bool append : {false, true}) {
        capnp::MallocMessageBuilder message;
        auto request = message.initRoot<api::StepRequest>();
        request.setLayer(1);
        auto entries = request.initEntries(2);
        for (uint32_t i = 0; i < 2; ++i) {
          entries[i].setSequenceId(i + 1);
          entries[i].setPosition(10);
          entries[i].setTokens(1 + i);
        }
        const size_t kv = 3 * 2 * 32 * 2, q = 3 * 4 * 32 * 4;
        auto fill = [&](api::Tensor::Builder tensor, size_t bytes, uint64_t offset) {
          if (arena) {
            auto range = tensor.initArena();
            range.setId(1);
            range.setOffset(offset);
            range.setBytes(bytes);
          } else {
            tensor.initInline(bytes);
          }
        };
        if (append) {
          fill(request.initK(), kv, 0);
          fill(request.initV(), kv, 4096);
        }
        fill(request.initQ(), q, 8192);
        if (arena) fill(request.initOut(), q, 16384);
        request.setWantLse(true);
        seeds.push_back(Flat(message));
      }
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    kj::Array<capnp::word> words = kj::heapArray<capnp::word>(input.size() / sizeof(capnp::word));
    if (words.size() > 0) std::memcpy(words.begin(), input.data(), words.size() * sizeof(capnp::word));
    (void)kj::runCatchingExceptions([&] {
      capnp::FlatArrayMessageReader reader(words);
      const absl::StatusOr<CheckedStep> step = CheckStep(
          config_, reader.getRoot<api::StepRequest>(),
          [&](uint32_t id) { return id == 1 ? absl::MakeSpan(arena_) : absl::Span<uint8_t>(); },
          [](SequenceId id) { return id == 1 || id == 2; });
      MustExplain(step.status());
      if (!step.ok()) return;
      uint64_t tokens = 0;
      for (const AttendEntry& entry : step->entries) {
        KV_CHECK(entry.tokens >= 1);
        tokens += entry.tokens;
      }
      KV_CHECK(tokens == step->tokens);
      for (const StepTensor* const tensor : {&step->k, &step->v, &step->q, &step->out, &step->lse}) {
        // Each byte that the step may touch is where it says.
        uint8_t sum = 0;
        for (const uint8_t byte : tensor->bytes) sum += byte;
        sink_ = sum;
        if (tensor->where == StepTensor::Where::kArena) {
          KV_CHECK(tensor->bytes.data() >= arena_.data() &&
                   tensor->bytes.data() + tensor->bytes.size() <= arena_.data() + arena_.size());
        }
      }
      KV_CHECK(!step->append() || step->k.bytes.size() == tokens * 2 * 32 * 2);
      KV_CHECK(!step->attend() || step->q.bytes.size() == tokens * 4 * 32 * DTypeBytes(step->q_dtype));
    });
    (void)kj::runCatchingExceptions([&] {
      capnp::FlatArrayMessageReader reader(words);
      const absl::StatusOr<CheckedRead> read = CheckRead(
          config_, reader.getRoot<api::ReadRequest>(),
          [&](uint32_t id) { return id == 1 ? absl::MakeSpan(arena_) : absl::Span<uint8_t>(); },
          [](SequenceId id) { return id == 1 || id == 2; });
      MustExplain(read.status());
      if (!read.ok()) return;
      KV_CHECK(read->bytes == read->tokens * 2 * 32 * 2);
      for (const StepTensor* const tensor : {&read->k, &read->v}) {
        KV_CHECK(tensor->where != StepTensor::Where::kInline);
        if (!tensor->given()) continue;
        KV_CHECK(tensor->bytes.size() == read->bytes && tensor->bytes.data() >= arena_.data() &&
                 tensor->bytes.data() + tensor->bytes.size() <= arena_.data() + arena_.size());
      }
    });
  }

 private:
  const CacheConfig config_ = SmallConfig("raw");
  std::vector<uint8_t> arena_ = std::vector<uint8_t>(1 << 16);
  volatile uint8_t sink_ = 0;
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

std::unique_ptr<FuzzTarget> MakePeerWireTarget() { return std::make_unique<PeerWireTarget>(); }
std::unique_ptr<FuzzTarget> MakePeerAuthTarget() { return std::make_unique<PeerAuthTarget>(); }
std::unique_ptr<FuzzTarget> MakeManifestTarget() { return std::make_unique<ManifestTarget>(); }
std::unique_ptr<FuzzTarget> MakeStepTarget() { return std::make_unique<StepTarget>(); }
std::unique_ptr<FuzzTarget> MakeCodecSpecTarget() { return std::make_unique<CodecSpecTarget>(); }

}  // namespace kvmanager::fuzz
