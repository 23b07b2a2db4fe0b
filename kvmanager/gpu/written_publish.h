// Publishes blocks of a sequence on a GPU once kernels have written them.
//
// Other sequences find what is published, and their kernels wait for no other connection's. So the store hears of a
// block only when its bytes are written and were checked. A client may go on meanwhile.
//
// Invariant: what is named had been reserved before the last wait began, and no crop took any of it away since.
//
// Owned by the sequence's capability, and kept by its caller until its promises are gone. The loop's thread.
#pragma once

#include <kj/async.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

class WrittenPublish {
 public:
  /// Resolves once what was reserved for the sequence until then has been written and looked at, with what was found.
  using Wait = absl::AnyInvocable<kj::Promise<absl::Status>()>;

  /// store: outlives this.
  WrittenPublish(PageStore* store, SequenceId sequence) : store_(store), sequence_(sequence) {}

  /// PageStore::Publish after `wait`, which is called once more for what was reserved while it waited, if that is named
  /// too. page_tokens: of the sequence's cache. Errors: those of both.
  kj::Promise<absl::StatusOr<PublishResult>> Publish(std::vector<BlockName> names, uint64_t page_tokens, Wait wait);
  /// The sequence keeps its first `tokens` tokens.
  void OnCrop(uint64_t tokens) { cuts_ += tokens < named_tokens_; }

 private:
  uint64_t Reserved() const;  // tokens in every layer

  PageStore* const store_;
  const SequenceId sequence_;
  uint64_t named_tokens_ = 0;  // by the call that named most
  uint64_t cuts_ = 0;          // crops that took some of those away
};

}  // namespace kvmanager
