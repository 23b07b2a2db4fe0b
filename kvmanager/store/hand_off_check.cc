#include "kvmanager/store/hand_off_check.h"

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {
namespace {

// Activations are of pages, in their order, and as large as this cache's.
absl::Status CheckActivations(const Cache& cache, const HandOffHeader& first) {
  auto page = first.pages.begin();
  for (size_t i = 0; i < first.activations.size(); ++i) {
    const HandOffPage& of = first.activations[i];
    const auto field = [i](absl::string_view name) { return absl::StrCat("activations[", i, "].", name); };
    while (page != first.pages.end() && (page->layer != of.layer || page->block != of.block)) ++page;
    if (page == first.pages.end()) {
      return InvalidField(field("block"), absl::StrCat(of.block, " of layer ", of.layer),
                          "a page that travels encoded, behind those before it");
    }
    ++page;
    if (cache.config.hidden == 0 || of.bytes != cache.activation_page_bytes()) {
      return InvalidField(
          field("bytes"), of.bytes,
          cache.config.hidden > 0 ? absl::StrCat(cache.activation_page_bytes()) : "no activations: the cache has none");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBlockNames(absl::string_view field, absl::Span<const HandOffBlock> blocks,
                             absl::flat_hash_set<BlockKey>* seen) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].named && !seen->insert(blocks[i].name.key).second) {
      return InvalidField(absl::StrCat(field, "[", i, "].name"), blocks[i].name.key.ToHex(8), "named once");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFirst(const Cache& cache, const HandOffHeader& first) {
  const uint64_t page_tokens = cache.page_tokens();
  const uint64_t tokens_max = kSequenceBlocksMax * page_tokens;
  if (first.tokens > tokens_max) return InvalidField("tokens", first.tokens, absl::StrCat("at most ", tokens_max));
  const uint64_t full_blocks = first.tokens / page_tokens;
  if (first.blocks.size() != full_blocks) {
    return InvalidField("blocks", first.blocks.size(), absl::StrCat(full_blocks, " for ", first.tokens, " tokens"));
  }
  if (first.aged.size() != cache.layers()) {
    return InvalidField("aged", first.aged.size(), absl::StrCat(cache.layers(), ", one per layer"));
  }
  for (size_t layer = 0; layer < first.aged.size(); ++layer) {
    if (first.aged[layer] <= full_blocks) continue;
    return InvalidField(absl::StrCat("aged[", layer, "]"), first.aged[layer], absl::StrCat("at most ", full_blocks));
  }
  absl::flat_hash_set<BlockKey> keys;
  KV_RETURN_IF_ERROR(CheckBlockNames("blocks", first.blocks, &keys));
  for (size_t i = 0; i < first.pages.size(); ++i) {
    const HandOffPage& page = first.pages[i];
    const auto field = [i](absl::string_view name) { return absl::StrCat("pages[", i, "].", name); };
    const uint32_t layer_min = i == 0 ? 0 : first.pages[i - 1].layer;
    if (page.layer < layer_min || page.layer >= cache.layers()) {
      return InvalidField(field("layer"), page.layer, absl::StrCat(layer_min, "..", cache.layers() - 1));
    }
    const uint32_t block_min = i > 0 && page.layer == layer_min ? first.pages[i - 1].block + 1 : 0;
    if (page.block < block_min || page.block >= first.aged[page.layer]) {
      return InvalidField(field("block"), page.block,
                          absl::StrCat(block_min, "..", int64_t{first.aged[page.layer]} - 1, ", the aged pages"));
    }
    const uint64_t bytes = cache.aged_bytes(page.block, page.layer);
    // An earlier build names a sink as an encoded page, withdraws it, and sends it with the trailer.
    if (page.bytes == cache.page_bytes(page.layer)) continue;
    if (page.bytes != bytes) return InvalidField(field("bytes"), page.bytes, absl::StrCat(bytes));
  }
  return CheckActivations(cache, first);
}

}  // namespace kvmanager
