// K and V that are read back: of which form, what a read waits for, and what it holds until when.
#include "kvmanager/rpc/read.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "kvmanager/rpc/calls_testing.h"

namespace kvmanager {
namespace {

using testing::DetailOfReply;
using testing::FlippingCodec;
using testing::KeysValues;
using testing::kPage;
using testing::MakeKeysValues;
using testing::MakeText;
using testing::Text;

using Call = testing::TestCall<api::Cache::ReadResults>;
using Change = absl::FunctionRef<void(api::ReadRequest::Builder)>;

// Of kernels that write behind their calls: when, a test says.
class WrittenLater final : public MemoryCalls {
 public:
  absl::StatusOr<kj::Promise<void>> Step(const std::shared_ptr<Session>&, const StepCache&, const CheckedStep&,
                                         StepContext&) const override {
    return absl::UnimplementedError("step");
  }
  absl::StatusOr<kj::Promise<void>> Extend(const std::shared_ptr<Session>&, const StepCache&,
                                           ExtendContext&) const override {
    return absl::UnimplementedError("extend");
  }
  absl::Span<uint8_t> ArenaBytes(const Session&, const StepCache&, uint32_t) const override { return {}; }
  absl::Status CheckUsable(Session&, const StepCache&, SequenceId) const override { return absl::OkStatus(); }
  bool HasWritten(Session&, const StepCache&, SequenceId) const override { return !later; }
  kj::Promise<absl::Status> WhenAllWritten(const std::shared_ptr<Session>&, const StepCache&,
                                           SequenceId sequence) const override {
    asked.push_back(sequence);
    if (!later) return absl::OkStatus();
    auto waiting = kj::newPromiseAndFulfiller<absl::Status>();
    waits.push_back(kj::mv(waiting.fulfiller));
    return kj::mv(waiting.promise);
  }
  void TellWhenWritten(Session&, const StepCache&, SequenceId, int, std::vector<uint64_t>) const override {}
  absl::StatusOr<Forked> Fork(Session&, const StepCache&, SequenceId) const override {
    return absl::UnimplementedError("fork");
  }
  absl::StatusOr<uint64_t> Crop(Session&, const StepCache&, SequenceId, uint64_t) const override {
    return absl::UnimplementedError("crop");
  }
  bool GoesByHost(const absl::Status&) const override { return false; }

  bool later = false;
  mutable std::vector<SequenceId> asked;
  mutable std::vector<kj::Own<kj::PromiseFulfiller<absl::Status>>> waits;
};

class ReadTest : public testing::CallsTest {
 public:
  ReadTest() {
    server_->on_read = [this](ReadContext& context) -> absl::StatusOr<kj::Promise<void>> {
      KV_ASSIGN_OR_RETURN(const CheckedRead read,
                          CheckRead(config_, context.getParams().getRequest(), arenas_of_session(), held_by_session()));
      return reads_.Run(session_, *bound_, read, context);
    };
  }
  ~ReadTest() noexcept override {}

 protected:
  void Open(const std::string& codec, int lag_pages) { OpenCache(codec, lag_pages, &calls_); }
  // A page at a time, so that pages age. spoilt: pages that will not decode.
  SequenceId Grown(const Text& text, int tokens, const std::vector<int>& spoilt = {}) {
    const SequenceId sequence = HeldSequence(text, 0);
    for (int at = 0; at < tokens; at += kPage) {
      const int count = std::min(kPage, tokens - at);
      KeysValues kv = MakeKeysValues(config_.layout, text, at, count, 1);
      // Pages begin with a byte that is theirs to choose: of the first token's K.
      kv.k[0] = std::count(spoilt.begin(), spoilt.end(), at / kPage) > 0 ? FlippingCodec::kUndecodable : 0;
      const AppendEntry entry{sequence, static_cast<uint64_t>(at), count, kv.k.data(), kv.v.data()};
      EXPECT_TRUE(store().Append(cache(), 1, {&entry, 1}).ok());
    }
    return sequence;
  }
  // Reads entries of layer 1, inline; change: has the last word.
  std::unique_ptr<Call> Read(
      const std::vector<AttendEntry>& entries, Change change = [](api::ReadRequest::Builder) {}) {
    auto sent = client_.readRequest();
    auto request = sent.initRequest();
    request.setLayer(1);
    SetEntries(request.initEntries(static_cast<uint32_t>(entries.size())), entries);
    change(request);
    return Send<api::Cache::ReadResults>(kj::mv(sent));
  }
  // Rows of Grown's sequences; pages before `encoded` are decoded.
  KeysValues Rows(const Text& text, const std::vector<AttendEntry>& entries, int encoded) {
    KeysValues rows;
    const size_t row_bytes = size_t(config_.layout.kv_heads) * config_.layout.head_dim * 2;
    for (const AttendEntry& entry : entries) {
      const auto position = static_cast<int>(entry.position);
      KeysValues kv = MakeKeysValues(config_.layout, text, entry.position, entry.tokens, 1);
      for (int t = 0; t < entry.tokens; ++t) {
        if ((position + t) % kPage == 0) kv.k[t * row_bytes] = 0;
        if ((position + t) / kPage >= encoded) continue;
        for (size_t i = 1; i < row_bytes; i += 2) kv.v[t * row_bytes + i] ^= 0x80;
      }
      rows.k.insert(rows.k.end(), kv.k.begin(), kv.k.end());
      rows.v.insert(rows.v.end(), kv.v.begin(), kv.v.end());
    }
    return rows;
  }
  static std::vector<uint8_t> Bytes(capnp::Data::Reader data) { return {data.begin(), data.end()}; }
  size_t bytes(int tokens) const { return size_t(tokens) * config_.layout.kv_heads * config_.layout.head_dim * 2; }

  ReadMetrics read_metrics_{&metrics_};
  PollList polls_;
  WrittenLater calls_;
  const Reads reads_{{&store(), &*workers_, &queue_, &polls_, &clock_, {}, &read_metrics_}};
};

TEST_F(ReadTest, GivesRowsInTheFormThatTheSequenceReads) {
  const Text text = MakeText(3 * kPage + 5);
  for (const bool encodes : {true, false}) {
    SCOPED_TRACE(encodes);
    Open(encodes ? "flipping" : "raw", 0);
    const SequenceId sequence = Grown(text, 3 * kPage + 5);
    test().executor.FinishAll();
    const std::vector<AttendEntry> entries = {
        {sequence, 10, 2 * kPage + 3}, {sequence, 3 * kPage + 1, 4}, {sequence, 0, 1}};
    auto call = Read(entries);
    RunUntilEnded(call);
    const KeysValues want = Rows(text, entries, encodes ? 3 : 0);
    EXPECT_TRUE(Bytes(call->reply().getK()) == want.k);
    EXPECT_TRUE(Bytes(call->reply().getV()) == want.v);
    EXPECT_EQ(call->reply().getEncodedTokens(), encodes ? 2u * kPage + 4 : 0u);
    EXPECT_EQ(call->reply().getEncodedTokens() + call->reply().getRawTokens(), 2u * kPage + 8);
    EXPECT_EQ(calls_.asked, std::vector<SequenceId>{sequence});  // once
    calls_.asked.clear();
    Release(sequence);
  }
  EXPECT_EQ(read_metrics_.encoded_tokens.Value(), 2 * kPage + 4);
  EXPECT_EQ(read_metrics_.raw_tokens.Value(), 2 * kPage + 8 + 4);
}

TEST_F(ReadTest, WaitsForWhatIsWrittenAndForWhatIsEncoded) {
  Open("flipping", 0);
  const Text text = MakeText(2 * kPage + 1);
  for (const int cancelled_at : {0, 1, 2}) {  // while it is written, while it is encoded, never
    SCOPED_TRACE(cancelled_at);
    const SequenceId sequence = Grown(text, 2 * kPage + 1);
    const uint32_t arena = AddArena(1 << 16);
    const std::shared_ptr<Region> region = session_->FindArena(arena);
    session_->RemoveArena(arena);
    const uint32_t same = session_->AddArena(region);
    const std::vector<AttendEntry> entries = {{sequence, 1, 2 * kPage}};
    calls_.later = true;
    calls_.waits.clear();
    auto call = Read(entries, [&](auto request) { SetArena(request.initK(), same, 0, bytes(2 * kPage)); });
    session_->RemoveArena(same);
    EXPECT_EQ(region.use_count(), 2);
    ASSERT_EQ(calls_.waits.size(), 1u);
    if (cancelled_at == 0) call = nullptr;
    calls_.waits[0]->fulfill(absl::OkStatus());
    EndWork();
    if (cancelled_at == 1) call = nullptr;
    loop_.RunReady();
    EXPECT_EQ(region.use_count(), cancelled_at == 2 ? 2 : 1);
    test().executor.FinishAll();
    EndWork();
    EXPECT_EQ(region->data()[0] == 0xee, cancelled_at != 2);
    if (cancelled_at == 2) {
      ASSERT_TRUE(call->ended());
      const KeysValues want = Rows(text, entries, 2);
      EXPECT_TRUE(std::equal(want.k.begin(), want.k.end(), region->data()));
      EXPECT_EQ(region->data()[want.k.size()], 0xee);
      EXPECT_EQ(call->reply().getK().size(), 0u);
      EXPECT_TRUE(Bytes(call->reply().getV()) == want.v);
    }
    Release(sequence);
  }
  EXPECT_EQ(read_metrics_.encoded_tokens.Value(), 2 * kPage - 1);
}

TEST_F(ReadTest, CancelledReadsKeepWhatTheWorkersTouch) {
  Open("raw", 0);
  const SequenceId sequence = Grown(MakeText(40 * kPage), 40 * kPage);
  const uint32_t arena = AddArena(1 << 20);
  const std::shared_ptr<Region> region = session_->FindArena(arena);
  BlockWorkers();
  auto call = Read({{sequence, 0, 40 * kPage}}, [&](auto request) { SetArena(request.initK(), arena, 0, bytes(640)); });
  ASSERT_FALSE(call->ended());
  call = nullptr;
  loop_.RunReady();
  session_->RemoveArena(arena);
  Release(sequence);
  bound_ = nullptr;
  EXPECT_EQ(region.use_count(), 2);
  EXPECT_GT(test().pool->used_bytes(), 0u);
  EndWork();
  EXPECT_EQ(region.use_count(), 1);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  EXPECT_EQ(region->data()[0], 0xee);  // nobody waited for it, so nobody read
  EXPECT_EQ(read_metrics_.raw_tokens.Value(), 0);
}

TEST_F(ReadTest, LetsOthersHaveTheirTurn) {
  Open("raw", 0);
  workers_.emplace(kThreads, std::chrono::microseconds(0));  // a turn is one page
  constexpr int kPages = 8;
  const SequenceId sequence = Grown(MakeText(kPages * kPage), kPages * kPage);
  const uint32_t arena = AddArena(1 << 20);
  const uint8_t* const rows = session_->ArenaBytes(arena).data();
  // A latch may end only once nobody waits for it.
  const auto one = std::make_shared<std::latch>(1), other = std::make_shared<std::latch>(1);
  const auto blocked = std::make_shared<std::latch>(2), looked = std::make_shared<std::latch>(1);
  for (const auto& gate : {one, other}) {
    workers_->Post(WorkerPool::Priority::kAttend, [blocked, gate] {
      blocked->count_down();
      gate->wait();
    });
  }
  blocked->wait();
  auto call = Read({{sequence, 0, kPages * kPage}},
                   [&](auto request) { SetArena(request.initK(), arena, 0, bytes(kPages * kPage)); });
  std::vector<uint8_t> seen;  // of each page, by who came later
  workers_->Post(WorkerPool::Priority::kAttend, [&] {
    for (int page = 0; page < kPages; ++page) seen.push_back(rows[bytes(page * kPage)]);
    looked->count_down();
  });
  one->count_down();  // one thread runs both of the read's turns, then what came later
  looked->wait();
  other->count_down();
  RunUntilEnded(call);
  for (int page = 0; page < kPages; ++page) EXPECT_EQ(seen[page] == 0xee, page >= 2) << page;
  for (int page = 0; page < kPages; ++page) EXPECT_EQ(rows[bytes(page * kPage)], 0) << page;
}

TEST_F(ReadTest, NamesTheFirstPageThatDoesNotDecode) {
  Open("flipping", 0);
  const Text text = MakeText(9 * kPage);
  const SequenceId whole = Grown(text, 9 * kPage), spoilt = Grown(text, 9 * kPage, {2, 3, 7});
  test().executor.FinishAll();
  auto call = Read({{whole, 0, 9 * kPage}, {spoilt, 0, 2 * kPage}, {spoilt, kPage + 4, 7 * kPage}});
  RunUntilEnded(call);
  const auto status = call->reply().getStatus();
  EXPECT_EQ(status.getCode(), static_cast<uint16_t>(absl::StatusCode::kDataLoss));
  EXPECT_EQ(DetailOfReply(status).field, "entries[2]");
  EXPECT_EQ(DetailOfReply(status).value, absl::StrCat("page 2 of sequence ", spoilt, " that decodes to NaN or Inf"));
  EXPECT_NE(DetailOfReply(status).bound, "");
  EXPECT_EQ(call->reply().getK().size(), 0u);
  ASSERT_EQ(errors_.List().size(), 1u);
  EXPECT_EQ(errors_.List()[0].method, "read");
  EXPECT_EQ(read_metrics_.encoded_tokens.Value() + read_metrics_.raw_tokens.Value(), 0);
  // Where none of its tokens is asked for, such a page harms nobody.
  call = Read({{spoilt, 4 * kPage, 3 * kPage}});
  RunUntilEnded(call);
  EXPECT_EQ(call->reply().getStatus().getCode(), 0);
}

TEST_F(ReadTest, SaysWhyItCannotRead) {
  Open("flipping", 0);
  const Text text = MakeText(2 * kPage);
  const SequenceId sequence = Grown(text, kPage);
  const auto code_of = [](const std::unique_ptr<Call>& call) {
    EXPECT_TRUE(call->ended());
    return static_cast<absl::StatusCode>(call->reply().getStatus().getCode());
  };
  const auto beyond = Read({{sequence, kPage - 1, 2}});
  EXPECT_NE(code_of(beyond), absl::StatusCode::kOk);
  EXPECT_NE(DetailOfReply(beyond->reply().getStatus()).field.find("entries[0]"), std::string::npos);
  // What kernels wrote is not finite, as one of two sequences says.
  calls_.later = true;
  const auto unwritten = Read({{sequence, 0, 1}, {Grown(text, kPage), 0, 1}});
  ASSERT_EQ(calls_.waits.size(), 2u);
  calls_.waits[0]->fulfill(absl::OkStatus());
  calls_.waits[1]->fulfill(absl::InvalidArgumentError("NaN"));
  loop_.RunReady();
  EXPECT_EQ(code_of(unwritten), absl::StatusCode::kInvalidArgument);
  calls_.later = false;
  // Its pages were to come from a peer.
  SequenceId arriving = 0;
  const std::unique_ptr<ImportLease> import = Arriving(text, &arriving);
  const auto arrives = Read({{arriving, 0, 1}});
  EXPECT_FALSE(arrives->ended());
  import->Break(absl::UnavailableError("the peer is gone"));
  loop_.RunReady();
  EXPECT_EQ(code_of(arrives), absl::StatusCode::kUnavailable);
  EXPECT_EQ(errors_.List().size(), 3u);
}

}  // namespace
}  // namespace kvmanager
