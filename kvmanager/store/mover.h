// Copies pages between a GPU and the host, and has workers look at what comes to the host: demotion, fetch and hand-off
// by way of the host alike, and what comes from the disk. Who asks has reserved the slots, pins the sources, and makes
// the transitions of the copies when they have landed. On the store's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/store_metrics.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

/// One form of one page on its way. Workers write `checksum` and what is behind it, the rest is as it was made.
struct MovingPage {
  PageRef to;
  const uint8_t* source = nullptr;
  uint8_t* target = nullptr;
  uint64_t bytes = 0;
  bool raw = false;         // the form: raw, or encoded
  bool stays = true;        // the checksum is of this form; false: of the raw form beside the encoded one
  int open_tokens = 0;      // > 0: of an open page, whose other tokens become zeros
  bool must_match = false;  // the checksum is known, whatever it is
  uint64_t checksum = 0;    // XXH3-64 of the source; 0: not known. Of what came to the host once it has landed
  uint64_t expected = 0;    // what `checksum` was before that
  bool refused = false;     // bytes that no page may have, or of another checksum
};

class Mover {
 public:
  /// The pages once they have landed. moved: false if the GPU has failed or the move was given up; nothing was looked
  /// at then.
  using Landed = absl::AnyInvocable<void(bool moved, std::vector<MovingPage> pages)>;

  /// host: the tier whose workers look at pages. alive: expires with the store.
  Mover(Tier* host, StoreMetrics* metrics, std::weak_ptr<const bool> alive)
      : host_(host), metrics_(metrics), alive_(std::move(alive)) {}

  /// Copies `pages` into slots of `to`: out of `upper` if `to` is in the next lower tier, else into it. `landed` is
  /// called once, not before this returned, and not at all once the store has gone. upper.mover() is not nullptr.
  /// given_up: once true, nobody looks at pages that have come any more; nullptr: never.
  void Move(Tier& upper, const std::shared_ptr<Cache>& to, std::vector<MovingPage> pages,
            std::shared_ptr<const bool> given_up, Landed landed);
  /// Has workers look at pages that have come into slots of `to`, which is in host memory; `landed` as Move's, and with
  /// `moved` true.
  void Check(const std::shared_ptr<Cache>& to, std::vector<MovingPage> pages, Landed landed);

 private:
  struct Batch;
  void OnMoved(const std::shared_ptr<Batch>& batch, bool moved);
  void LookAtAll(const std::shared_ptr<Batch>& batch);
  void Land(Batch& batch, bool moved);

  Tier* const host_;
  StoreMetrics* const metrics_;
  const std::weak_ptr<const bool> alive_;
};

}  // namespace kvmanager
