#include "kvmanager/memory/page_hash_secret.h"

#define XXH_INLINE_ALL  // shows what the library keeps to itself
#include <xxhash.h>

#include "kvmanager/memory/page_hash_device.h"

namespace kvmanager::page_hash {

const uint8_t* DefaultSecret() {
  static_assert(sizeof(XXH3_kSecret) == kSecretBytes);
  return XXH3_kSecret;
}

}  // namespace kvmanager::page_hash
