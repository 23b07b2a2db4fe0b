// Manifests of hand-offs are parsed where that holds nobody up: small ones by the loop, others by workers, and those
// that take more than a worker's piece by the background's thread.
#pragma once

#include <cstddef>
#include <utility>

#include "kvmanager/handoff/incoming_parts.h"

namespace kvmanager {

constexpr size_t kManifestOfLoopBytes = 64 << 10, kManifestOfWorkersBytes = 2 << 20;  // a blob of a MiB, and pages

/// Calls `then` on the loop's thread with what `parse` returns. bytes: of the manifest. Any thread.
template <typename Parse, typename Then>
void ParseThen(const IncomingParts& parts, size_t bytes, WorkerPool::Owner owner, Parse parse, Then then) {
  if (bytes <= kManifestOfLoopBytes) {
    return parts.queue->Post([parse = std::move(parse), then = std::move(then)]() mutable { then(parse()); });
  }
  WorkerPool* const workers = bytes <= kManifestOfWorkersBytes ? parts.workers : parts.background;
  workers->Post(
      WorkerPool::Priority::kEncode,
      [queue = parts.queue, parse = std::move(parse), then = std::move(then)]() mutable {
        queue->Post([parsed = parse(), then = std::move(then)]() mutable { then(std::move(parsed)); });
      },
      owner);
}

}  // namespace kvmanager
