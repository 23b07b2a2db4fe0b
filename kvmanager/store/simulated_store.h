// A store with one GPU that is none, as hand-offs between GPUs need two: its stream runs at once, or when told.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/simulated_gpu.h"

namespace kvmanager::testing {

/// A store whose device has one stream.
class SimulatedStore {
 public:
  /// moves: pages move to the host and back.
  explicit SimulatedStore(uint64_t bytes = 16 << 20, bool moves = false)
      : test_(4 << 20, bytes, moves), stream_(&test_.device, &counts_) {}
  ~SimulatedStore() {
    store().report().CheckInvariants();
    stream_.Close();
  }
  PageStore& store() { return *test_.store; }
  TestStore& test() { return test_; }
  CacheId Open(CacheConfig config) {
    config.device = TestDevice::kOrdinal;
    return test_.Open(config);
  }
  SequenceId Create(CacheId cache) { return store().Create(cache, {})->sequence; }
  /// To all layers, or layers first_layer .. first_layer + layers - 1.
  absl::Status Extend(CacheId cache, SequenceId sequence, const Text& text, uint64_t position, int tokens,
                      int first_layer = 0, int layers = 0) {
    if (layers == 0) layers = store().caches().Describe(cache)->config.layers;
    AppendEntry entry;
    entry.sequence = sequence;
    entry.position = position;
    entry.tokens = tokens;
    SimulatedSubmission submission = NewSubmission(cache);
    const absl::Status extended = store().Append(cache, {first_layer, layers}, {&entry, 1});
    if (extended.ok()) {
      AddUpdates(sequence, &submission);
      for (int layer = first_layer; layer < first_layer + layers; ++layer) {
        submission.writes.push_back({sequence, layer, position, tokens, Upto(text, position + tokens), 0});
      }
    }
    const uint64_t number = stream_.Submit(std::move(submission));
    if (extended.ok() && store().exports().AwaitsWrites(sequence)) {
      writes_.push_back({number, sequence, first_layer, std::vector<uint64_t>(layers, position + tokens)});
    }
    if (!hold_writes) RunWrites();
    return extended;
  }
  /// Runs what was submitted, and tells hand-offs.
  void RunWrites(uint64_t submissions = UINT64_MAX) {
    stream_.Run(submissions);
    while (!writes_.empty() && writes_.front().number <= stream_.ran()) {
      store().exports().Written(writes_.front().sequence, writes_.front().first_layer, writes_.front().tokens);
      writes_.pop_front();
    }
    if (!hold_encodes && stream_.queued() == 0) test_.device.executor.FinishAll();
  }
  /// One that will have `tokens` tokens; what it has is written once what was submitted has run.
  absl::StatusOr<std::unique_ptr<ExportLease>> ExportGrowing(SequenceId sequence, uint64_t tokens,
                                                             ExportWay way = ExportWay::kDirect) {
    KV_ASSIGN_OR_RETURN(std::unique_ptr<ExportLease> lease, store().exports().Growing(sequence, tokens, {.way = way}));
    writes_.push_back({stream_.submitted(), sequence, 0, store().Describe(sequence)->layer_tokens});
    if (!hold_writes) RunWrites();
    return lease;
  }
  /// Attends to the newest token in every layer, or those from first_layer on, and compares what is read with rule 2
  /// of page_store.h. It must be there.
  void ExpectReads(CacheId cache, SequenceId sequence, const Text& text, uint64_t tokens, int first_layer = 0,
                   int layers = 0) {
    if (layers == 0) layers = store().caches().Describe(cache)->config.layers;
    test_.device.executor.FinishAll();
    SimulatedSubmission submission = NewSubmission(cache);
    const AttendEntry entry{sequence, tokens - 1, 1};
    auto lease = store().Attend(cache, {first_layer, layers}, {&entry, 1});
    ASSERT_TRUE(lease.ok()) << lease.status();
    ASSERT_TRUE((*lease)->ready());
    AddUpdates(sequence, &submission);
    for (int layer = first_layer; layer < first_layer + layers; ++layer) {
      submission.queries.push_back({sequence, layer, tokens - 1, 1, Upto(text, tokens), (*lease)->aged(0)});
    }
    stream_.Submit(std::move(submission));
    ASSERT_NO_FATAL_FAILURE(stream_.Run(UINT64_MAX));
  }
  /// Submissions that have not run.
  size_t queued() const { return stream_.queued(); }
  uint64_t used_bytes() {
    store().tables().CollectReleased();
    return test_.device.pool->slot_bytes_used();
  }
  static Text Upto(Text text, uint64_t tokens) {
    text.Truncate(tokens);
    return text;
  }

  bool hold_encodes = false;
  bool hold_writes = false;  // until RunWrites

 private:
  struct Write {
    uint64_t number = 0;  // of the submission
    SequenceId sequence = 0;
    int first_layer = 0;
    std::vector<uint64_t> tokens;
  };
  SimulatedSubmission NewSubmission(CacheId cache) {
    SimulatedSubmission submission;
    submission.config = store().caches().Describe(cache)->config;
    submission.codec = store().caches().codec(cache);
    submission.epoch = stream_.OpenPlan();
    return submission;
  }
  void AddUpdates(SequenceId sequence, SimulatedSubmission* submission) {
    for (int layer = 0; layer < submission->config.layers; ++layer) {
      SimulatedSubmission::Update update{sequence, layer, {}};
      ASSERT_TRUE(store().tables().TakeChanges(sequence, layer, &update.pages).ok());
      submission->updates.push_back(std::move(update));
    }
  }

  TestStore test_;
  SimulatedStream::Counts counts_;
  SimulatedStream stream_;
  std::deque<Write> writes_;
};

/// As a copier does. Checks checksums that are known.
inline absl::Status CopyIn(ImportLease& to, const ExportedPage& page) {
  const absl::Span<uint8_t> target = to.target(page.page);
  if (target.empty()) return absl::OkStatus();
  EXPECT_EQ(target.size(), page.bytes.size());
  std::memcpy(target.data(), page.bytes.data(), target.size());
  if (page.checksum != 0) {
    EXPECT_EQ(page.checksum, Checksum({page.bytes.begin(), page.bytes.end()}));
  }
  const absl::StatusOr<uint64_t> looked = to.Validate(page.page);
  EXPECT_TRUE(looked.ok() && *looked == 0);
  const ArrivedPage arrived{page.page, page.checksum};
  return to.Arrived({&arrived, 1});
}

inline absl::StatusOr<std::unique_ptr<ImportLease>> ImportTo(SimulatedStore& to, HandOffHeader first) {
  first.config.device = TestDevice::kOrdinal;
  return to.store().imports().Import(first);
}

}  // namespace kvmanager::testing
