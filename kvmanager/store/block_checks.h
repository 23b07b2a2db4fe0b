// BlockChecks of the store's blocks. On the store's thread.
#pragma once

#include <memory>
#include <vector>

#include "kvmanager/store/block_check.h"
#include "kvmanager/store/block_index.h"

namespace kvmanager {

/// Of those of `held` that are to be verified; takes over a hold of each. nullptr: they have no more than
/// kVerifiedAtOnceBytes. alive: expires with the store.
std::unique_ptr<BlockCheck> MakeBlockCheck(BlockIndex* blocks, std::vector<Block*> held,
                                           std::weak_ptr<const bool> alive);

}  // namespace kvmanager
