#include "kvmanager/rpc/wire.h"

#include <algorithm>
#include <cstring>
#include <tuple>
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
  out.setPoolBytes(info.pool_bytes);
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
  out.setInMemory(static_cast<uint32_t>(match.in_memory));
}

void WriteHits(const MatchResult& match, api::MatchResult::Builder out) {
  WriteMatch({match.hit_blocks, match.reason, match.hit_blocks}, out);
}

BlockNamesReader::BlockNamesReader(std::string field, capnp::List<api::BlockName>::Reader in, size_t names_max)
    : field_(std::move(field)), in_(in) {
  if (in.size() > names_max) {
    status_ = InvalidField(field_, absl::StrCat(in.size(), " blocks long"),
                           absl::StrCat("at most ", names_max, " blocks long"));
    return;
  }
  names_.reserve(in.size());
}

bool BlockNamesReader::ReadNext() {
  if (!status_.ok()) return false;
  const size_t end = std::min<size_t>(in_.size(), names_.size() + kNamesOfPiece);
  while (names_.size() < end) {
    const uint32_t i = static_cast<uint32_t>(names_.size());
    const capnp::Data::Reader key = in_[i].getKey(), tokens = in_[i].getTokens();
    BlockName& name = names_.emplace_back();
    for (const auto& [part, given, digest] :
         {std::tuple("key", &key, &name.key.bytes), {"tokens", &tokens, &name.tokens.bytes}}) {
      if (given->size() != digest->size()) {
        status_ = ReadDigest(absl::StrCat(field_, "[", i, "].", part), *given).status();
        return false;
      }
      std::memcpy(digest->data(), given->begin(), digest->size());
    }
  }
  return end < in_.size();
}

absl::StatusOr<std::vector<BlockName>> ReadBlockNames(absl::string_view field, capnp::List<api::BlockName>::Reader in,
                                                      size_t names_max) {
  BlockNamesReader reader(std::string(field), in, names_max);
  while (reader.ReadNext()) {
  }
  KV_RETURN_IF_ERROR(reader.status());
  return reader.Take();
}

}  // namespace kvmanager
