// The checksum that pages and frames travel and are kept with: XXH3-64, on the widest instructions of this CPU (the
// library's own dispatch; without it, it is half as fast). Pure, any thread.
#pragma once

#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <cstddef>
#include <cstdint>

namespace kvmanager {

inline uint64_t Checksum(const void* bytes, size_t size) { return XXH3_64bits(bytes, size); }

}  // namespace kvmanager
