// Encode jobs of pages, and who waits for them. On the store's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/page_executor.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class EncodeJobs;

/// A hand-off that sends pages of a sequence while it grows. It lives in a lease and leaves the store's lists when
/// destroyed. Callbacks of the lease's owner run in Tell alone.
class PageFollower {
 public:
  virtual ~PageFollower() = default;
  /// What every layer will have: no append goes beyond.
  virtual uint64_t tokens() const = 0;
  /// A page of the sequence is full.
  virtual void OnFull(uint32_t block, uint32_t layer) = 0;
  /// These pages have been encoded, of one cache and any sequences.
  virtual void OnEncoded(absl::Span<const PageRef> pages) = 0;
  /// As Exports'.
  virtual bool AwaitsWrites(SequenceId sequence) const = 0;
  virtual void OnWritten(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) = 0;
  /// Tells its owner what is new.
  virtual void Tell() = 0;
};

/// Something that waits until pages are encoded, or have arrived. It lives in a lease and leaves the store's lists when
/// destroyed.
class EncodeWaiter {
 public:
  /// jobs outlives `alive`.
  EncodeWaiter(EncodeJobs* jobs, std::weak_ptr<const bool> alive) : jobs_(jobs), alive_(std::move(alive)) {}
  virtual ~EncodeWaiter();
  EncodeWaiter(const EncodeWaiter&) = delete;
  EncodeWaiter& operator=(const EncodeWaiter&) = delete;

  bool is_ready() const { return ready_; }
  void CallWhenReady(absl::AnyInvocable<void()> fn);

 protected:
  /// Waits for `pages`, whose blocks the lease keeps, and `jobs`; resolves at once if there are none.
  void WaitFor(std::vector<PageRef> pages, IndexJobs jobs = {});
  /// Every page waited for has its final form, or never will (Block::never_arrives).
  virtual void Resolve() = 0;
  bool store_has_gone() const { return alive_.expired(); }

 private:
  friend class EncodeJobs;
  EncodeJobs* const jobs_;
  const std::weak_ptr<const bool> alive_;
  std::vector<PageRef> pending_;
  IndexJobs pending_jobs_;
  absl::AnyInvocable<void()> fn_;
  bool ready_ = false;
};

class EncodeJobs {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    BlockIndex* blocks = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit EncodeJobs(Parts parts) : parts_(std::move(parts)) {}
  EncodeJobs(const EncodeJobs&) = delete;
  EncodeJobs& operator=(const EncodeJobs&) = delete;

  /// Sealed pages of `cache` go to its executor.
  void Post(const std::shared_ptr<Cache>& cache, std::vector<PageRef> pages);
  /// Posted, and not encoded yet.
  uint64_t pages() const { return pages_; }
  /// nullptr: none.
  void SetSampler(PageSampler* sampler) { sampler_ = sampler; }

  /// Whether the page's bytes are still to come: from the codec, or from elsewhere. What will not arrive is not waited
  /// for.
  static bool Awaits(const PageRef& ref) {
    const Page page = ref.page();
    return page.awaits_encoding() || (page.state == PageState::kReceiving && !ref.block->corrupt);
  }
  void Add(EncodeWaiter* waiter) { waiting_.push_back(waiter); }
  void Remove(EncodeWaiter* waiter);
  /// Pages have been encoded, have arrived or will not arrive, or jobs of indexes have ended.
  void NotifyWaiters();

  std::vector<PageFollower*>& followers() { return followers_; }
  void TellFollowers();

  void CheckInvariants() const;

 private:
  void OnEncoded(const std::vector<PageRef>& pages, absl::Span<const EncodeItem> items);
  void Sample(const PageRef& ref);

  const Parts parts_;
  PageSampler* sampler_ = nullptr;
  uint64_t pages_ = 0;
  std::vector<PageFollower*> followers_;
  std::vector<EncodeWaiter*> waiting_;
  std::deque<EncodeWaiter*> ready_;  // whose callbacks are to be called
};

}  // namespace kvmanager
