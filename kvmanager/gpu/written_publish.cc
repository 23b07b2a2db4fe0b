#include "kvmanager/gpu/written_publish.h"

#include <utility>

namespace kvmanager {

uint64_t WrittenPublish::Reserved() const {
  const absl::StatusOr<SequenceInfo> info = store_->Describe(sequence_);
  return info.ok() ? info->tokens : 0;
}

kj::Promise<absl::StatusOr<PublishResult>> WrittenPublish::Publish(std::vector<BlockName> names, uint64_t page_tokens,
                                                                   Wait wait) {
  using Published = absl::StatusOr<PublishResult>;
  const uint64_t named = names.size() * page_tokens, reserved = Reserved(), cuts = cuts_;
  named_tokens_ = std::max(named_tokens_, named);
  auto waited = wait();
  return waited.then([this, names = std::move(names), page_tokens, wait = std::move(wait), named, reserved,
                      cuts](absl::Status written) mutable -> kj::Promise<Published> {
    if (!written.ok()) return Published(written);
    const bool came_later = reserved < named && Reserved() >= named;
    if (came_later || cuts != cuts_) return Publish(std::move(names), page_tokens, std::move(wait));
    return store_->Publish(sequence_, names);
  });
}

}  // namespace kvmanager
