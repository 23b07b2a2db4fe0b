// Work that takes too long for the event loop, run on a worker: its result comes back as a promise.
#pragma once

#include <kj/async.h>
#include <kj/common.h>

#include <atomic>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

/// Runs `work` once on a worker. The promise belongs to the thread that runs the messages of `queue`. Dropping it drops
/// the result, but `work` runs even so: it must own what it reads. Result: movable, and destroyed on the loop's thread.
template <typename Result>
kj::Promise<Result> OnWorker(WorkerPool* workers, MessageQueue* queue, WorkerPool::Owner owner,
                             absl::AnyInvocable<Result()> work) {
  struct Waiting {
    kj::Own<kj::PromiseFulfiller<Result>> fulfiller;
  };
  auto pair = kj::newPromiseAndFulfiller<Result>();
  auto waiting = std::make_unique<Waiting>();
  waiting->fulfiller = kj::mv(pair.fulfiller);
  auto task = [queue, waiting = std::move(waiting), work = std::move(work)]() mutable {
    Result result = work();
    queue->Post([waiting = std::move(waiting), result = std::move(result)]() mutable {
      waiting->fulfiller->fulfill(kj::mv(result));
    });
  };
  workers->Post(WorkerPool::Priority::kEncode, std::move(task), owner);
  return kj::mv(pair.promise);
}

/// Calls `piece` on workers, one at a time and in turns (worker_pool.h), until it returns false. The promise belongs to
/// the thread that runs the messages of `queue`, and `piece` is destroyed there. Dropping the promise stops it behind
/// the piece that runs: it must own what it reads.
inline kj::Promise<void> OnWorkerInTurns(WorkerPool* workers, MessageQueue* queue, WorkerPool::Priority priority,
                                         WorkerPool::Owner owner, absl::AnyInvocable<bool()> piece) {
  struct Pieces {
    void Post(std::shared_ptr<Pieces> self) {
      workers->Post(
          priority,
          [self = std::move(self)]() mutable {
            Pieces& pieces = *self;
            pieces.Run(std::move(self));
          },
          owner);
    }
    void Run(std::shared_ptr<Pieces> self) {
      const Turn turn = workers->NewTurn();
      while (!stopped.load(std::memory_order_relaxed) && piece()) {
        if (turn.over()) return Post(std::move(self));
      }
      queue->Post([self = std::move(self)] { self->fulfiller->fulfill(); });
    }

    WorkerPool* workers;
    MessageQueue* queue;
    WorkerPool::Priority priority;
    WorkerPool::Owner owner;
    absl::AnyInvocable<bool()> piece;
    std::atomic<bool> stopped{false};
    kj::Own<kj::PromiseFulfiller<void>> fulfiller;
  };
  auto pair = kj::newPromiseAndFulfiller<void>();
  // The workers' reference goes back to the loop with its last message.
  auto pieces = std::make_shared<Pieces>();
  pieces->workers = workers;
  pieces->queue = queue;
  pieces->priority = priority;
  pieces->owner = owner;
  pieces->piece = std::move(piece);
  pieces->fulfiller = kj::mv(pair.fulfiller);
  pieces->Post(pieces);
  return pair.promise.attach(kj::defer([pieces] { pieces->stopped.store(true, std::memory_order_relaxed); }));
}

}  // namespace kvmanager
