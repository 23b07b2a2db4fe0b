// Reads pages out of the memory of other daemons, wherever they run: what the transport needs of UCX, without UCX.
// Implemented by UcxMemory (transport/ucx), and by tests.
//
// Outlives the transport that uses it. Any thread; nothing here blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager {

class RemoteMemory {
 public:
  /// A peer's memory that can be read for as long as this lives.
  class Source {
   public:
    virtual ~Source() = default;
    virtual uint64_t bytes() const = 0;
  };
  /// What was read, in memory of this side that nobody else uses until this is destroyed, on any thread. A peer that
  /// has taken over the process that reads may still change it.
  class Piece {
   public:
    virtual ~Piece() = default;
    virtual absl::Span<const uint8_t> bytes() const = 0;
  };
  using Done = absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<Piece>>)>;
  /// In which a description is good: those made in another are refused.
  using Context = absl::Span<const uint8_t>;
  static constexpr size_t kDescriptionBytesMax = 16 << 10;

  virtual ~RemoteMemory() = default;
  /// What peers can read of this side, in order of address.
  virtual absl::Span<const absl::Span<const uint8_t>> memory() const = 0;
  /// What a peer needs to read memory()[index]: 1..kDescriptionBytesMax bytes.
  virtual std::string Describe(size_t index, Context context) const = 0;
  /// What a peer described. UNAVAILABLE: not made by a peer that this side trusts, in this context; or by one that
  /// cannot be read from here. Whether it can shows when it is read.
  virtual absl::StatusOr<std::shared_ptr<Source>> Open(absl::Span<const uint8_t> description, Context context) = 0;
  /// REQUIRES: offset and bytes within the source. done: once, from any thread, perhaps before this returns or only
  /// when the peer is given up; not at all if this object ends before. UNAVAILABLE: the peer or the way there failed.
  virtual void Read(std::shared_ptr<Source> from, uint64_t offset, uint64_t bytes, Done done) = 0;
};

}  // namespace kvmanager
