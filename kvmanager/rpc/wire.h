// Between the schema's structs and the daemon's values. Pure functions; what comes from a client is checked for form
// here (lengths, enumerants) and for meaning by whoever uses it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/handoff/config_wire.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// OK leaves the builder as it is: its default.
void WriteStatus(const absl::Status& status, api::Status::Builder out);

void WriteCacheInfo(const CacheInfo& info, api::CacheInfo::Builder out);
void WriteSequenceInfo(const SequenceInfo& info, api::SequenceInfo::Builder out);
/// Of a sequence: its hits are all in its memory.
void WriteHits(const MatchResult& match, api::MatchResult::Builder out);
void WriteMatch(const MatchResult& match, api::MatchResult::Builder out);

/// Reads a list of names in pieces that each take less than a turn of the event loop. The list stays as long as this.
class BlockNamesReader {
 public:
  /// `field` names the list in errors. At most `names_max` names, each of 32 and 32 bytes.
  BlockNamesReader(std::string field, capnp::List<api::BlockName>::Reader in, size_t names_max);

  /// Reads the next names. False: those were all, or one is wrong.
  bool ReadNext();
  /// INVALID_ARGUMENT: naming the name that is wrong.
  const absl::Status& status() const { return status_; }
  /// REQUIRES: ReadNext has returned false, and status() is OK.
  std::vector<BlockName> Take() { return std::move(names_); }

 private:
  static constexpr size_t kNamesOfPiece = 512;

  const std::string field_;
  const capnp::List<api::BlockName>::Reader in_;
  std::vector<BlockName> names_;
  absl::Status status_;
};

/// The same at once.
absl::StatusOr<std::vector<BlockName>> ReadBlockNames(absl::string_view field, capnp::List<api::BlockName>::Reader in,
                                                      size_t names_max);

}  // namespace kvmanager
