// Requests that are understood but wrong: a code, a field, its value and its bound; nothing has changed; the connection
// lives.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/raw_rpc.h"

namespace kvmanager::testing {
namespace {

constexpr int kInvalid = 3, kNotFound = 5, kPrecondition = 9;
const client::CacheOptions kShape = SmallCache("hack:k_bits=3,v_bits=2", 1);

class BadRequestTest : public ::testing::Test {
 public:
  ~BadRequestTest() noexcept override {}  // KJ's capabilities may throw in theirs

 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start({}));
    raw_ = std::make_unique<RawRpc>();
    connection_ = raw_->Connect(daemon_->admin());  // with Admin, besides all else
    ASSERT_NE(connection_, nullptr);
    cache_ = OpenCache(
        *connection_, [](api::CacheConfig::Builder) {}, nullptr);
    sequence_ = CreateSequence(cache_, &sequence_id_);
    ASSERT_EQ(Append(cache_, sequence_id_, 0, 0, 100).getCode(), 0);
    ASSERT_EQ(Append(cache_, sequence_id_, 1, 0, 100).getCode(), 0);
    // The full page of each layer is a sink: its encoding is given up a moment later, which would look like a change.
    EXPECT_TRUE(Eventually([this] {
      const auto page = Scrape(*daemon_);
      return page.ok() && page->Sum("kvmanager_sink_pages_total") == 2;
    }));
  }
  void TearDown() override {
    sequence_ = nullptr;
    cache_ = nullptr;
    connection_.reset();
    raw_.reset();
  }

  /// A copy of a reply's status that outlives the reply.
  api::Status::Reader Keep(api::Status::Reader status) {
    kept_.push_back(std::make_unique<capnp::MallocMessageBuilder>());
    kept_.back()->setRoot(status);
    return kept_.back()->getRoot<api::Status>().asReader();
  }
  api::Cache::Client OpenCache(RawRpc::Connection& connection,
                               const std::function<void(api::CacheConfig::Builder)>& edit,
                               api::Status::Reader* status) {
    auto request = connection.daemon.openCacheRequest();
    FillConfig(kShape, request.initConfig());
    edit(request.getConfig());
    auto reply = request.send().wait(raw_->wait());
    if (status != nullptr) {
      *status = Keep(reply.getStatus());
    } else {
      EXPECT_EQ(reply.getStatus().getCode(), 0) << reply.getStatus().getMessage().cStr();
    }
    return reply.getCache();
  }
  api::Sequence::Client CreateSequence(api::Cache::Client cache, uint64_t* id) {
    auto request = cache.createSequencesRequest();
    request.initRequests(1);
    auto reply = request.send().wait(raw_->wait());
    EXPECT_EQ(reply.getReplies().size(), 1u);
    *id = reply.getReplies()[0].getSequenceId();
    return reply.getReplies()[0].getSequence();
  }
  api::Status::Reader Step(api::Cache::Client cache, const std::function<void(api::StepRequest::Builder)>& fill) {
    auto request = cache.stepRequest();
    fill(request.initRequest());
    auto reply = request.send().wait(raw_->wait());
    return Keep(reply.getReply().getStatus());
  }
  /// A good append of `tokens` tokens to `layer`, then edited.
  void FillAppend(api::StepRequest::Builder request, uint64_t id, int layer, uint64_t position, int tokens) {
    request.setLayer(layer);
    auto entry = request.initEntries(1)[0];
    entry.setSequenceId(id);
    entry.setPosition(position);
    entry.setTokens(tokens);
    const std::vector<uint8_t> k = source_.K(layer, position, tokens), v = source_.V(layer, position, tokens);
    request.initK().setInline(kj::arrayPtr(k.data(), k.size()));
    request.initV().setInline(kj::arrayPtr(v.data(), v.size()));
  }
  void FillQuery(api::StepRequest::Builder request, int layer, uint64_t position, int tokens) {
    const std::vector<float> q = source_.Q(layer, position, tokens);
    request.initQ().setInline(kj::arrayPtr(reinterpret_cast<const kj::byte*>(q.data()), q.size() * 4));
  }
  api::Status::Reader Append(api::Cache::Client cache, uint64_t id, int layer, uint64_t position, int tokens) {
    return Step(cache, [&](api::StepRequest::Builder request) { FillAppend(request, id, layer, position, tokens); });
  }
  uint64_t Tokens(api::Sequence::Client& sequence) {
    return sequence.infoRequest().send().wait(raw_->wait()).getInfo().getTokens();
  }

  /// Runs `request`, expects the refusal, and that nothing changed and the connection lives.
  void ExpectRefused(const char* what, int code, const char* field,
                     const std::function<api::Status::Reader()>& request) {
    SCOPED_TRACE(what);
    const std::string before = raw_->Fingerprint(*connection_);
    EXPECT_TRUE(Refuses(request(), code, field));
    EXPECT_EQ(raw_->Fingerprint(*connection_), before);
  }
  /// An append of 5 tokens with a query, edited by `edit`.
  void ExpectStepRefused(const char* what, int code, const char* field,
                         const std::function<void(api::StepRequest::Builder)>& edit) {
    ExpectRefused(what, code, field, [&] {
      return Step(cache_, [&](api::StepRequest::Builder request) {
        FillAppend(request, sequence_id_, 0, 100, 5);
        FillQuery(request, 0, 100, 5);
        edit(request);
      });
    });
  }

  const Source source_{17, Kind::kNormal, kShape};
  std::unique_ptr<DaemonProcess> daemon_;
  std::vector<std::unique_ptr<capnp::MallocMessageBuilder>> kept_;
  std::unique_ptr<RawRpc> raw_;
  std::unique_ptr<RawRpc::Connection> connection_;
  api::Cache::Client cache_ = nullptr;
  api::Sequence::Client sequence_ = nullptr;
  uint64_t sequence_id_ = 0;
};

TEST_F(BadRequestTest, HelloComesFirstAndNamesItsVersion) {
  auto silent = raw_->Connect(daemon_->listen(), /*hello=*/false);
  api::Status::Reader status;
  OpenCache(
      *silent, [](api::CacheConfig::Builder) {}, &status);
  EXPECT_EQ(status.getCode(), kPrecondition);
  auto admin = silent->daemon.adminRequest().send().wait(raw_->wait());
  EXPECT_EQ(admin.getError().getCode(), kPrecondition);
  EXPECT_FALSE(admin.hasAdmin());
  auto request = silent->daemon.helloRequest();
  request.initRequest().setApiMajor(7);
  auto reply = request.send().wait(raw_->wait());
  EXPECT_TRUE(Refuses(reply.getReply().getStatus(), kPrecondition, "apiMajor"));
  auto again = silent->daemon.helloRequest();
  again.initRequest().setApiMajor(api::API_MAJOR);
  EXPECT_EQ(again.send().wait(raw_->wait()).getReply().getStatus().getCode(), 0) << "the connection lives";
}

TEST_F(BadRequestTest, EveryFieldOfACachesGeometryHasItsBounds) {
  struct Field {
    const char* name;
    std::vector<uint32_t> bad;
    void (*set)(api::CacheConfig::Builder, uint32_t);
  };
  // 65536 + n: a field that is narrowed to 16 bits before it is checked would take it for n.
  const std::vector<Field> fields = {
      {"layers", {0, 1025, 0x80000000u, UINT32_MAX}, [](auto c, uint32_t x) { c.setLayers(x); }},
      {"kv", {0, 257, 65536 + 2, UINT32_MAX}, [](auto c, uint32_t x) { c.setKvHeads(x); }},
      {"query", {0, 1, 3, 2 * 64 + 2, 65536 + 4, UINT32_MAX}, [](auto c, uint32_t x) { c.setQueryHeads(x); }},
      {"head", {0, 8, 63, 272, 65536 + 64, UINT32_MAX}, [](auto c, uint32_t x) { c.setHeadDim(x); }},
      {"page", {0, 8, 65, 272, 65536 + 64, UINT32_MAX}, [](auto c, uint32_t x) { c.setPageTokens(x); }},
      {"tensor", {0, 1025, UINT32_MAX}, [](auto c, uint32_t x) { c.setTensorParallelSize(x); }},
      {"tensor", {1, 5, UINT32_MAX}, [](auto c, uint32_t x) { c.setTensorParallelRank(x); }},
      {"lag", {65, 0x80000000u, UINT32_MAX}, [](auto c, uint32_t x) { c.setLagPages(x); }},
      {"dtype", {2, 77, 65535}, [](auto c, uint32_t x) { c.setDtype(static_cast<api::DType>(x)); }},
  };
  for (const Field& field : fields) {
    for (const uint32_t bad : field.bad) {
      ExpectRefused(absl::StrCat(field.name, " ", bad).c_str(), kInvalid, field.name, [&] {
        api::Status::Reader status;
        OpenCache(
            *connection_, [&](api::CacheConfig::Builder c) { field.set(c, bad); }, &status);
        return status;
      });
    }
  }
  struct Text {
    const char* name;
    std::vector<std::string> bad;
    void (*set)(api::CacheConfig::Builder, const std::string&);
  };
  const std::string long_text(257, 'x'), control("a\nlayers=3");
  const std::vector<Text> texts = {
      {"model", {"", long_text, control}, [](auto c, const std::string& x) { c.setModel(x); }},
      {"revision", {long_text, control}, [](auto c, const std::string& x) { c.setRevision(x); }},
      {"tenant", {long_text, control}, [](auto c, const std::string& x) { c.setTenant(x); }},
      {"rope", {long_text, control}, [](auto c, const std::string& x) { c.setRope(x); }},
      {"calibration", {long_text, control, "xyz"}, [](auto c, const std::string& x) { c.setCalibrationDigest(x); }},
      {"codec", {std::string(5000, 'x'), ""}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"codec", {"unheard-of", "hack,k_bits=3", "RAW"}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"k_bits",
       {"hack:k_bits=5", "hack:k_bits=", "hack:k_bits=-1", "hack:k_bits=99999999999999999999"},
       [](auto c, const std::string& x) { c.setCodec(x); }},
      {"v_bits", {"hack:v_bits=0", "hack:v_bits=two"}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"part", {"hack:part=48", "hack:part=128"}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"meta", {"hack:meta=4"}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"k_axis", {"hack:k_axis=time"}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"rounding", {"hack:rounding=up"}, [](auto c, const std::string& x) { c.setCodec(x); }},
      {"parameter", {"hack:sideways=1", "raw:sideways=1"}, [](auto c, const std::string& x) { c.setCodec(x); }},
  };
  for (const Text& text : texts) {
    for (const std::string& bad : text.bad) {
      ExpectRefused(absl::StrCat(text.name, " = ", bad.substr(0, 60)).c_str(), kInvalid, text.name, [&] {
        api::Status::Reader status;
        OpenCache(
            *connection_, [&](api::CacheConfig::Builder c) { text.set(c, bad); }, &status);
        return status;
      });
    }
  }
}

TEST_F(BadRequestTest, StepsNameWhatIsWrong) {
  ExpectStepRefused("layer", kInvalid, "layer", [](auto r) { r.setLayer(2); });
  ExpectStepRefused("layer", kInvalid, "layer", [](auto r) { r.setLayer(UINT32_MAX); });
  ExpectStepRefused("no entries", kInvalid, "entries", [](auto r) { r.initEntries(0); });
  ExpectStepRefused("too many entries", kInvalid, "entries", [](auto r) { r.initEntries(16385); });
  ExpectStepRefused("unknown sequence", kNotFound, "equence",
                    [](auto r) { r.getEntries()[0].setSequenceId(1u << 30); });
  ExpectStepRefused("no tokens", kInvalid, "tokens", [](auto r) { r.getEntries()[0].setTokens(0); });
  ExpectStepRefused("huge tokens", kInvalid, "tokens", [](auto r) { r.getEntries()[0].setTokens(UINT32_MAX); });
  ExpectStepRefused("more tokens than tensors", kInvalid, "k", [](auto r) { r.getEntries()[0].setTokens(6); });
  ExpectStepRefused("position behind", kPrecondition, "position", [](auto r) { r.getEntries()[0].setPosition(99); });
  ExpectStepRefused("position ahead", kPrecondition, "position", [](auto r) { r.getEntries()[0].setPosition(101); });
  ExpectStepRefused("position beyond all", kInvalid, "position",
                    [](auto r) { r.getEntries()[0].setPosition(UINT64_MAX); });
  const std::vector<kj::byte> one(1, 0);
  ExpectStepRefused("short k", kInvalid, "k", [&](auto r) { r.getK().setInline(kj::arrayPtr(one.data(), 1)); });
  ExpectStepRefused("short v", kInvalid, "v", [&](auto r) { r.getV().setInline(kj::arrayPtr(one.data(), 1)); });
  ExpectStepRefused("empty v", kInvalid, "v", [&](auto r) { r.getV().setInline(nullptr); });
  ExpectStepRefused("short q", kInvalid, "q", [&](auto r) { r.getQ().setInline(kj::arrayPtr(one.data(), 1)); });
  ExpectStepRefused("k alone", kInvalid, "v", [](auto r) { r.getV().setNone(); });
  ExpectStepRefused("v alone", kInvalid, "k", [](auto r) { r.getK().setNone(); });
  ExpectStepRefused("nothing to do", kInvalid, "q", [](auto r) {
    r.getK().setNone();
    r.getV().setNone();
    r.getQ().setNone();
  });
  ExpectStepRefused("q dtype", kInvalid, "Dtype", [](auto r) { r.setQDtype(static_cast<api::DType>(3)); });
  ExpectStepRefused("q dtype and size", kInvalid, "q", [](auto r) { r.setQDtype(api::DType::FLOAT16); });
  ExpectStepRefused("scale NaN", kInvalid, "scale", [](auto r) { r.setScale(NAN); });
  ExpectStepRefused("scale infinite", kInvalid, "scale", [](auto r) { r.setScale(INFINITY); });
  ExpectStepRefused("scale negative", kInvalid, "scale", [](auto r) { r.setScale(-1); });
  ExpectStepRefused("out inline", kInvalid, "out", [&](auto r) {
    const std::vector<kj::byte> bytes(5 * 4 * 64 * 4);
    r.initOut().setInline(kj::arrayPtr(bytes.data(), bytes.size()));
  });
  ExpectStepRefused("no such arena", kNotFound, "arena", [](auto r) {
    auto arena = r.initK().initArena();
    arena.setId(12345);
    arena.setBytes(5 * 2 * 64 * 2);
  });
  // Attention alone, beyond the end.
  ExpectRefused("query beyond the end", kInvalid, "tokens", [&] {
    return Step(cache_, [&](api::StepRequest::Builder r) {
      auto entry = r.initEntries(1)[0];
      entry.setSequenceId(sequence_id_);
      entry.setPosition(98);
      entry.setTokens(3);
      FillQuery(r, 0, 98, 3);
    });
  });
  EXPECT_EQ(Tokens(sequence_), 100u);
  EXPECT_EQ(Append(cache_, sequence_id_, 0, 100, 5).getCode(), 0) << "and a good one is taken";
}

TEST_F(BadRequestTest, ReadsNameWhatIsWrong) {
  const auto read = [&](const std::function<void(api::ReadRequest::Builder)>& edit) {
    auto request = cache_.readRequest();
    auto entry = request.initRequest().initEntries(1)[0];
    entry.setSequenceId(sequence_id_);
    entry.setPosition(10);
    entry.setTokens(90);
    edit(request.getRequest());
    auto reply = request.send().wait(raw_->wait());
    return Keep(reply.getReply().getStatus());
  };
  const auto refused = [&](const char* what, int code, const char* field,
                           const std::function<void(api::ReadRequest::Builder)>& edit) {
    ExpectRefused(what, code, field, [&] { return read(edit); });
  };
  refused("layer", kInvalid, "layer", [](auto r) { r.setLayer(2); });
  refused("layer", kInvalid, "layer", [](auto r) { r.setLayer(UINT32_MAX); });
  refused("no entries", kInvalid, "entries", [](auto r) { r.initEntries(0); });
  refused("too many entries", kInvalid, "entries", [](auto r) { r.initEntries(16385); });
  refused("unknown sequence", kNotFound, "entries[0].sequenceId",
          [](auto r) { r.getEntries()[0].setSequenceId(1u << 30); });
  refused("no tokens", kInvalid, "entries[0].tokens", [](auto r) { r.getEntries()[0].setTokens(0); });
  refused("beyond the end", kInvalid, "entries[0].tokens", [](auto r) { r.getEntries()[0].setTokens(91); });
  refused("more than a step", kInvalid, "entries[0].tokens",
          [](auto r) { r.getEntries()[0].setTokens((1 << 18) + 1); });
  refused("huge tokens", kInvalid, "entries[0].tokens", [](auto r) { r.getEntries()[0].setTokens(UINT32_MAX); });
  refused("behind the end", kInvalid, "entries[0].position", [](auto r) { r.getEntries()[0].setPosition(100); });
  refused("beyond all", kInvalid, "entries[0].position", [](auto r) { r.getEntries()[0].setPosition(UINT64_MAX); });
  refused("inline k", kInvalid, "k", [&](auto r) { r.initK().initInline(90 * 2 * 64 * 2); });
  refused("inline v", kInvalid, "v", [&](auto r) { r.initV().initInline(90 * 2 * 64 * 2); });
  refused("no such arena", kNotFound, "v.arena.id", [](auto r) {
    auto arena = r.initV().initArena();
    arena.setId(12345);
    arena.setBytes(90 * 2 * 64 * 2);
  });
  EXPECT_EQ(read([](auto) {}).getCode(), 0) << "and a good one is answered";
}

TEST_F(BadRequestTest, NaNAndInfinityAreRefusedWithTheirPlace) {
  const size_t row = size_t(kShape.kv_heads) * kShape.head_dim;
  for (const uint16_t bits : {0x7e00, 0x7c00, 0xfc00, 0x7c01, 0xffff}) {
    for (const bool in_v : {false, true}) {
      for (const size_t token : {size_t{0}, size_t{4}}) {
        ExpectStepRefused("not finite", kInvalid, in_v ? "v" : "k", [&](api::StepRequest::Builder r) {
          std::vector<uint8_t> bytes = in_v ? source_.V(0, 100, 5) : source_.K(0, 100, 5);
          const size_t element = token * row + 1 * kShape.head_dim + 33;
          memcpy(bytes.data() + element * 2, &bits, 2);
          (in_v ? r.getV() : r.getK()).setInline(kj::arrayPtr(bytes.data(), bytes.size()));
        });
      }
    }
  }
  // The place is in the message: token 3, head 1, channel 33.
  const api::Status::Reader status = Step(cache_, [&](api::StepRequest::Builder r) {
    FillAppend(r, sequence_id_, 0, 100, 5);
    std::vector<uint8_t> bytes = source_.K(0, 100, 5);
    const uint16_t nan = 0x7e00;
    memcpy(bytes.data() + (3 * row + kShape.head_dim + 33) * 2, &nan, 2);
    r.getK().setInline(kj::arrayPtr(bytes.data(), bytes.size()));
  });
  const std::string said = absl::StrCat(status.getMessage().cStr(), status.getField().cStr(), status.getValue().cStr());
  EXPECT_NE(said.find('3'), std::string::npos) << said;
  EXPECT_NE(said.find("33"), std::string::npos) << said;
  // Nor does a query come through, although it is not stored: the append that came with it has not happened.
  const size_t q_row = size_t(kShape.query_heads) * kShape.head_dim;
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    for (const size_t at : {size_t{0}, 3 * q_row + kShape.head_dim + 33, 5 * q_row - 1}) {
      const std::string place = absl::StrCat("entries[0].q[token ", at / q_row, "][head ", at % q_row / kShape.head_dim,
                                             "][channel ", at % kShape.head_dim, "]");
      ExpectStepRefused("query not finite", kInvalid, place.c_str(), [&](api::StepRequest::Builder r) {
        std::vector<float> q = source_.Q(0, 100, 5);
        q[at] = value;
        r.initQ().setInline(kj::arrayPtr(reinterpret_cast<const kj::byte*>(q.data()), q.size() * 4));
      });
    }
  }
  EXPECT_EQ(Append(cache_, sequence_id_, 0, 100, 5).getCode(), 0);
}

TEST_F(BadRequestTest, ABatchIsAllOrNothing) {
  uint64_t other_id = 0;
  api::Sequence::Client other = CreateSequence(cache_, &other_id);
  ASSERT_EQ(Append(cache_, other_id, 0, 0, 60).getCode(), 0);
  ASSERT_EQ(Append(cache_, other_id, 1, 0, 60).getCode(), 0);
  auto batch = [&](const std::function<void(api::StepRequest::Builder, std::vector<uint8_t>*)>& edit) {
    return Step(cache_, [&](api::StepRequest::Builder r) {
      r.setLayer(0);
      auto entries = r.initEntries(2);
      entries[0].setSequenceId(other_id);
      entries[0].setPosition(60);
      entries[0].setTokens(70);
      entries[1].setSequenceId(sequence_id_);
      entries[1].setPosition(100);
      entries[1].setTokens(1);
      std::vector<uint8_t> k = source_.K(0, 0, 71);
      const std::vector<uint8_t> v = source_.V(0, 0, 71);
      edit(r, &k);
      r.initK().setInline(kj::arrayPtr(k.data(), k.size()));
      r.initV().setInline(kj::arrayPtr(v.data(), v.size()));
    });
  };
  ExpectRefused("the last element of the last entry is NaN", kInvalid, "k", [&] {
    return batch([](api::StepRequest::Builder, std::vector<uint8_t>* k) { k->back() = k->at(k->size() - 2) = 0x7f; });
  });
  ExpectRefused("the second position", kPrecondition, "position", [&] {
    return batch([](api::StepRequest::Builder r, std::vector<uint8_t>*) { r.getEntries()[1].setPosition(7); });
  });
  ExpectRefused("the second sequence", kNotFound, "equence", [&] {
    return batch([](api::StepRequest::Builder r, std::vector<uint8_t>*) { r.getEntries()[1].setSequenceId(0); });
  });
  const api::Status::Reader twice = batch([&](api::StepRequest::Builder r, std::vector<uint8_t>*) {
    r.getEntries()[1].setSequenceId(other_id);
    r.getEntries()[1].setPosition(60);
  });
  EXPECT_NE(twice.getCode(), 0) << "one sequence twice in an append";
  EXPECT_EQ(batch([](api::StepRequest::Builder, std::vector<uint8_t>*) {}).getCode(), 0);
}

TEST_F(BadRequestTest, AnotherConnectionsNamesAreUnknown) {
  auto stranger = raw_->Connect(daemon_->listen());
  ASSERT_NE(stranger, nullptr);
  api::Cache::Client same = OpenCache(
      *stranger, [](api::CacheConfig::Builder) {}, nullptr);
  const std::string before = raw_->Fingerprint(*connection_);
  EXPECT_TRUE(Refuses(Append(same, sequence_id_, 0, 100, 5), kNotFound, "equence"));
  // Nor one's own in another cache.
  api::Cache::Client other = OpenCache(
      *connection_, [](api::CacheConfig::Builder c) { c.setTenant("other"); }, nullptr);
  EXPECT_TRUE(Refuses(Append(other, sequence_id_, 0, 100, 5), kNotFound, "equence"));
  // Nor another's arena.
  auto arena_request = connection_->daemon.createArenaRequest();
  arena_request.setBytes(1 << 20);
  auto arena = arena_request.send().wait(raw_->wait());
  ASSERT_EQ(arena.getStatus().getCode(), 0);
  uint64_t theirs = 0;
  api::Sequence::Client their_sequence = CreateSequence(same, &theirs);
  EXPECT_TRUE(Refuses(Step(same,
                           [&](api::StepRequest::Builder r) {
                             FillAppend(r, theirs, 0, 0, 5);
                             auto range = r.initK().initArena();
                             range.setId(arena.getId());
                             range.setBytes(5 * 2 * 64 * 2);
                           }),
                      kNotFound, "arena"));
  EXPECT_EQ(Tokens(sequence_), 100u);
}

// All connections here are one user's, who has at most three quarters.
TEST_F(BadRequestTest, ArenasOfAUsersConnectionsTogetherAreBounded) {
  constexpr uint64_t kMost = (1 << 20) / 4 * 3;
  DaemonOptions options;
  options.more_flags = {"--arena-bytes", "1MiB"};
  ASSERT_OK_AND_ASSIGN(const auto daemon, DaemonProcess::Start(options));
  auto one = raw_->Connect(daemon->listen()), two = raw_->Connect(daemon->listen());
  const auto create = [&](RawRpc::Connection& connection, uint64_t bytes) {
    auto request = connection.daemon.createArenaRequest();
    request.setBytes(bytes);
    return request.send().wait(raw_->wait());
  };
  constexpr int kExhausted = 8;
  EXPECT_TRUE(Refuses(create(*one, kMost + 4096).getStatus(), kExhausted, "this user"));
  {
    auto arena = create(*one, kMost - 4096);
    ASSERT_EQ(arena.getStatus().getCode(), 0);
    EXPECT_TRUE(Refuses(create(*two, 8192).getStatus(), kExhausted, "this user"));
    EXPECT_EQ(create(*two, 4096).getStatus().getCode(), 0);
  }
  EXPECT_TRUE(Eventually([&] { return create(*two, kMost).getStatus().getCode() == 0; })) << "given back";
  one.reset();
  two.reset();
}

TEST_F(BadRequestTest, ArenasHaveBoundsAndCannotBeShrunk) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{100}, uint64_t{4097}, (uint64_t{1} << 30) + 4096, UINT64_MAX}) {
    ExpectRefused(absl::StrCat("arena of ", bytes).c_str(), kInvalid, "bytes", [&] {
      auto request = connection_->daemon.createArenaRequest();
      request.setBytes(bytes);
      return Keep(request.send().wait(raw_->wait()).getStatus());
    });
  }
  constexpr uint64_t kBytes = 1 << 20;
  auto request = connection_->daemon.createArenaRequest();
  request.setBytes(kBytes);
  auto made = request.send().wait(raw_->wait());
  ASSERT_EQ(made.getStatus().getCode(), 0) << made.getStatus().getMessage().cStr();
  const uint64_t k_bytes = 5 * 2 * 64 * 2;
  struct Range {
    const char* what;
    uint64_t offset, bytes;
    const char* field;
  };
  for (const Range& range :
       {Range{"unaligned", 32, k_bytes, "offset"}, Range{"past the end", kBytes - 64, k_bytes, "offset"},
        Range{"far past", uint64_t{1} << 40, k_bytes, "offset"}, Range{"wraps", UINT64_MAX - 63, k_bytes, "offset"},
        Range{"short", 0, k_bytes - 2, "bytes"}, Range{"long", 0, UINT64_MAX, "bytes"}}) {
    ExpectStepRefused(range.what, kInvalid, range.field, [&](api::StepRequest::Builder r) {
      auto arena = r.initK().initArena();
      arena.setId(made.getId());
      arena.setOffset(range.offset);
      arena.setBytes(range.bytes);
    });
  }
  // The memfd behind it is sealed.
  auto fd = made.getArena().getFd().wait(raw_->wait());
  KJ_IF_MAYBE (number, fd) {
    EXPECT_EQ(ftruncate(*number, 0), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(ftruncate(*number, kBytes * 2), -1);
    const int seals = fcntl(*number, F_GET_SEALS);
    EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    EXPECT_NE(fallocate(*number, FALLOC_FL_COLLAPSE_RANGE, 0, 4096), 0);
    struct stat now {};
    ASSERT_EQ(fstat(*number, &now), 0);
    EXPECT_EQ(uint64_t(now.st_size), kBytes);
    // A hole is zeros, not a fault in the daemon.
    (void)fallocate(*number, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kBytes);
    EXPECT_EQ(Step(cache_,
                   [&](api::StepRequest::Builder r) {
                     FillAppend(r, sequence_id_, 0, 100, 5);
                     auto arena = r.initK().initArena();
                     arena.setId(made.getId());
                     arena.setBytes(k_bytes);
                   })
                  .getCode(),
              0);
  } else {
    ADD_FAILURE() << "the arena came without a descriptor";
  }
}

TEST_F(BadRequestTest, SequencesNameWhatIsWrong) {
  ExpectRefused("crop beyond the end", kInvalid, "tokens", [&] {
    auto request = sequence_.cropRequest();
    request.setTokens(101);
    return Keep(request.send().wait(raw_->wait()).getStatus());
  });
  ExpectRefused("crop far beyond", kInvalid, "tokens", [&] {
    auto request = sequence_.cropRequest();
    request.setTokens(UINT64_MAX);
    return Keep(request.send().wait(raw_->wait()).getStatus());
  });
  const std::vector<kj::byte> digest(32, 7);
  for (const size_t key_bytes : {0, 31, 33}) {
    ExpectRefused("length of a key", kInvalid, "key", [&] {
      auto request = sequence_.publishRequest();
      auto names = request.initNames(1);
      names[0].setKey(kj::arrayPtr(std::vector<kj::byte>(key_bytes + 1).data(), key_bytes));
      names[0].setTokens(kj::arrayPtr(digest.data(), 32));
      return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
    });
    ExpectRefused("length of a token digest", kInvalid, "tokens", [&] {
      auto request = sequence_.publishRequest();
      auto names = request.initNames(1);
      names[0].setKey(kj::arrayPtr(digest.data(), 32));
      names[0].setTokens(kj::arrayPtr(std::vector<kj::byte>(key_bytes + 1).data(), key_bytes));
      return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
    });
  }
  ExpectRefused("more names than full blocks", kPrecondition, "names", [&] {
    auto request = sequence_.publishRequest();
    auto names = request.initNames(2);
    for (auto name : names) {
      name.setKey(kj::arrayPtr(digest.data(), 32));
      name.setTokens(kj::arrayPtr(digest.data(), 32));
    }
    return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
  });
  ExpectRefused("too many names", kInvalid, "names", [&] {
    auto request = sequence_.publishRequest();
    request.initNames(65537);
    return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
  });
  ExpectRefused("a blob that is too large", kInvalid, "blob", [&] {
    auto request = sequence_.handOffRequest();
    request.setPeer("127.0.0.1:9");
    request.initBlob((1 << 20) + 1);
    return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
  });
  ExpectRefused("a peer that is no address", kInvalid, "peer", [&] {
    auto request = sequence_.handOffRequest();
    request.setPeer(std::string(400, 'p'));
    return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
  });
  ExpectRefused("an unending timeout", kInvalid, "timeout", [&] {
    auto request = sequence_.handOffRequest();
    request.setPeer("127.0.0.1:9");
    request.setTimeoutMs(UINT32_MAX);
    return Keep(request.send().wait(raw_->wait()).getReply().getStatus());
  });
  ExpectRefused("too many requests", kInvalid, "requests", [&] {
    auto request = cache_.matchRequest();
    request.initRequests(4097);
    return Keep(request.send().wait(raw_->wait()).getStatus());
  });
  ExpectRefused("an unknown cache to purge", kNotFound, "cache", [&] {
    api::Admin::Client admin = connection_->daemon.adminRequest().send().wait(raw_->wait()).getAdmin();
    auto request = admin.purgeRequest();
    request.setCacheId(999);
    return Keep(request.send().wait(raw_->wait()).getStatus());
  });
  const auto explain = [&](const std::function<void(api::Admin::ExplainParams::Builder)>& edit) {
    api::Admin::Client admin = connection_->daemon.adminRequest().send().wait(raw_->wait()).getAdmin();
    auto request = admin.explainRequest();
    edit(request);
    return Keep(request.send().wait(raw_->wait()).getError());
  };
  ExpectRefused("an unknown cache to explain", kNotFound, "cache",
                [&] { return explain([](auto r) { r.setCacheId(999); }); });
  ExpectRefused("too many names to explain", kInvalid, "names",
                [&] { return explain([](auto r) { r.initNames(65537); }); });
  ExpectRefused("a name without a key to explain", kInvalid, "names[0].key",
                [&] { return explain([](auto r) { r.initNames(1); }); });
  EXPECT_EQ(explain([](auto) {}).getCode(), 0);
  const auto retain = [&](const std::function<void(api::Cache::RetainParams::Builder)>& edit) {
    auto request = cache_.retainRequest();
    edit(request);
    return Keep(request.send().wait(raw_->wait()).getStatus());
  };
  ExpectRefused("too many names to retain", kInvalid, "names",
                [&] { return retain([](auto r) { r.initNames(65537); }); });
  ExpectRefused("a name without a key to retain", kInvalid, "names[0].key",
                [&] { return retain([](auto r) { r.initNames(1); }); });
  for (const uint8_t priority : {101, 255}) {
    ExpectRefused("a priority beyond all", kInvalid, "priority",
                  [&] { return retain([&](auto r) { r.setPriority(priority); }); });
  }
  for (const uint64_t ttl_ms : {uint64_t{315360000001}, uint64_t{1} << 62, UINT64_MAX}) {
    ExpectRefused("a time beyond all", kInvalid, "ttlMs", [&] { return retain([&](auto r) { r.setTtlMs(ttl_ms); }); });
  }
  EXPECT_EQ(retain([](auto r) { r.setTtlMs(315360000000); }).getCode(), 0);
  ExpectRefused("an unknown cache to retain blocks of", kNotFound, "cache", [&] {
    api::Admin::Client admin = connection_->daemon.adminRequest().send().wait(raw_->wait()).getAdmin();
    auto request = admin.retainRequest();
    request.setCacheId(999);
    return Keep(request.send().wait(raw_->wait()).getStatus());
  });
  // The layers differ: no fork.
  ASSERT_EQ(Append(cache_, sequence_id_, 0, 100, 1).getCode(), 0);
  ExpectRefused("fork between two layers", kPrecondition, "tokens", [&] {
    auto reply = sequence_.forkRequest().send().wait(raw_->wait());
    return Keep(reply.getReply().getStatus());
  });
}

}  // namespace
}  // namespace kvmanager::testing
