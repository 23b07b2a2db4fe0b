#include "kvmanager/rpc/step_check.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"

namespace kvmanager {
namespace {

constexpr int kKvHeads = 2, kQueryHeads = 8, kHeadDim = 64, kLayers = 4;
constexpr size_t kKvRow = kKvHeads * kHeadDim * 2, kQRow = kQueryHeads * kHeadDim * 4, kLseRow = kQueryHeads * 4;
constexpr size_t kArenaBytes = 1 << 20;

class StepCheckTest : public testing::Test {
 protected:
  StepCheckTest() : arena_(kArenaBytes) {
    config_.model = "m";
    config_.layers = kLayers;
    config_.query_heads = kQueryHeads;
    config_.layout = {DType::kFloat16, kKvHeads, kHeadDim, 64};
  }

  // A valid append-and-attend of `tokens` tokens for sequences 10, 11, ... with everything inline.
  void Fill(api::StepRequest::Builder request, std::vector<uint32_t> tokens) {
    request.setLayer(1);
    auto entries = request.initEntries(tokens.size());
    size_t total = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      entries[i].setSequenceId(10 + i);
      entries[i].setPosition(100 * i);
      entries[i].setTokens(tokens[i]);
      total += tokens[i];
    }
    request.initK().initInline(total * kKvRow);
    request.initV().initInline(total * kKvRow);
    request.initQ().initInline(total * kQRow);
  }

  absl::StatusOr<CheckedStep> Check(api::StepRequest::Reader request) {
    return CheckStep(
        config_, request, [this](uint32_t id) { return id == 3 ? absl::MakeSpan(arena_) : absl::Span<uint8_t>(); },
        [](SequenceId sequence) { return sequence >= 10 && sequence < 20; });
  }

  // Changes a valid request and gives the error's field, or "" if it was accepted.
  std::string FieldAfter(std::function<void(api::StepRequest::Builder)> change) {
    capnp::MallocMessageBuilder message;
    auto request = message.initRoot<api::StepRequest>();
    Fill(request, {1, 3});
    change(request);
    auto step = Check(request.asReader());
    if (step.ok()) return "";
    const ErrorDetail detail = DetailOf(step.status());
    EXPECT_FALSE(detail.value.empty()) << step.status();
    EXPECT_FALSE(detail.bound.empty()) << step.status();
    return detail.field;
  }

  static void SetArena(api::Tensor::Builder tensor, uint32_t id, uint64_t offset, uint64_t bytes) {
    auto range = tensor.initArena();
    range.setId(id);
    range.setOffset(offset);
    range.setBytes(bytes);
  }

  CacheConfig config_;
  std::vector<uint8_t> arena_;
};

TEST_F(StepCheckTest, AcceptsWhatIsRight) {
  capnp::MallocMessageBuilder message;
  auto request = message.initRoot<api::StepRequest>();
  Fill(request, {1, 3});
  request.setWantLse(true);
  auto step = Check(request.asReader());
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->layer, 1);
  EXPECT_EQ(step->tokens, 4u);
  EXPECT_EQ(step->entries[1].sequence, 11u);
  EXPECT_EQ(step->entries[1].position, 100u);
  EXPECT_EQ(step->entries[1].tokens, 3);
  EXPECT_TRUE(step->append());
  EXPECT_TRUE(step->attend());
  EXPECT_TRUE(step->lse_inline);
  EXPECT_EQ(step->k.bytes.size(), 4 * kKvRow);
  EXPECT_EQ(step->q.bytes.size(), 4 * kQRow);
  EXPECT_EQ(step->out_bytes, 4 * kQRow);
  EXPECT_EQ(step->lse_bytes, 4 * kLseRow);
  EXPECT_EQ(step->multiply_adds_max, (1 * 1 + 3 * 103) * uint64_t{2} * kQueryHeads * kHeadDim);
}

TEST_F(StepCheckTest, AcceptsArenas) {
  EXPECT_EQ(FieldAfter([](auto request) {
              SetArena(request.initQ(), 3, kArenaBytes - 4 * kQRow, 4 * kQRow);
              SetArena(request.initOut(), 3, 0, 4 * kQRow);
              SetArena(request.initLse(), 3, 64, 4 * kLseRow);
            }),
            "");
  // Half-precision queries are half as long.
  EXPECT_EQ(FieldAfter([](auto request) {
              request.setQDtype(api::DType::BFLOAT16);
              SetArena(request.initQ(), 3, 0, 2 * kQRow);
            }),
            "");
  EXPECT_EQ(FieldAfter([](auto request) { request.initQ().setNone(); }), "");
  EXPECT_EQ(FieldAfter([](auto request) {
              request.initK().setNone();
              request.initV().setNone();
            }),
            "");
}

TEST_F(StepCheckTest, ErrorsNameTheField) {
  using R = api::StepRequest::Builder;
  EXPECT_EQ(FieldAfter([](R r) { r.setLayer(kLayers); }), "layer");
  EXPECT_EQ(FieldAfter([](R r) { r.setLayer(UINT32_MAX); }), "layer");
  EXPECT_EQ(FieldAfter([](R r) { r.setScale(std::numeric_limits<float>::quiet_NaN()); }), "scale");
  EXPECT_EQ(FieldAfter([](R r) { r.setScale(std::numeric_limits<float>::infinity()); }), "scale");
  EXPECT_EQ(FieldAfter([](R r) { r.setScale(-1); }), "scale");
  EXPECT_EQ(FieldAfter([](R r) { r.setQDtype(static_cast<api::DType>(9)); }), "qDtype");
  EXPECT_EQ(FieldAfter([](R r) { r.initEntries(0); }), "entries");
  EXPECT_EQ(FieldAfter([](R r) { r.initEntries(limits::kStepEntriesMax + 1); }), "entries");
  EXPECT_EQ(FieldAfter([](R r) { r.getEntries()[1].setSequenceId(20); }), "entries[1].sequenceId");
  EXPECT_EQ(FieldAfter([](R r) { r.getEntries()[1].setPosition(UINT64_MAX); }), "entries[1].position");
  EXPECT_EQ(FieldAfter([](R r) { r.getEntries()[0].setTokens(0); }), "entries[0].tokens");
  EXPECT_EQ(FieldAfter([](R r) { r.getEntries()[1].setTokens(UINT32_MAX); }), "entries[1].tokens");
  EXPECT_EQ(FieldAfter([](R r) { r.getEntries()[1].setTokens(limits::kStepTokensMax); }), "entries[1].tokens");
  EXPECT_EQ(FieldAfter([](R r) { r.getEntries()[1].setTokens(4); }), "k.inline");
  EXPECT_EQ(FieldAfter([](R r) { r.initV().initInline(4 * kKvRow - 2); }), "v.inline");
  EXPECT_EQ(FieldAfter([](R r) { r.initV().setNone(); }), "v");
  EXPECT_EQ(FieldAfter([](R r) { r.initK().setNone(); }), "k");
  EXPECT_EQ(FieldAfter([](R r) { r.initQ().initInline(4 * kQRow + 4); }), "q.inline");
  EXPECT_EQ(FieldAfter([](R r) {
              r.initK().setNone();
              r.initV().setNone();
              r.initQ().setNone();
            }),
            "q");
  EXPECT_EQ(FieldAfter([](R r) { r.initOut().initInline(4 * kQRow); }), "out");
  EXPECT_EQ(FieldAfter([](R r) { r.initLse().initInline(4 * kLseRow); }), "lse");
  EXPECT_EQ(FieldAfter([](R r) {
              r.initQ().setNone();
              SetArena(r.initOut(), 3, 0, 4 * kQRow);
            }),
            "out");
  EXPECT_EQ(FieldAfter([](R r) {
              r.initQ().setNone();
              r.setWantLse(true);
            }),
            "lse");
}

TEST_F(StepCheckTest, QueriesAreFinite) {
  struct Value {
    api::DType dtype;
    size_t bytes;
    uint32_t bits;
    bool finite;
  };
  const Value values[] = {
      {api::DType::FLOAT32, 4, 0x7fc00000, false}, {api::DType::FLOAT32, 4, 0x7f800001, false},
      {api::DType::FLOAT32, 4, 0xff800000, false}, {api::DType::FLOAT32, 4, 0x7f7fffff, true},
      {api::DType::FLOAT32, 4, 0x00000001, true},  {api::DType::FLOAT16, 2, 0x7c00, false},
      {api::DType::FLOAT16, 2, 0xfe01, false},     {api::DType::FLOAT16, 2, 0xfbff, true},
      {api::DType::BFLOAT16, 2, 0xff80, false},    {api::DType::BFLOAT16, 2, 0x7fc0, false},
      {api::DType::BFLOAT16, 2, 0x7f7f, true},
  };
  const size_t row = kQueryHeads * kHeadDim;
  for (const Value& value : values) {
    for (const bool in_arena : {false, true}) {
      // Elements of the first and last token, and one in the middle: token 1 of entry 1.
      for (const auto& [at, field] : {std::pair<size_t, const char*>{0, "entries[0].q[token 0][head 0][channel 0]"},
                                      {2 * row + 5 * kHeadDim + 33, "entries[1].q[token 1][head 5][channel 33]"},
                                      {4 * row - 1, "entries[1].q[token 2][head 7][channel 63]"}}) {
        std::fill(arena_.begin(), arena_.end(), 0);
        const std::string got = FieldAfter([&, at = at](api::StepRequest::Builder r) {
          r.setQDtype(value.dtype);
          const size_t bytes = 4 * row * value.bytes;
          uint8_t* q = arena_.data() + 64;
          if (in_arena) {
            SetArena(r.initQ(), 3, 64, bytes);
          } else {
            q = r.initQ().initInline(bytes).begin();
          }
          std::memcpy(q + at * value.bytes, &value.bits, value.bytes);
        });
        EXPECT_EQ(got, value.finite ? "" : field) << std::hex << value.bits << (in_arena ? " in an arena" : " inline");
      }
    }
  }
}

// The event loop looks at so many at once; the rest of a larger step are for workers, in parts.
TEST_F(StepCheckTest, ManyQueriesAreLeftToOthers) {
  const size_t row = kQueryHeads * kHeadDim, count = kQueryBytesAtOnceMax / (4 * row);
  for (const size_t tokens : {count, count + 1}) {
    capnp::MallocMessageBuilder message;
    auto request = message.initRoot<api::StepRequest>();
    auto entries = request.initEntries(2);
    entries[0].setSequenceId(10);
    entries[0].setTokens(1);
    entries[1].setSequenceId(11);
    entries[1].setTokens(static_cast<uint32_t>(tokens) - 1);
    auto q = request.initQ().initInline(4 * row * tokens);
    const uint32_t infinity = 0xff800000;
    std::memcpy(q.end() - 4, &infinity, 4);
    const absl::StatusOr<CheckedStep> step = Check(request);
    if (tokens == count) {
      EXPECT_FALSE(step.ok());
      continue;
    }
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_TRUE(step->queries_unchecked);
    const absl::Span<const uint8_t> all = step->q.bytes;
    EXPECT_TRUE(CheckQueries(*step, config_, all.first(4 * row * count)).ok());
    EXPECT_EQ(DetailOf(CheckQueries(*step, config_, all.subspan(4 * row * count))).field,
              absl::StrCat("entries[1].q[token ", tokens - 2, "][head 7][channel 63]"));
  }
}

TEST_F(StepCheckTest, ArenaRangesStayInside) {
  using R = api::StepRequest::Builder;
  EXPECT_EQ(FieldAfter([](R r) { SetArena(r.initQ(), 4, 0, 4 * kQRow); }), "q.arena.id");
  EXPECT_EQ(FieldAfter([](R r) { SetArena(r.initQ(), 3, 32, 4 * kQRow); }), "q.arena.offset");
  EXPECT_EQ(FieldAfter([](R r) { SetArena(r.initQ(), 3, 0, 4 * kQRow - 1); }), "q.arena.bytes");
  EXPECT_EQ(FieldAfter([](R r) { SetArena(r.initQ(), 3, kArenaBytes - 4 * kQRow + 64, 4 * kQRow); }), "q.arena.offset");
  EXPECT_EQ(FieldAfter([](R r) { SetArena(r.initOut(), 3, UINT64_MAX - 63, 4 * kQRow); }), "out.arena.offset");
  // The largest step's q does not fit the arena, whatever its offset.
  EXPECT_EQ(FieldAfter([](R r) {
              r.getEntries()[1].setTokens(limits::kStepTokensMax - 1);
              r.initK().setNone();
              r.initV().setNone();
              SetArena(r.initQ(), 3, 0, limits::kStepTokensMax * kQRow);
            }),
            "q.arena.offset");
}

// Inline output is bounded by what a message may carry, however the queries came.
TEST_F(StepCheckTest, LargeInlineOutputIsRefused) {
  arena_.resize(64 << 20);
  EXPECT_EQ(FieldAfter([](api::StepRequest::Builder r) {
              const uint64_t tokens = limits::kReplyBytesMax / kQRow + 1;
              r.getEntries()[1].setTokens(tokens - 1);
              r.initK().setNone();
              r.initV().setNone();
              SetArena(r.initQ(), 3, 0, tokens * kQRow);
            }),
            "out");
}

TEST_F(StepCheckTest, WorkBoundSaturates) {
  config_.query_heads = 16384;
  config_.layout.kv_heads = 256;
  config_.layout.head_dim = 256;
  capnp::MallocMessageBuilder message;
  auto request = message.initRoot<api::StepRequest>();
  auto entries = request.initEntries(1);
  entries[0].setSequenceId(10);
  entries[0].setPosition(limits::kPositionMax);
  entries[0].setTokens(limits::kStepTokensMax);
  auto step = Check(request.asReader());  // refused later: no tensor at all
  EXPECT_FALSE(step.ok());
  EXPECT_EQ(DetailOf(step.status()).field, "q");
}

// Mutated messages: an error, an exception of Cap'n Proto, or spans that stay inside the message and the arena.
TEST_F(StepCheckTest, MutationsStayInside) {
  std::mt19937_64 random(3);
  capnp::MallocMessageBuilder message;
  auto request = message.initRoot<api::StepRequest>();
  Fill(request, {1, 3});
  SetArena(request.initOut(), 3, 128, 4 * kQRow);
  const kj::Array<capnp::word> good = capnp::messageToFlatArray(message);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    kj::Array<capnp::word> words = kj::heapArray<capnp::word>(good.asPtr());
    auto bytes = words.asBytes();
    // Mostly the head, where the structure is.
    const size_t range = random() % 4 == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 320);
    bytes[random() % range] ^= uint8_t(1 << random() % 8);
    KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                   capnp::FlatArrayMessageReader reader(words);
                   auto step = Check(reader.getRoot<api::StepRequest>());
                   if (!step.ok()) return;
                   ++accepted;
                   for (const StepTensor* tensor : {&step->k, &step->v, &step->q, &step->out, &step->lse}) {
                     if (!tensor->given()) continue;
                     const bool arena = tensor->where == StepTensor::Where::kArena;
                     const uint8_t* begin = arena ? arena_.data() : bytes.begin();
                     const uint8_t* end = arena ? arena_.data() + arena_.size() : bytes.end();
                     ASSERT_GE(tensor->bytes.data(), begin);
                     ASSERT_LE(tensor->bytes.data() + tensor->bytes.size(), end);
                   }
                   for (const AttendEntry& entry : step->entries) ASSERT_GE(entry.tokens, 1);
                 })) {
      (void)exception;
    }
  }
  EXPECT_GT(accepted, 100);
}

TEST_F(StepCheckTest, ReadsSayWhereTheirRowsGo) {
  capnp::MallocMessageBuilder message;
  auto request = message.initRoot<api::ReadRequest>();
  const auto check = [&] {
    return CheckRead(
        config_, request.asReader(),
        [this](uint32_t id) { return id == 3 ? absl::MakeSpan(arena_) : absl::Span<uint8_t>(); },
        [](SequenceId sequence) { return sequence >= 10 && sequence < 20; });
  };
  const auto field = [&] { return DetailOf(check().status()).field; };
  request.setLayer(kLayers - 1);
  auto entries = request.initEntries(2);
  for (uint32_t i = 0; i < 2; ++i) {
    entries[i].setSequenceId(10 + i);
    entries[i].setPosition(1000 * i);
    entries[i].setTokens(3 + i);
  }
  const size_t bytes = 7 * kKvRow;
  auto read = check();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->tokens, 7u);
  EXPECT_EQ(read->bytes, bytes);
  EXPECT_FALSE(read->k.given() || read->v.given());
  SetArena(request.initK(), 3, 128, bytes);
  SetArena(request.initV(), 3, kArenaBytes - bytes, bytes);
  read = check();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->k.bytes.data(), arena_.data() + 128);
  EXPECT_EQ(read->v.bytes.data(), arena_.data() + kArenaBytes - bytes);
  EXPECT_EQ(read->v.bytes.size(), bytes);
  SetArena(request.initV(), 3, kArenaBytes - bytes + 64, bytes);
  EXPECT_EQ(field(), "v.arena.offset");
  SetArena(request.initV(), 3, UINT64_MAX - 63, bytes);
  EXPECT_EQ(field(), "v.arena.offset");
  SetArena(request.initV(), 3, 4096 + 32, bytes);
  EXPECT_EQ(field(), "v.arena.offset");
  // Not over one another, by a byte.
  SetArena(request.initV(), 3, 128, bytes);
  EXPECT_EQ(field(), "v.arena.offset");
  SetArena(request.initV(), 3, 128 + bytes - 64, bytes);
  EXPECT_EQ(field(), "v.arena.offset");
  SetArena(request.initV(), 3, 128 + bytes, bytes);
  EXPECT_TRUE(check().ok());
  SetArena(request.initV(), 3, 128 + bytes, bytes - 2);
  EXPECT_EQ(field(), "v.arena.bytes");
  SetArena(request.initV(), 4, 128 + bytes, bytes);
  EXPECT_EQ(field(), "v.arena.id");
  request.initV().setInline(kj::arrayPtr(arena_.data(), bytes));
  EXPECT_EQ(field(), "v");
  // A reply has room for 32 MiB: that of 70,003 tokens of K, not of V, too.
  request.initV();
  entries[1].setTokens(70000);
  SetArena(request.initK(), 3, 0, 70003 * kKvRow);
  EXPECT_EQ(field(), "k.arena.offset");  // the arena is of 1 MiB
  request.initK();
  EXPECT_EQ(field(), "k");
  entries[1].setTokens(32000);
  EXPECT_TRUE(check().ok());
  entries[1].setTokens(limits::kStepTokensMax);
  EXPECT_EQ(field(), "entries[1].tokens");
  request.setLayer(kLayers);
  EXPECT_EQ(field(), "layer");
}

TEST_F(StepCheckTest, QueryRowsAreOfTheCachesShape) {
  const size_t row = size_t{kQueryHeads} * kHeadDim * 2;
  capnp::MallocMessageBuilder message;
  auto request = message.initRoot<api::ExtendRequest>();
  const auto check = [&] { return CheckQueryRows(config_, request.asReader().getQueries()); };
  const auto field = [&]() -> std::string {
    const auto rows = check();
    return rows.ok() ? "" : DetailOf(rows.status()).field;
  };
  EXPECT_TRUE(check().ok());
  EXPECT_TRUE(check()->empty());
  auto queries = request.initQueries(limits::kQueryRowsMax);
  for (uint32_t i = 0; i < queries.size(); ++i) {
    queries[i].setLayer(i % kLayers);
    queries[i].initQ(row)[7] = static_cast<kj::byte>(i);
  }
  const auto rows = check();
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), limits::kQueryRowsMax);
  for (uint32_t i = 0; i < rows->size(); ++i) {
    EXPECT_EQ((*rows)[i].layer, static_cast<int>(i % kLayers));
    EXPECT_EQ((*rows)[i].q.size(), row);
    EXPECT_EQ((*rows)[i].q[7], i);
  }
  queries[3].setLayer(kLayers);
  EXPECT_EQ(field(), "queries[3].layer");
  queries[3].setLayer(UINT32_MAX);
  EXPECT_EQ(field(), "queries[3].layer");
  queries[3].setLayer(0);
  for (const size_t bytes : {size_t{0}, row - 1, row + 1, 2 * row}) {
    queries[5].initQ(static_cast<uint32_t>(bytes));
    EXPECT_EQ(field(), "queries[5].q") << bytes;
  }
  request.initQueries(limits::kQueryRowsMax + 1);
  EXPECT_EQ(field(), "queries");
}

}  // namespace
}  // namespace kvmanager
