// The manifest of a hand-off: HandOffContent and the engine's blob as a hand_off.capnp message, and back. Pure.
//
// What is parsed comes from a peer and is hostile: lengths, counts and references are checked here, the cache and its
// codec by PageStore::Import, the pages' bytes by their checksums and PageStore.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

constexpr uint16_t kManifestVersion = 1;

struct Manifest {
  HandOffContent content;
  std::string blob;
};

/// Sizes and checksums of pages are not in it: they travel with the transport's offer.
std::string WriteManifest(const HandOffContent& content, absl::string_view blob);

/// Errors: INVALID_ARGUMENT with field, value and bound; FAILED_PRECONDITION for another version.
absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes, absl::Span<const uint64_t> page_bytes,
                                       absl::Span<const uint64_t> page_checksums);

}  // namespace kvmanager
