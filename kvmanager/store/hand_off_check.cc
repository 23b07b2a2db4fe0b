#include "kvmanager/store/hand_off_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

bool BlockNamesCheck::Next(absl::string_view field, absl::Span<const HandOffBlock> blocks, size_t* at,
                           size_t count_max) {
  const size_t to = std::min(blocks.size(), *at + count_max);
  for (; *at < to; ++*at) {
    const HandOffBlock& block = blocks[*at];
    if (!block.named || seen_.insert(block.name.key).second) continue;
    status_ = InvalidField(absl::StrCat(field, "[", *at, "].name"), block.name.key.ToHex(8), "named once");
    return false;
  }
  return true;
}

// ---- the header ----

bool HeaderCheck::Next() {
  const size_t from = at_;
  switch (stage_) {
    case Stage::kCounts:
      status_ = CheckCounts();
      GoTo(Stage::kNames);
      break;
    case Stage::kNames:
      if (!names_.Next("blocks", header_.blocks, &at_, kAtOnce)) status_ = names_.status();
      if (at_ == header_.blocks.size()) GoTo(Stage::kPages);
      break;
    case Stage::kPages:
      for (; at_ < header_.pages.size() && at_ < from + kAtOnce && status_.ok(); ++at_) status_ = CheckPage(at_);
      if (at_ == header_.pages.size()) GoTo(Stage::kActivations);
      break;
    case Stage::kActivations:
      for (; at_ < header_.activations.size() && at_ < from + kAtOnce && status_.ok(); ++at_) {
        status_ = CheckActivations(at_);
      }
      if (at_ == header_.activations.size()) GoTo(Stage::kDone);
      break;
    case Stage::kDone:
      break;
  }
  return status_.ok() && stage_ != Stage::kDone;
}

absl::Status HeaderCheck::CheckCounts() {
  const uint64_t page_tokens = cache_.page_tokens();
  const uint64_t tokens_max = kSequenceBlocksMax * page_tokens;
  if (header_.tokens > tokens_max) return InvalidField("tokens", header_.tokens, absl::StrCat("at most ", tokens_max));
  const uint64_t full_blocks = header_.tokens / page_tokens;
  if (header_.blocks.size() != full_blocks) {
    return InvalidField("blocks", header_.blocks.size(), absl::StrCat(full_blocks, " for ", header_.tokens, " tokens"));
  }
  if (header_.aged.size() != cache_.layers()) {
    return InvalidField("aged", header_.aged.size(), absl::StrCat(cache_.layers(), ", one per layer"));
  }
  for (size_t layer = 0; layer < header_.aged.size(); ++layer) {
    if (header_.aged[layer] <= full_blocks) continue;
    return InvalidField(absl::StrCat("aged[", layer, "]"), header_.aged[layer], absl::StrCat("at most ", full_blocks));
  }
  names_.Reserve(header_.blocks.size());
  pages_per_layer_ = full_blocks + (header_.tokens % page_tokens != 0);
  trailer_pages_ = pages_per_layer_ * cache_.layers();
  if (trailer_pages_ > kHandOffPagesMax) {
    return InvalidField("tokens", header_.tokens, absl::StrCat("what has at most ", kHandOffPagesMax, " pages"));
  }
  forms_.assign(trailer_pages_, ArrivalForm::kRaw);
  return absl::OkStatus();
}

absl::Status HeaderCheck::CheckPage(size_t i) {
  const HandOffPage& page = header_.pages[i];
  const auto field = [i](absl::string_view name) { return absl::StrCat("pages[", i, "].", name); };
  const uint32_t layer_min = i == 0 ? 0 : header_.pages[i - 1].layer;
  if (page.layer < layer_min || page.layer >= cache_.layers()) {
    return InvalidField(field("layer"), page.layer, absl::StrCat(layer_min, "..", cache_.layers() - 1));
  }
  const uint32_t block_min = i > 0 && page.layer == layer_min ? header_.pages[i - 1].block + 1 : 0;
  if (page.block < block_min || page.block >= header_.aged[page.layer]) {
    return InvalidField(field("block"), page.block,
                        absl::StrCat(block_min, "..", int64_t{header_.aged[page.layer]} - 1, ", the aged pages"));
  }
  const bool keeps_raw = cache_.keeps_raw(page.block, page.layer);
  const uint64_t raw_bytes = cache_.layout(page.layer).raw_bytes(), encoded_bytes = cache_.page_bytes(page.layer);
  const uint64_t bytes = keeps_raw ? raw_bytes : encoded_bytes;
  // An earlier build names a sink as an encoded page, withdraws it, and sends it with the trailer.
  if (page.bytes != encoded_bytes && page.bytes != bytes) {
    return InvalidField(field("bytes"), page.bytes, absl::StrCat(bytes));
  }
  // Which is not wanted before.
  if (keeps_raw && page.bytes != raw_bytes) return absl::OkStatus();
  forms_[size_t{page.layer} * pages_per_layer_ + page.block] =
      keeps_raw ? ArrivalForm::kKeptRaw : ArrivalForm::kEncoded;
  --trailer_pages_;
  return absl::OkStatus();
}

// Activations are of pages, in their order, and as large as this cache's.
absl::Status HeaderCheck::CheckActivations(size_t i) {
  const HandOffPage& of = header_.activations[i];
  const auto field = [i](absl::string_view name) { return absl::StrCat("activations[", i, "].", name); };
  const std::vector<HandOffPage>& pages = header_.pages;
  while (page_ < pages.size() && (pages[page_].layer != of.layer || pages[page_].block != of.block)) ++page_;
  if (page_ == pages.size()) {
    return InvalidField(field("block"), absl::StrCat(of.block, " of layer ", of.layer),
                        "a page that travels encoded, behind those before it");
  }
  ++page_;
  if (cache_.config.hidden == 0 || of.bytes != cache_.activation_page_bytes()) {
    return InvalidField(
        field("bytes"), of.bytes,
        cache_.config.hidden > 0 ? absl::StrCat(cache_.activation_page_bytes()) : "no activations: the cache has none");
  }
  return absl::OkStatus();
}

// ---- the trailer ----

bool TrailerCheck::Next() {
  const size_t from = at_;
  switch (stage_) {
    case Stage::kCounts:
      status_ = CheckCounts();
      GoTo(Stage::kWithdrawn);
      break;
    case Stage::kWithdrawn:
      for (; at_ < trailer_.withdrawn.size() && at_ < from + kAtOnce && status_.ok(); ++at_)
        status_ = CheckWithdrawn(at_);
      if (at_ == trailer_.withdrawn.size()) GoTo(Stage::kNames);
      break;
    case Stage::kNames:
      if (!names_.Next("blocks", header_.blocks, &at_, kAtOnce)) status_ = names_.status();
      if (at_ == header_.blocks.size()) GoTo(Stage::kNewNames);
      break;
    case Stage::kNewNames:
      if (!names_.Next("blocks", trailer_.blocks, &at_, kAtOnce)) status_ = names_.status();
      if (status_.ok()) status_ = CheckNewNames(from, at_);
      if (at_ == trailer_.blocks.size()) {
        GoTo(Stage::kPages);
        if (status_.ok() && trailer_.pages.size() != trailer_pages_) {
          status_ = InvalidField("pages", trailer_.pages.size(),
                                 absl::StrCat(trailer_pages_, ", those that the header does not send"));
        }
      }
      break;
    case Stage::kPages:
      for (; at_ < trailer_.pages.size() && at_ < from + kAtOnce && status_.ok(); ++at_) status_ = CheckPage(at_);
      if (at_ == trailer_.pages.size()) GoTo(Stage::kDone);
      break;
    case Stage::kDone:
      break;
  }
  return status_.ok() && stage_ != Stage::kDone;
}

absl::Status TrailerCheck::CheckCounts() {
  const uint64_t tokens_max = kSequenceBlocksMax * cache_.page_tokens();
  if (trailer_.index.prompt_tokens > tokens_max) {
    return InvalidField("prompt_tokens", trailer_.index.prompt_tokens, absl::StrCat("at most ", tokens_max));
  }
  if (trailer_.index.iterations > IndexFacts::kIterationsMax) {
    return InvalidField("index_iterations", trailer_.index.iterations,
                        absl::StrCat("at most ", IndexFacts::kIterationsMax));
  }
  if (trailer_.blocks.size() != header_.blocks.size()) {
    return InvalidField("blocks", trailer_.blocks.size(), absl::StrCat(header_.blocks.size(), ", as in the header"));
  }
  names_.Reserve(header_.blocks.size());
  return absl::OkStatus();
}

absl::Status TrailerCheck::CheckWithdrawn(size_t i) {
  const uint32_t number = trailer_.withdrawn[i];
  const std::string field = absl::StrCat("withdrawn[", i, "]");
  if (number >= header_.pages.size() || (i > 0 && number <= trailer_.withdrawn[i - 1])) {
    return InvalidField(field, number, absl::StrCat("ascending, below ", header_.pages.size()));
  }
  if (cache_.identity()) return InvalidField(field, number, "none: this codec declines no page");
  const HandOffPage& page = header_.pages[number];
  ArrivalForm& form = forms_[forms_.size() / cache_.layers() * page.layer + page.block];
  trailer_pages_ += form != ArrivalForm::kRaw;
  form = ArrivalForm::kRaw;
  return absl::OkStatus();
}

absl::Status TrailerCheck::CheckNewNames(size_t from, size_t to) {
  for (size_t i = from; i < to; ++i) {
    if (!trailer_.blocks[i].named || !header_.blocks[i].named) continue;
    return InvalidField(absl::StrCat("blocks[", i, "].name"), trailer_.blocks[i].name.key.ToHex(8),
                        "none: the header named it");
  }
  return absl::OkStatus();
}

// Exactly what the header does not send, in order.
absl::Status TrailerCheck::CheckPage(size_t i) {
  while (forms_[form_] != ArrivalForm::kRaw) ++form_;
  const HandOffPage& page = trailer_.pages[i];
  const auto field = [i](absl::string_view name) { return absl::StrCat("pages[", i, "].", name); };
  const uint64_t pages_per_layer = forms_.size() / cache_.layers();
  const uint64_t layer = form_ / pages_per_layer, block = form_ % pages_per_layer;
  ++form_;
  if (page.layer != layer) return InvalidField(field("layer"), page.layer, absl::StrCat(layer));
  if (page.block != block) return InvalidField(field("block"), page.block, absl::StrCat(block));
  const uint64_t bytes = cache_.layout(page.layer).raw_bytes();
  if (page.bytes != bytes) return InvalidField(field("bytes"), page.bytes, absl::StrCat(bytes));
  return absl::OkStatus();
}

}  // namespace kvmanager
