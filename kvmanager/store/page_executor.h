// Interfaces the store calls for background work: EncodeExecutor (encode pages, train indexes) and PageSampler (compare
// both forms of some pages).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// Training of one layer's index on a GPU: the keys are copied to the host and given to the job's tasks, whose image
/// goes to `image` and is completed there (DeviceSelection::LaunchPrepareIndexes). All addresses are the device's.
struct DeviceIndexJob {
  SequenceId sequence = 0;
  std::shared_ptr<IndexJob> job;
  std::vector<const uint8_t*> pages;  // raw form; the keys are their first halves
  uint64_t key_bytes = 0;             // of a page
  uint8_t* image = nullptr;
  /// Once, on the store's thread; until then bytes and slots stay. An error: the image is not there.
  absl::AnyInvocable<void(absl::Status)> done;
};

/// Runs encode jobs away from the store's thread.
class EncodeExecutor {
 public:
  virtual ~EncodeExecutor() = default;
  /// Encodes `items` (their `declined` is set), in turns of `owner`, and then calls `done(items)` on the store's
  /// thread, exactly once. The codec and the bytes stay alive until then.
  virtual void Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items, WorkerPool::Owner owner,
                      absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) = 0;
  /// Runs `tasks`, in any order and at once, and then calls `done()` on the store's thread, exactly once.
  virtual void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) = 0;
  /// Of a GPU whose caches have indexes. The keys will be there in the order of submission, as what is encoded.
  virtual void Train(DeviceIndexJob job);
};

/// A page whose encoded form has just been made.
struct PageSample {
  CacheId cache = 0;
  CacheDigest digest;  // the cache's
  uint32_t layer = 0;
  std::shared_ptr<const Codec> codec;  // shared: it outlives the cache's closing
  const uint8_t* raw = nullptr;        // of a cache on a GPU there, where its engine may write over both forms
  const uint8_t* encoded = nullptr;
  int device = CacheConfig::kHost;  // as CacheConfig::device
};

/// Looks at both forms of some pages before their raw form goes. The store's thread.
class PageSampler {
 public:
  virtual ~PageSampler() = default;
  /// Asked once for each page that was encoded.
  virtual bool Wants(CacheId cache, uint32_t layer) = 0;
  /// Right after Wants said so. Both forms stay until `done` is called, once, on the store's thread.
  virtual void Compare(const PageSample& page, absl::AnyInvocable<void()> done) = 0;
};

}  // namespace kvmanager
