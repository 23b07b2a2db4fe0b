// What one connection holds: its sequences and arenas, by the numbers that its requests name them with.
//
// Shared by the connection, its capabilities and its running calls, whichever lives longest; the loop's thread alone.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/rpc/arena_bytes.h"
#include "kvmanager/rpc/call_records.h"
#include "kvmanager/rpc/held_sequences.h"
#include "kvmanager/rpc/memory_calls.h"
#include "kvmanager/rpc/principals.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session_gpus.h"
#include "kvmanager/rpc/session_messages.h"
#include "kvmanager/rpc/session_uses.h"

namespace kvmanager {

class Session {
 public:
  /// What every session uses. Everything outlives them.
  struct Parts {
    PageStore* store = nullptr;
    const DrainSwitch* drain = nullptr;
    HeldSequences* held = nullptr;
    ArenaBytes* arenas = nullptr;
    CallRecords* calls = nullptr;
    MessageRoom* requests = nullptr;
    MessageRoom* replies = nullptr;
    SessionUses* uses = nullptr;
    SessionGpus::Parts gpus;
  };

  /// parts: outlives this. pid: of the process that connected, as the socket's credentials say; 0: unknown.
  Session(const Parts& parts, const Proof& proof, uint32_t pid,
          absl::AnyInvocable<void(EndReason, const std::string& why)> cut_off)
      : parts_(parts),
        pid_(pid),
        cut_off_(std::move(cut_off)),
        proof_(proof),
        use_(parts.uses),
        gpus_(parts.gpus, pid),
        messages_(
            parts.requests, parts.replies, [this] { CutOff(EndReason::kUnfinished); },
            [this] { CutOff(EndReason::kUnread); }) {}
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  CallRecords& calls() const { return *parts_.calls; }

  /// Ends the connection soon, after the caller has returned. Nothing if it has ended. why: more than the reason says.
  void CutOff(EndReason reason, const std::string& why = "") {
    if (cut_off_ != nullptr) cut_off_(reason, why);
  }
  /// The connection is gone; calls and capabilities may live a little longer.
  void Detach() {
    cut_off_ = nullptr;
    messages_.Detach();
    background_ = nullptr;
  }

  bool handshake_done() const { return handshake_done_; }
  /// token: SHA-256 of the one that it showed.
  void Greet(std::string name, const std::optional<Digest>& token = std::nullopt) {
    handshake_done_ = true;
    messages_.Greet();
    name_ = std::move(name);
    proof_.token = token;
  }
  const std::string& name() const { return name_; }
  uint32_t pid() const { return pid_; }

  /// Of who it is, so far.
  const Proof& proof() const { return proof_; }

  // Sequences.
  enum class Begins { kNow, kBefore };
  /// Whether this connection may hold one more. Errors: RESOURCE_EXHAUSTED; UNAVAILABLE where it begins now and the
  /// daemon drains (a claim takes over what is here already).
  absl::Status CheckRoomForSequence(Begins begins) const;
  void Hold(SequenceId sequence, CacheId cache);
  /// One of them is released soon: it takes no room any more.
  void LetGo() { ++let_go_; }
  /// Drops it from the store too.
  void Release(SequenceId sequence);
  bool Holds(SequenceId sequence, CacheId cache) const {
    const auto found = sequences_.find(sequence);
    return found != sequences_.end() && found->second == cache;
  }

  // Arenas in host memory; those on GPUs are numbered with them. Regions are shared with the calls that use them.
  absl::Status ReserveArena(uint64_t bytes);
  void UnreserveArena(uint64_t bytes);
  uint32_t AddArena(std::shared_ptr<Region> region);
  void RemoveArena(uint32_t id);
  /// nullptr: unknown.
  std::shared_ptr<Region> FindArena(uint32_t id) const {
    const auto found = arenas_.find(id);
    return found == arenas_.end() ? nullptr : found->second;
  }
  /// Without taking part in owning it; empty: unknown.
  absl::Span<uint8_t> ArenaBytes(uint32_t id) const {
    const auto found = arenas_.find(id);
    return found == arenas_.end() ? absl::Span<uint8_t>()
                                  : absl::Span<uint8_t>(found->second->data(), found->second->bytes());
  }

  /// A number for an arena on a GPU, which SessionGpus keeps.
  uint32_t NewArenaId() { return next_arena_++; }

  SessionMessages& messages() { return messages_; }
  SessionGpus& gpus() { return gpus_; }
  const SessionGpus& gpus() const { return gpus_; }

  // Caches.
  /// What all capabilities of one cache share: `cache`, or what an earlier one of them gave.
  std::shared_ptr<const BoundCache> Bind(std::shared_ptr<const BoundCache> cache);
  /// nullptr: this connection has no capability of it.
  std::shared_ptr<const BoundCache> BoundOf(CacheId cache) const {
    const auto found = bound_.find(cache);
    return found == bound_.end() ? nullptr : found->second.lock();
  }

 private:
  friend absl::StatusOr<std::shared_ptr<const void>> ReserveCache(const std::shared_ptr<Session>& session);
  friend absl::StatusOr<std::shared_ptr<const void>> ReserveBlockLease(const std::shared_ptr<Session>& session);
  friend absl::StatusOr<std::shared_ptr<const void>> ReserveMappedPages(const std::shared_ptr<Session>& session,
                                                                        uint64_t pages);
  friend absl::StatusOr<std::shared_ptr<const void>> ReserveSlab(const std::shared_ptr<Session>& session);
  friend absl::StatusOr<std::shared_ptr<const void>> ReservePrefetch(const std::shared_ptr<Session>& session,
                                                                     uint64_t names);

  friend void GoOnWith(Session& session, kj::Promise<void> work);

  struct IgnoresFailures final : kj::TaskSet::ErrorHandler {
    void taskFailed(kj::Exception&&) override {}
  };
  /// Who pays for arenas; over TCP nobody shares memory with this host.
  uint32_t User() const { return proof_.uid.value_or(UINT32_MAX); }

  const Parts& parts_;
  const uint32_t pid_;
  absl::AnyInvocable<void(EndReason, const std::string&)> cut_off_;  // nullptr once the connection is gone
  bool handshake_done_ = false;
  std::string name_;
  Proof proof_;
  SessionUses::Entry use_;
  absl::flat_hash_map<SequenceId, CacheId> sequences_;
  size_t let_go_ = 0;  // of them
  uint64_t slabs_ = 0;
  absl::flat_hash_map<uint32_t, std::shared_ptr<Region>> arenas_;
  SessionGpus gpus_;
  SessionMessages messages_;
  absl::flat_hash_map<CacheId, std::weak_ptr<const BoundCache>> bound_;
  size_t bound_max_ = 16;  // of bound_; then those that are gone make room
  uint32_t next_arena_ = 1;
  IgnoresFailures ignores_;
  std::unique_ptr<kj::TaskSet> background_ = std::make_unique<kj::TaskSet>(ignores_);  // nullptr: it is gone
};

/// A place for one capability of a cache of this session: kept by it, or by what makes it. Errors: RESOURCE_EXHAUSTED.
absl::StatusOr<std::shared_ptr<const void>> ReserveCache(const std::shared_ptr<Session>& session);
/// The same for a lease on blocks that are read where they lie.
absl::StatusOr<std::shared_ptr<const void>> ReserveBlockLease(const std::shared_ptr<Session>& session);
/// The same for the pages of such a lease.
absl::StatusOr<std::shared_ptr<const void>> ReserveMappedPages(const std::shared_ptr<Session>& session, uint64_t pages);
/// The same for names of blocks that are prefetched.
absl::StatusOr<std::shared_ptr<const void>> ReservePrefetch(const std::shared_ptr<Session>& session, uint64_t names);
/// The same for the descriptor of a slab.
absl::StatusOr<std::shared_ptr<const void>> ReserveSlab(const std::shared_ptr<Session>& session);

/// Work that no call waits for. It ends with the connection.
void GoOnWith(Session& session, kj::Promise<void> work);

/// Space that a connection fills with one arena: given back when the arena's memory goes.
class ArenaMemory {
 public:
  /// `bytes` are reserved.
  ArenaMemory(std::shared_ptr<Session> session, uint64_t bytes) : session_(std::move(session)), bytes_(bytes) {}
  ~ArenaMemory() { session_->UnreserveArena(bytes_); }
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

 private:
  const std::shared_ptr<Session> session_;
  const uint64_t bytes_;
};

/// `info` and who holds the sequence.
void WriteHeldSequence(const HeldSequences& held, const SequenceInfo& info, api::SequenceInfo::Builder out);

}  // namespace kvmanager
