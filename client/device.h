// A GPU of the daemon, as an engine shares it: words by which their streams wait for one another, and arenas in its
// memory.
//
//   auto device = DeviceClient::Open(client.get(), 0);
//   auto arena = (*device)->CreateArena(bytes);             // kernels of this process use (*arena)->data()
//   ... kernels on `stream` write K, V and Q ...
//   (*device)->EnqueueReady(stream, ++ready);
//   auto done = ...;                                        // a call that the daemon's stream runs behind `ready`
//   (*device)->EnqueueWaitDone(stream, *done);
//   ... kernels on `stream` read the output; no host waited ...
//   if ((*device)->lost()) ...                              // the daemon went: what was waited for may not be there
//
// A lease, as other handles are: it belongs to the thread of its Client, and is void after Reconnect(). A thread of its
// own sees the connection's end and lets through whatever of this process's streams waits for the daemon, so that they
// end; it ends the connection itself when a daemon that hangs, or is stopped, holds up a stream. The GPU's work is of
// this process: nothing here waits for it but the destructor.
//
// In builds without the CUDA Toolkit Open() says so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/shared_semaphores.h"

namespace kvmanager::client {

struct DeviceDescription {
  int ordinal = 0;  // the daemon's; this process's is device().info().ordinal
  DeviceUuid uuid = {};
  std::string name;
  uint64_t pool_bytes = 0, slab_bytes = 0;
  uint32_t slabs = 0;
  bool samples_queries = false;  // the daemon wants rows of queries (in_process.h)
};

class DeviceClient {
 public:
  /// Opens the daemon's GPU `ordinal`, and the same GPU here, which becomes this thread's current device. `client` is
  /// one that Client::Connect made. Errors: FAILED_PRECONDITION when the daemon uses no GPU or over TCP, saying what to
  /// do; NOT_FOUND for another ordinal; UNAVAILABLE where this process cannot use that GPU.
  static absl::StatusOr<std::unique_ptr<DeviceClient>> Open(Client* client, int ordinal);
  /// This process's streams no longer use its words and arenas, or only wait for them. Waits for what runs on the GPU.
  virtual ~DeviceClient() = default;

  virtual const DeviceDescription& description() const = 0;
  virtual const Device& device() const = 0;
  virtual SharedSemaphores& words() = 0;

  /// GPU memory, zeroed, mapped by both processes; rounded up to 2 MiB. data() are addresses of the device: host code
  /// must not use them. A TensorView's arena, for caches on this GPU.
  virtual absl::StatusOr<std::unique_ptr<Arena>> CreateArena(uint64_t bytes) = 0;

  /// Behind all work on this process's `stream` so far, the daemon's stream may pass `value`: values grow.
  virtual absl::Status EnqueueReady(CUstream_st* stream, uint64_t value) = 0;
  /// What comes later on this process's `stream` waits for the daemon's to reach `value`, or to be lost: also once
  /// `done` has not moved for Client::Options::deadline_ms though this process's streams owe the daemon nothing.
  virtual absl::Status EnqueueWaitDone(CUstream_st* stream, uint64_t value) = 0;
  /// Behind all work on this process's `stream` so far: steps up to `epoch` are over (in_process.h).
  virtual absl::Status EnqueueReleased(CUstream_st* stream, uint64_t epoch) = 0;

  /// The daemon copies between two ranges of this client's device arenas behind `ready` (0: at once); returns what
  /// `done` will be behind that. To try how an engine is wired.
  virtual absl::StatusOr<uint64_t> Copy(const TensorView& from, const TensorView& to, uint64_t ready) = 0;

  /// A descriptor, the caller's, of a slab of the pool with pages of this cache's tenant, once (in_process.h).
  virtual absl::StatusOr<int> MapSlab(uint32_t cache_id, uint32_t slab) = 0;

  /// The connection has ended, or was ended here: waits for `done` pass. Any thread.
  virtual bool lost() const = 0;
};

}  // namespace kvmanager::client
