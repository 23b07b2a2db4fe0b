#include "kvmanager/rpc/wire.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

void WriteStatus(const absl::Status& status, api::Status::Builder out) {
  if (status.ok()) return;
  out.setCode(static_cast<uint16_t>(status.code()));
  out.setMessage(TextOf(std::string(status.message())));
  const ErrorDetail detail = DetailOf(status);
  if (!detail.field.empty()) out.setField(TextOf(detail.field));
  if (!detail.value.empty()) out.setValue(TextOf(detail.value));
  if (!detail.bound.empty()) out.setBound(TextOf(detail.bound));
}

void WriteCacheInfo(const CacheInfo& info, api::CacheInfo::Builder out) {
  out.setCacheId(info.cache);
  WriteCacheConfig(info.config, out.initConfig());
  out.setDigest(DataOf(info.digest));
  out.setCodecVersion(info.codec.version);
  out.setRawPageBytes(info.config.layout.raw_bytes());
  out.setEncodedPageBytes(info.codec.encoded_bytes);
  out.setMeanEncodedPageBytes(info.codec.mean_page_bytes());
  out.setPayloadPageBytes(info.codec.payload_bytes);
  out.setSequences(info.sequences);
  out.setPublishedBlocks(info.published_blocks);
  out.setResidentRawBytes(info.raw_bytes);
  out.setResidentEncodedBytes(info.encoded_bytes);
  out.setResidentActivationBytes(info.activation_bytes);
  out.setSinkTokens(info.codec.sink_tokens);
}

void WriteSequenceInfo(const SequenceInfo& info, api::SequenceInfo::Builder out) {
  out.setSequenceId(info.sequence);
  out.setCacheId(info.cache);
  out.setTokens(info.tokens);
  out.setHitBlocks(info.hit_blocks);
  out.setPublishedBlocks(info.published_blocks);
  out.setBytes(info.bytes);
}

void WriteMatch(const MatchResult& match, api::MatchResult::Builder out) {
  out.setHitBlocks(match.hit_blocks);
  out.setReason(static_cast<api::MissReason>(match.reason));
}

absl::StatusOr<std::vector<BlockName>> ReadBlockNames(absl::string_view field, capnp::List<api::BlockName>::Reader in,
                                                      size_t names_max) {
  if (in.size() > names_max) {
    return InvalidField(field, absl::StrCat(in.size(), " blocks long"),
                        absl::StrCat("at most ", names_max, " blocks long"));
  }
  std::vector<BlockName> names(in.size());
  for (uint32_t i = 0; i < in.size(); ++i) {
    const auto name = in[i];
    const capnp::Data::Reader key = name.getKey(), tokens = name.getTokens();
    if (key.size() != sizeof names[i].key.bytes) return ReadDigest(absl::StrCat(field, "[", i, "].key"), key).status();
    if (tokens.size() != sizeof names[i].tokens.bytes) {
      return ReadDigest(absl::StrCat(field, "[", i, "].tokens"), tokens).status();
    }
    std::memcpy(names[i].key.bytes.data(), key.begin(), key.size());
    std::memcpy(names[i].tokens.bytes.data(), tokens.begin(), tokens.size());
  }
  return names;
}

}  // namespace kvmanager
