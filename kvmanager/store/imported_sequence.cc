#include "kvmanager/store/imported_sequence.h"

#include <algorithm>
#include <utility>

namespace kvmanager {

ImportedSequence::ImportedSequence(const ImportParts& parts, std::shared_ptr<Cache> of,
                                   std::shared_ptr<const HandOffHeader> header)
    : parts(parts), cache(std::move(of)), header(std::move(header)), hidden(SequenceTable::New(cache)) {
  shows_whole = cache->codec->NewIndex({}) != nullptr;
  ++cache->leases;
  parts.metrics->import_leases.Increment();
  parts.sequences->Hide(hidden.get());
}

ImportedSequence::~ImportedSequence() {
  if (parts.alive.expired()) return;
  if (hidden != nullptr) {
    parts.sequences->Unhide(hidden.get());
    parts.sequences->Leave(*hidden, 0);
  }
  std::vector<Block*> left;
  for (NewBlock& block : new_blocks) {
    if (!std::exchange(block.held, false)) continue;
    parts.blocks->ForgetHolder(block.block);
    left.push_back(block.block);
  }
  parts.sequences->LeaveBlocks(cache, std::move(left));
  --cache->leases;
  if (!cache->wanted) parts.caches->CloseIfUnused(cache);
  parts.metrics->import_leases.Decrement();
}

void ImportedSequence::LetGo(NewBlock& block) {
  if (!std::exchange(block.held, false)) return;
  parts.blocks->ForgetHolder(block.block);
  parts.blocks->Release(std::exchange(block.block, nullptr));
}

}  // namespace kvmanager
