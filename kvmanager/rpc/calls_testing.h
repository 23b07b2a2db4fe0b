// What the tests of a cache's calls share: a connection with a cache, workers that can be held up, and calls of the
// cache's capability that can be cancelled.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "kvmanager/base/event_loop.h"
#include "kvmanager/rpc/flipping_codec.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager::testing {

/// A cache's capability that leaves its calls to a test.
class TestCache final : public api::Cache::Server {
 public:
  using ReadContext = capnp::CallContext<api::Cache::ReadParams, api::Cache::ReadResults>;
  template <typename Context>
  using Body = std::function<absl::StatusOr<kj::Promise<void>>(Context&)>;

  explicit TestCache(std::shared_ptr<Session>* session) : session_(*session) {}
  kj::Promise<void> step(StepContext context) override {
    return Serve(*session_, Method::kStep, context, [&] { return on_step(context); });
  }
  kj::Promise<void> extend(ExtendContext context) override {
    return Serve(*session_, Method::kExtend, context, [&] { return on_extend(context); });
  }
  kj::Promise<void> read(ReadContext context) override {
    return Serve(*session_, Method::kRead, context, [&] { return on_read(context); });
  }

  kj::Promise<void> readBlocks(ReadBlocksContext context) override {
    return Serve(*session_, Method::kReadBlocks, context, [&] { return on_read_blocks(context); });
  }
  kj::Promise<void> writeBlocks(WriteBlocksContext context) override {
    return Serve(*session_, Method::kWriteBlocks, context, [&] { return on_write_blocks(context); });
  }
  kj::Promise<void> bindSlabs(BindSlabsContext context) override {
    return Serve(*session_, Method::kMapBlocks, context, [&] { return on_bind_slabs(context); });
  }
  kj::Promise<void> mapSlab(MapSlabContext context) override {
    return Serve(*session_, Method::kMapBlocks, context, [&] { return on_map_slab(context); });
  }

  Body<StepContext> on_step;
  Body<ExtendContext> on_extend;
  Body<ReadContext> on_read;
  Body<ReadBlocksContext> on_read_blocks;
  Body<WriteBlocksContext> on_write_blocks;
  Body<BindSlabsContext> on_bind_slabs;
  Body<MapSlabContext> on_map_slab;

 private:
  std::shared_ptr<Session>& session_;
};

/// A call under way. Destroying it cancels the call, as a client does that drops its promise.
template <typename Results>
struct TestCall {
  bool ended() const { return response.has_value() || threw; }
  auto reply() { return response.value().getReply(); }

  std::optional<capnp::Response<Results>> response;
  bool threw = false;
  kj::Promise<void> waiting = nullptr;
};

inline ErrorDetail DetailOfReply(api::Status::Reader status) {
  return {status.getField().cStr(), status.getValue().cStr(), status.getBound().cStr()};
}

class CallsTest : public PageStoreTest {
 protected:
  static constexpr size_t kThreads = 2;

  CallsTest() { FlippingCodec::Register(&test().registry); }
  ~CallsTest() noexcept override {}
  void TearDown() override {
    EndWork();
    bound_ = nullptr;
    while (!held_here_.empty()) Release(held_here_.back());
    session_ = nullptr;
    PageStoreTest::TearDown();
  }

  /// Opens the cache that calls are of: of "raw" or "flipping" pages.
  CacheId OpenCache(const std::string& codec, int lag_pages, const MemoryCalls* calls) {
    parts_.store = &store();
    parts_.drain = &drain_;
    parts_.held = &held_;
    parts_.arenas = &arenas_;
    parts_.calls = &records_;
    parts_.requests = parts_.replies = &messages_;
    parts_.uses = &uses_;
    session_ = std::make_shared<Session>(parts_, Proof{.unix_socket = true}, /*pid=*/7,
                                         [](EndReason, const std::string&) { FAIL(); });
    auto bound = std::make_shared<BoundCache>();
    bound->config = MakeConfig(codec, lag_pages);
    config_ = bound->config;
    bound->cache.id = test().Open(bound->config);
    bound->cache.config = &bound->config;
    bound->cache.codec = std::make_shared<FlippingCodec>(bound->config.layout, codec == "flipping");
    bound->cache.raw = std::make_shared<FlippingCodec>(bound->config.layout, false);
    bound->calls = calls;
    bound_ = std::move(bound);
    return bound_->cache.id;
  }
  CacheId cache() const { return bound_->cache.id; }
  SequenceId Hold(SequenceId sequence) {
    session_->Hold(sequence, cache());
    held_here_.push_back(sequence);
    return sequence;
  }
  void Release(SequenceId sequence) {
    std::erase(held_here_, sequence);
    session_->Release(sequence);
  }
  /// With `tokens` tokens of `text` in every layer.
  SequenceId HeldSequence(const Text& text, int tokens) {
    return Hold(tokens == 0 ? Create(cache()) : Filled(cache(), text, tokens));
  }
  /// Of a sequence of two full pages of `text` that a peer sends, and of which no page has come; it is held.
  std::unique_ptr<ImportLease> Arriving(const Text& text, SequenceId* sequence) {
    TestStore sender;
    FlippingCodec::Register(&sender.registry);
    sender.executor.run_inline = true;
    const CacheId there = sender.Open(config_);
    const SequenceId sent = sender.store->Create(there, {})->sequence;
    for (const int at : {0, kPage}) EXPECT_TRUE(sender.AppendAll(there, sent, text, at, kPage).ok());
    const auto whole = sender.store->exports().Whole(sent, {.will_append = true});
    EXPECT_TRUE(whole.ok()) << whole.status();
    auto import = store().imports().Import((*whole)->header());
    EXPECT_TRUE(import.ok()) << import.status();
    EXPECT_TRUE((*import)->Extend(*(*whole)->trailer()).ok());
    *sequence = Hold(*(*import)->Show());
    return *std::move(import);
  }
  uint64_t tokens(SequenceId sequence, int layer = 0) { return store().Describe(sequence)->layer_tokens[layer]; }

  size_t values_per_row() const { return size_t(config_.query_heads) * config_.layout.head_dim; }
  size_t QBytes(int tokens) const { return tokens * values_per_row() * 4; }
  size_t LseBytes(int tokens) const { return size_t(tokens) * config_.query_heads * 4; }
  std::vector<float> MakeQueries(int tokens) {
    std::vector<float> q(tokens * values_per_row());
    for (float& value : q) value = std::uniform_real_distribution<float>(-1, 1)(random_);
    return q;
  }
  static std::vector<uint8_t> BytesOf(const std::vector<float>& values) {
    std::vector<uint8_t> bytes(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  static bool Raw(int, int) { return false; }
  static bool BeforeOwn(int page, int own) { return page < own; }
  static void ExpectNear(const uint8_t* got, const std::vector<float>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(LoadElement(got, DType::kFloat32, i), want[i], 1e-4) << i;
    }
  }
  static void ExpectInline(capnp::Data::Reader got, const std::vector<float>& want) {
    ASSERT_EQ(got.size(), want.size() * 4);
    ExpectNear(got.begin(), want);
  }

  uint32_t AddArena(size_t bytes) {
    Region::Options options;
    options.bytes = bytes;
    std::shared_ptr<Region> region = *Region::Create(options);
    std::memset(region->data(), 0xee, region->bytes());
    return session_->AddArena(std::move(region));
  }
  std::function<absl::Span<uint8_t>(uint32_t)> arenas_of_session() const {
    return [this](uint32_t arena) { return session_->ArenaBytes(arena); };
  }
  std::function<bool(SequenceId)> held_by_session() const {
    return [this](SequenceId sequence) { return session_->Holds(sequence, cache()); };
  }
  static void SetArena(api::Tensor::Builder tensor, uint32_t id, uint64_t offset, uint64_t bytes) {
    auto range = tensor.initArena();
    range.setId(id);
    range.setOffset(offset);
    range.setBytes(bytes);
  }
  static void SetInline(api::Tensor::Builder tensor, const std::vector<uint8_t>& bytes) {
    tensor.setInline(kj::arrayPtr(bytes.data(), bytes.size()));
  }
  static void SetEntries(capnp::List<api::StepEntry>::Builder out, const std::vector<AttendEntry>& entries) {
    for (uint32_t i = 0; i < entries.size(); ++i) {
      out[i].setSequenceId(entries[i].sequence);
      out[i].setPosition(entries[i].position);
      out[i].setTokens(static_cast<uint32_t>(entries[i].tokens));
    }
  }

  /// Sends what `request` is, and runs what is ready.
  template <typename Results, typename Request>
  std::unique_ptr<TestCall<Results>> Send(Request request) {
    auto call = std::make_unique<TestCall<Results>>();
    call->waiting = request.send()
                        .then([to = call.get()](auto response) { to->response.emplace(kj::mv(response)); },
                              [to = call.get()](kj::Exception&&) { to->threw = true; })
                        .eagerlyEvaluate(nullptr);
    loop_.RunReady();
    return call;
  }
  void RunUntilEnded(const auto& call) {
    loop_.Run([&] { return call->ended(); });
  }

  /// Keeps the workers from what comes now, until Unblock.
  void BlockWorkers() {
    gate_ = std::make_shared<std::latch>(1);
    std::latch blocked(kThreads);
    for (size_t i = 0; i < kThreads; ++i) {
      workers_->Post(WorkerPool::Priority::kAttend, [&blocked, gate = gate_] {
        blocked.count_down();
        gate->wait();
      });
    }
    blocked.wait();
  }
  void Unblock() {
    if (gate_ != nullptr) gate_->count_down();
    gate_ = nullptr;
  }
  /// Runs everything that workers and messages have to do.
  void EndWork() {
    Unblock();
    workers_.emplace(kThreads);  // at the same address; the one before ends what it has
    loop_.RunReady();
  }

  Metrics metrics_;
  RecentErrors errors_;
  const SteadyClock clock_;
  DrainSwitch drain_{&metrics_};
  HeldSequences held_{&metrics_};
  ArenaBytes arenas_{&metrics_, 1 << 30};
  CallRecords records_{&metrics_, &errors_, &clock_};
  SessionUses uses_;
  MessageRoom messages_{{.whole = 64 << 20, .share = 64 << 20}, &clock_};
  Session::Parts parts_;
  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  std::shared_ptr<std::latch> gate_;
  std::optional<WorkerPool> workers_{std::in_place, kThreads};
  std::shared_ptr<Session> session_;
  std::shared_ptr<const BoundCache> bound_;
  CacheConfig config_;  // of it
  std::vector<SequenceId> held_here_;
  std::mt19937 random_{5};
  kj::Own<TestCache> new_server_ = kj::heap<TestCache>(&session_);
  TestCache* const server_ = new_server_.get();  // client_'s
  api::Cache::Client client_{kj::mv(new_server_)};
};

}  // namespace kvmanager::testing
