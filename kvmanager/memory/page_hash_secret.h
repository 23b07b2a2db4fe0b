// XXH3's default secret, out of the library.
#pragma once

#include <cstdint>

namespace kvmanager::page_hash {

/// kSecretBytes of them.
const uint8_t* DefaultSecret();

}  // namespace kvmanager::page_hash
