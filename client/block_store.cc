#include "client/block_store.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

constexpr size_t kEncodingMax = 2;  // parts: one is encoded while the one before is given to the daemon

}  // namespace

absl::StatusOr<BlockStore::State> BlockStore::Run(const BlockStoreSignals& signals) {
  auto state = RunOn(signals);
  if (!state.ok()) Abandon();
  return state;
}

absl::StatusOr<BlockStore::State> BlockStore::RunOn(const BlockStoreSignals& signals) {
  while (true) {
    const uint32_t waiting = signals.waiting.load(std::memory_order_relaxed);
    if (!looked_up_) KV_RETURN_IF_ERROR(LookUp(waiting));
    KV_ASSIGN_OR_RETURN(bool moved, BeginNext(waiting));
    if (signals.urgent.load(std::memory_order_relaxed) != 0) return State::kUrgent;
    KV_ASSIGN_OR_RETURN(const bool wrote, WriteNext());
    moved |= wrote;
    const bool waits = writing_.size() >= options_.writes || (encoding_.empty() && !moved);
    if (!writing_.empty() && (waits || writing_.front().call.ready())) {
      KV_RETURN_IF_ERROR(TakeWritten());
      moved = true;
    }
    if (moved) continue;
    if (encoding_.empty() && writing_.empty()) {
      NoteRead();
      return declined_ ? State::kDeclined : State::kDone;
    }
    work_.Rest();
  }
}

absl::Status BlockStore::LookUp(uint32_t waiting) {
  looked_up_ = true;
  if (stopped_) return absl::OkStatus();
  work_.Ask();
  if (options_.ahead) KV_RETURN_IF_ERROR(BeginNext(waiting).status());
  KV_ASSIGN_OR_RETURN(const uint32_t present, work_.Present());
  present_ = std::min(present - std::min(present, options_.first), options_.count);
  if (present_ > next_) {
    counts_.found = present_ - next_;
    next_ = present_;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> BlockStore::BeginNext(uint32_t waiting) {
  if (declined_ || encoding_.size() >= kEncodingMax || stagings_.empty() || ranges_.empty()) return false;
  const MutexLock lock(mutex_);
  if (AllBegun()) return false;
  BlockPart part{next_, NextBlocks(waiting), stagings_.back(), options_.tied ? stagings_.back() : ranges_.back(),
                 parts_};
  KV_RETURN_IF_ERROR(work_.Begin(&part));
  ++parts_;
  next_ += part.count;
  stagings_.pop_back();
  if (!options_.tied) ranges_.pop_back();
  encoding_.push_back(part);
  return true;
}

uint32_t BlockStore::NextBlocks(uint32_t waiting) {
  uint32_t wanted = options_.count - next_;
  if (waiting == 0) {
    const uint32_t size = size_;
    size_ = std::min(2 * size_, options_.blocks);
    wanted = wanted > size || wanted <= 2 * options_.first_blocks ? std::min(wanted, size) : wanted / 2;
  }
  return work_.Fits(next_, std::min(wanted, options_.blocks));
}

absl::StatusOr<bool> BlockStore::WriteNext() {
  if (encoding_.empty() || writing_.size() >= options_.writes) return false;
  KV_ASSIGN_OR_RETURN(const bool encoded, work_.Encoded(encoding_.front()));
  if (!encoded) return false;
  const BlockPart part = encoding_.front();
  encoding_.pop_front();
  if (part.at + part.count <= present_) {  // begun before that was known
    counts_.found += part.count;
    stagings_.push_back(part.staging);
    if (!options_.tied) ranges_.push_back(part.range);
    NoteRead();
    return true;
  }
  declined_ = declined_ || work_.Declined(part);
  if (declined_) {  // what was begun behind it is the caller's, too
    next_ = std::min(next_, part.at);
    return true;
  }
  NoteRead();
  writing_.push_back({part, work_.Write(part)});
  if (!options_.tied) stagings_.push_back(part.staging);
  return true;
}

absl::Status BlockStore::TakeWritten() {
  const BlockPart part = writing_.front().part;
  const auto result = writing_.front().call.Wait();
  writing_.pop_front();
  (options_.tied ? stagings_ : ranges_).push_back(part.range);
  if (absl::IsResourceExhausted(result.status())) {
    counts_.full += part.count;
    full_ = std::string(result.status().message());
    return absl::OkStatus();
  }
  KV_RETURN_IF_ERROR(result.status());
  counts_.written += result->written;
  counts_.present += result->present;
  counts_.written_bytes += part.bytes * result->written / part.count;
  return absl::OkStatus();
}

void BlockStore::NoteRead() {
  if (AllBegun() && encoding_.empty() && (!declined_ || stopped_)) read_.store(1, std::memory_order_release);
}

void BlockStore::Stop() {
  const MutexLock lock(mutex_);
  stopped_ = true;
}

void BlockStore::Abandon() {
  Stop();
  work_.Drain();
  encoding_.clear();
  for (; !writing_.empty(); writing_.pop_front()) writing_.front().call.Wait().status().IgnoreError();
  NoteRead();
}

}  // namespace kvmanager::client
