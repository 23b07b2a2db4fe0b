// The manifests of a hand-off: HandOffHeader, HandOffTrailer and the engine's blob as hand_off.capnp messages, and
// back. Pure.
//
// What is parsed comes from a peer and is hostile: lengths, counts and references are checked here, the cache and its
// codec by Imports::Import, the pages' bytes by their checksums and ImportLease::Validate.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/store/page_store.h"
#include "transport/page_sizes.h"

namespace kvmanager {

constexpr uint16_t kManifestVersion = 2;
constexpr uint16_t kActivationsManifestVersion = 3;  // of a header that offers activations

struct TrailerManifest {
  HandOffTrailer trailer;
  std::string blob;
};

/// Sizes of pages are not in them, nor which are withdrawn: the transport's parts say so.
std::string WriteHandOffHeader(const HandOffHeader& header);
std::string WriteHandOffTrailer(const HandOffTrailer& trailer, absl::string_view blob);

/// Errors: INVALID_ARGUMENT with field, value and bound; FAILED_PRECONDITION for another version.
absl::StatusOr<HandOffHeader> ParseHandOffHeader(absl::string_view bytes, const PageSizes& page_bytes);
absl::StatusOr<TrailerManifest> ParseHandOffTrailer(absl::string_view bytes, const PageSizes& page_bytes,
                                                    absl::Span<const uint32_t> withdrawn);

}  // namespace kvmanager
