// What a call of the store waits for while blocks that it names come from the disk.
#pragma once

#include <vector>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/ids.h"

namespace kvmanager {

/// kAhead: nobody waits for it so far: it stands back behind loads that somebody waits for.
enum class LoadUrgency { kAwaited, kAhead };

/// Keeps what it has found and loaded in memory until it is destroyed: on the store's thread, perhaps after the store
/// has closed.
class DiskLoad {
 public:
  virtual ~DiskLoad() = default;
  /// Looks for some more of the names, and begins to read what the disk has. False: it is done, or has to wait.
  virtual bool DoPiece() = 0;
  /// All that can be had is in memory; the rest is a miss.
  virtual bool done() const = 0;
  /// The names that it was begun with, once, when it is done.
  virtual std::vector<BlockName> TakeNames() = 0;
  /// After DoPiece was false and it is not done: `fn` is called once, when DoPiece can go on.
  virtual void OnMore(absl::AnyInvocable<void()> fn) = 0;
};

}  // namespace kvmanager
