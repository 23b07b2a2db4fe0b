// Lists what a hand-off sends, in turns of the loop between which others are served. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvmanager/handoff/hand_off_turns.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// The lease of what `beginning` lists, which goes with the promise. What takes no longer than a turn is done at once.
/// Errors: its own; ExportBeginning::Commit's.
kj::Promise<absl::StatusOr<std::unique_ptr<ExportLease>>> ListExport(
    HandOffTurns* turns, const std::string& payer, absl::StatusOr<std::unique_ptr<ExportBeginning>> beginning);

}  // namespace kvmanager
