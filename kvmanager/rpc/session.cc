#include "kvmanager/rpc/session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {

Session::~Session() { KV_CHECK(sequences_.empty()); }

absl::Status Session::CheckRoomForSequence(Begins begins) const {
  if (begins == Begins::kNow && parts_.drain->on()) {
    return absl::UnavailableError("this daemon is draining: it accepts no new sequences");
  }
  const size_t held = sequences_.size() - let_go_;
  if (held < limits::kSequencesMax) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "sequences of this connection", absl::StrCat(held),
                    absl::StrCat("below ", limits::kSequencesMax));
}

void Session::Hold(SequenceId sequence, CacheId cache) {
  sequences_.emplace(sequence, cache);
  use_->sequences = sequences_.size();
  parts_.held->Hold(sequence, this);
}

void Session::Release(SequenceId sequence) {
  KV_CHECK(sequences_.erase(sequence) == 1);
  if (let_go_ > 0) --let_go_;
  use_->sequences = sequences_.size();
  parts_.held->Release(sequence);
  gpus_.Forget(sequence);
  parts_.store->Drop(sequence);
}

absl::Status Session::ReserveArena(uint64_t bytes) {
  if (bytes == 0 || bytes % limits::kArenaBytesStep != 0 || bytes > limits::kArenaBytesMax) {
    return InvalidField("bytes", bytes,
                        absl::StrCat("a multiple of ", limits::kArenaBytesStep, ", at most ", limits::kArenaBytesMax));
  }
  if (use_->arenas >= limits::kArenasMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arenas of this connection", absl::StrCat(use_->arenas),
                      absl::StrCat("below ", limits::kArenasMax));
  }
  if (use_->arena_bytes + bytes > limits::kArenaBytesTotalMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of this connection",
                      absl::StrCat(use_->arena_bytes + bytes), absl::StrCat("at most ", limits::kArenaBytesTotalMax));
  }
  KV_RETURN_IF_ERROR(parts_.arenas->Reserve(User(), bytes));
  ++use_->arenas;
  use_->arena_bytes += bytes;
  return absl::OkStatus();
}

void Session::UnreserveArena(uint64_t bytes) {
  --use_->arenas;
  use_->arena_bytes -= bytes;
  parts_.arenas->GiveBack(User(), bytes);
}

absl::StatusOr<std::shared_ptr<const void>> ReserveCache(const std::shared_ptr<Session>& session) {
  uint64_t& caches = session->use_->caches;
  if (caches >= limits::kCachesHeldMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "caches that this connection holds", absl::StrCat(caches),
                      absl::StrCat("below ", limits::kCachesHeldMax, " to open another; drop some, and finish calls"));
  }
  ++caches;
  return std::shared_ptr<const void>(session.get(), [session](const void*) { --session->use_->caches; });
}

namespace {

absl::StatusOr<std::shared_ptr<const void>> Reserve(const std::shared_ptr<Session>& session, uint64_t* held,
                                                    uint64_t count, uint64_t most, const char* field) {
  if (count > most - *held) {
    return FieldError(absl::StatusCode::kResourceExhausted, field,
                      count == 1 ? absl::StrCat(*held) : absl::StrCat(*held, " and ", count, " more"),
                      absl::StrCat(count == 1 ? "below " : "at most ", most));
  }
  *held += count;
  return std::shared_ptr<const void>(session.get(), [session, held, count](const void*) { *held -= count; });
}

}  // namespace

absl::StatusOr<std::shared_ptr<const void>> ReserveBlockLease(const std::shared_ptr<Session>& session) {
  return Reserve(session, &session->use_->block_leases, 1, limits::kBlockLeasesMax,
                 "leases on blocks of this connection");
}

absl::StatusOr<std::shared_ptr<const void>> ReserveMappedPages(const std::shared_ptr<Session>& session,
                                                               uint64_t pages) {
  return Reserve(session, &session->use_->mapped_pages, pages, limits::kMappedPagesHeldMax,
                 "pages under leases on blocks of this connection");
}

absl::StatusOr<std::shared_ptr<const void>> ReservePrefetch(const std::shared_ptr<Session>& session, uint64_t names) {
  return Reserve(session, &session->use_->prefetch_names, names, limits::kPrefetchNamesMax,
                 "names that are prefetched for this connection");
}

absl::StatusOr<std::shared_ptr<const void>> ReserveSlab(const std::shared_ptr<Session>& session) {
  return Reserve(session, &session->slabs_, 1, limits::kSlabsHeldMax, "descriptors of slabs of this connection");
}

void GoOnWith(Session& session, kj::Promise<void> work) {
  if (session.background_ != nullptr) session.background_->add(kj::mv(work));
}

uint32_t Session::AddArena(std::shared_ptr<Region> region) {
  const uint32_t id = next_arena_++;
  arenas_.emplace(id, std::move(region));
  return id;
}

void Session::RemoveArena(uint32_t id) { arenas_.erase(id); }

std::shared_ptr<const BoundCache> Session::Bind(std::shared_ptr<const BoundCache> cache) {
  const CacheId id = cache->cache.id;
  if (bound_.size() >= bound_max_) {
    absl::erase_if(bound_, [](const auto& entry) { return entry.second.expired(); });
    bound_max_ = std::max(bound_max_, 2 * bound_.size());
  }
  std::weak_ptr<const BoundCache>& entry = bound_[id];
  if (auto earlier = entry.lock()) return earlier;
  entry = cache;
  return cache;
}

void WriteHeldSequence(const HeldSequences& held, const SequenceInfo& info, api::SequenceInfo::Builder out) {
  WriteSequenceInfo(info, out);
  const Session* const holder = held.HolderOf(info.sequence);
  if (holder == nullptr) return;  // a received one that waits for its claim
  out.setClient(TextOf(holder->name()));
  out.setPid(holder->pid());
}

}  // namespace kvmanager
