#include "kvmanager/store/mover.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/store/page_check.h"
#include "kvmanager/store/raw_page.h"

namespace kvmanager {
namespace {

constexpr size_t kPagesPerTask = 16;  // that a worker looks at

// What is copied of a page of so many bytes (PageCopy::bytes): slots are larger.
uint32_t MovedBytes(uint64_t bytes) {
  constexpr uint64_t kUnit = 16;
  return static_cast<uint32_t>((bytes + kUnit - 1) / kUnit * kUnit);
}

// On a worker: the bytes come from memory that engines write.
void LookAt(const Cache& cache, MovingPage& page) {
  // The rest of an open page is what the slot held before.
  if (page.open_tokens > 0) ZeroRawTail(cache.layout(page.to.layer), page.target, page.open_tokens);
  page.refused = !CheckPageValues(cache, page.to.layer, page.raw, {page.target, page.bytes}, "page").ok();
  if (!page.stays) return;
  const uint64_t checksum = Checksum(page.target, page.bytes);
  page.refused |= (page.must_match || page.checksum != 0) && page.checksum != checksum;
  page.expected = std::exchange(page.checksum, checksum);
}

}  // namespace

// Shared by the mover, its tasks and their end.
struct Mover::Batch {
  Tier* upper;  // nullptr: nothing is copied
  std::shared_ptr<Cache> to;
  std::vector<MovingPage> pages;
  std::shared_ptr<const bool> given_up;
  Landed landed;
  uint64_t bytes = 0;
};

void Mover::Move(Tier& upper, const std::shared_ptr<Cache>& to, std::vector<MovingPage> pages,
                 std::shared_ptr<const bool> given_up, Landed landed) {
  auto batch = std::make_shared<Batch>(Batch{&upper, to, std::move(pages), std::move(given_up), std::move(landed)});
  const bool fetch = to->tier == &upper;
  std::vector<PageCopy> copies;
  copies.reserve(batch->pages.size());
  for (const MovingPage& page : batch->pages) {
    uint8_t* const source = const_cast<uint8_t*>(page.source);
    copies.push_back({fetch ? page.target : source, fetch ? source : page.target, MovedBytes(page.bytes)});
    batch->bytes += page.bytes;
  }
  // Pages of one size go in one launch.
  std::stable_sort(copies.begin(), copies.end(),
                   [](const PageCopy& a, const PageCopy& b) { return a.bytes < b.bytes; });
  metrics_->moving_bytes.Increment(static_cast<double>(batch->bytes));
  upper.mover()->Move(fetch ? PageDirection::kFetch : PageDirection::kDemote, std::move(copies),
                      [this, alive = alive_, batch](bool moved) {
                        if (!alive.expired()) OnMoved(batch, moved);
                      });
}

void Mover::OnMoved(const std::shared_ptr<Batch>& batch, bool moved) {
  if (!moved) batch->upper->StopMoving();  // the GPU has failed
  if (batch->given_up != nullptr && *batch->given_up) moved = false;
  if (!moved || batch->to->tier == batch->upper) return Land(*batch, moved);
  LookAtAll(batch);
}

void Mover::Check(const std::shared_ptr<Cache>& to, std::vector<MovingPage> pages, Landed landed) {
  auto batch = std::make_shared<Batch>(Batch{nullptr, to, std::move(pages), nullptr, std::move(landed)});
  for (const MovingPage& page : batch->pages) batch->bytes += page.bytes;
  metrics_->moving_bytes.Increment(static_cast<double>(batch->bytes));
  LookAtAll(batch);
}

void Mover::LookAtAll(const std::shared_ptr<Batch>& batch) {
  std::vector<absl::AnyInvocable<void()>> tasks;
  for (size_t at = 0; at < batch->pages.size(); at += kPagesPerTask) {
    tasks.push_back([batch, at] {
      const size_t end = std::min(at + kPagesPerTask, batch->pages.size());
      for (size_t i = at; i < end; ++i) LookAt(*batch->to, batch->pages[i]);
    });
  }
  host_->executor()->Run(std::move(tasks), [this, alive = alive_, batch] {
    if (!alive.expired()) Land(*batch, true);
  });
}

void Mover::Land(Batch& batch, bool moved) {
  metrics_->moving_bytes.Decrement(static_cast<double>(batch.bytes));
  // A worker may hold the batch a little longer than its last task runs: what is the store's goes here, on its thread.
  Landed landed = std::move(batch.landed);
  const std::shared_ptr<Cache> to = std::move(batch.to);
  landed(moved, std::move(batch.pages));
}

}  // namespace kvmanager
