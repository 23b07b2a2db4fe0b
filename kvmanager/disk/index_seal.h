// How a daemon that ends leaves the files of its index: their sizes, and the checksums of those that RocksDB trusts to
// their end. RocksDB takes a log that was cut for one whose writer died, and would lose what was behind silently.
//
// The file "sealed" beside the index is there from one daemon's end to the next one's start: one line for each file,
// "CHECKSUM BYTES NAME", and one with the checksum of these. Behind a crash there is none. Tables have checksums of
// their own, which are compared when they are read: here it is their sizes alone.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvmanager {

/// What the file is to say of an index that nobody has open. Errors: UNAVAILABLE.
absl::StatusOr<std::string> SealIndex(const std::string& index);
/// sealed: the file's path. OK: the index is as it was left, or there is no such file that can be used. Errors:
/// DATA_LOSS naming a file of the index.
absl::Status CheckIndexSeal(const std::string& sealed, const std::string& index);

}  // namespace kvmanager
