#include "kvmanager/server/manifest.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/api/hand_off.capnp.h"
#include "kvmanager/base/status.h"
#include "kvmanager/server/limits.h"
#include "kvmanager/server/wire.h"
#include "transport/transport.h"

namespace kvmanager {
namespace {

absl::StatusOr<Manifest> Read(api::HandOffManifest::Reader in, absl::Span<const uint64_t> page_bytes,
                              absl::Span<const uint64_t> page_checksums) {
  if (in.getVersion() != kManifestVersion) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "manifest.version", absl::StrCat(in.getVersion()),
                      absl::StrCat(kManifestVersion));
  }
  Manifest manifest;
  HandOffContent& content = manifest.content;
  KV_ASSIGN_OR_RETURN(content.config, ReadCacheConfig(in.getConfig()));
  KV_RETURN_IF_ERROR(ValidateCacheConfig(content.config));
  content.codec_version = in.getCodecVersion();
  content.tokens = in.getTokens();
  content.index = {in.getPromptTokens(), in.getIndexIterations()};
  const auto blocks = in.getBlocks();
  if (blocks.size() > limits::kHandOffBlocksMax) {
    return InvalidField("manifest.blocks", absl::StrCat(blocks.size(), " long"),
                        absl::StrCat("at most ", limits::kHandOffBlocksMax, " long"));
  }
  const uint64_t page_tokens = content.config.layout.page_tokens;
  if (content.tokens / page_tokens != blocks.size()) {
    return InvalidField("manifest.tokens", content.tokens,
                        absl::StrCat(blocks.size(), " blocks of ", page_tokens, ", and less than one more"));
  }
  content.blocks.resize(blocks.size());
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    const auto block = blocks[i];
    const capnp::Data::Reader key = block.getKey();
    if (key.size() == 0) continue;
    KV_ASSIGN_OR_RETURN(content.blocks[i].name.key, ReadDigest("manifest.blocks.key", key));
    KV_ASSIGN_OR_RETURN(content.blocks[i].name.tokens, ReadDigest("manifest.blocks.tokens", block.getTokens()));
    content.blocks[i].named = true;
  }
  const auto pages = in.getPages();
  if (pages.size() != page_bytes.size() || pages.size() != page_checksums.size()) {
    return InvalidField("manifest.pages", absl::StrCat(pages.size(), " long"),
                        absl::StrCat(page_bytes.size(), " long, as offered"));
  }
  content.pages.resize(pages.size());
  for (uint32_t i = 0; i < pages.size(); ++i) {
    const auto page = pages[i];
    if (page.getBlock() > blocks.size()) {
      return InvalidField(absl::StrCat("manifest.pages[", i, "].block"), page.getBlock(),
                          absl::StrCat("0..", blocks.size()));
    }
    if (page.getLayer() >= static_cast<uint32_t>(content.config.layers)) {
      return InvalidField(absl::StrCat("manifest.pages[", i, "].layer"), page.getLayer(),
                          absl::StrCat("0..", content.config.layers - 1));
    }
    content.pages[i] = {page.getBlock(), page.getLayer(), page.getEncoded() ? PageForm::kEncoded : PageForm::kRaw,
                        page_bytes[i], page_checksums[i]};
  }
  const capnp::Data::Reader blob = in.getBlob();
  if (blob.size() > limits::kBlobBytesMax) {
    return InvalidField("manifest.blob", absl::StrCat(blob.size(), " bytes long"),
                        absl::StrCat("at most ", limits::kBlobBytesMax, " bytes long"));
  }
  manifest.blob.assign(reinterpret_cast<const char*>(blob.begin()), blob.size());
  return manifest;
}

}  // namespace

std::string WriteManifest(const HandOffContent& content, absl::string_view blob) {
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<api::HandOffManifest>();
  out.setVersion(kManifestVersion);
  WriteCacheConfig(content.config, out.initConfig());
  out.setCodecVersion(content.codec_version);
  out.setTokens(content.tokens);
  out.setPromptTokens(content.index.prompt_tokens);
  out.setIndexIterations(content.index.iterations);
  auto blocks = out.initBlocks(content.blocks.size());
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    if (!content.blocks[i].named) continue;
    blocks[i].setKey(DataOf(content.blocks[i].name.key));
    blocks[i].setTokens(DataOf(content.blocks[i].name.tokens));
  }
  auto pages = out.initPages(content.pages.size());
  for (uint32_t i = 0; i < pages.size(); ++i) {
    const HandOffPage& page = content.pages[i];
    pages[i].setBlock(page.block);
    pages[i].setLayer(page.layer);
    pages[i].setEncoded(page.form == PageForm::kEncoded);
  }
  out.setBlob(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(blob.data()), blob.size()));
  const kj::Array<capnp::word> words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size());
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes, absl::Span<const uint64_t> page_bytes,
                                       absl::Span<const uint64_t> page_checksums) {
  if (bytes.empty() || bytes.size() > SendRequest::kManifestBytesMax || bytes.size() % sizeof(capnp::word) != 0) {
    return InvalidField("manifest", absl::StrCat(bytes.size(), " bytes long"),
                        absl::StrCat("a multiple of 8, at most ", SendRequest::kManifestBytesMax));
  }
  kj::Array<capnp::word> words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), bytes.size());
  absl::StatusOr<Manifest> manifest = absl::InternalError("not read");
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 // Everything is read once, so an honest message stays within twice its own size.
                 capnp::ReaderOptions options;
                 options.traversalLimitInWords = 2 * words.size() + 1024;
                 options.nestingLimit = 8;
                 capnp::FlatArrayMessageReader reader(words, options);
                 manifest = Read(reader.getRoot<api::HandOffManifest>(), page_bytes, page_checksums);
               })) {
    return InvalidField("manifest", absl::StrCat("malformed (", exception->getDescription().cStr(), ")"),
                        "a hand_off.capnp message");
  }
  return manifest;
}

}  // namespace kvmanager
