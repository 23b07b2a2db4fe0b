#include "kvmanager/rpc/session.h"

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {

Session::~Session() { KV_CHECK(sequences_.empty()); }

absl::Status Session::CheckNewSequence() const {
  if (parts_.drain->on()) return absl::UnavailableError("this daemon is draining: it accepts no new sequences");
  return CheckRoomForSequence();
}

absl::Status Session::CheckRoomForSequence() const {
  if (sequences_.size() < limits::kSequencesMax) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "sequences of this connection",
                    absl::StrCat(sequences_.size()), absl::StrCat("below ", limits::kSequencesMax));
}

void Session::Hold(SequenceId sequence, CacheId cache) {
  sequences_.emplace(sequence, cache);
  parts_.held->Hold(sequence, this);
}

void Session::Release(SequenceId sequence) {
  KV_CHECK(sequences_.erase(sequence) == 1);
  parts_.held->Release(sequence);
  gpus_.Forget(sequence);
  parts_.drops->Drop(sequence);
}

absl::Status Session::ReserveArena(uint64_t bytes) {
  if (bytes == 0 || bytes % limits::kArenaBytesStep != 0 || bytes > limits::kArenaBytesMax) {
    return InvalidField("bytes", bytes,
                        absl::StrCat("a multiple of ", limits::kArenaBytesStep, ", at most ", limits::kArenaBytesMax));
  }
  if (arenas_reserved_ >= limits::kArenasMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arenas of this connection", absl::StrCat(arenas_reserved_),
                      absl::StrCat("below ", limits::kArenasMax));
  }
  if (arena_bytes_ + bytes > limits::kArenaBytesTotalMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of this connection",
                      absl::StrCat(arena_bytes_ + bytes), absl::StrCat("at most ", limits::kArenaBytesTotalMax));
  }
  KV_RETURN_IF_ERROR(parts_.arenas->Reserve(bytes));
  ++arenas_reserved_;
  arena_bytes_ += bytes;
  return absl::OkStatus();
}

void Session::UnreserveArena(uint64_t bytes) {
  --arenas_reserved_;
  arena_bytes_ -= bytes;
  parts_.arenas->GiveBack(bytes);
}

uint32_t Session::AddArena(std::shared_ptr<Region> region) {
  const uint32_t id = next_arena_++;
  arenas_.emplace(id, std::move(region));
  return id;
}

void Session::RemoveArena(uint32_t id) { arenas_.erase(id); }

std::shared_ptr<const BoundCache> Session::Bind(std::shared_ptr<const BoundCache> cache) {
  const CacheId id = cache->cache.id;
  absl::erase_if(bound_, [](const auto& entry) { return entry.second.expired(); });
  const auto [entry, first] = bound_.emplace(id, cache);
  return first ? cache : entry->second.lock();
}

void WriteHeldSequence(const HeldSequences& held, const SequenceInfo& info, api::SequenceInfo::Builder out) {
  WriteSequenceInfo(info, out);
  const Session* const holder = held.HolderOf(info.sequence);
  if (holder == nullptr) return;  // a received one that waits for its claim
  out.setClient(TextOf(holder->name()));
  out.setPid(holder->pid());
}

}  // namespace kvmanager
