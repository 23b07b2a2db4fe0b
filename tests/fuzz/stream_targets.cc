// Targets that are byte streams into running servers: an RPC connection, a hand-off.
#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/server.h"
#include "monitoring/metrics.h"
#include "spdlog/spdlog.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"
#include "tests/harness.h"
#include "tests/model.h"
#include "tests/raw_rpc.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/wire.h"
#include "transport/tcp/wire_testing.h"

namespace kvmanager::fuzz {
namespace {

class RpcTarget final : public FuzzTarget {
 public:
  RpcTarget() {
    spdlog::set_level(spdlog::level::off);
    Options options;
    options.listen = {absl::StrCat("unix:", directory_.path(), "/kv.sock")};
    options.host_pool_bytes = 32 << 20;
    options.threads = 1;
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(options);
    KV_CHECK(server.ok());
    server_ = std::move(*server);
    address_ = server_->listen_address();
    admin_ = server_->admin_address();
    // KJ's statics are made here, before the threads: ThreadSanitizer cannot see their guards in the uninstrumented
    // library.
    { testing::RawRpc statics; }
    loop_ = std::thread([this] { server_->Run(); });
  }
  ~RpcTarget() override {
    server_->Stop();
    loop_.join();
  }

  /// A whole session as the wire saw it, and its beginnings.
  std::vector<std::string> Seeds() override {
    testing::Proxy proxy(admin_);
    proxy.Record();
    Session("tcp:" + proxy.address());
    const std::string whole = proxy.Recorded();
    std::vector<std::string> seeds = {whole};
    // Cut at message boundaries: number of segments less one, their sizes in words, padded to 8 bytes.
    size_t at = 0;
    while (at + 8 <= whole.size()) {
      uint32_t segments, words = 0;
      memcpy(&segments, whole.data() + at, 4);
      ++segments;
      KV_CHECK(at + 4 + 4 * segments <= whole.size());
      for (uint32_t i = 0; i < segments; ++i) {
        uint32_t size;
        memcpy(&size, whole.data() + at + 4 + 4 * i, 4);
        words += size;
      }
      at += (4 + 4 * segments + 7) / 8 * 8 + 8 * size_t{words};
      seeds.push_back(whole.substr(0, at));
    }
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override { RunStream(address_, input); }
  void Check() override {
    std::thread([this] {
      Session(admin_);
      testing::RawRpc rpc;
      auto connection = rpc.Connect(admin_);
      KV_CHECK(connection != nullptr);
      KV_CHECK(testing::Eventually([&] {
        api::Admin::Client admin = connection->daemon.adminRequest().send().wait(rpc.wait()).getAdmin();
        auto purge = admin.purgeRequest();
        purge.setAll(true);
        purge.send().wait(rpc.wait());
        auto status = admin.statusRequest().send().wait(rpc.wait());
        return status.getStatus().getConnections() == 0 && status.getStatus().getLeases() == 0 &&
               status.getStatus().getPools()[0].getUsedBytes() == 0;
      }));
    }).join();
  }

 private:
  /// One call of every method, with small tensors.
  static void Session(const std::string& address) {
    std::thread([&] {
      client::CacheOptions shape = testing::SmallCache("hack:k_bits=3,v_bits=2", 0, 64, 16);
      const testing::Source source{1, testing::Kind::kNormal, shape};
      testing::RawRpc rpc;
      auto connection = rpc.Connect(address);
      KV_CHECK(connection != nullptr);
      kj::WaitScope& wait = rpc.wait();
      auto open = connection->daemon.openCacheRequest();
      testing::FillConfig(shape, open.initConfig());
      auto opened = open.send().wait(wait);
      KV_CHECK(opened.getStatus().getCode() == 0);
      api::Cache::Client cache = opened.getCache();
      std::vector<BlockName> names;
      Digest digest;
      KV_CHECK(opened.getInfo().getDigest().size() == digest.bytes.size());
      memcpy(digest.bytes.data(), opened.getInfo().getDigest().begin(), digest.bytes.size());
      NameBlocks(digest, source.TokenIds(0, 64), 64, &names);
      auto name = [&](api::BlockName::Builder to) {
        to.setKey(kj::arrayPtr(names[0].key.bytes.data(), 32));
        to.setTokens(kj::arrayPtr(names[0].tokens.bytes.data(), 32));
      };
      auto arena = connection->daemon.createArenaRequest();
      arena.setBytes(4096);
      arena.send().wait(wait);
      auto create = cache.createSequencesRequest();
      name(create.initRequests(1)[0].initPrefix(1)[0]);
      auto created = create.send().wait(wait);
      KV_CHECK(created.getReplies()[0].getStatus().getCode() == 0);
      api::Sequence::Client sequence = created.getReplies()[0].getSequence();
      const uint64_t at = created.getReplies()[0].getMatch().getHitBlocks() * 64;
      for (int layer = 0; layer < shape.layers; ++layer) {
        const int tokens = 70;
        auto step = cache.stepRequest();
        auto request = step.initRequest();
        request.setLayer(layer);
        auto entry = request.initEntries(1)[0];
        entry.setSequenceId(created.getReplies()[0].getSequenceId());
        entry.setPosition(at);
        entry.setTokens(tokens);
        const auto k = source.K(layer, at, tokens), v = source.V(layer, at, tokens);
        const auto q = source.Q(layer, at, tokens);
        request.initK().setInline(kj::arrayPtr(k.data(), k.size()));
        request.initV().setInline(kj::arrayPtr(v.data(), v.size()));
        request.initQ().setInline(kj::arrayPtr(reinterpret_cast<const kj::byte*>(q.data()), q.size() * 4));
        request.setWantLse(true);
        KV_CHECK(step.send().wait(wait).getReply().getStatus().getCode() == 0);
      }
      auto match = cache.matchRequest();
      name(match.initRequests(1)[0].initPrefix(1)[0]);
      match.send().wait(wait);
      auto publish = sequence.publishRequest();
      name(publish.initNames(1)[0]);
      publish.send().wait(wait);
      sequence.forkRequest().send().wait(wait);
      auto crop = sequence.cropRequest();
      crop.setTokens(at + 65);
      crop.send().wait(wait);
      sequence.infoRequest().send().wait(wait);
      auto hand_off = sequence.handOffRequest();
      hand_off.setPeer("127.0.0.1:1");
      hand_off.setTimeoutMs(1000);
      hand_off.send().wait(wait);
      auto claim = cache.claimRequest();
      claim.initTicket(32);
      claim.send().wait(wait);
      cache.infoRequest().send().wait(wait);
      api::Admin::Client admin = connection->daemon.adminRequest().send().wait(wait).getAdmin();
      admin.statusRequest().send().wait(wait);
      admin.cachesRequest().send().wait(wait);
      admin.sequencesRequest().send().wait(wait);
      admin.peersRequest().send().wait(wait);
    }).join();
  }

  testing::TempDir directory_;
  std::unique_ptr<Server> server_;
  std::string address_, admin_;  // inputs come to the first
  std::thread loop_;
};

/// Takes what fits into a budget, into memory of its own; what it holds is counted.
class BudgetReceiver final : public HandOffReceiver {
 public:
  static constexpr uint64_t kBytesMax = 1 << 20;

  void Offer(std::string, HandOffPart first, int64_t, OfferReply reply) override {
    KV_CHECK(!first.manifest.empty());
    if (!Fits(first)) return reply.done(InvalidField("pages", first.page_bytes.size(), "a small hand-off"));
    reply.done(Accepted{std::make_shared<Pages>(this, first), "ticket"});
  }
  ReceiverLoad Load() const override { return {}; }

  std::atomic<int> active{0};
  std::atomic<uint64_t> completed{0};

 private:
  static bool Fits(const HandOffPart& part) {
    return part.page_bytes.total() <= kBytesMax && part.page_bytes.size() <= 1000;
  }
  class Pages final : public IncomingHandOff {
   public:
    Pages(BudgetReceiver* receiver, const HandOffPart& first) : receiver_(receiver) {
      ++receiver_->active;
      Add(first);
    }
    ~Pages() override { --receiver_->active; }
    absl::Span<uint8_t> target(uint32_t page) const override {
      return absl::MakeSpan(const_cast<std::vector<uint8_t>&>(pages_.at(page)));
    }
    void Arrived(absl::Span<const uint32_t> pages) override {
      for (const uint32_t page : pages) KV_CHECK(!pages_.at(page).empty() && !std::exchange(arrived_.at(page), true));
    }
    void Extend(HandOffPart last, absl::AnyInvocable<void(absl::Status)> reply) override {
      KV_CHECK(!last.manifest.empty() && !std::exchange(extended_, true));
      if (!Fits(last)) return reply(InvalidField("pages", last.page_bytes.size(), "a small hand-off"));
      for (const uint32_t page : last.withdrawn) arrived_.at(page) = true;
      Add(last);
      reply(absl::OkStatus());
    }
    void Complete(absl::AnyInvocable<void(absl::Status)> reply) override {
      // Whatever the stream was, what is complete is all of what was announced.
      KV_CHECK(extended_);
      for (size_t i = 0; i < pages_.size(); ++i) KV_CHECK(pages_[i].empty() || arrived_[i]);
      ++receiver_->completed;
      reply(absl::OkStatus());
    }
    void Abort(absl::Status why) override { KV_CHECK(!why.ok()); }

   private:
    void Add(const HandOffPart& part) {
      for (const uint64_t bytes : part.page_bytes) {
        pages_.emplace_back(pages_.size() % 5 == 4 ? 0 : bytes);  // every fifth is there
        arrived_.push_back(false);
      }
    }
    BudgetReceiver* const receiver_;
    std::vector<std::vector<uint8_t>> pages_;
    std::vector<char> arrived_;
    bool extended_ = false;
  };
};

/// A hand-off's two connections: the input begins with the length of what the control connection carries, two bytes;
/// the rest is the data connection's.
class PeerStreamTarget final : public FuzzTarget {
 public:
  PeerStreamTarget() : transport_metrics_(&metrics_) {
    TcpTransport::Options options;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.metrics = &transport_metrics_;
    options.stall_ms = kStallMs;
    absl::StatusOr<std::unique_ptr<TcpTransport>> transport = TcpTransport::Create(options);
    KV_CHECK(transport.ok());
    transport_ = std::move(*transport);
  }
  std::vector<std::string> Seeds() override {
    std::vector<std::string> seeds;
    for (const size_t count : {0, 1, 7}) {
      HandOffPart first, last;
      first.manifest = last.manifest = "a manifest";
      std::vector<tcp::PageRecord> records;
      std::string payload;
      for (uint32_t i = 0; i < count; ++i) {
        const std::string bytes(64 * (i + 1), static_cast<char>(i));
        first.page_bytes.push_back(bytes.size());
        if (i % 5 == 4) continue;
        records.push_back({i, XXH3_64bits(bytes.data(), bytes.size())});
        payload += bytes;
      }
      const std::string hello = tcp::EncodeHello({});
      const std::string offer = hello + tcp::EncodeOffer({}, 0, first);
      seeds.push_back(Split(offer + tcp::EncodeEmpty(tcp::FrameType::kCancel), ""));
      std::string data = hello + tcp::EncodeJoin({{}, 1});
      if (!records.empty()) {
        std::string head(tcp::kHeaderBytes + tcp::kPageRecordBytes * records.size(), 0);
        tcp::PutPagesHead(records, reinterpret_cast<uint8_t*>(head.data()));
        data += head + payload;
      }
      seeds.push_back(Split(offer + tcp::EncodeTrailer(last), data));
    }
    return seeds;
  }
  // Every eighth input keeps the checks that it has.
  void Run(absl::Span<const uint8_t> input) override { Play(input, token_ % 8 != 7); }
  void Check() override {
    KV_CHECK(testing::Eventually([&] { return receiver_.active == 0; }));
    // On a busy machine a hand-off may be given up between its two streams: kStallMs are few.
    const uint64_t before = receiver_.completed;
    const std::string seed = Seeds().back();
    KV_CHECK(testing::Eventually([&] {
      Play(BytesOf(seed), true);
      KV_CHECK(testing::Eventually([&] { return receiver_.active == 0; }));
      return receiver_.completed > before;
    }));
  }

 private:
  static constexpr int64_t kStallMs = 100;  // a hand-off whose connections are gone is kept so long

  void Play(absl::Span<const uint8_t> input, bool with_good_checks) {
    if (input.size() < 2) return;
    std::string both(input.begin() + 2, input.end());
    const size_t control_bytes = std::min<size_t>(input[0] | input[1] << 8, both.size());
    std::string streams[2] = {both.substr(0, control_bytes), both.substr(control_bytes)};
    ++token_;
    for (std::string& stream : streams) {
      // A token of its own: the hand-off of the last run may not have ended yet.
      constexpr size_t kTokenAt = tcp::kHelloBytes + tcp::kHeaderBytes;
      for (size_t i = 0; i < 8 && kTokenAt + i < stream.size(); ++i) {
        stream[kTokenAt + i] = static_cast<char>(token_ >> (8 * i));
      }
      if (with_good_checks) stream = tcp::WithGoodChecks(stream);
      if (!stream.empty()) RunStream(transport_->listen_address(), BytesOf(stream));
    }
  }

  static std::string Split(const std::string& control, const std::string& data) {
    const char length[2] = {static_cast<char>(control.size()), static_cast<char>(control.size() >> 8)};
    return std::string(length, 2) + control + data;
  }
  BudgetReceiver receiver_;
  Metrics metrics_;
  TransportMetrics transport_metrics_;
  std::unique_ptr<TcpTransport> transport_;
  uint64_t token_ = 0;
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeRpcTarget() { return std::make_unique<RpcTarget>(); }
std::unique_ptr<FuzzTarget> MakePeerStreamTarget() { return std::make_unique<PeerStreamTarget>(); }

}  // namespace kvmanager::fuzz
