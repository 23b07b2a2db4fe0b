// A stream of a GPU that is none: submissions run when a test says so, in order, on slots in host memory.
//
// A submission touches slots when it runs, through tables that are as old as it is itself, and its plan is released
// then, not before. So a slot that was used again too early shows: its id is stale, or its bytes are another's. What
// queries read is compared with rule 2 of page_store.h. One thread; failures are GoogleTest's fatal ones.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/store/store_testing.h"

namespace kvmanager::testing {

/// A page that queries read, and how.
struct PageRead {
  uint32_t own = 0;  // page of the queries
  uint32_t page = 0;
  bool encoded = false;
  uint64_t bytes = 0;  // XXH3-64: of a raw page its tokens, of K and V by head
  bool operator==(const PageRead&) const = default;
};
/// PageRead::bytes of a raw page's first `tokens` tokens.
uint64_t RawBytesRead(const PageLayout& layout, const uint8_t* page, int tokens);

/// Tokens of one layer of a sequence, as of a submission.
struct SimulatedRows {
  SequenceId sequence = 0;
  int layer = 0;
  uint64_t position = 0;
  int tokens = 0;
  Text text;                                     // of the whole layer
  uint32_t aged = 0;                             // of queries
  std::shared_ptr<std::vector<PageRead>> reads;  // of queries: where what they read is noted, if anywhere
};

/// What a stream runs in one piece, in the order of its fields. Of one cache.
struct SimulatedSubmission {
  uint64_t epoch = 0;  // of its plan, released behind it
  CacheConfig config;
  std::shared_ptr<const Codec> codec;
  struct Truncate {
    SequenceId sequence = 0;
    size_t pages = 0;
  };
  std::vector<Truncate> truncates;
  struct Update {
    SequenceId sequence = 0;
    int layer = 0;
    std::vector<PagePlace> pages;
  };
  std::vector<Update> updates;
  std::vector<OpenCopy> copies;
  std::vector<SimulatedRows> writes;
  std::vector<SimulatedRows> queries;
};

/// As a GPU does before open pages of a finished hand-off are sent.
void CopyOpenPages(const ExportLease& lease);

/// One stream, and its holder of plans.
class SimulatedStream {
 public:
  struct Counts {
    uint64_t queries = 0, raw = 0, encoded = 0, declined = 0;  // pages, but for the first
  };
  /// Both outlive it.
  SimulatedStream(TestDevice* device, Counts* counts);

  uint64_t OpenPlan() { return *device_->epochs.OpenPlan(holder_); }
  /// Returns its number, from 1 on.
  uint64_t Submit(SimulatedSubmission submission);
  /// Runs the next submissions, at most `count`.
  void Run(uint64_t count);
  /// What was submitted and has not run never does; its plans stay unreleased.
  void Abandon();
  /// Nothing runs here any more, nor will.
  void Close();

  uint64_t submitted() const { return submitted_; }
  uint64_t ran() const { return ran_; }  // or abandoned
  size_t queued() const { return queue_.size(); }
  bool closed() const { return closed_; }

 private:
  void RunOne(const SimulatedSubmission& submission);
  void Write(const SimulatedSubmission& submission, const SimulatedRows& rows);
  void Query(const SimulatedSubmission& submission, const SimulatedRows& rows);
  void Bytes(PageId slot, uint8_t** bytes) const;

  TestDevice* const device_;
  Counts* const counts_;
  ReleaseCounter counter_;
  ReleaseEpochs::HolderId holder_ = 0;
  std::deque<SimulatedSubmission> queue_;
  uint64_t submitted_ = 0;
  uint64_t ran_ = 0;
  bool closed_ = false;
  std::map<std::pair<SequenceId, int>, std::vector<PagePlace>> tables_;  // by sequence and layer
};

}  // namespace kvmanager::testing
