// What one connection holds of GPUs: at most one stream on each, arenas, and what it runs there. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvmanager/gpu/device_arena.h"
#include "kvmanager/gpu/device_stream.h"
#include "kvmanager/gpu/device_work.h"
#include "kvmanager/gpu/process_steps.h"

namespace kvmanager {

class SessionGpus {
 public:
  /// What those of every connection use. Everything outlives them.
  struct Parts {
    DeviceWork::Parts work;
    ProcessSteps::Parts process;
  };

  /// parts: outlives this. pid: of the process that connected; 0: unknown.
  SessionGpus(const Parts& parts, uint32_t pid) : parts_(parts), pid_(pid) {}
  SessionGpus(const SessionGpus&) = delete;
  SessionGpus& operator=(const SessionGpus&) = delete;

  void AddArena(uint32_t id, std::shared_ptr<DeviceArena> arena) { arenas_.emplace(id, std::move(arena)); }
  /// The arena's memory stays until what this connection's stream was given so far has passed.
  void RemoveArena(uint32_t id);
  /// Its address on the device, its size and its GPU; nullptr: unknown, or host memory.
  std::shared_ptr<const DeviceArena> ArenaOf(uint32_t id) const {
    const auto found = arenas_.find(id);
    return found == arenas_.end() ? nullptr : found->second;
  }

  /// nullptr: none is open.
  std::shared_ptr<DeviceStream> StreamOf(int ordinal) const;
  /// gpu: the stream's.
  void SetStream(Gpu* gpu, const std::shared_ptr<DeviceStream>& stream);
  /// Closes it; it keeps this connection's arenas and work of its GPU until it has drained.
  void CloseStream(DeviceStream* stream);

  /// What this connection runs on a GPU: in the daemon, and in its own process. Made when first asked for. Errors:
  /// FAILED_PRECONDITION without a stream; RESOURCE_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<DeviceWork>> WorkOf(int ordinal);
  absl::StatusOr<std::shared_ptr<ProcessSteps>> ProcessStepsOf(int ordinal);
  std::shared_ptr<ProcessSteps> FindProcessSteps(int ordinal) const;  // nullptr: it was not asked for
  /// A sequence is given up, before the store drops it.
  void Forget(SequenceId sequence);

 private:
  /// A GPU that this connection opened.
  struct OpenDevice {
    Gpu* gpu = nullptr;
    std::weak_ptr<DeviceStream> stream;  // its capability owns it
  };

  const Parts& parts_;
  const uint32_t pid_;
  absl::flat_hash_map<uint32_t, std::shared_ptr<DeviceArena>> arenas_;
  absl::flat_hash_map<int, OpenDevice> devices_;  // by ordinal
  absl::flat_hash_map<int, std::shared_ptr<DeviceWork>> works_;
  absl::flat_hash_map<int, std::shared_ptr<ProcessSteps>> process_steps_;
};

}  // namespace kvmanager
