// Copies pages out of another process's GPU memory into a GPU of this host: what the transport needs of CUDA, without
// CUDA. Implemented by PeerCopier (transport/cuda), and by tests.
//
// Outlives the transport that uses it. Any thread; nothing here blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "transport/transport.h"

namespace kvmanager {

class DeviceCopier {
 public:
  /// Memory that a sender passed. Kept mapped a while after its last user has let go (Sweep).
  class Source {
   public:
    virtual ~Source() = default;
  };
  struct Page {
    Source* from = nullptr;  // one of the job's sources
    uint64_t offset = 0;     // in it; the page is within its bytes
    uint8_t* to = nullptr;
    uint32_t bytes = 0;
    uint64_t checksum = 0;  // set: XXH3-64 of what is in the target
  };
  /// What has happened: every byte of `pages` is in its target, and their checksums say what it is; or an error, of
  /// field `gpu`: that memory cannot be reached, or the GPU has failed.
  using Copied = absl::AnyInvocable<void(absl::Status, std::vector<Page> pages)>;

  virtual ~DeviceCopier() = default;
  /// slab.fd is taken. Whether it is what it says shows when it is copied from.
  virtual std::shared_ptr<Source> Open(const DeviceSlab& slab) = 0;
  /// Copies are to come within a few milliseconds: whoever makes them may be awake by then.
  virtual void Expect() {}
  /// Targets are memory of the GPU `device` (HandOffReceiver::Accepted). sources: shared until `copied`, which is
  /// called once, from any thread; nothing is written after.
  virtual void Copy(int device, std::vector<std::shared_ptr<Source>> sources, std::vector<Page> pages,
                    Copied copied) = 0;
  /// Lets go of memory that nobody has used since the last call.
  virtual void Sweep() = 0;
};

}  // namespace kvmanager
