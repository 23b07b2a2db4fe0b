// Cache.read through whole daemons: what was appended comes back, bit for bit where its page is raw, and as its codec
// decodes it where it is not.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "client/client.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Arena;
using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::Pending;
using client::ReadBatch;
using client::ReadResult;
using client::StepEntry;
using client::TensorView;

size_t RowBytes(const CacheOptions& shape) { return size_t(shape.kv_heads) * shape.head_dim * DTypeBytes(shape.dtype); }

/// A read of one range, into memory of its own.
struct Rows {
  std::vector<uint8_t> k, v;
};
absl::StatusOr<ReadResult> ReadRange(Cache& cache, uint64_t sequence, int layer, uint64_t position, int tokens,
                                     Rows* rows) {
  const StepEntry entry{sequence, position, tokens};
  rows->k.assign(tokens * RowBytes(cache.description().options), 0xee);
  rows->v = rows->k;
  ReadBatch batch;
  batch.layer = layer;
  batch.entries = {&entry, 1};
  batch.k = TensorView::Inline(rows->k.data(), rows->k.size());
  batch.v = TensorView::Inline(rows->v.data(), rows->v.size());
  return cache.Read(batch);
}

/// All of a sequence's layers against its model.
void ExpectReads(Cache& cache, uint64_t sequence, const ModelSequence& model, uint64_t position, int tokens) {
  for (int layer = 0; layer < cache.description().options.layers; ++layer) {
    SCOPED_TRACE(::testing::Message() << "layer " << layer << " tokens " << position << " and " << tokens << " more");
    const ModelSequence::Rows expected = model.Read(layer, position, tokens);
    Rows rows;
    ASSERT_OK_AND_ASSIGN(const ReadResult read, ReadRange(cache, sequence, layer, position, tokens, &rows));
    EXPECT_EQ(read.encoded_tokens, expected.encoded_tokens);
    EXPECT_EQ(read.raw_tokens, tokens - expected.encoded_tokens);
    EXPECT_TRUE(rows.k == expected.k);
    EXPECT_TRUE(rows.v == expected.v);
  }
}

class ReadTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(64 << 20); }
  void TearDown() override {
    client_.reset();
    daemon_.reset();
  }
  void Start(uint64_t pool_bytes) {
    client_.reset();
    DaemonOptions options;
    options.host_pool_bytes = pool_bytes;
    options.more_flags = {"--threads", "2", "--calibration-dir", artifacts_.path()};
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }

  TempDir artifacts_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(ReadTest, EveryCodecGivesWhatItDecodes) {
  const CacheOptions shape = SmallCache("raw");
  const std::string million = "million:m=16,bits=6", stacked = "zack+million:m=32,bits=6";
  const auto artifact = SyntheticCalibration(
      {shape.model, shape.revision, shape.layers, shape.kv_heads, shape.query_heads, shape.head_dim}, 7,
      {million, stacked});
  const std::string file = SerializeCalibration(artifact->model(), artifact->tensors(), artifact->metadata());
  std::ofstream(std::filesystem::path(artifacts_.path()) / "a.safetensors", std::ios::binary)
      .write(file.data(), std::streamsize(file.size()));
  const auto files = MakeCalibrationDirectory(artifacts_.path());
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  registry.SetCalibrations(files.get());

  std::set<std::string> left;
  for (const auto& [name, help] : registry.Names()) left.insert(name);
  for (const std::string& spec :
       {std::string("raw"), std::string("hack:k_bits=3,v_bits=2"), std::string("hack:k_bits=8,v_bits=8"),
        std::string("hack:k_axis=token,k_bits=4,v_bits=3"), std::string("pq:bits=4,iterations=1"),
        std::string("default"), std::string("default:calibration=a"), million + ",calibration=a",
        stacked + ",calibration=a", stacked + ",fold=1,calibration=a",
        std::string("zack:mode=joint,rate=0.3,calibration=a"),
        std::string("zack:mode=joint,rate=0.3,fold=1,calibration=a"), std::string("zack+hack:calibration=a"),
        std::string("zack+hack:fold=1,calibration=a"), std::string("hack;1=raw;sinks=64"),
        std::string("hack:k_bits=2,v_bits=1;0=million:m=16,bits=6,calibration=a")}) {
    left.erase(spec.substr(0, spec.find_first_of(":;")));
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const Kind kind : {Kind::kNormal, Kind::kHuge}) {
        SCOPED_TRACE(::testing::Message() << spec << " dtype " << int(dtype) << " kind " << int(kind));
        CacheOptions options = SmallCache(spec, 1);
        options.dtype = dtype;
        const Source source{uint64_t(11 + int(kind)), kind, options};
        ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
        ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
        const int tokens = 4 * 64 + 9;
        ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, tokens, 64));
        ModelSequence model(options, registry);
        LoadModel(model, source, 0, tokens, 64);
        ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, made.sequence->id(), model, 0, tokens));
        // Found by name, all of it is read as it is encoded.
        ASSERT_OK(made.sequence->Publish(Names(*cache, source, 4)));
        ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, 4)));
        ASSERT_EQ(hit.match.hit_blocks, 4);
        ModelSequence shared(options, registry);
        LoadModel(shared, source, 0, 4 * 64, 64);
        shared.MarkShared(4 * 64);
        ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, hit.sequence->id(), shared, 0, 4 * 64));
      }
    }
  }
  EXPECT_TRUE(left.empty()) << "not tried: " << *left.begin();
}

TEST_F(ReadTest, RaggedBatchesComeInTheOrderOfTheirEntries) {
  std::mt19937_64 random(5);
  const auto uniform = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  ASSERT_OK_AND_ASSIGN(auto arena, client_->CreateArena(8 << 20));
  ASSERT_OK_AND_ASSIGN(auto spoilt, client_->CreateArena(8 << 20));  // what is given up may still write to its ranges
  for (const std::string codec : {"raw", "hack:k_bits=4,v_bits=4"}) {
    CacheOptions options = SmallCache(codec, uniform(0, 2), codec == "raw" ? 16 : 64, 32);
    options.kv_heads = 3;
    options.query_heads = 3;
    options.dtype = DType::kBFloat16;
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    std::vector<CreatedSequence> sequences;
    std::vector<ModelSequence> models;
    for (int i = 0; i < 5; ++i) {
      const Source source{uint64_t(100 + i), Kind::kOutliers, options};
      ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
      const int tokens = uniform(1, 300), chunk = uniform(1, 80);
      ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, tokens, chunk));
      models.emplace_back(options);
      LoadModel(models.back(), source, 0, tokens, chunk);
      sequences.push_back(std::move(made));
    }
    for (int round = 0; round < 40; ++round) {
      SCOPED_TRACE(::testing::Message() << codec << " round " << round);
      // Several calls at once, into ranges of one arena or through the socket.
      struct Call {
        std::vector<StepEntry> entries;
        Rows expected;
        uint64_t encoded_tokens = 0;
        Rows own;
        TensorView k, v;
        std::unique_ptr<Pending<absl::StatusOr<ReadResult>>> pending;
      };
      std::vector<Call> calls(uniform(1, 4));
      size_t free = 0;
      const bool give_one_up = uniform(0, 3) == 0;
      for (Call& call : calls) {
        const int layer = uniform(0, 1);
        for (int n = uniform(1, 9); n > 0; --n) {
          const size_t of = uniform(0, 4);  // perhaps the same tokens twice
          const int at = uniform(0, int(models[of].tokens(layer)) - 1);
          const int tokens = uniform(1, int(models[of].tokens(layer)) - at);
          call.entries.push_back({sequences[of].sequence->id(), uint64_t(at), tokens});
          const ModelSequence::Rows rows = models[of].Read(layer, at, tokens);
          call.expected.k.insert(call.expected.k.end(), rows.k.begin(), rows.k.end());
          call.expected.v.insert(call.expected.v.end(), rows.v.begin(), rows.v.end());
          call.encoded_tokens += rows.encoded_tokens;
        }
        const size_t bytes = call.expected.k.size();
        const auto place = [&](std::vector<uint8_t>* own) {
          if (uniform(0, 2) == 0) {
            own->resize(bytes);
            return TensorView::Inline(own->data(), bytes);
          }
          const TensorView view = (give_one_up && &call == &calls.front() ? spoilt : arena)->View(free, bytes);
          if (view.arena == arena.get()) std::memset(view.data, 0xee, bytes);
          free += (bytes + 63) / 64 * 64;
          return view;
        };
        call.k = place(&call.own.k);
        call.v = place(&call.own.v);
        ReadBatch batch;
        batch.layer = layer;
        batch.entries = call.entries;
        batch.k = call.k;
        batch.v = call.v;
        call.pending = std::make_unique<Pending<absl::StatusOr<ReadResult>>>(cache->ReadAsync(batch));
      }
      if (give_one_up) calls.front().pending.reset();
      for (Call& call : calls) {
        if (call.pending == nullptr) continue;
        ASSERT_OK_AND_ASSIGN(const ReadResult read, call.pending->Wait());
        EXPECT_EQ(read.encoded_tokens, call.encoded_tokens);
        EXPECT_EQ((read.encoded_tokens + read.raw_tokens) * RowBytes(options), call.expected.k.size());
        EXPECT_EQ(std::memcmp(call.k.data, call.expected.k.data(), call.expected.k.size()), 0);
        EXPECT_EQ(std::memcmp(call.v.data, call.expected.v.data(), call.expected.v.size()), 0);
      }
    }
  }
}

TEST_F(ReadTest, ForksAndCropsReadWhatTheyHold) {
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 2);
  const Source source{1, Kind::kNormal, options}, other{2, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ModelSequence model(options);
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 420, 420));
  LoadModel(model, source, 0, 420, 420);
  // An append of all at once ages nothing: all of it is raw.
  EXPECT_EQ(model.Read(0, 0, 420).encoded_tokens, 0u);
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, made.sequence->id(), model, 0, 420));
  ASSERT_OK_AND_ASSIGN(auto fork, made.sequence->Fork());
  ModelSequence forked = model;
  ASSERT_OK(Load(*cache, fork->id(), other, 420, 3, 1));
  LoadModel(forked, other, 420, 3, 1);
  EXPECT_EQ(forked.Read(0, 0, 423).encoded_tokens, 3 * 64u);  // page 0 is a sink
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, fork->id(), forked, 0, 423));
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, made.sequence->id(), model, 100, 320));
  // A crop ages by the newest token that it takes away.
  ASSERT_OK(made.sequence->Crop(330));
  model.Crop(330);
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, made.sequence->id(), model, 0, 330));
  ASSERT_OK(Load(*cache, made.sequence->id(), other, 330, 100, 7));
  LoadModel(model, other, 330, 100, 7);
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, made.sequence->id(), model, 0, 430));
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*cache, fork->id(), forked, 300, 123));
  // Layers of different lengths: each gives what it has.
  ASSERT_OK(LoadLayer(*cache, made.sequence->id(), other, 0, 430, 5));
  Rows rows;
  EXPECT_OK(ReadRange(*cache, made.sequence->id(), 0, 430, 5, &rows));
  EXPECT_EQ(rows.k, other.K(0, 430, 5));
  EXPECT_TRUE(NamesField(ReadRange(*cache, made.sequence->id(), 1, 430, 5, &rows).status(),
                         absl::StatusCode::kInvalidArgument, "entries[0].position"));
}

TEST_F(ReadTest, PagesStayUntilTheReadIsDone) {
  ASSERT_NO_FATAL_FAILURE(Start(4 << 20));
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  const Source source{1, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  const int tokens = 16 * 64;
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, tokens, 64));
  ModelSequence model(options);
  LoadModel(model, source, 0, tokens, 64);
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 15)));
  for (int round = 0; round < 20; ++round) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, 15)));
    const int found = hit.match.hit_blocks;
    if (found == 0) break;  // evicted, all of it
    const StepEntry entry{hit.sequence->id(), 0, found * 64};
    Rows rows;
    rows.k.resize(found * 64 * RowBytes(options));
    rows.v = rows.k;
    ReadBatch batch;
    batch.layer = round % 2;
    batch.entries = {&entry, 1};
    batch.k = TensorView::Inline(rows.k.data(), rows.k.size());
    batch.v = TensorView::Inline(rows.v.data(), rows.v.size());
    auto pending = cache->ReadAsync(batch);
    made.sequence.reset();
    hit.sequence.reset();  // nothing but the read holds them now
    // Others want all the room there is.
    const Source filler{uint64_t(50 + round), Kind::kNormal, options};
    ASSERT_OK_AND_ASSIGN(CreatedSequence greedy, cache->CreateSequence());
    for (uint64_t at = 0; Load(*cache, greedy.sequence->id(), filler, at, 64, 64).ok(); at += 64) {
    }
    ASSERT_OK(pending.Wait());
    ModelSequence shared = model;
    shared.MarkShared(15 * 64);
    const ModelSequence::Rows expected = shared.Read(batch.layer, 0, found * 64);
    EXPECT_TRUE(rows.k == expected.k && rows.v == expected.v) << round;
    // And back: somebody computes the prefix anew, when the filler's pages that were being encoded have gone, too.
    greedy.sequence.reset();
    absl::Status loaded;
    EXPECT_TRUE(Eventually([&] {
      made.sequence.reset();
      auto again = cache->CreateSequence();
      if (!again.ok()) return false;
      made = *std::move(again);
      loaded = Load(*cache, made.sequence->id(), source, 0, tokens, 64);
      return !absl::IsResourceExhausted(loaded);
    }));
    ASSERT_OK(loaded);
    ASSERT_OK(made.sequence->Publish(Names(*cache, source, 15)));
  }
}

TEST_F(ReadTest, AHandedOverSequenceGivesTheSameRows) {
  DaemonOptions other;
  other.more_flags = {"--threads", "2"};
  ASSERT_OK_AND_ASSIGN(auto peer, DaemonProcess::Start(other));
  ASSERT_OK_AND_ASSIGN(auto peer_client, Client::Connect(peer->listen(), {}));
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 1);
  const Source source{4, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(auto there, peer_client->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  const int tokens = 20 * 64 + 5;
  ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(peer->peer(), tokens));
  // The receiver asks for everything as soon as it may.
  auto claim = there->ClaimAsync(hand_off->ticket(), 0);
  ModelSequence model(options);
  for (int at = 0; at < tokens; at += 64) {
    const int n = std::min(64, tokens - at);
    ASSERT_OK(Load(*cache, made.sequence->id(), source, at, n, n));
    LoadModel(model, source, at, n, n);
  }
  auto finished = hand_off->FinishAsync("");
  ASSERT_OK_AND_ASSIGN(client::ClaimedSequence claimed, claim.Wait());
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*there, claimed.sequence->id(), model, 0, tokens));
  ASSERT_OK(finished.Wait());
  ASSERT_NO_FATAL_FAILURE(ExpectReads(*there, claimed.sequence->id(), model, 64, tokens - 64));
}

TEST_F(ReadTest, WhatTheClientCanTellIsRefusedBeforeItIsSent) {
  const CacheOptions options = SmallCache("raw");
  const Source source{1, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 10, 10));
  std::vector<uint8_t> k(10 * RowBytes(options)), v = k;
  const StepEntry entry{made.sequence->id(), 0, 10};
  ReadBatch good;
  good.entries = {&entry, 1};
  good.k = TensorView::Inline(k.data(), k.size());
  good.v = TensorView::Inline(v.data(), v.size());
  ASSERT_OK(cache->Read(good));
  const auto refused = [&](const char* field, const ReadBatch& batch) {
    EXPECT_TRUE(NamesField(cache->Read(batch).status(), absl::StatusCode::kInvalidArgument, field));
  };
  ReadBatch bad = good;
  bad.layer = -1;
  refused("layer", bad);
  bad = good;
  bad.k = {};
  refused("k", bad);
  bad = good;
  bad.v.bytes -= 1;
  refused("v (bytes)", bad);
  bad = good;
  const StepEntry backwards{made.sequence->id(), 0, -1};
  bad.entries = {&backwards, 1};
  refused("tokens", bad);
  bad = good;
  bad.layer = 2;
  refused("layer", bad);  // by the daemon
  made.sequence.reset();
  EXPECT_TRUE(NamesField(cache->Read(good).status(), absl::StatusCode::kNotFound, "entries[0].sequenceId"));
}

}  // namespace
}  // namespace kvmanager::testing
