#include "kvmanager/store/export_holds.h"

#include <algorithm>

namespace kvmanager {

bool ExportHolds::GiveBackSome(BlockIndex* from, size_t pages_max) {
  size_t left = pages_max;
  for (size_t listed = 16 * pages_max; left > 0 && listed > 0 && !pages.empty(); --listed) {
    const PageRef ref = pages.back();
    const bool encoded = numbers.back() != kNotEncoded;
    pages.pop_back();
    numbers.pop_back();
    if (ref.block == nullptr) continue;  // which takes no time
    encoded ? from->UnpinEncoded(ref) : from->Unpin(ref);
    --left;
  }
  if (!pages.empty()) return true;
  for (std::vector<PageRef>* const pins : {&tail, &open, &activations}) {
    for (; left > 0 && !pins->empty(); --left) {
      const PageRef ref = pins->back();
      pins->pop_back();
      from->Unpin(ref);
    }
  }
  while (left > 0 && !blocks.empty()) {
    Block* const block = blocks.back();
    blocks.pop_back();
    left -= std::min<size_t>(left, block->pages().size());
    from->ForgetHolder(block);
    from->Release(block);
  }
  return !pages.empty() || !tail.empty() || !open.empty() || !activations.empty() || !blocks.empty();
}

}  // namespace kvmanager
