// Random operations of several clients against models of their sequences; some clients die on the way.
//
// Every answer is compared: contents by attention against plain loops over what was appended (pages that must be read
// encoded pass through the codec's Decode), counts exactly, refusals by their code. In the end nothing may be left of
// it.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::StepBatch;
using client::StepEntry;
using client::StepResult;
using client::TensorView;

constexpr int kPrompts = 3;           // few, so that prefixes meet
constexpr uint64_t kTokensMax = 500;  // of a sequence
constexpr size_t kSequencesMax = 6;   // of an actor
constexpr double kRawError = 5e-4, kHackError = 0.06;

std::vector<CacheOptions> Shapes() {
  return {SmallCache("raw", 2, 16, 32), SmallCache("hack:k_bits=3,v_bits=2", 1, 64, 32),
          SmallCache("hack:k_bits=8,v_bits=8", 0, 64, 64)};
}

/// One client with its sequences and their models.
class Actor {
 public:
  Actor(const DaemonProcess& daemon, uint64_t seed) : daemon_(daemon), random_(seed), seed_(seed) { Reconnect(); }
  ~Actor() { DropAll(); }

  void DropAll() {
    live_.clear();
    caches_.clear();
    client_.reset();
    proxy_.reset();
  }

  /// One random operation; false when a fatal check failed.
  bool Step() {
    ++steps_;
    SCOPED_TRACE(::testing::Message() << "seed " << seed_ << " step " << steps_);
    const int choice = Uniform(0, 99);
    if (live_.empty() || (choice < 12 && live_.size() < kSequencesMax)) {
      Create();
    } else if (choice < 45) {
      FeedOne();
    } else if (choice < 55) {
      FeedBatch();
    } else if (choice < 60) {
      AskOld();
    } else if (choice < 63) {
      ReadBack();
    } else if (choice < 70) {
      Fork();
    } else if (choice < 77) {
      Crop();
    } else if (choice < 85) {
      Publish();
    } else if (choice < 90) {
      live_.erase(live_.begin() + Uniform(0, int(live_.size()) - 1));
    } else if (choice < 95) {
      Refusals();
    } else if (choice < 97) {
      EXPECT_OK(client_->Purge(Client::kAllCaches));
      // A purge closes caches that nothing holds: open them again.
      OpenCaches();
    } else if (choice < 98) {
      Die();
    } else {
      Inspect();
    }
    return !::testing::Test::HasFatalFailure() && failures_ < 3;
  }

 private:
  struct Live {
    size_t cache = 0;
    std::unique_ptr<client::Sequence> sequence;
    ModelSequence model;
    std::vector<uint64_t> origin;  // the seed that each token is of
  };

  int Uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  Live& Pick() { return live_[Uniform(0, int(live_.size()) - 1)]; }
  void Fail() { ++failures_; }

  void Reconnect() {
    // Half of the connections may be cut by a proxy, the others are plain Unix sockets.
    std::string address = daemon_.listen();
    if (Uniform(0, 1) == 1) {
      proxy_ = std::make_unique<Proxy>(daemon_.listen());
      address = "tcp:" + proxy_->address();
    } else {
      proxy_.reset();
    }
    auto client = Client::Connect(address, {.admin_address = daemon_.admin()});
    ASSERT_OK(client);
    client_ = std::move(*client);
    OpenCaches();
  }
  void OpenCaches() {
    caches_.clear();
    for (const CacheOptions& shape : Shapes()) {
      auto cache = client_->OpenCache(shape);
      ASSERT_OK(cache);
      caches_.push_back(std::move(*cache));
    }
  }
  /// The client's end without a word: the stream is cut, or everything is destroyed at once.
  void Die() {
    if (proxy_ != nullptr) {
      proxy_->Cut();
      EXPECT_TRUE(Eventually([&] { return !client_->Ping().ok(); }));
      for (Live& live : live_) EXPECT_FALSE(live.sequence->Info().ok());
    }
    live_.clear();
    caches_.clear();
    client_.reset();
    Reconnect();
  }

  static std::vector<uint32_t> Ids(const CacheOptions& shape, const std::vector<uint64_t>& origin) {
    std::vector<uint32_t> ids;
    for (size_t at = 0; at < origin.size(); ++at) {
      ids.push_back(Source{origin[at], Kind::kNormal, shape}.TokenIds(at, 1)[0]);
    }
    return ids;
  }
  std::vector<BlockName> NamesOf(size_t cache, const std::vector<uint64_t>& origin) {
    std::vector<BlockName> names;
    const client::CacheDescription& d = caches_[cache]->description();
    NameBlocks(d.digest, Ids(d.options, origin), d.options.page_tokens, &names);
    return names;
  }

  void Create() {
    const size_t cache = Uniform(0, int(caches_.size()) - 1);
    const CacheOptions shape = Shapes()[cache];
    std::vector<uint64_t> origin;
    std::vector<BlockName> names;
    if (Uniform(0, 3) != 0) {
      const int blocks = Uniform(1, 5);
      origin.assign(size_t(blocks) * shape.page_tokens, 1 + Uniform(0, kPrompts - 1));
      names = NamesOf(cache, origin);
    }
    auto made = caches_[cache]->CreateSequence(names);
    ASSERT_OK(made);
    const uint64_t found = uint64_t(made->match.hit_blocks) * shape.page_tokens;
    ASSERT_LE(found, origin.size());
    origin.resize(found);
    Live live{cache, std::move(made->sequence), ModelSequence(shape), origin};
    if (found > 0) {
      const Source source{origin[0], Kind::kNormal, shape};
      LoadModel(live.model, source, 0, int(found), int(found));
      live.model.MarkShared(found);
    }
    live_.push_back(std::move(live));
  }

  /// Mostly the prompt that the sequence began with, so that equal blocks meet; now and then another text.
  uint64_t NextSeed(const Live& live) {
    if (Uniform(0, 9) == 0) return 1000 + Uniform(0, 1000);
    return live.origin.empty() ? 1 + Uniform(0, kPrompts - 1) : live.origin.back();
  }

  void FeedOne() {
    Live& live = Pick();
    const uint64_t at = live.origin.size();
    if (at >= kTokensMax) return;
    const CacheOptions shape = Shapes()[live.cache];
    const Source source{NextSeed(live), Kind::kNormal, shape};
    const int tokens = Uniform(0, 2) == 0 ? 1 : Uniform(1, 150), chunk = Uniform(1, tokens);
    StepResult counts, expected_counts;
    const auto got = Feed(*caches_[live.cache], live.sequence->id(), source, at, tokens, chunk, &counts);
    if (got.status().code() == absl::StatusCode::kResourceExhausted) {
      // Some layers may be ahead of others now.
      live_.erase(live_.begin() + (&live - live_.data()));
      return;
    }
    ASSERT_OK(got);
    // Ageing looks at where appends begin: the model repeats the chunks.
    const std::vector<double> expected = FeedModel(live.model, source, at, tokens, chunk, &expected_counts);
    live.origin.insert(live.origin.end(), tokens, source.seed);
    EXPECT_LT(RelativeError(*got, expected), live.cache == 0 ? kRawError : kHackError)
        << "cache " << live.cache << " at " << at << " tokens " << tokens << " chunk " << chunk << (Fail(), "");
    EXPECT_EQ(counts.encoded_pairs, expected_counts.encoded_pairs) << "at " << at << " tokens " << tokens;
    EXPECT_EQ(counts.raw_pairs, expected_counts.raw_pairs);
  }

  void FeedBatch() {
    const size_t cache = Uniform(0, int(caches_.size()) - 1);
    const CacheOptions shape = Shapes()[cache];
    std::vector<Live*> of;
    for (Live& live : live_) {
      if (live.cache == cache && live.origin.size() < kTokensMax) of.push_back(&live);
    }
    if (of.empty()) return;
    std::vector<int> tokens;
    std::vector<uint64_t> seeds;
    for (Live* live : of) {
      tokens.push_back(Uniform(0, 1) == 0 ? 1 : Uniform(1, 70));
      seeds.push_back(NextSeed(*live));
    }
    for (int layer = 0; layer < shape.layers; ++layer) {
      std::vector<StepEntry> entries;
      std::vector<uint8_t> k, v;
      std::vector<float> q;
      for (size_t i = 0; i < of.size(); ++i) {
        const uint64_t at = of[i]->origin.size();
        const Source source{seeds[i], Kind::kNormal, shape};
        entries.push_back({of[i]->sequence->id(), at, tokens[i]});
        const auto ki = source.K(layer, at, tokens[i]), vi = source.V(layer, at, tokens[i]);
        const auto qi = source.Q(layer, at, tokens[i]);
        k.insert(k.end(), ki.begin(), ki.end());
        v.insert(v.end(), vi.begin(), vi.end());
        q.insert(q.end(), qi.begin(), qi.end());
      }
      std::vector<float> out(q.size());
      StepBatch batch;
      batch.layer = layer;
      batch.entries = entries;
      batch.k = TensorView::Inline(k.data(), k.size());
      batch.v = TensorView::Inline(v.data(), v.size());
      batch.q = TensorView::Inline(q.data(), q.size() * 4);
      batch.out = TensorView::Inline(out.data(), out.size() * 4);
      const auto done = caches_[cache]->Step(batch);
      if (done.status().code() == absl::StatusCode::kResourceExhausted) {
        live_.erase(std::remove_if(live_.begin(), live_.end(),
                                   [&](const Live& l) { return l.cache == cache && l.origin.size() < kTokensMax; }),
                    live_.end());
        return;
      }
      ASSERT_OK(done);
      size_t at_out = 0;
      StepResult expected;
      for (size_t i = 0; i < of.size(); ++i) {
        const uint64_t at = of[i]->origin.size();
        const Source source{seeds[i], Kind::kNormal, shape};
        of[i]->model.Append(layer, source.K(layer, at, tokens[i]), source.V(layer, at, tokens[i]));
        const auto want = of[i]->model.Attend(layer, at, tokens[i], source.Q(layer, at, tokens[i]));
        expected.encoded_pairs += want.encoded_pairs;
        expected.raw_pairs += want.raw_pairs;
        EXPECT_LT(RelativeError(absl::MakeConstSpan(out).subspan(at_out, want.out.size()), want.out),
                  cache == 0 ? kRawError : kHackError)
            << "cache " << cache << " entry " << i << " at " << at << " tokens " << tokens[i] << (Fail(), "");
        at_out += want.out.size();
      }
      EXPECT_EQ(done->encoded_pairs, expected.encoded_pairs);
      EXPECT_EQ(done->raw_pairs, expected.raw_pairs);
    }
    for (size_t i = 0; i < of.size(); ++i) of[i]->origin.insert(of[i]->origin.end(), tokens[i], seeds[i]);
  }

  void AskOld() {
    Live& live = Pick();
    const uint64_t tokens = live.origin.size();
    const uint64_t first = live.model.encoded_tokens();  // a query's own page is raw
    if (tokens == 0 || first >= tokens) return;
    const uint64_t at = first + Uniform(0, int(tokens - first) - 1);
    const int n = Uniform(1, int(std::min<uint64_t>(tokens - at, 20)));
    const Source source{77, Kind::kNormal, Shapes()[live.cache]};
    const auto got = Ask(*caches_[live.cache], live.sequence->id(), source, at, n);
    ASSERT_OK(got);
    EXPECT_LT(RelativeError(*got, AskModel(live.model, source, at, n)), live.cache == 0 ? kRawError : kHackError)
        << "cache " << live.cache << " at " << at << " of " << tokens << (Fail(), "");
  }

  void ReadBack() {
    Live& live = Pick();
    if (live.origin.empty()) return;
    const CacheOptions shape = Shapes()[live.cache];
    const int at = Uniform(0, int(live.origin.size()) - 1), tokens = Uniform(1, int(live.origin.size()) - at);
    const StepEntry entry{live.sequence->id(), uint64_t(at), tokens};
    for (int layer = 0; layer < shape.layers; ++layer) {
      const ModelSequence::Rows expected = live.model.Read(layer, at, tokens);
      std::vector<uint8_t> k(expected.k.size()), v(expected.v.size());
      client::ReadBatch batch;
      batch.layer = layer;
      batch.entries = {&entry, 1};
      batch.k = TensorView::Inline(k.data(), k.size());
      batch.v = TensorView::Inline(v.data(), v.size());
      const auto read = caches_[live.cache]->Read(batch);
      ASSERT_OK(read);
      EXPECT_EQ(read->encoded_tokens, expected.encoded_tokens) << "cache " << live.cache << (Fail(), "");
      EXPECT_EQ(read->raw_tokens, tokens - expected.encoded_tokens);
      EXPECT_TRUE(k == expected.k && v == expected.v)
          << "cache " << live.cache << " layer " << layer << " at " << at << " tokens " << tokens << (Fail(), "");
    }
  }

  void Fork() {
    if (live_.size() >= kSequencesMax) return;
    Live& live = Pick();
    auto fork = live.sequence->Fork();
    if (fork.status().code() == absl::StatusCode::kResourceExhausted) return;
    ASSERT_OK(fork);
    Live copy{live.cache, std::move(*fork), live.model, live.origin};
    live_.push_back(std::move(copy));
  }

  void Crop() {
    Live& live = Pick();
    const uint64_t tokens = live.origin.size();
    const uint64_t to = Uniform(0, int(tokens));
    const uint64_t page_tokens = Shapes()[live.cache].page_tokens;
    const bool refused = to < live.model.crop_limit_tokens() && to % page_tokens != 0;
    const absl::Status status = live.sequence->Crop(to);
    if (status.code() == absl::StatusCode::kResourceExhausted) return;
    ASSERT_EQ(status.code(), refused ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kOk)
        << status.ToString() << " to " << to << " of " << tokens << ", limit " << live.model.crop_limit_tokens();
    if (refused) return;
    live.model.Crop(to);
    live.origin.resize(to);
  }

  void Publish() {
    Live& live = Pick();
    const uint64_t page_tokens = Shapes()[live.cache].page_tokens;
    const int full = int(live.origin.size() / page_tokens);
    if (full == 0) return;
    std::vector<BlockName> names = NamesOf(live.cache, live.origin);
    names.resize(Uniform(1, full));
    const auto outcome = live.sequence->Publish(names);
    ASSERT_OK(outcome);
    EXPECT_LE(outcome->published + outcome->shared + outcome->deferred, int(names.size()));
  }

  void Refusals() {
    Live& live = Pick();
    const uint64_t tokens = live.origin.size();
    const Source source{5, Kind::kNormal, Shapes()[live.cache]};
    EXPECT_CODE(Load(*caches_[live.cache], live.sequence->id(), source, tokens + 1, 1, 1), kFailedPrecondition);
    EXPECT_CODE(Load(*caches_[live.cache], UINT64_MAX - 7, source, 0, 1, 1), kNotFound);
    EXPECT_CODE(live.sequence->Crop(tokens + 1), kInvalidArgument);
    EXPECT_FALSE(live.sequence->HandOff("127.0.0.1:1", "").ok());
    CheckInfo(live);
  }
  void CheckInfo(Live& live) {
    const auto info = live.sequence->Info();
    ASSERT_OK(info);
    EXPECT_EQ(info->tokens, live.origin.size());
    EXPECT_EQ(info->id, live.sequence->id());
  }
  void Inspect() {
    for (Live& live : live_) CheckInfo(live);
    const auto status = client_->Status();
    ASSERT_OK(status);
    EXPECT_GE(status->leases, live_.size());
    EXPECT_LE(status->pools.at(0).used_bytes, status->pools.at(0).capacity_bytes);
  }

  const DaemonProcess& daemon_;
  std::mt19937_64 random_;
  const uint64_t seed_;
  int steps_ = 0;
  int failures_ = 0;
  std::unique_ptr<Proxy> proxy_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<client::Cache>> caches_;
  std::vector<Live> live_;
};

/// Everything is given back: no leases, no sequences, no bytes, and the gauges agree.
void ExpectNothingLeft(DaemonProcess& daemon) {
  auto client = Client::Connect(daemon.listen(), {});
  ASSERT_OK(client);
  EXPECT_TRUE(Eventually([&] {
    const auto status = (*client)->Status();
    return status.ok() && status->leases == 0 && status->connections == 1;
  }));
  ASSERT_OK((*client)->Purge(Client::kAllCaches));
  EXPECT_TRUE(Eventually([&] {
    const auto status = (*client)->Status();
    return status.ok() && status->pools.at(0).used_bytes == 0;
  }));
  const auto status = (*client)->Status();
  ASSERT_OK(status);
  EXPECT_EQ(status->leases, 0u);
  EXPECT_EQ(status->published_blocks, 0u);
  EXPECT_EQ(status->pools.at(0).used_bytes, 0u);
  const auto sequences = (*client)->Sequences();
  ASSERT_OK(sequences);
  EXPECT_TRUE(sequences->empty());
  const auto page = Scrape(daemon);
  ASSERT_OK(page);
  for (const char* const gauge :
       {"kvmanager_page_bytes", "kvmanager_pages", "kvmanager_sequences", "kvmanager_leases",
        "kvmanager_held_sequences", "kvmanager_pool_used_bytes", "kvmanager_published_blocks"}) {
    EXPECT_EQ(page->Sum(gauge), 0) << gauge;
  }
}

class RandomTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(RandomTest, ClientsThatTakeTurns) {
  DaemonOptions options;
  options.host_pool_bytes = 16 << 20;
  options.more_flags = {"--threads", "2"};
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  {
    std::vector<std::unique_ptr<Actor>> actors;
    for (uint64_t i = 0; i < 3; ++i) actors.push_back(std::make_unique<Actor>(*daemon, GetParam() * 10 + i));
    std::mt19937_64 turn(GetParam());
    const int steps = kSanitized ? 300 : 1500;
    for (int step = 0; step < steps; ++step) {
      if (!actors[turn() % actors.size()]->Step()) break;
    }
  }
  ExpectNothingLeft(*daemon);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTest, ::testing::Values(1, 2, 3, 4));

TEST(RandomThreadsTest, ClientsAtOnceInASmallPool) {
  DaemonOptions options;
  options.host_pool_bytes = 4 << 20;  // evictions and refusals
  options.more_flags = {"--threads", "2", "--quality-sample", "2"};
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 3; ++i) {
    threads.emplace_back([&daemon, i] {
      Actor actor(*daemon, 500 + i);
      const int steps = kSanitized ? 150 : 700;
      for (int step = 0; step < steps; ++step) {
        if (!actor.Step()) break;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectNothingLeft(*daemon);
}

}  // namespace
}  // namespace kvmanager::testing
