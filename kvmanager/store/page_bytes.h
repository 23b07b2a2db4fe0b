// Where the bytes of a page are, and their checksum. On the store's thread.
#pragma once

#include <cstdint>

#include "kvmanager/store/block.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

inline uint8_t* PageData(const Cache& cache, PageId id) { return cache.tier->pool()->Data(id); }

/// The bytes of a page in raw form: of an identity codec also once it is sealed. nullptr: gone.
inline const uint8_t* RawPageData(const Cache& cache, const Page& page) {
  if (page.raw.valid()) return PageData(cache, page.raw);
  return cache.identity() && page.encoded.valid() ? PageData(cache, page.encoded) : nullptr;
}

/// Of the form that stays; 0: it is made when the page leaves its memory.
inline uint64_t PageChecksum(const Cache& cache, uint32_t layer, const Page& page) {
  const MemoryBackend& memory = cache.tier->memory();
  if (page.encoded.valid()) return memory.Checksum(PageData(cache, page.encoded), cache.page_bytes(layer, page.rung));
  return memory.Checksum(PageData(cache, page.raw), cache.layout(layer).raw_bytes());
}

}  // namespace kvmanager
