// What an operator wants to see of a daemon at one moment, calculated from two readings of its metrics: one place for
// the page and for `kvctl top`.
//
// Values that copy; any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "monitoring/readings.h"

namespace kvmanager {

/// Sizes in bytes, times in seconds. Rates are those between the two readings; NaN where nothing happened that has one.
struct Frame {
  struct Tier {
    std::string name;  // "host", "gpu0"
    double used_bytes = 0, capacity_bytes = 0;
  };
  struct Form {
    std::string tier, codec, form;  // form: "raw", "encoded"
    double bytes = 0;
  };
  struct Tenant {
    std::string name;  // TenantLabel
    double bytes = 0, sequences = 0, published_blocks = 0;
  };
  struct Times {
    double per_s = 0;             // observations
    double p50_s = 0, p99_s = 0;  // of those between the readings
  };
  struct Quality {
    std::string codec;
    double pages = 0, p50 = 0, p99 = 0;  // relative errors of all sampled pages since the start
  };
  struct HitBlocks {
    double host = 0, device = 0, disk = 0;  // by where the blocks were
  };
  struct Disk {
    double used_bytes = 0, capacity_bytes = 0, blocks = 0;
    double unwritten_blocks = 0;  // published, and not durable yet
    double written_bytes_per_s = 0, read_bytes_per_s = 0;
    Times write, read;                                          // of a block
    double errors = 0, unwritten_evictions = 0, set_aside = 0;  // since the start
  };
  struct Kept {
    double recorded_blocks = 0;   // that a restart would find
    double unclaimed_blocks = 0;  // found at the start, whose cache is not open
    double recovered_blocks = 0, unclaimed_lost_blocks = 0, unrecovered_blocks = 0, unrecorded_blocks = 0;
  };

  std::vector<Tier> tiers;      // those with a pool, the host's first
  std::vector<Form> forms;      // largest first
  std::vector<Tenant> tenants;  // largest first
  double evictable_bytes = 0;   // of the host's pool
  double sequences = 0, connections = 0, caches = 0, published_blocks = 0, tickets = 0;
  bool draining = false;
  double waiting_pages = 0;  // full, and not encoded yet

  std::optional<Disk> disk;  // where there is one (--disk-path)
  std::optional<Kept> kept;  // where the daemon has recorded blocks for a restart, or found some (--state-dir)

  double asked_blocks = 0, hit_blocks = 0;  // between the readings
  HitBlocks hit_tiers;                      // of hit_blocks
  double sent_bytes_per_s = 0, received_bytes_per_s = 0, active_transfers = 0;
  double transfers_ok = 0, transfers_failed = 0;  // since the start
  Times attend_loop, attend_workers, encode;
  std::vector<Quality> quality;  // empty: nothing is sampled
  double calls_per_s = 0, errors_per_s = 0, appended_tokens_per_s = 0, attended_tokens_per_s = 0;
  double evicted_blocks_per_s = 0, refused_full = 0;  // requests refused since the start because a pool was full
};

/// `after` was read `seconds` (more than 0) after `before`, from the same daemon; equal readings give rates of 0.
Frame FrameOf(const Readings& before, const Readings& after, double seconds);

}  // namespace kvmanager
