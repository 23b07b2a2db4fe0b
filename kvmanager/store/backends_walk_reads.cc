// A walk's queries, and pages that are read back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kvmanager/base/reading_rule.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/backends_walk.h"

namespace kvmanager::backends_walk {

using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::RawPrefixEquals;

ExpectedPage BackendsWalk::Expect(const WalkedCache& cache, const WalkedSequence& model, int layer, uint32_t page,
                                  bool some_query_beyond_lag) const {
  const PageLayout& layout = cache.config.layout;
  const uint64_t begin = uint64_t{page} * layout.page_tokens;
  ExpectedPage expected;
  expected.raw_tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, model.tokens[layer] - begin));
  expected.raw = MakeRawPage(layout, model.text, page, expected.raw_tokens, layer);
  expected.lag_applies = page >= model.aged[layer];
  if (!expected.lag_applies || some_query_beyond_lag) {
    expected.encoded = MakeEncodedPage(*cache.codec, expected.raw, page, layer);
  }
  if (!expected.lag_applies && !expected.encoded.empty()) expected.raw.clear();
  return expected;
}

void BackendsWalk::AttendSome() {
  if (reads_.size() >= kReadsMax) return;
  int first, layers;
  const std::vector<uint64_t> chosen = PickSome(/*waiting=*/true, &first, &layers);
  Read read;
  read.first_layer = first;
  read.layers = layers;
  for (const uint64_t number : chosen) {
    const WalkedSequence& model = sequences_.at(number);
    const uint64_t tokens = model.tokens[first];
    if (tokens == 0) continue;
    read.client = model.client;
    read.cache = model.cache;
    read.sequences.push_back(number);
    const uint64_t position = Below(2) ? tokens - 1 : Below(tokens);
    const int count = static_cast<int>(1 + Below(tokens - position));
    for (const Memory memory : kMemories) read.entries[memory].push_back({model.ids[memory], position, count});
  }
  if (read.sequences.empty()) return;
  if (Below(12) == 0) return AttendWrong(read.entries, read.cache, first, layers);
  const WalkedCache& cache = caches_[read.cache];
  const uint32_t page_tokens = cache.config.layout.page_tokens;
  std::vector<bool> wrong(read.sequences.size(), false);
  for (int layer = first; layer < first + layers; ++layer) {
    Listed& listed = read.host.emplace_back();
    for (size_t i = 0; i < read.sequences.size(); ++i) {
      const WalkedSequence& model = sequences_.at(read.sequences[i]);
      const AttendEntry& entry = read.entries[kHost][i];
      const uint64_t last = entry.position + entry.tokens - 1;
      listed.expected.emplace_back();
      bool refused = false;
      for (uint32_t page = 0; page <= last / page_tokens; ++page) {
        const bool beyond_lag = last / page_tokens > page + uint64_t(cache.config.lag_pages);
        listed.expected.back().push_back(Expect(cache, model, layer, page, beyond_lag));
        // A query inside a page that is kept encoded alone.
        const bool inside = entry.position + 1 < (page + uint64_t{1}) * page_tokens;
        refused |= inside && listed.expected.back().back().raw.empty() && !cache.codec->info().identity;
      }
      listed.refused |= refused;
      read.refused |= refused;
      if (refused) wrong[i] = true;
      ASSERT_TRUE(!refused || model.SeesPartOfAged(first, entry, cache.config));
    }
  }
  read.wrong_entries = std::count(wrong.begin(), wrong.end(), true);
  for (int layer = first; layer < first + layers; ++layer) AttendHost(&read, layer);
  AttendGpu(&read);
  reads_.push_back(std::move(read));
}

void BackendsWalk::AttendWrong(std::array<std::vector<AttendEntry>, 2> entries, size_t which, int first_layer,
                               int layers) {
  const WalkedCache& cache = caches_[which];
  const size_t bad = Below(entries[kHost].size());
  const uint64_t fault = Below(5);
  const auto other = Pick();
  for (const Memory memory : kMemories) {
    AttendEntry& entry = entries[memory][bad];
    if (fault == 0) entry.position += 10'000;
    if (fault == 1) entry.tokens = Below(2) ? 0 : 10'000;
    if (fault == 2) entry.sequence = uint64_t{1} << 40;
    if (fault == 3) first_layer = cache.config.layers;
    if (fault == 4) entry.sequence = other->second.cache == which ? 0 : other->second.ids[memory];
  }
  const bool unknown = fault == 2 || (fault == 4 && other->second.cache == which);
  const auto host = store(kHost).Attend(cache.ids[kHost], first_layer, entries[kHost]);
  const auto gpu = store(kGpu).Attend(cache.ids[kGpu], {first_layer, layers}, entries[kGpu]);
  EXPECT_EQ(Compare(host.status(), gpu.status()), Answer::kRefused);
  EXPECT_EQ(host.status().code(), unknown ? absl::StatusCode::kNotFound : absl::StatusCode::kInvalidArgument)
      << host.status();
}

void BackendsWalk::AttendHost(Read* read, int layer) {
  const WalkedCache& cache = caches_[read->cache];
  Listed& listed = read->host[layer - read->first_layer];
  auto lease = store(kHost).Attend(cache.ids[kHost], layer, read->entries[kHost]);
  if (!lease.ok()) {
    listed.answered = true;
    listed.status = lease.status();
    EXPECT_TRUE(listed.refused) << lease.status();
    return;
  }
  Await(&listed, *std::move(lease));
  for (size_t i = 0; i < read->sequences.size(); ++i) {
    EXPECT_EQ(listed.lease->aged(i), sequences_.at(read->sequences[i]).aged[layer]);
  }
}

void BackendsWalk::MarkWaiting(const Read& read, int change) {
  for (const uint64_t number : read.sequences) {
    const auto found = sequences_.find(number);
    if (found == sequences_.end()) continue;
    for (int i = 0; i < read.layers; ++i) found->second.waiting[read.first_layer + i] += change;
  }
}

// Who had to wait attends again: only then tables tell which pages were declined.
void BackendsWalk::AttendGpu(Read* read) {
  const auto gone = [this](uint64_t number) { return !sequences_.contains(number); };
  if (read->client->dead || std::any_of(read->sequences.begin(), read->sequences.end(), gone)) {
    read->gpu_given_up = true;
    return;
  }
  auto lease =
      store(kGpu).Attend(caches_[read->cache].ids[kGpu], {read->first_layer, read->layers}, read->entries[kGpu]);
  if (!lease.ok()) {
    read->gpu_answered = true;
    read->gpu_status = lease.status();
    EXPECT_TRUE(read->refused) << lease.status();
    return;
  }
  for (size_t i = 0; i < read->sequences.size(); ++i) {
    EXPECT_EQ((*lease)->aged(i), sequences_.at(read->sequences[i]).aged[read->first_layer]);
  }
  if (!(*lease)->ready()) {
    read->waits = *std::move(lease);
    MarkWaiting(*read, +1);
    return;
  }
  EXPECT_FALSE(read->refused);
  Submission submission = NewSubmission(read->cache);
  for (int layer = read->first_layer; layer < read->first_layer + read->layers; ++layer) {
    for (size_t i = 0; i < read->sequences.size(); ++i) {
      const WalkedSequence& model = sequences_.at(read->sequences[i]);
      const AttendEntry& entry = read->entries[kGpu][i];
      TakeChanges(model, layer, 1, &submission);
      submission.queries.push_back(RowsOf(model, layer, entry.position, entry.tokens));
      read->gpu_reads.push_back(std::make_shared<std::vector<PageRead>>());
      submission.queries.back().reads = read->gpu_reads.back();
    }
  }
  submission.epoch = OpenPlan(read->client);
  read->submitted = read->client->stream.Submit(std::move(submission));
}

void BackendsWalk::CheckListed(const Listed& listed, const PageLayout& layout) const {
  for (size_t entry = 0; entry < listed.expected.size(); ++entry) {
    const auto pages = listed.lease->pages(entry);
    ASSERT_EQ(pages.size(), listed.expected[entry].size());
    for (size_t i = 0; i < pages.size(); ++i) {
      const ExpectedPage& expected = listed.expected[entry][i];
      ASSERT_EQ(pages[i].lag_applies, expected.lag_applies);
      ASSERT_EQ(pages[i].raw != nullptr, !expected.raw.empty());
      ASSERT_EQ(pages[i].encoded != nullptr, !expected.encoded.empty());
      if (pages[i].raw) {
        ASSERT_TRUE(RawPrefixEquals(layout, pages[i].raw, expected.raw, expected.raw_tokens));
      }
      if (pages[i].encoded) {
        ASSERT_EQ(std::memcmp(pages[i].encoded, expected.encoded.data(), expected.encoded.size()), 0);
      }
    }
  }
}

void BackendsWalk::Await(Listed* listed, std::unique_ptr<AttendLease> lease) {
  listed->lease = std::move(lease);
  listed->lease->OnReady([called = listed->called] { *called = true; });
}

void BackendsWalk::Answered(Listed* listed, const PageLayout& layout) {
  if (listed->answered) return;
  EXPECT_EQ(listed->lease->ready(), *listed->called);
  if (!listed->lease->ready()) return;
  listed->answered = true;
  listed->status = listed->lease->status();
  EXPECT_EQ(listed->status.ok(), !listed->refused) << listed->status;
  if (listed->status.ok()) CheckListed(*listed, layout);
}

void BackendsWalk::CompareRead(Read* read) {
  read->compared = true;
  ++counts.reads;
  const WalkedCache& cache = caches_[read->cache];
  const PageLayout& layout = cache.config.layout;
  const bool identity = cache.codec->info().identity;
  absl::Status host;
  for (const Listed& listed : read->host) host.Update(listed.status);
  ASSERT_EQ(host.code(), read->gpu_status.code()) << host << " in host memory, on the GPU " << read->gpu_status;
  if (read->wrong_entries == 1) {
    ASSERT_EQ(DetailOf(host).field, DetailOf(read->gpu_status).field);
  }
  if (read->refused) {
    ASSERT_EQ(host.code(), absl::StatusCode::kFailedPrecondition) << host;
    ++counts.reads_refused;
    return;
  }
  for (int l = 0; l < read->layers; ++l) {
    for (size_t i = 0; i < read->sequences.size(); ++i) {
      const AttendEntry& entry = read->entries[kHost][i];
      const auto pages = read->host[l].lease->pages(i);
      const uint32_t first_own = static_cast<uint32_t>(entry.position / layout.page_tokens);
      std::vector<PageRead> reads;
      for (uint32_t page = 0; page < pages.size(); ++page) {
        const AttentionPage& of = pages[page];
        for (uint32_t own = std::max(page, first_own); own < pages.size(); ++own) {
          const bool raw = identity || ReadingRule::ReadsRaw(of.raw != nullptr, of.encoded != nullptr, of.lag_applies,
                                                             own - page, cache.config.lag_pages);
          const uint8_t* const bytes = raw && of.raw != nullptr ? of.raw : of.encoded;
          const size_t size = cache.codec->info().page_bytes(read->first_layer + l);
          const uint64_t read_bytes =
              raw ? testing::RawBytesRead(layout, bytes, read->host[l].expected[i][page].raw_tokens)
                  : testing::Checksum({bytes, bytes + size});
          reads.push_back({own, page, !raw, read_bytes});
          ++(raw ? counts.raw : counts.encoded);
        }
      }
      ASSERT_TRUE(reads == *read->gpu_reads[l * read->sequences.size() + i])
          << "entry " << i << " of layer " << read->first_layer + l;
    }
  }
}

void BackendsWalk::CheckReads() {
  for (size_t index = 0; index < reads_.size();) {
    Read& read = reads_[index];
    const PageLayout& layout = caches_[read.cache].config.layout;
    bool host_answered = true;
    for (Listed& listed : read.host) {
      Answered(&listed, layout);
      host_answered &= listed.answered;
    }
    if (read.waits != nullptr && read.waits->ready()) {
      MarkWaiting(read, -1);
      read.waits = nullptr;
      AttendGpu(&read);
    }
    read.gpu_answered |= read.submitted > 0 && read.client->stream.ran() >= read.submitted;
    if (::testing::Test::HasFailure()) return;
    const bool may_end = read.compared || (host_answered && read.gpu_given_up);
    if (host_answered && read.gpu_answered && !read.compared) CompareRead(&read);
    if (::testing::Test::HasFailure()) return;
    if (may_end && Below(16) == 0) {
      EndRead(index);
    } else {
      ++index;
    }
  }
}

void BackendsWalk::EndRead(size_t index) {
  const Read read = std::move(reads_[index]);
  reads_.erase(reads_.begin() + index);
  if (read.waits != nullptr) MarkWaiting(read, -1);
  for (const Listed& listed : read.host) {
    if (listed.answered && listed.status.ok()) CheckListed(listed, caches_[read.cache].config.layout);
  }
}

void BackendsWalk::LoadSome() {
  if (loads_.size() >= kReadsMax) return;
  int layer, layers;
  const std::vector<uint64_t> chosen = PickSome(/*waiting=*/true, &layer, &layers);
  Load load;
  std::array<std::vector<AttendEntry>, 2> entries;
  for (const uint64_t number : chosen) {
    const WalkedSequence& model = sequences_.at(number);
    const WalkedCache& cache = caches_[model.cache];
    if (model.tokens[layer] == 0) continue;
    RunWrites(model);
    load.client = model.client;
    load.cache = model.cache;
    const uint64_t position = Below(model.tokens[layer]);
    const int tokens = static_cast<int>(1 + Below(model.tokens[layer] - position));
    const uint32_t page_tokens = cache.config.layout.page_tokens;
    for (const Memory memory : kMemories) {
      entries[memory].push_back({model.ids[memory], position, tokens});
      auto& expected = load.listed[memory].expected.emplace_back();
      for (uint64_t page = position / page_tokens; page <= (position + tokens - 1) / page_tokens; ++page) {
        expected.push_back(Expect(cache, model, layer, static_cast<uint32_t>(page), false));
      }
    }
  }
  if (entries[kHost].empty()) return;
  absl::Status statuses[2];
  for (const Memory memory : kMemories) {
    auto lease = store(memory).Load(caches_[load.cache].ids[memory], layer, entries[memory]);
    statuses[memory] = lease.status();
    if (lease.ok()) Await(&load.listed[memory], *std::move(lease));
  }
  ASSERT_EQ(Compare(statuses[kHost], statuses[kGpu]), Answer::kOk) << statuses[kHost];
  loads_.push_back(std::move(load));
}

void BackendsWalk::CheckLoads() {
  for (size_t index = 0; index < loads_.size();) {
    Load& load = loads_[index];
    const PageLayout& layout = caches_[load.cache].config.layout;
    for (Listed& listed : load.listed) Answered(&listed, layout);
    const bool may_end = load.compared;
    if (!load.compared && load.listed[kHost].answered && load.listed[kGpu].answered) {
      load.compared = true;
      ++counts.loads;
      for (size_t i = 0; i < load.listed[kHost].expected.size(); ++i) {
        const auto host = load.listed[kHost].lease->pages(i), gpu = load.listed[kGpu].lease->pages(i);
        ASSERT_EQ(host.size(), gpu.size());
        for (size_t page = 0; page < host.size(); ++page) {
          ASSERT_EQ(host[page].raw != nullptr, gpu[page].raw != nullptr);
          ASSERT_EQ(host[page].encoded != nullptr, gpu[page].encoded != nullptr);
          ASSERT_EQ(host[page].lag_applies, gpu[page].lag_applies);
          const int tokens = load.listed[kHost].expected[i][page].raw_tokens;
          if (host[page].raw == nullptr) {
            const size_t size = load.listed[kHost].expected[i][page].encoded.size();
            ASSERT_EQ(std::memcmp(host[page].encoded, gpu[page].encoded, size), 0);
          } else {
            ASSERT_EQ(testing::RawBytesRead(layout, host[page].raw, tokens),
                      testing::RawBytesRead(layout, gpu[page].raw, tokens));
          }
        }
      }
    }
    if (::testing::Test::HasFailure()) return;
    if (may_end && Below(16) == 0) {
      EndLoad(index);
    } else {
      ++index;
    }
  }
}

void BackendsWalk::EndLoad(size_t index) {
  const Load load = std::move(loads_[index]);
  loads_.erase(loads_.begin() + index);
  for (const Listed& listed : load.listed) {
    if (listed.answered) CheckListed(listed, caches_[load.cache].config.layout);
  }
}

}  // namespace kvmanager::backends_walk
