#include "kvmanager/memory/host_pinner.h"

#include <utility>

namespace kvmanager {
namespace {

std::map<const uint8_t*, const uint8_t*> EndsOf(const std::vector<absl::Span<uint8_t>>& spans) {
  std::map<const uint8_t*, const uint8_t*> ends;
  for (const absl::Span<uint8_t> span : spans) ends.emplace(span.data(), span.data() + span.size());
  return ends;
}

}  // namespace

HostPinner::HostPinner(std::vector<absl::Span<uint8_t>> spans, Calls calls)
    : spans_(std::move(spans)), ends_(EndsOf(spans_)), calls_(std::move(calls)), thread_([this] { Run(); }) {}

HostPinner::~HostPinner() {
  stop_.store(true, std::memory_order_relaxed);
  thread_.join();
  for (uint32_t i = ready_spans(); i-- > 0;) calls_.unpin(spans_[i].data());
}

void HostPinner::Run() {
  absl::Status status;
  for (const absl::Span<uint8_t> span : spans_) {
    if (stop_.load(std::memory_order_relaxed)) {
      status = absl::CancelledError("pinning was stopped");
      break;
    }
    status = calls_.pin(span.data(), span.size());
    if (!status.ok()) break;
    ready_spans_.fetch_add(1, std::memory_order_release);
  }
  MutexLock lock(mutex_);
  status_ = std::move(status);
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

uint64_t HostPinner::ready_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t i = 0, count = ready_spans(); i < count; ++i) bytes += spans_[i].size();
  return bytes;
}

uint64_t HostPinner::total_bytes() const {
  uint64_t bytes = 0;
  for (const absl::Span<uint8_t> span : spans_) bytes += span.size();
  return bytes;
}

absl::Status HostPinner::status() const {
  MutexLock lock(mutex_);
  return status_;
}

void HostPinner::Wait() {
  MutexLock lock(mutex_);
  while (!done_.load(std::memory_order_acquire)) lock.Wait(changed_);
}

}  // namespace kvmanager
