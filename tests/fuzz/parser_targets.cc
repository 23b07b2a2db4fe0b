// Targets that are pure functions of bytes: frames between daemons, step requests, a model's tensors.
#include <kj/exception.h>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/step_check.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"
#include "transport/tcp/peer_key.h"
#include "transport/tcp/wire.h"
#include "transport/tcp/wire_testing.h"

namespace kvmanager::fuzz {
namespace {

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
            tcp::EncodeTrailer(last),
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
    if (const auto* last = std::get_if<tcp::TrailerFrame>(&*frame)) MustExplain(tcp::CheckPart(last->part, 20));
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
    const kj::Array<capnp::word> words = WordsOf(input);
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

class SafetensorsTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    auto file = [](const std::string& header, size_t data) {
      const uint64_t size = header.size();
      std::string bytes(reinterpret_cast<const char*>(&size), 8);
      return bytes + header + std::string(data, 'd');
    };
    return {file(R"({"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}})", 12),
            file(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},)"
                 R"("b":{"dtype":"BF16","shape":[],"data_offsets":[16,18]}})",
                 18),
            file(R"({"z":{"dtype":"I64","shape":[0,5],"data_offsets":[0,0]}})", 0), file("{}", 0),
            file(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0)};
  }
  void Run(absl::Span<const uint8_t> input) override {
    TensorMap tensors;
    const absl::Status status = ParseSafetensors(input, "fuzz", &tensors);
    if (!status.ok()) {
      KV_CHECK(!status.message().empty() && tensors.empty());
      return;
    }
    uint8_t sum = 0;
    for (const auto& [name, tensor] : tensors) {
      KV_CHECK(tensor.bytes.empty() || (tensor.bytes.data() >= input.data() &&
                                        tensor.bytes.data() + tensor.bytes.size() <= input.data() + input.size()));
      for (const uint8_t byte : tensor.bytes) sum += byte;
    }
    sink_ = sum;
  }

 private:
  volatile uint8_t sink_ = 0;
};

}  // namespace

std::unique_ptr<FuzzTarget> MakePeerWireTarget() { return std::make_unique<PeerWireTarget>(); }
std::unique_ptr<FuzzTarget> MakePeerAuthTarget() { return std::make_unique<PeerAuthTarget>(); }
std::unique_ptr<FuzzTarget> MakeSafetensorsTarget() { return std::make_unique<SafetensorsTarget>(); }
std::unique_ptr<FuzzTarget> MakeStepTarget() { return std::make_unique<StepTarget>(); }

}  // namespace kvmanager::fuzz
