// The cache that a step is for, as calls need it after the cache itself was closed.
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

struct StepCache {
  CacheId id = 0;
  const CacheConfig* config = nullptr;
  std::shared_ptr<const Codec> codec;               // of encoded pages
  std::shared_ptr<const Codec> raw;                 // whose attention reads raw pages
  std::shared_ptr<const DeviceCodec> device_codec;  // of a cache on a GPU, made for it
  WorkerPool::Owner owner = WorkerPool::kDaemon;    // the tenant's
};

}  // namespace kvmanager
