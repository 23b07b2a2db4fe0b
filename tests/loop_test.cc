// Large calls, hand-offs, and very many sequences, caches and connections do not hold the event loop, nor do their
// ends.
#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/rpc/limits.h"
#include "tests/loop_case.h"

namespace kvmanager::testing {
namespace {

// What another tenant wrote is zeroed before somebody else has it.
LOOP_TEST(WhenMemoryChangesTenant) {
  {
    ASSERT_OK_AND_ASSIGN(auto theirs, client_->OpenCache(Options("theirs", 8, 128)));
    ASSERT_OK_AND_ASSIGN(const CreatedSequence made, Long(*theirs, 24000, 400));  // of 64 KiB: 1.5 GiB
  }
  ASSERT_OK(client_->Ping());
  EXPECT_TRUE(Eventually([&] { return client_->Status()->pools[0].used_bytes == 0; }));
  Look("1.5 GiB of one tenant, dropped");
  CacheOptions options = Options("loop", 8, 128);
  options.page_tokens = 256;
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  std::vector<CreatedSequence> all;
  std::vector<StepEntry> entries;
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    entries.push_back({made.sequence->id(), 0, 1});
    all.push_back(std::move(made));
  }
  const std::vector<uint8_t> rows(entries.size() * 8 * 128 * 2);
  StepBatch batch;
  batch.entries = {entries.data(), 1};
  batch.k = batch.v = TensorView::Inline(rows.data(), rows.size() / entries.size());
  ASSERT_OK(cache->Step(batch));
  Look("one token, in a page of 1 MiB");
  entries[0].position = 1;
  batch.entries = entries;
  batch.k = batch.v = TensorView::Inline(rows.data(), rows.size());
  ASSERT_OK(cache->Step(batch));
  Look("200 tokens, in as many pages of 1 MiB");
}

LOOP_TEST(WithLargeAppends) {
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(Options("large", 8, 128)));
  const size_t token_bytes = 8 * 128 * 2;  // of K, and of V
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(const auto arena, client_->CreateArena(128 * kMiB));
  uint64_t position = 0;
  const auto append = [&](TensorView k, TensorView v) {
    const StepEntry entry{made.sequence->id(), position, static_cast<int>(k.bytes / token_bytes)};
    position += entry.tokens;
    StepBatch batch;
    batch.entries = {&entry, 1};
    batch.k = k;
    batch.v = v;
    return cache->Step(batch).status();
  };
  const std::vector<uint8_t> rows(15 * kMiB);
  ASSERT_OK(append(TensorView::Inline(rows.data(), rows.size()), TensorView::Inline(rows.data(), rows.size())));
  Look("an append of 30 MiB inline");
  ASSERT_OK(append(arena->View(0, 64 * kMiB), arena->View(64 * kMiB, 64 * kMiB)));
  Look("an append of 128 MiB in an arena");
}

// The most pages that a step can open.
LOOP_TEST(WithAppendsOfVeryManyPages) {
  ASSERT_OK_AND_ASSIGN(const auto arena, client_->CreateArena(128 * kMiB));
  for (const std::string codec : {"raw", "hack"}) {
    const int head_dim = codec == "raw" ? 32 : 64, page_tokens = codec == "raw" ? kPageTokens : 64;
    CacheOptions options = Options("pages", 1, head_dim);
    options.codec = codec;
    options.page_tokens = page_tokens;
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    const size_t token_bytes = head_dim * 2;  // of K, and of V
    const int tokens = 1 << 18;               // the most of one step
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    const auto append = [&](absl::Span<const StepEntry> entries, int rows) {
      StepBatch batch;
      batch.entries = entries;
      batch.k = arena->View(0, rows * token_bytes);
      batch.v = arena->View(64 * kMiB, rows * token_bytes);
      return cache->Step(batch).status();
    };
    StepEntry entry{made.sequence->id(), 0, tokens};
    ASSERT_OK(append({&entry, 1}, tokens));
    Look(absl::StrCat(codec, ": an append of ", tokens, " tokens"));
    // Its pages age by the next one.
    entry = {made.sequence->id(), uint64_t(tokens), 1};
    ASSERT_OK(append({&entry, 1}, 1));
    Look(absl::StrCat(codec, ": one token behind them"));
    made.sequence.reset();
    // Many sequences whose open pages fill, and that open others.
    std::vector<CreatedSequence> all;
    std::vector<StepEntry> entries;
    for (int i = 0; i < 4096; ++i) {
      ASSERT_OK_AND_ASSIGN(CreatedSequence one, cache->CreateSequence());
      entries.push_back({one.sequence->id(), 0, page_tokens - 1});
      all.push_back(std::move(one));
    }
    ASSERT_OK(append(entries, 4096 * (page_tokens - 1)));
    Look(absl::StrCat(codec, ": 4,096 times a page but one token"));
    for (StepEntry& each : entries) each = {each.sequence, uint64_t(page_tokens) - 1, page_tokens};
    ASSERT_OK(append(entries, 4096 * page_tokens));
    Look(absl::StrCat(codec, ": 4,096 pages behind them"));
    all.clear();
    ASSERT_OK(client_->Ping());
    Look(absl::StrCat(codec, ": the end of all of them"));
  }
}

// Out of a daemon and into the same one: as many pages as a quarter of the bound.
LOOP_TEST(WithHandOffsOfVeryManyPages) {
  DaemonOptions large;
  large.host_pool_bytes = uint64_t{3000} << 20;
  ASSERT_NO_FATAL_FAILURE(Restart(large));
  CacheOptions options = Options("sent", 1, 16);
  options.layers = 4;
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  constexpr int kAtOnce = 2000;
  const std::vector<uint8_t> rows(size_t{kAtOnce} * kPageTokens * 16 * 2);
  const auto append = [&](const client::Sequence& sequence, int layer) -> absl::Status {
    for (int done = 0; done < kMostBlocks; done += kAtOnce) {
      const StepEntry entry{sequence.id(), uint64_t(done) * kPageTokens, kAtOnce * kPageTokens};
      StepBatch batch;
      batch.layer = layer;
      batch.entries = {&entry, 1};
      batch.k = batch.v = TensorView::Inline(rows.data(), rows.size());
      KV_RETURN_IF_ERROR(cache->Step(batch).status());
    }
    return absl::OkStatus();
  };
  {
    ASSERT_OK_AND_ASSIGN(const CreatedSequence made, cache->CreateSequence());
    for (int layer = 0; layer < 4; ++layer) ASSERT_OK(append(*made.sequence, layer));
    Look("appends of 60,000 blocks of 4 layers");
    ASSERT_OK_AND_ASSIGN(auto fork, made.sequence->Fork());
    Look("fork of them");
    fork.reset();
    ASSERT_OK_AND_ASSIGN(const auto sent, made.sequence->HandOff(daemon_->peer(), "", 60000));
    EXPECT_EQ(sent.pages_sent, 4u * kMostBlocks);
    Look("handOff of them");
    // And cancelled, at some time.
    for (const int64_t ms : {5, 40}) {
      EXPECT_FALSE(made.sequence->HandOff(daemon_->peer(), "", ms).ok());
      ASSERT_OK(client_->Ping());
    }
    Look("two that end before");
  }
  ASSERT_OK(client_->Ping());
  ASSERT_OK_AND_ASSIGN(const CreatedSequence grows, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(const auto hand_off,
                       grows.sequence->BeginHandOff(daemon_->peer(), uint64_t{kMostBlocks} * kPageTokens, 60000));
  Look("beginHandOff");
  for (int layer = 0; layer < 4; ++layer) ASSERT_OK(append(*grows.sequence, layer));
  Look("appends meanwhile");
  ASSERT_OK(hand_off->Finish(""));
  Look("its end");
}

LOOP_TEST(WithManySequences) {
  const std::vector<absl::Span<const BlockName>> none(4096);
  std::vector<std::vector<absl::StatusOr<CreatedSequence>>> all;
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(auto made, cache_->CreateSequences(none));
    all.push_back(std::move(made));
  }
  Look("createSequences of 2 x 4,096 empty ones");
  Client::Options with_time;
  with_time.deadline_ms = 120000;
  ASSERT_OK_AND_ASSIGN(auto other, Client::Connect(daemon_->listen(), with_time));
  ASSERT_OK_AND_ASSIGN(const auto listed, other->Sequences());
  EXPECT_EQ(listed.size(), 8192u);
  Look("listing of 8,192 sequences");
  all.clear();
  EXPECT_TRUE(Eventually([&] { return other->Status()->leases == 0; }));
  Look("drop of 8,192 sequences");
}

LOOP_TEST(WithManyCaches) {
  Client::Options with_time;
  with_time.deadline_ms = 120000;
  ASSERT_OK_AND_ASSIGN(auto opener, Client::Connect(daemon_->listen(), with_time));
  std::deque<std::unique_ptr<Cache>> caches;  // as many as a connection may hold
  for (int i = 0; i < 6000; ++i) {
    CacheOptions options = Options(absl::StrCat("many", i % 2));  // a tenant has at most half of the daemon's
    options.revision = absl::StrCat(i);
    ASSERT_OK_AND_ASSIGN(auto cache, opener->OpenCache(options));
    caches.push_back(std::move(cache));
    if (caches.size() == limits::kCachesHeldMax) caches.pop_front();
  }
  ASSERT_OK_AND_ASSIGN(const auto status, client_->Status());
  EXPECT_GE(status.caches, 4095u);
  // Once the daemon has looked at them, which it does once a second.
  ASSERT_OK_AND_ASSIGN(const auto made, cache_->CreateSequence());
  EXPECT_TRUE(Eventually([&] { return Scrape(*daemon_)->Sum("kvmanager_tenant_sequences") == 1; }));
  Look("6,000 caches opened, counted and looked at");
  caches.clear();
  opener.reset();
  EXPECT_TRUE(Eventually([&] { return Scrape(*daemon_)->Sum("kvmanager_connections") == 1; }));
  Look("the end of their connection");
}

// The kernel makes the table larger as it fills, which stops a process of several threads for some 10 ms.
LOOP_TEST(DescriptorsDoNotOutgrowTheirTable) {
  const auto table = [this] {
    std::ifstream status(absl::StrCat("/proc/", daemon_->pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("FDSize:", 0) == 0) return std::stoi(line.substr(7));
    }
    return 0;
  };
  const int before = table();
  std::vector<int> sockets;
  for (int i = 0; i < 600; ++i) {
    sockets.push_back(ConnectSocket(daemon_->listen()));
    ASSERT_GE(sockets.back(), 0);
  }
  EXPECT_TRUE(Eventually([&] { return Scrape(*daemon_)->Sum("kvmanager_connections") == 601; }));
  EXPECT_EQ(table(), before);
  for (const int socket : sockets) close(socket);
}

LOOP_TEST(AtTheEndOfAConnectionThatHeldManySequences) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto client = Client::Connect(daemon_->listen(), {});
    auto cache = (*client)->OpenCache(Options("ends"));
    const std::vector<absl::Span<const BlockName>> none(4096);
    std::vector<std::vector<absl::StatusOr<CreatedSequence>>> all;
    for (int i = 0; i < 2; ++i) all.push_back(*(*cache)->CreateSequences(none));
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(Eventually([&] { return client_->Status()->leases == 0; }));
  Look("end of a connection with 8,192 sequences");
}

LOOP_TEST(AtTheEndOfAConnectionThatHeldMuch) {
  // In a process of its own, which ends without a word.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto client = Client::Connect(daemon_->listen(), {});
    auto cache = (*client)->OpenCache(Options("ends"));
    auto made = Long(**cache, 4096, 1024);
    std::vector<std::unique_ptr<client::Sequence>> forks;
    for (int i = 0; i < 512; ++i) forks.push_back(*(*made).sequence->Fork());
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(Eventually([&] { return client_->Status()->pools[0].used_bytes == 0; }));
  Look("end of a connection with 512 forks of 4,096 blocks");
}

}  // namespace
}  // namespace kvmanager::testing
