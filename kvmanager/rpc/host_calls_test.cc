// Steps of a cache in host memory: what they give, where they run, what they hold until when.
#include "kvmanager/rpc/host_calls.h"

#include <gtest/gtest.h>

#include "kvmanager/rpc/calls_testing.h"
#include "kvmanager/rpc/step_call.h"

namespace kvmanager {
namespace {

using testing::AttentionResult;
using testing::DetailOfReply;
using testing::KeysValues;
using testing::kPage;
using testing::MakeKeysValues;
using testing::MakeText;
using testing::Text;

using Call = testing::TestCall<api::Cache::StepResults>;

class HostCallsTest : public testing::CallsTest {
 public:
  ~HostCallsTest() noexcept override {}

 protected:
  HostCallsTest() {
    server_->on_step = [this](StepContext& context) -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(const CheckedStep step,
                          CheckStep(config_, context.getParams().getRequest(), arenas_of_session(), held_by_session()));
      return used_->Step(session_, bound_->cache, step, context);
    };
    server_->on_extend = [this](ExtendContext& context) { return calls_.Extend(session_, bound_->cache, context); };
  }
  void Open(const std::string& codec, int lag_pages) { OpenCache(codec, lag_pages, &calls_); }
  // K and V of `text`'s tokens of layer 1, and queries, of one entry, inline; `change` has the last word.
  std::unique_ptr<Call> Step(
      const AttendEntry& entry, const Text* append, const std::vector<float>& q,
      absl::FunctionRef<void(api::StepRequest::Builder)> change = [](api::StepRequest::Builder) {}) {
    auto sent = client_.stepRequest();
    auto request = sent.initRequest();
    request.setLayer(1);
    SetEntries(request.initEntries(1), {entry});
    if (append != nullptr) {
      const KeysValues kv = MakeKeysValues(config_.layout, *append, entry.position, entry.tokens, 1);
      SetInline(request.initK(), kv.k);
      SetInline(request.initV(), kv.v);
    }
    if (!q.empty()) SetInline(request.initQ(), BytesOf(q));
    change(request);
    return Send<api::Cache::StepResults>(kj::mv(sent));
  }

  // Of queries at position .. position + tokens - 1 of layer 1.
  template <typename Encoded>
  AttentionResult Reference(const Text& text, uint64_t position, int tokens, const std::vector<float>& q,
                            Encoded encoded) {
    const KeysValues kv = MakeKeysValues(config_.layout, text, 0, static_cast<int>(position) + tokens, 1);
    return testing::ReferenceAttention(config_.layout, config_.query_heads, kv.k, kv.v, position, tokens, q, encoded);
  }
  uint64_t used_bytes() { return test().pool->used_bytes(); }
  struct Large;
  /// So many tokens that workers copy them.
  int LargeTokens() const {
    const PageLayout& layout = config_.layout;
    const uint64_t token_bytes = 2 * layout.kv_heads * layout.head_dim * DTypeBytes(layout.dtype);
    return static_cast<int>(kLoopAppendBytesMax / token_bytes) + kPage + 1;
  }

  AttendMetrics attend_metrics_{&metrics_};
  HostCalls::Parts MakeParts(QualityMonitor* quality = nullptr) {
    return {&store(), &*workers_, &queue_, &turns_, &clock_, quality, &attend_metrics_};
  }
  TakingTurns turns_{&queue_};
  const HostCalls calls_{MakeParts()};
  const HostCalls* used_ = &calls_;
};

TEST_F(HostCallsTest, SmallStepsAppendAttendAndReplyOnTheLoop) {
  Open("raw", 2);
  const Text text = MakeText(20);
  const SequenceId sequence = HeldSequence(text, 0);
  BlockWorkers();
  const std::vector<float> q = MakeQueries(5);
  const auto call = Step({sequence, 0, 5}, &text, q, [](auto request) { request.setWantLse(true); });
  ASSERT_TRUE(call->ended());
  ASSERT_EQ(call->reply().getStatus().getCode(), 0) << call->reply().getStatus().getMessage().cStr();
  const AttentionResult want = Reference(text, 0, 5, q, Raw);
  ExpectInline(call->reply().getOut(), want.out);
  ExpectInline(call->reply().getLse(), want.lse);
  EXPECT_EQ(call->reply().getRawPairs(), 15u);
  EXPECT_EQ(call->reply().getEncodedPairs(), 0u);
  EXPECT_EQ(tokens(sequence, 1), 5u);
  EXPECT_EQ(tokens(sequence, 0), 0u);
  EXPECT_EQ(attend_metrics_.tokens.Value(), 5);
  EXPECT_EQ(attend_metrics_.raw_pairs.Value(), 15);
  // Either half alone. Nothing was asked of the output of an append.
  const auto append = Step({sequence, 5, 3}, &text, {});
  ASSERT_TRUE(append->ended());
  EXPECT_EQ(append->reply().getOut().size() + append->reply().getLse().size(), 0u);
  EXPECT_EQ(tokens(sequence, 1), 8u);
  const std::vector<float> one = MakeQueries(1);
  const auto attend = Step({sequence, 7, 1}, nullptr, one);
  ASSERT_TRUE(attend->ended());
  ExpectInline(attend->reply().getOut(), Reference(text, 7, 1, one, Raw).out);
  EXPECT_EQ(attend->reply().getLse().size(), 0u);
  EXPECT_EQ(tokens(sequence, 1), 8u);
}

TEST_F(HostCallsTest, RowsFollowTheEntries) {
  Open("raw", 2);
  const Text text = MakeText(9);
  const SequenceId first = HeldSequence(text, 0), second = HeldSequence(text, 0);
  const std::vector<float> q = MakeQueries(9);
  const auto call = Step({first, 0, 9}, &text, q, [&](auto request) {
    SetEntries(request.initEntries(2), {{first, 0, 2}, {second, 0, 7}});
    request.setWantLse(true);
  });
  ASSERT_TRUE(call->ended());
  AttentionResult want;
  for (const auto& [at, count] : {std::pair{0, 2}, std::pair{2, 7}}) {
    const KeysValues kv = MakeKeysValues(config_.layout, text, at, count, 1);
    const std::vector<float> rows(q.begin() + static_cast<int>(at * values_per_row()), q.end());
    const auto part = testing::ReferenceAttention(config_.layout, config_.query_heads, kv.k, kv.v, 0, count, rows, Raw);
    want.out.insert(want.out.end(), part.out.begin(), part.out.end());
    want.lse.insert(want.lse.end(), part.lse.begin(), part.lse.end());
  }
  ExpectInline(call->reply().getOut(), want.out);
  ExpectInline(call->reply().getLse(), want.lse);
}

TEST_F(HostCallsTest, LargeStepsRunOnTheWorkers) {
  Open("raw", 0);
  const Text text = MakeText(40);
  const SequenceId sequence = HeldSequence(text, 0);
  BlockWorkers();
  const std::vector<float> q = MakeQueries(40);
  auto call = Step({sequence, 0, 40}, &text, q, [](auto request) { request.setWantLse(true); });
  EXPECT_FALSE(call->ended());
  EXPECT_EQ(tokens(sequence, 1), 40u);  // appended before the reply
  // The sequence may be dropped and the cache closed: the call has what it needs.
  Release(sequence);
  bound_ = nullptr;
  Unblock();
  RunUntilEnded(call);
  const AttentionResult want = Reference(text, 0, 40, q, Raw);
  ExpectInline(call->reply().getOut(), want.out);
  ExpectInline(call->reply().getLse(), want.lse);
  EXPECT_EQ(call->reply().getRawPairs(), 40u * 41 / 2);
}

TEST_F(HostCallsTest, ArenasStayUntilTheWorkersAreDone) {
  Open("raw", 2);
  const Text text = MakeText(40);
  for (const bool on_workers : {false, true}) {
    SCOPED_TRACE(on_workers);
    const int count = on_workers ? 40 : 3;
    const SequenceId sequence = HeldSequence(text, 0);
    const uint32_t arena = AddArena(1 << 18);
    uint8_t* const data = session_->ArenaBytes(arena).data();
    const std::weak_ptr<Region> region = session_->FindArena(arena);
    const std::vector<float> q = MakeQueries(count);
    const size_t q_bytes = QBytes(count), out_at = 1 << 16, lse_at = 1 << 17;
    std::memcpy(data, q.data(), q_bytes);
    BlockWorkers();
    auto call = Step({sequence, 0, count}, &text, {}, [&](auto request) {
      SetArena(request.initQ(), arena, 0, q_bytes);
      SetArena(request.initOut(), arena, out_at, q_bytes);
      SetArena(request.initLse(), arena, lse_at, LseBytes(count));
    });
    EXPECT_EQ(call->ended(), !on_workers);
    const std::shared_ptr<Region> to_look_at = region.lock();
    session_->RemoveArena(arena);
    EXPECT_EQ(to_look_at.use_count(), on_workers ? 4 : 1);  // q's, out's and lse's
    Unblock();
    RunUntilEnded(call);
    EXPECT_EQ(call->reply().getStatus().getCode(), 0);
    EXPECT_EQ(call->reply().getOut().size() + call->reply().getLse().size(), 0u);
    const AttentionResult want = Reference(text, 0, count, q, Raw);
    ExpectNear(data + out_at, want.out);
    ExpectNear(data + lse_at, want.lse);
    for (const size_t untouched : {out_at - 1, out_at + q_bytes, lse_at - 1, lse_at + LseBytes(count)}) {
      EXPECT_EQ(data[untouched], 0xee) << untouched;
    }
    call = nullptr;
    EndWork();
    EXPECT_EQ(to_look_at.use_count(), 1);
  }
}

// K and V of a large append, in an arena: as many tokens as are copied by workers.
struct HostCallsTest::Large {
  Large(HostCallsTest& test, const Text& of) : text(of), tokens(static_cast<int>(of.ids.size())) {
    const KeysValues kv = MakeKeysValues(test.config_.layout, text, 0, tokens, 1);
    side_bytes = kv.k.size();
    v_at = (side_bytes + 63) / 64 * 64;
    arena = test.AddArena(v_at + side_bytes);
    data = test.session_->ArenaBytes(arena).data();
    std::memcpy(data, kv.k.data(), side_bytes);
    std::memcpy(data + v_at, kv.v.data(), side_bytes);
  }
  void Set(api::StepRequest::Builder request) const {
    HostCallsTest::SetArena(request.initK(), arena, 0, side_bytes);
    HostCallsTest::SetArena(request.initV(), arena, v_at, side_bytes);
  }
  const Text& text;
  const int tokens;
  size_t side_bytes = 0, v_at = 0;
  uint32_t arena = 0;
  uint8_t* data = nullptr;
};

TEST_F(HostCallsTest, LargeAppendsAreWrittenByWorkers) {
  Open("raw", 2);
  const Text text = MakeText(LargeTokens());
  const Large large(*this, text);
  const SequenceId sequence = HeldSequence(text, 0);
  const std::vector<float> q = MakeQueries(1);
  BlockWorkers();
  auto call = Step({sequence, 0, large.tokens}, nullptr, {}, [&](auto request) { large.Set(request); });
  EXPECT_FALSE(call->ended());
  EXPECT_TRUE(session_->messages().reading_held()) << "what comes next must find it done";
  EXPECT_EQ(tokens(sequence, 1), 0u);
  session_->RemoveArena(large.arena);
  Unblock();
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getStatus().getCode(), 0);
  EXPECT_FALSE(session_->messages().reading_held());
  EXPECT_EQ(tokens(sequence, 1), large.tokens);
  call = Step({sequence, uint64_t(large.tokens) - 1, 1}, nullptr, q);
  RunUntilEnded(call);
  ExpectInline(call->reply().getOut(), Reference(text, large.tokens - 1, 1, q, Raw).out);
}

// Whose request is small, and is not kept for longer than the call.
TEST_F(HostCallsTest, AppendsThatOpenManyPagesAreWrittenByWorkers) {
  Open("raw", 2);
  const Text text = MakeText(1);
  const KeysValues one = MakeKeysValues(config_.layout, text, 0, 1, 1);
  std::vector<AttendEntry> steps;
  std::vector<uint8_t> k, v;
  for (uint64_t bytes = 0; bytes <= kLoopOpenedBytesMax; bytes += config_.layout.raw_bytes()) {
    steps.push_back({HeldSequence(text, 0), 0, 1});
    k.insert(k.end(), one.k.begin(), one.k.end());
    v.insert(v.end(), one.v.begin(), one.v.end());
  }
  ASSERT_LT(k.size() + v.size(), kLoopAppendBytesMax);
  const auto append = [&] {
    return Step(steps[0], nullptr, {}, [&](auto request) {
      SetEntries(request.initEntries(static_cast<uint32_t>(steps.size())), steps);
      request.initK().setInline(kj::arrayPtr(k.data(), k.size()));
      request.initV().setInline(kj::arrayPtr(v.data(), v.size()));
    });
  };
  BlockWorkers();
  auto call = append();
  EXPECT_FALSE(call->ended());
  call = nullptr;  // the request goes; workers have a copy
  loop_.RunReady();
  EndWork();
  EXPECT_EQ(used_bytes(), 0u);
  call = append();
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getStatus().getCode(), 0) << call->reply().getStatus().getMessage().cStr();
  const std::vector<float> q = MakeQueries(1);
  for (const AttendEntry& entry : {steps.front(), steps.back()}) {
    EXPECT_EQ(tokens(entry.sequence, 1), 1u);
    call = Step(entry, nullptr, q);
    RunUntilEnded(call);
    ExpectInline(call->reply().getOut(), Reference(text, 0, 1, q, Raw).out);
  }
}

TEST_F(HostCallsTest, LargeAppendsThatFailOrAreGivenUpChangeNothing) {
  Open("raw", 2);
  const Text text = MakeText(LargeTokens());
  const Large large(*this, text);
  const SequenceId sequence = HeldSequence(text, 0);
  for (const bool given_up : {false, true}) {
    SCOPED_TRACE(given_up);
    const uint16_t infinity = 0x7c00;
    std::memcpy(large.data + large.v_at + large.side_bytes - 2, &infinity, 2);
    BlockWorkers();
    auto call = Step({sequence, 0, large.tokens}, nullptr, {}, [&](auto request) { large.Set(request); });
    ASSERT_FALSE(call->ended());
    EXPECT_GT(used_bytes(), 0u);
    if (given_up) {
      call = nullptr;
      loop_.RunReady();
      EndWork();
    } else {
      Unblock();
      RunUntilEnded(call);
      EXPECT_EQ(DetailOfReply(call->reply().getStatus()).field.substr(0, 18), "entries[0].v[token");
      call = nullptr;
      EndWork();
    }
    EXPECT_FALSE(session_->messages().reading_held());
    EXPECT_EQ(tokens(sequence, 1), 0u);
    EXPECT_EQ(used_bytes(), 0u);
  }
}

// More queries than the loop looks at in a turn.
TEST_F(HostCallsTest, WorkersLookAtManyQueriesBeforeAnythingIsAppended) {
  Open("raw", 2);
  const int count = static_cast<int>(kQueryBytesAtOnceMax / QBytes(1)) + 1;
  const Text text = MakeText(count);
  const size_t q_bytes = QBytes(count), out_at = (q_bytes + 63) / 64 * 64;
  const std::vector<float> q = MakeQueries(count);
  enum class Case { kServed, kNotFinite, kNoArena, kGivenUp };
  for (const Case which : {Case::kServed, Case::kNotFinite, Case::kNoArena, Case::kGivenUp}) {
    SCOPED_TRACE(static_cast<int>(which));
    const SequenceId sequence = HeldSequence(text, 0);
    const uint32_t arena = AddArena(out_at + q_bytes);
    const std::shared_ptr<Region> region = session_->FindArena(arena);
    std::memcpy(region->data(), BytesOf(q).data(), q_bytes);
    const uint32_t infinity = 0x7f800000;
    if (which == Case::kNotFinite) std::memcpy(region->data() + q_bytes - 4, &infinity, 4);
    BlockWorkers();
    auto call = Step({sequence, 0, count}, &text, {}, [&](auto request) {
      SetArena(request.initQ(), arena, 0, q_bytes);
      SetArena(request.initOut(), arena, out_at, q_bytes);
    });
    EXPECT_FALSE(call->ended());
    EXPECT_TRUE(session_->messages().reading_held());
    EXPECT_EQ(tokens(sequence, 1), 0u);
    if (which == Case::kNoArena) session_->RemoveArena(arena);
    if (which == Case::kGivenUp) {
      call = nullptr;
      loop_.RunReady();
    }
    Unblock();
    if (call != nullptr) RunUntilEnded(call);
    EndWork();
    EXPECT_FALSE(session_->messages().reading_held());
    EXPECT_EQ(tokens(sequence, 1), which == Case::kServed ? uint64_t(count) : 0u);
    switch (which) {
      case Case::kServed:
        EXPECT_EQ(call->reply().getStatus().getCode(), 0) << call->reply().getStatus().getMessage().cStr();
        {
          // The last ones alone: the reference of all takes a minute under ThreadSanitizer.
          constexpr int kLast = 16;
          const size_t skipped = q.size() / count * (count - kLast);
          const std::vector<float> last(q.begin() + skipped, q.end());
          ExpectNear(region->data() + out_at + QBytes(count - kLast),
                     Reference(text, count - kLast, kLast, last, Raw).out);
        }
        break;
      case Case::kNotFinite:
        EXPECT_EQ(DetailOfReply(call->reply().getStatus()).field.substr(0, 19), "entries[0].q[token ");
        break;
      case Case::kNoArena:
        EXPECT_EQ(DetailOfReply(call->reply().getStatus()).field, "q.arena");
        break;
      case Case::kGivenUp:
        break;
    }
    session_->RemoveArena(arena);
  }
}

// More pages than the loop lists at once, and more entries than one plan takes.
TEST_F(HostCallsTest, LargeBatchesAreListedInTurnsAndPlannedInParts) {
  Open("raw", 2);
  constexpr int kContext = 3 * kPage;
  const int entries = static_cast<int>(kLoopPagesMax / 3) + 60;
  ASSERT_GT(static_cast<size_t>(entries), kPlanEntriesMax);
  const Text text = MakeText(kContext);
  std::vector<AttendEntry> steps;
  for (int i = 0; i < entries; ++i) {
    const SequenceId sequence = HeldSequence(text, 0);
    ASSERT_TRUE(Step({sequence, 0, kContext}, &text, {})->ended());
    steps.push_back({sequence, uint64_t(kContext) - 1, 1});
  }
  const std::vector<float> one = MakeQueries(1);
  const auto each = Reference(text, kContext - 1, 1, one, Raw).out;
  std::vector<float> q, want;
  for (int i = 0; i < entries; ++i) {
    q.insert(q.end(), one.begin(), one.end());
    want.insert(want.end(), each.begin(), each.end());
  }
  const auto begin = [&] {
    return Step(steps[0], nullptr, q, [&](auto request) { SetEntries(request.initEntries(entries), steps); });
  };
  enum class Case { kServed, kGivenUpAtOnce, kGivenUpByWorkers };
  for (const Case which : {Case::kServed, Case::kGivenUpAtOnce, Case::kGivenUpByWorkers}) {
    SCOPED_TRACE(static_cast<int>(which));
    BlockWorkers();
    auto call = begin();
    EXPECT_FALSE(call->ended());
    EXPECT_EQ(store().report().Use().lease_pages, uint64_t(entries) * 3);
    if (which == Case::kGivenUpAtOnce) call = nullptr;
    loop_.RunReady();
    EXPECT_FALSE(session_->messages().reading_held());
    if (which == Case::kGivenUpByWorkers) call = nullptr;
    loop_.RunReady();
    Unblock();
    if (call != nullptr) {
      RunUntilEnded(call);
      ASSERT_EQ(call->reply().getStatus().getCode(), 0) << call->reply().getStatus().getMessage().cStr();
      ExpectInline(call->reply().getOut(), want);
      call = nullptr;
    }
    EndWork();
    while (store().long_calls().ReleaseSome()) {
    }
    EXPECT_EQ(store().report().Use().lease_pages, 0u);
    EXPECT_FALSE(session_->messages().reading_held());
  }
}

TEST_F(HostCallsTest, WaitsForPagesThatAreBeingEncoded) {
  Open("flipping", 0);
  const Text text = MakeText(2 * kPage + 4);
  for (const bool cancelled : {false, true}) {
    SCOPED_TRACE(cancelled);
    const SequenceId sequence = HeldSequence(text, 0);
    const uint32_t arena = AddArena(1 << 18);
    const std::weak_ptr<Region> region = session_->FindArena(arena);
    const double counted = attend_metrics_.tokens.Value();
    ASSERT_TRUE(Step({sequence, 0, 2 * kPage}, &text, {})->ended());
    const std::vector<float> q = MakeQueries(4);
    BlockWorkers();  // small enough for the loop, late as it is
    auto call = Step({sequence, 2 * kPage, 4}, &text, q,
                     [&](auto request) { SetArena(request.initOut(), arena, 0, QBytes(4)); });
    EXPECT_FALSE(call->ended());
    EXPECT_EQ(tokens(sequence, 1), 2u * kPage + 4);
    const std::shared_ptr<Region> to_look_at = region.lock();
    session_->RemoveArena(arena);
    if (cancelled) {
      // Nothing runs, so nothing is kept.
      call = nullptr;
      loop_.RunReady();
      EXPECT_EQ(to_look_at.use_count(), 1);
      test().executor.FinishAll();
      EndWork();
      EXPECT_EQ(attend_metrics_.tokens.Value(), counted);
      EXPECT_EQ(to_look_at->data()[0], 0xee);
      continue;
    }
    test().executor.FinishAll();
    loop_.RunReady();
    ASSERT_TRUE(call->ended());
    ExpectNear(to_look_at->data(), Reference(text, 2 * kPage, 4, q, BeforeOwn).out);
    EXPECT_EQ(call->reply().getEncodedPairs(), 4u * 2 * kPage);
    EXPECT_EQ(call->reply().getRawPairs(), 1u + 2 + 3 + 4);
    EXPECT_EQ(attend_metrics_.encoded_pairs.Value(), 4 * 2 * kPage);
    EXPECT_EQ(attend_metrics_.tokens.Value(), counted + 4);
    EndWork();
  }
}

TEST_F(HostCallsTest, CancelledStepsKeepWhatTheWorkersTouch) {
  Open("raw", 2);
  const Text text = MakeText(40);
  const SequenceId sequence = HeldSequence(text, 0);
  const uint32_t arena = AddArena(1 << 18);
  const std::weak_ptr<Region> region = session_->FindArena(arena);
  BlockWorkers();
  auto call = Step({sequence, 0, 40}, &text, MakeQueries(40),
                   [&](auto request) { SetArena(request.initOut(), arena, 0, QBytes(40)); });
  ASSERT_FALSE(call->ended());
  call = nullptr;
  loop_.RunReady();
  session_->RemoveArena(arena);
  Release(sequence);
  bound_ = nullptr;
  EXPECT_FALSE(region.expired());
  EXPECT_GT(used_bytes(), 0u);
  EndWork();
  EXPECT_TRUE(region.expired());
  EXPECT_EQ(used_bytes(), 0u);
}

// The pages of a sequence that a peer sends, of which none has come; then the hand-off ends early.
TEST_F(HostCallsTest, AnErrorOfTheLeaseComesAfterTheAppend) {
  Open("flipping", 0);
  const Text text = MakeText(2 * kPage + 1);
  SequenceId sequence = 0;
  const std::unique_ptr<ImportLease> import = Arriving(text, &sequence);
  auto call = Step({sequence, 2 * kPage, 1}, &text, MakeQueries(1));
  EXPECT_FALSE(call->ended());
  import->Break(absl::UnavailableError("the peer is gone"));
  loop_.RunReady();
  ASSERT_TRUE(call->ended());
  const auto status = call->reply().getStatus();
  EXPECT_EQ(status.getCode(), static_cast<uint16_t>(absl::StatusCode::kUnavailable));
  EXPECT_NE(std::string(status.getMessage().cStr()).find("the peer is gone"), std::string::npos);
  EXPECT_EQ(call->reply().getOut().size(), 0u);
  EXPECT_EQ(tokens(sequence, 1), 2u * kPage + 1);
  ASSERT_EQ(errors_.List().size(), 1u);
  EXPECT_EQ(errors_.List()[0].method, "step");
  EXPECT_EQ(attend_metrics_.tokens.Value(), 0);
}

TEST_F(HostCallsTest, WhatIsRefusedNamesItsFieldAndChangesNothing) {
  Open("flipping", 0);
  const Text text = MakeText(3 * kPage);
  const SequenceId sequence = HeldSequence(text, 5);
  const std::vector<float> q = MakeQueries(2);
  const auto refused = [&](std::unique_ptr<Call> call) {
    EXPECT_TRUE(call->ended() && !call->threw);
    EXPECT_NE(call->reply().getStatus().getCode(), 0);
    EXPECT_EQ(call->reply().getOut().size(), 0u);
    EXPECT_EQ(tokens(sequence, 1), 5u);
    return DetailOfReply(call->reply().getStatus());
  };
  const ErrorDetail position = refused(Step({sequence, 6, 2}, &text, q));
  EXPECT_EQ(position.field, "entries[0].position");
  EXPECT_EQ(position.value, "6");
  EXPECT_NE(position.bound.find("5"), std::string::npos) << position.bound;
  const ErrorDetail spoilt = refused(Step({sequence, 5, 2}, &text, q, [&](auto request) {
    StoreElement(request.getV().getInline().begin(), DType::kFloat16, 4 * 32 + 33, NAN);
  }));
  EXPECT_NE(spoilt.field.find("v"), std::string::npos) << spoilt.field;
  EXPECT_FALSE(spoilt.value.empty() || spoilt.bound.empty());
  // A query beyond the layer's end.
  EXPECT_FALSE(refused(Step({sequence, 4, 2}, nullptr, q)).field.empty());
  // No error after that: what was right is appended.
  EXPECT_TRUE(Step({sequence, 5, 2}, &text, q)->ended());
  EXPECT_EQ(tokens(sequence, 1), 7u);
  EXPECT_EQ(errors_.List().size(), 3u);
}

TEST_F(HostCallsTest, QueriesOfCachesThatEncodeAreNoted) {
  const Text text = MakeText(20);
  for (const bool encodes : {false, true}) {
    Metrics metrics;
    QualityMonitor quality(&test().executor, &metrics, 1);
    const HostCalls calls(MakeParts(&quality));
    used_ = &calls;
    Open(encodes ? "flipping" : "raw", 2);
    const SequenceId sequence = HeldSequence(text, 0);
    auto call = Step({sequence, 0, 20}, &text, MakeQueries(20));
    RunUntilEnded(call);
    EXPECT_EQ(quality.query_bytes() > 0, encodes);
    Release(sequence);
  }
}

TEST_F(HostCallsTest, EnginesHaveNoKernelsHere) {
  Open("raw", 2);
  auto request = client_.extendRequest();
  request.initRequest();
  const auto call = Send<api::Cache::ExtendResults>(kj::mv(request));
  ASSERT_TRUE(call->ended());
  const auto status = call->reply().getStatus();
  EXPECT_EQ(status.getCode(), static_cast<uint16_t>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(DetailOfReply(status).field, "device");
  EXPECT_EQ(DetailOfReply(status).value, "-1");
}

TEST_F(HostCallsTest, EverythingIsWrittenAndCopiedAtOnce) {
  Open("raw", 2);
  const SequenceId sequence = HeldSequence(MakeText(kPage), kPage);
  const StepCache& cache = bound_->cache;
  EXPECT_TRUE(calls_.CheckUsable(*session_, cache, sequence).ok());
  EXPECT_TRUE(calls_.HasWritten(*session_, cache, sequence));
  const auto fork = calls_.Fork(*session_, cache, sequence);
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(fork->copied, 0u);
  EXPECT_EQ(*calls_.Crop(*session_, cache, sequence, 3), 0u);
  EXPECT_EQ(tokens(sequence), 3u);
  EXPECT_EQ(tokens(fork->sequence), uint64_t{kPage});
  EXPECT_TRUE(absl::IsInvalidArgument(calls_.Crop(*session_, cache, sequence, 4).status()));
  EXPECT_TRUE(absl::IsNotFound(calls_.Fork(*session_, cache, 1000).status()));
  store().Drop(fork->sequence);
  EXPECT_FALSE(calls_.GoesByHost(absl::FailedPreconditionError("any")));
}

}  // namespace
}  // namespace kvmanager
