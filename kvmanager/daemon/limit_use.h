// How much of each limit is used now: asks those who hold it. The loop's thread.
#pragma once

#include <vector>

#include "kvmanager/daemon/limit_table.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/handoff/incoming_hand_offs.h"
#include "kvmanager/handoff/recomputer.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/rpc/arena_bytes.h"
#include "kvmanager/rpc/connections.h"
#include "kvmanager/rpc/message_room.h"
#include "kvmanager/rpc/principals.h"
#include "kvmanager/rpc/session_uses.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

struct LimitHolders {
  PageStore* store = nullptr;
  const PagePool* host_pool = nullptr;
  const BlockDisk* disk = nullptr;  // nullptr: none
  Gpus gpus;
  const ArenaBytes* arenas = nullptr;
  const Recomputer* recomputer = nullptr;
  IncomingHandOffs* incoming = nullptr;
  const OutgoingHandOffs* outgoing = nullptr;
  const Principals* principals = nullptr;
  const MessageRoom* requests = nullptr;
  const MessageRoom* replies = nullptr;
  const SessionUses* sessions = nullptr;
  const Connections* connections = nullptr;
};

LimitUse MeasureLimits(const LimitHolders& holders);

}  // namespace kvmanager
