// Peers that hand sequences to this daemon, without a transport: what it would call is up to a test. Pages are those of
// another store.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/manifest.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager::testing {

constexpr int kTokens = 11 * kPage + 3;

/// A peer's hand-off: what the transport would call, and what it was told.
struct Peer {
  std::unique_ptr<ExportLease> lease;
  CacheConfig config;
  std::vector<SentPage> pages;
  std::vector<absl::Status> waited;
  std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);
  std::optional<absl::StatusOr<HandOffReceiver::Accepted>> answer;
  std::optional<absl::Status> extended, completed;

  IncomingHandOff& hand_off() { return *(*answer)->hand_off; }
  const std::string& ticket() const { return (*answer)->ticket; }
  HandOffPart First() const {
    HandOffPart part;
    part.manifest = WriteHandOffHeader(lease->header());
    for (size_t i = 0; i < lease->header().size(); ++i) {
      part.page_bytes.push_back(static_cast<uint32_t>(lease->header().page(i).bytes));
    }
    return part;
  }
  HandOffPart Last() const {
    HandOffPart part;
    part.manifest = WriteHandOffTrailer(*lease->trailer(), "blob");
    for (const HandOffPage& page : lease->trailer()->pages)
      part.page_bytes.push_back(static_cast<uint32_t>(page.bytes));
    part.withdrawn = lease->trailer()->withdrawn;
    return part;
  }
};

class IncomingHandOffsTest : public PageStoreTest {
 public:
  ~IncomingHandOffsTest() noexcept override {}

 protected:
  void TearDown() override {
    peers_.clear();
    incoming().DropAll();
    incoming().SetLoop(nullptr);
    recomputer_.Stop();
    workers_.emplace(1);  // the one before ends what it has
    loop_.RunReady();
    EXPECT_EQ(hand_off_metrics_.waiting.Value(), 0);
    for (const SequenceId sequence : fillers_) store().Drop(sequence);
    PageStoreTest::TearDown();
  }
  IncomingHandOffs& incoming() {
    if (!incoming_.has_value()) {
      IncomingHandOffs::Parts parts;
      parts.store = &store();
      parts.store_metrics = &test().store_metrics;
      parts.registry = &test().registry;
      parts.workers = &*workers_;
      parts.background = &*workers_;
      parts.queue = &queue_;
      parts.clock = &clock_;
      parts.recomputer = &recomputer_;
      parts.drain = &drain_;
      parts.metrics = &hand_off_metrics_;
      parts.host_pool_bytes = host_pool_bytes_;
      parts.lease_ms = 1000000;
      parts.peer_tenants = peer_tenants_;
      incoming_.emplace(parts);
      incoming_->SetLoop(&loop_);
    }
    return *incoming_;
  }
  // Offers a sequence of kTokens tokens; change: has the last word.
  Peer& Offer(
      const std::string& codec, int64_t room_ms = 0,
      absl::FunctionRef<void(HandOffPart&)> change = [](HandOffPart&) {}) {
    peers_.push_back(std::make_unique<Peer>());
    Peer& peer = *peers_.back();
    peer.config = MakeConfig(codec, 1);
    peer.config.tenant = config_tenant_;
    const CacheId cache = sender_.Open(peer.config);
    const SequenceId sequence = sender_.store->Create(cache, {})->sequence;
    EXPECT_TRUE(sender_.AppendAll(cache, sequence, text_, 0, kTokens).ok());
    sender_.executor.FinishAll();
    peer.lease = *sender_.store->exports().Whole(sequence);
    sender_.executor.FinishAll();
    peer.pages = TakeAll(*peer.lease);
    HandOffPart first = peer.First();
    change(first);
    HandOffReceiver::OfferReply reply;
    reply.waiting = [&peer](absl::Status why) { peer.waited.push_back(std::move(why)); };
    reply.done = [&peer](auto accepted) {
      EXPECT_FALSE(peer.answer.has_value());
      peer.answer.emplace(std::move(accepted));
    };
    reply.gone = peer.gone;
    incoming().Offer("10.0.0.1:7", std::move(first), room_ms, std::move(reply));
    const size_t waited = peer.waited.size();
    loop_.Run([&] { return peer.answer.has_value() || peer.waited.size() > waited; });
    return peer;
  }
  Peer& Accepted(const std::string& codec) {
    Peer& peer = Offer(codec);
    KV_CHECK(peer.answer.has_value() && peer.answer->ok());
    return peer;
  }
  // Bytes of pages [from, to) come, and workers look at them. spoil: a page whose bytes are another's.
  void Arrive(Peer& peer, size_t from, size_t to, size_t spoil = SIZE_MAX) {
    std::vector<uint32_t> numbers;
    for (size_t i = from; i < to; ++i) {
      const absl::Span<uint8_t> target = peer.hand_off().target(static_cast<uint32_t>(i));
      ASSERT_EQ(target.size(), peer.pages[i].bytes.bytes.size());
      std::memcpy(target.data(), peer.pages[i].bytes.bytes.data(), target.size());
      if (i == spoil) std::memset(target.data() + target.size() - 64, 0xff, 64);
      numbers.push_back(static_cast<uint32_t>(i));
    }
    peer.hand_off().Arrived(numbers);
  }
  void Extend(Peer& peer, HandOffPart last) {
    peer.hand_off().Extend(std::move(last), [&peer](absl::Status status) { peer.extended = std::move(status); });
    loop_.Run([&] { return peer.extended.has_value(); });
  }
  void Complete(Peer& peer) {
    peer.hand_off().Complete([&peer](absl::Status status) {
      EXPECT_FALSE(peer.completed.has_value());
      peer.completed = std::move(status);
    });
  }
  // Of workers and messages.
  void EndWork() {
    workers_.emplace(1);  // at the same address
    loop_.RunReady();
  }
  size_t in_first(const Peer& peer) const { return peer.lease->header().size(); }
  CacheId cache(const Peer& peer) { return *store().caches().Open(peer.config); }
  absl::StatusOr<SequenceId> Find(const Peer& peer) { return incoming().tickets().Find(peer.ticket(), cache(peer)); }
  // Takes every slab but `slabs`, each by a sequence of its own.
  void Fill(size_t slabs_left = 0) {
    constexpr int kSlabTokens = (2 << 20) / 8192 / 2 * kPage;
    const CacheId raw = test().Open(MakeConfig("raw", 1));
    for (size_t i = slabs_left; i < pool_bytes_ / (2 << 20); ++i) {
      fillers_.push_back(Filled(raw, MakeText(kSlabTokens, static_cast<uint32_t>(i + 1)), kSlabTokens));
    }
  }
  void GiveBackOne() {
    store().Drop(fillers_.back());
    fillers_.pop_back();
  }
  uint64_t used_bytes() { return test().pool->used_bytes(); }
  // Of an offer that is over: nothing is left but what is being encoded.
  void ExpectNothingLeft(Peer& peer) {
    peer.answer.reset();
    EndWork();
    test().executor.FinishAll();
    EXPECT_EQ(used_bytes(), 0u);
    EXPECT_TRUE(store().report().SequenceIds().empty());
  }

  uint64_t host_pool_bytes_ = pool_bytes_;
  std::vector<std::string> peer_tenants_ = {"any"};
  std::string config_tenant_;  // of what is offered
  const Text text_ = MakeText(kTokens);
  TestStore sender_;
  const SteadyClock clock_;
  Metrics metrics_;
  HandOffMetrics hand_off_metrics_{&metrics_};
  RecomputeMetrics recompute_metrics_{&metrics_};
  DrainSwitch drain_{&metrics_};
  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  std::optional<WorkerPool> workers_{std::in_place, 1};
  Recomputer recomputer_{&*workers_, &queue_, &clock_, &recompute_metrics_, 64 << 20, {}};
  std::optional<IncomingHandOffs> incoming_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<SequenceId> fillers_;
};

}  // namespace kvmanager::testing
