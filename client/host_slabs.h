// Slabs of the daemon's host memory, mapped for reading: where the addresses of Cache::MapBlocksAsync point to.
//
// A slab is mapped once, by its number, and stays until the daemon wants it back or this is gone. What lies behind its
// last byte reads as zeros, as many as the slab has bytes: whoever reads a page whose place a broken daemon made up
// gets wrong bytes, and no signal. Forked children have no part of it, since the daemon gives a slab to another tenant
// once no process maps it. For the same reason descriptors are not kept, of which there would be thousands.
//
// Owner: the Connection, which makes new ones with each link and lets go of them before it closes its socket, and the
// leases of that link. The connection's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/fork_guard.h"

namespace kvmanager::client {

class HostSlabs {
 public:
  static constexpr size_t kSlabsMax = 16384;  // two mappings each, of the 65,530 that a process may have
  static constexpr uint64_t kSlabBytesMax = uint64_t{1} << 36;

  HostSlabs() = default;
  ~HostSlabs();  // unpins and unmaps; in a forked child nothing
  HostSlabs(const HostSlabs&) = delete;

  /// Empty: not mapped.
  absl::Span<const uint8_t> Find(uint32_t slab) const;
  /// Maps `bytes` of what `fd` names, which stays the caller's; pinned, where a pinner was given. Nothing where the
  /// slab is mapped already. Errors: INTERNAL (no sealed memory of so many bytes), FAILED_PRECONDITION (kSlabsMax),
  /// RESOURCE_EXHAUSTED.
  absl::Status Map(uint32_t slab, int fd, uint64_t bytes);
  /// Unpins and unmaps a slab; nothing where it is not mapped, or somebody holds it.
  void Unmap(uint32_t slab);
  /// Keeps slabs mapped: this process may read there even where the daemon has ended the lease on what it reads.
  class Hold {
   public:
    Hold(std::shared_ptr<HostSlabs> of, std::vector<uint32_t> slabs);
    ~Hold();
    Hold(const Hold&) = delete;
    HostSlabs& of() { return *of_; }

   private:
    const std::shared_ptr<HostSlabs> of_;
    const std::vector<uint32_t> slabs_;
  };
  /// Pins what is mapped, and what will be; the first pinner counts. nullptr: nothing.
  void PinWith(std::shared_ptr<SlabPinner> pinner);
  /// Why a slab could not be pinned, once; no more are tried then. Else OK.
  absl::Status TakePinError();

 private:
  struct Slab {
    const uint8_t* data = nullptr;
    uint64_t bytes = 0;
    void* reserved = nullptr;  // the mapping with all that is around it
    uint64_t reserved_bytes = 0;
    bool pinned = false;
  };
  void Pin(Slab& slab);
  void Unmap(const Slab& slab);

  const uint64_t forks_ = ForkCount();
  absl::flat_hash_map<uint32_t, Slab> slabs_;
  absl::flat_hash_map<uint32_t, size_t> holds_;  // how many, none 0
  std::shared_ptr<SlabPinner> pinner_;           // shared with whoever gives it to several connections
  absl::Status pin_error_;
  bool may_pin_ = false;  // there is a pinner, and it has not failed
};

}  // namespace kvmanager::client
