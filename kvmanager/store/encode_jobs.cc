#include "kvmanager/store/encode_jobs.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

EncodeWaiter::~EncodeWaiter() {
  if (!store_has_gone()) jobs_->Remove(this);
}

void EncodeWaiter::WaitFor(std::vector<PageRef> pages, IndexJobs jobs) {
  pending_ = std::move(pages);
  pending_jobs_ = std::move(jobs);
  std::erase_if(pending_jobs_, [](const auto& job) { return job->done(); });
  if (pending_.empty() && pending_jobs_.empty()) {
    ready_ = true;
    Resolve();
  } else {
    jobs_->Add(this);
  }
}

void EncodeWaiter::CallWhenReady(absl::AnyInvocable<void()> fn) {
  if (ready_) {
    fn();
  } else {
    fn_ = std::move(fn);
  }
}

void EncodeJobs::Remove(EncodeWaiter* waiter) {
  waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), waiter), waiting_.end());
  ready_.erase(std::remove(ready_.begin(), ready_.end(), waiter), ready_.end());
}

void EncodeJobs::Post(const std::shared_ptr<Cache>& cache, std::vector<PageRef> pages) {
  if (pages.empty()) return;
  pages_ += pages.size();
  std::vector<EncodeItem> items;
  items.reserve(pages.size());
  for (const PageRef& ref : pages) {
    const Page page = ref.page();
    parts_.blocks->Apply(ref, PageEvent::kEncode, {page.raw, page.encoded, false, 0});
    EncodeItem item;
    item.raw = PageData(*cache, page.raw);
    item.encoded = PageData(*cache, page.encoded);
    item.layer = ref.layer;
    item.first_token = uint64_t{ref.block->index} * cache->page_tokens();
    items.push_back(item);
  }
  cache->tier->executor()->Encode(
      cache->codec, std::move(items), cache->owner,
      [this, alive = parts_.alive, pages = std::move(pages)](absl::Span<const EncodeItem> done) {
        if (!alive.expired()) OnEncoded(pages, done);
      });
}

void EncodeJobs::OnEncoded(const std::vector<PageRef>& pages, absl::Span<const EncodeItem> items) {
  KV_CHECK(items.size() == pages.size());
  pages_ -= pages.size();
  std::vector<PageRef> done;  // for followers
  if (!followers_.empty()) done.reserve(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const PageRef ref = pages[i];
    Block* block = ref.block;
    const Page page = ref.page();
    const bool declined = items[i].declined;
    if (declined) {
      (items[i].is_sink ? parts_.metrics->sink_pages : parts_.metrics->declined_pages).Increment();
    } else {
      parts_.metrics->encoded_pages.Increment();
      parts_.metrics->encoded_bytes.Increment(static_cast<double>(block->cache->page_bytes(ref.layer)));
    }
    // A page that is quarantined goes, unless it is pinned.
    const bool stays = page.state != PageState::kQuarantined || page.pins > 0;
    if (stays && !followers_.empty()) done.push_back(ref);
    if (parts_.blocks->EndJobIfQuarantined(ref, declined)) continue;
    PageChange after{page.raw, declined ? PageId() : page.encoded, declined, 0};
    Page kept;
    kept.raw = after.raw;
    kept.encoded = after.encoded;
    after.checksum = PageChecksum(*block->cache, ref.layer, kept);
    parts_.blocks->Apply(ref, declined ? PageEvent::kDeclined : PageEvent::kEncoded, after);
    if (!declined && sampler_ != nullptr && sampler_->Wants(block->cache->id, ref.layer)) Sample(ref);
    parts_.blocks->ReleaseRawIfUnused(ref);
    parts_.blocks->MakeEvictableIfUnused(block);
  }
  for (PageFollower* follower : followers_) follower->OnEncoded(done);
  TellFollowers();
  NotifyWaiters();
}

void EncodeJobs::Sample(const PageRef& ref) {
  const std::shared_ptr<Cache> cache = ref.block->cache->shared_from_this();
  const Page page = ref.page();
  parts_.blocks->Pin(ref);
  ++cache->leases;
  PageSample sample{cache->id, cache->digest, ref.layer, cache->codec};
  sample.device = cache->config.device;
  sample.raw = PageData(*cache, page.raw);
  sample.encoded = PageData(*cache, page.encoded);
  sampler_->Compare(sample, [this, alive = parts_.alive, cache, ref] {
    if (alive.expired()) return;
    --cache->leases;
    parts_.blocks->Unpin(ref);
  });
}

void EncodeJobs::TellFollowers() {
  for (PageFollower* follower : followers_) follower->Tell();
}

void EncodeJobs::NotifyWaiters() {
  std::erase_if(waiting_, [this](EncodeWaiter* waiter) {
    auto& pending = waiter->pending_;
    while (!pending.empty() && !Awaits(pending.back())) pending.pop_back();
    auto& jobs = waiter->pending_jobs_;
    while (!jobs.empty() && (jobs.back()->done() || !jobs.back()->failure.ok())) jobs.pop_back();
    if (!pending.empty() || !jobs.empty()) return false;
    ready_.push_back(waiter);
    return true;
  });
  for (EncodeWaiter* waiter : ready_) {
    if (waiter->ready_) continue;
    waiter->ready_ = true;
    waiter->Resolve();
  }
  // A callback may destroy any lease, and may end further jobs.
  while (!ready_.empty()) {
    EncodeWaiter* waiter = ready_.front();
    ready_.pop_front();
    absl::AnyInvocable<void()> fn = std::move(waiter->fn_);
    waiter->fn_ = nullptr;
    if (fn) fn();
  }
}

void EncodeJobs::CheckInvariants() const {
  for (const EncodeWaiter* waiter : waiting_) KV_CHECK(!waiter->is_ready());
}

}  // namespace kvmanager
