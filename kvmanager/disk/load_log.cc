#include "kvmanager/disk/load_log.h"

#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"

namespace kvmanager {

void LoadLog::Loaded(uint64_t blocks, uint64_t used_bytes, uint64_t capacity_bytes) const {
  if (dropped_ > 0) spdlog::warn("{} records of the disk's index could not be used, and were dropped", dropped_);
  spdlog::info("the disk has {} blocks, {} of {} MiB; they were read in {} ms", blocks, used_bytes >> 20,
               capacity_bytes >> 20, ms());
}

void LoadLog::MadeAnew(const absl::Status& status, uint64_t blocks, int bad_reads) const {
  if (!status.ok()) {
    spdlog::error("the disk's index in {} could not be made anew ({}): the next start tries it again", path_,
                  std::string(status.message()));
    return;
  }
  spdlog::warn("the disk's index in {} was made anew from its records: {} blocks were found in {:.1f} s{}", path_,
               blocks, static_cast<double>(ms()) * 1e-3,
               bad_reads == 0 ? "" : absl::StrCat("; ", bad_reads, " places of its segments could not be read"));
}

}  // namespace kvmanager
