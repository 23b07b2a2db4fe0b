#include "kvmanager/eviction/ghost_table.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

static_assert(sizeof(Ghost) == 16);

GhostTable::GhostTable(size_t size)
    : sets_(size / kWays), entries_(static_cast<Ghost*>(std::calloc(size, sizeof(Ghost)))) {
  KV_CHECK(size >= kWays && (size & (size - 1)) == 0 && entries_ != nullptr);
}

Ghost GhostTable::Put(Ghost ghost) {
  KV_CHECK(ghost.id != 0);
  // A tick is a 64th of the table. Of a set that 2^16 ticks did not touch any may go.
  const uint16_t now = static_cast<uint16_t>(++puts_ / (sets_ * kWays / 64 + 1));
  ghost.put = now;
  Ghost* const set = SetOf(ghost.id);
  Ghost* place = set;
  for (Ghost* each = set; each < set + kWays; ++each) {
    if (each->id == ghost.id) {
      place = each;
      break;
    }
    const auto old = [now](const Ghost& g) { return g.id == 0 ? UINT16_MAX : static_cast<uint16_t>(now - g.put); };
    if (old(*each) > old(*place)) place = each;
  }
  return std::exchange(*place, ghost);
}

bool GhostTable::Take(uint64_t id, Ghost* ghost) {
  Ghost* const set = SetOf(id);
  for (Ghost* each = set; each < set + kWays; ++each) {
    if (each->id != id || id == 0) continue;
    *ghost = *each;
    *each = Ghost{};
    return true;
  }
  return false;
}

}  // namespace kvmanager
