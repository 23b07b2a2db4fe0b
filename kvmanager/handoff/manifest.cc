#include "kvmanager/handoff/manifest.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>
#include <kj/io.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/api/hand_off.capnp.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/config_wire.h"
#include "kvmanager/handoff/limits.h"
#include "transport/transport.h"

namespace kvmanager {
namespace {

using Page = api::HandOffManifest::Page;

absl::Status CheckVersion(uint16_t version) {
  if (version == kManifestVersion) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "manifest.version", absl::StrCat(version),
                    absl::StrCat(kManifestVersion));
}

absl::StatusOr<std::vector<HandOffBlock>> ReadBlocks(capnp::List<api::BlockName>::Reader in) {
  if (in.size() > limits::kHandOffBlocksMax) {
    return InvalidField("manifest.blocks", absl::StrCat(in.size(), " long"),
                        absl::StrCat("at most ", limits::kHandOffBlocksMax, " long"));
  }
  std::vector<HandOffBlock> blocks(in.size());
  for (uint32_t i = 0; i < in.size(); ++i) {
    const capnp::Data::Reader key = in[i].getKey();
    if (key.size() == 0) continue;
    KV_ASSIGN_OR_RETURN(blocks[i].name.key, ReadDigest("manifest.blocks.key", key));
    KV_ASSIGN_OR_RETURN(blocks[i].name.tokens, ReadDigest("manifest.blocks.tokens", in[i].getTokens()));
    blocks[i].named = true;
  }
  return blocks;
}

// bytes: of these pages, and then of those that follow. encoded: as every page must be. Blocks and layers are the
// store's to judge.
absl::StatusOr<std::vector<HandOffPage>> ReadPages(capnp::List<Page>::Reader in, PageSizes::Iterator& bytes,
                                                   bool encoded) {
  std::vector<HandOffPage> pages(in.size());
  for (uint32_t i = 0; i < in.size(); ++i) {
    const auto page = in[i];
    if (page.getEncoded() != encoded) {
      return InvalidField(absl::StrCat("manifest.pages[", i, "].encoded"), page.getEncoded() ? "true" : "false",
                          encoded ? "true in the first manifest" : "false in the last");
    }
    pages[i] = {page.getBlock(), page.getLayer(), *bytes};
    ++bytes;
  }
  return pages;
}

absl::StatusOr<HandOffHeader> ReadFirst(api::HandOffManifest::Reader in, const PageSizes& page_bytes) {
  const bool with_activations = in.getVersion() == kActivationsManifestVersion;
  if (!with_activations) KV_RETURN_IF_ERROR(CheckVersion(in.getVersion()));
  HandOffHeader header;
  KV_ASSIGN_OR_RETURN(header.config, ReadCacheConfig(in.getConfig()));
  KV_RETURN_IF_ERROR(ValidateCacheConfig(header.config));
  header.codec_version = in.getCodecVersion();
  header.tokens = in.getTokens();
  KV_ASSIGN_OR_RETURN(header.blocks, ReadBlocks(in.getBlocks()));
  const uint64_t page_tokens = header.config.layout.page_tokens;
  if (header.tokens / page_tokens != header.blocks.size()) {
    return InvalidField("manifest.tokens", header.tokens,
                        absl::StrCat(header.blocks.size(), " blocks of ", page_tokens, ", and less than one more"));
  }
  const auto aged = in.getAged();
  if (aged.size() != static_cast<uint32_t>(header.config.layers)) {
    return InvalidField("manifest.aged", absl::StrCat(aged.size(), " long"),
                        absl::StrCat(header.config.layers, " long, one per layer"));
  }
  for (const uint32_t pages : aged) header.aged.push_back(pages);
  const size_t pages = in.getPages().size(), activations = with_activations ? in.getActivations().size() : 0;
  if (pages + activations != page_bytes.size()) {
    return InvalidField("manifest.pages", absl::StrCat(pages, " and ", activations, " of activations"),
                        absl::StrCat(page_bytes.size(), " in all, as the transport's part"));
  }
  PageSizes::Iterator bytes = page_bytes.begin();
  KV_ASSIGN_OR_RETURN(header.pages, ReadPages(in.getPages(), bytes, /*encoded=*/true));
  if (!with_activations) return header;
  KV_ASSIGN_OR_RETURN(header.activations, ReadPages(in.getActivations(), bytes, /*encoded=*/true));
  return header;
}

absl::StatusOr<TrailerManifest> ReadLast(api::HandOffLastManifest::Reader in, const PageSizes& page_bytes) {
  KV_RETURN_IF_ERROR(CheckVersion(in.getVersion()));
  TrailerManifest manifest;
  KV_ASSIGN_OR_RETURN(manifest.trailer.blocks, ReadBlocks(in.getBlocks()));
  if (in.getPages().size() != page_bytes.size()) {
    return InvalidField("manifest.pages", absl::StrCat(in.getPages().size(), " long"),
                        absl::StrCat(page_bytes.size(), " long, as the transport's part"));
  }
  PageSizes::Iterator bytes = page_bytes.begin();
  KV_ASSIGN_OR_RETURN(manifest.trailer.pages, ReadPages(in.getPages(), bytes, /*encoded=*/false));
  manifest.trailer.index = {in.getPromptTokens(), in.getIndexIterations()};
  const capnp::Data::Reader blob = in.getBlob();
  if (blob.size() > limits::kBlobBytesMax) {
    return InvalidField("manifest.blob", absl::StrCat(blob.size(), " bytes long"),
                        absl::StrCat("at most ", limits::kBlobBytesMax, " bytes long"));
  }
  manifest.blob.assign(reinterpret_cast<const char*>(blob.begin()), blob.size());
  return manifest;
}

void WriteBlocks(absl::Span<const HandOffBlock> blocks, capnp::List<api::BlockName>::Builder out) {
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].named) continue;
    out[i].setKey(DataOf(blocks[i].name.key));
    out[i].setTokens(DataOf(blocks[i].name.tokens));
  }
}

void WritePages(absl::Span<const HandOffPage> pages, bool encoded, capnp::List<Page>::Builder out) {
  for (uint32_t i = 0; i < pages.size(); ++i) {
    out[i].setBlock(pages[i].block);
    out[i].setLayer(pages[i].layer);
    out[i].setEncoded(encoded);
  }
}

std::string BytesOf(capnp::MessageBuilder& message) {
  std::string bytes(capnp::computeSerializedSizeInWords(message) * sizeof(capnp::word), '\0');
  kj::ArrayOutputStream out(kj::arrayPtr(reinterpret_cast<kj::byte*>(bytes.data()), bytes.size()));
  capnp::writeMessage(out, message);
  return bytes;
}

// Root: the message's; read(Root::Reader) gives the Result.
template <typename Root, typename Result, typename Read>
absl::StatusOr<Result> Parse(absl::string_view bytes, Read read) {
  if (bytes.empty() || bytes.size() > HandOffPart::kManifestBytesMax || bytes.size() % sizeof(capnp::word) != 0) {
    return InvalidField("manifest", absl::StrCat(bytes.size(), " bytes long"),
                        absl::StrCat("a multiple of 8, at most ", HandOffPart::kManifestBytesMax));
  }
  // With a blob it has a MiB: it is copied only where it does not lie at a word.
  kj::ArrayPtr<const capnp::word> words(reinterpret_cast<const capnp::word*>(bytes.data()),
                                        bytes.size() / sizeof(capnp::word));
  kj::Array<capnp::word> copy;
  if (reinterpret_cast<uintptr_t>(bytes.data()) % sizeof(capnp::word) != 0) {
    copy = kj::heapArray<capnp::word>(words.size());
    std::memcpy(copy.begin(), bytes.data(), bytes.size());
    words = copy;
  }
  absl::StatusOr<Result> result = absl::InternalError("not read");
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 // Everything is read once, so an honest message stays within twice its own size.
                 capnp::ReaderOptions options;
                 options.traversalLimitInWords = 2 * words.size() + 1024;
                 options.nestingLimit = 8;
                 capnp::FlatArrayMessageReader reader(words, options);
                 result = read(reader.getRoot<Root>());
               })) {
    return InvalidField("manifest", absl::StrCat("malformed (", exception->getDescription().cStr(), ")"),
                        "a hand_off.capnp message");
  }
  return result;
}

}  // namespace

std::string WriteHandOffHeader(const HandOffHeader& header) {
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<api::HandOffManifest>();
  out.setVersion(header.activations.empty() ? kManifestVersion : kActivationsManifestVersion);
  WriteCacheConfig(header.config, out.initConfig());
  out.setCodecVersion(header.codec_version);
  out.setTokens(header.tokens);
  WriteBlocks(header.blocks, out.initBlocks(header.blocks.size()));
  WritePages(header.pages, true, out.initPages(header.pages.size()));
  if (!header.activations.empty()) {
    WritePages(header.activations, true, out.initActivations(header.activations.size()));
  }
  auto aged = out.initAged(header.aged.size());
  for (uint32_t layer = 0; layer < header.aged.size(); ++layer) aged.set(layer, header.aged[layer]);
  return BytesOf(message);
}

std::string WriteHandOffTrailer(const HandOffTrailer& trailer, absl::string_view blob) {
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<api::HandOffLastManifest>();
  out.setVersion(kManifestVersion);
  WriteBlocks(trailer.blocks, out.initBlocks(trailer.blocks.size()));
  WritePages(trailer.pages, false, out.initPages(trailer.pages.size()));
  out.setPromptTokens(trailer.index.prompt_tokens);
  out.setIndexIterations(trailer.index.iterations);
  out.setBlob(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(blob.data()), blob.size()));
  return BytesOf(message);
}

absl::StatusOr<HandOffHeader> ParseHandOffHeader(absl::string_view bytes, const PageSizes& page_bytes) {
  return Parse<api::HandOffManifest, HandOffHeader>(bytes, [&](auto root) { return ReadFirst(root, page_bytes); });
}

absl::StatusOr<TrailerManifest> ParseHandOffTrailer(absl::string_view bytes, const PageSizes& page_bytes,
                                                    absl::Span<const uint32_t> withdrawn) {
  KV_ASSIGN_OR_RETURN(TrailerManifest manifest, (Parse<api::HandOffLastManifest, TrailerManifest>(
                                                    bytes, [&](auto root) { return ReadLast(root, page_bytes); })));
  manifest.trailer.withdrawn.assign(withdrawn.begin(), withdrawn.end());
  return manifest;
}

}  // namespace kvmanager
