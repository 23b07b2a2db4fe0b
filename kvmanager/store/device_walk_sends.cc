// A walk's sequences that are sent while they grow.
#include <algorithm>
#include <cstring>

#include "kvmanager/store/device_walk.h"

namespace kvmanager::device_walk {

bool DeviceWalk::IsSent(SequenceId id) const {
  return std::any_of(sendings_.begin(), sendings_.end(),
                     [id](const Sending& sending) { return sending.id == id && !sending.lease->finished(); });
}
uint64_t DeviceWalk::TokensMax(SequenceId id) const {
  uint64_t tokens = UINT64_MAX;
  for (const Sending& sending : sendings_) {
    if (sending.id == id && !sending.lease->finished()) tokens = std::min(tokens, sending.tokens);
  }
  return tokens;
}

void DeviceWalk::TellWrites(bool all) {
  for (size_t i = 0; i < writes_.size();) {
    const Write& write = writes_[i];
    if (!write.client->dead && (write.client->stream.ran() < write.number || (!all && Below(3) == 0))) {
      ++i;
      continue;
    }
    if (!write.client->dead) store().exports().Written(write.id, write.first_layer, write.tokens);
    writes_.erase(writes_.begin() + i);
  }
}

void DeviceWalk::SendOne() {
  auto it = Pick();
  // What a codec declines is of interest.
  for (int tries = 0; tries < 3 && it != sequences_.end(); ++tries) {
    if (caches_[it->second.cache].config.codec == "declining") break;
    it = Pick();
  }
  if (it == sequences_.end() || it->second.client->dead || sendings_.size() >= kSendingMax) return;
  const ModelSequence& model = it->second;
  const ModelCache& cache = caches_[model.cache];
  const uint64_t tokens_max = uint64_t{kBlocksMax} * cache.config.layout.page_tokens;
  const uint64_t has = model.TokensInSomeLayer();
  Sending sending;
  sending.client = model.client;
  sending.id = it->first;
  sending.cache = model.cache;
  sending.by_host = moves_ && Below(2) == 0;
  sending.tokens = has + Below(tokens_max - has + 1);
  if (Below(4) > 0) sending.tokens = std::min(tokens_max, has + Below(20));
  auto lease = store().exports().Growing(
      it->first, sending.tokens,
      {.will_append = Below(2) == 0, .way = sending.by_host ? ExportWay::kByHost : ExportWay::kDirect});
  if (lease.status().code() == absl::StatusCode::kResourceExhausted) {
    ASSERT_TRUE(sending.by_host);
    ++counts.exhausted;
    return;
  }
  ASSERT_TRUE(lease.ok()) << lease.status();
  sending.lease = *std::move(lease);
  sendings_.push_back(std::move(sending));
  writes_.push_back({model.client, model.client->stream.submitted(), it->first, 0, model.tokens});
}

void DeviceWalk::GoOnSending() {
  const size_t index = Below(sendings_.size());
  Sending& sending = sendings_[index];
  const auto found = sequences_.find(sending.id);
  if (Below(200) == 0 || (found == sequences_.end() && Below(8) == 0)) {  // given up
    sendings_.erase(sendings_.begin() + index);
    return;
  }
  GoOnSending(index);
}
void DeviceWalk::GoOnSending(size_t index) {
  Sending& sending = sendings_[index];
  const auto found = sequences_.find(sending.id);
  if (!sending.lease->finished() && found != sequences_.end()) {
    const bool whole = found->second.TokensInEveryLayer() == sending.tokens;
    if (whole || Below(4) == 0) {
      const absl::Status status = sending.lease->Finish();
      if (status.code() == absl::StatusCode::kResourceExhausted) {
        ++counts.exhausted;
      } else {
        ASSERT_EQ(status.ok(), whole) << status;
      }
      if (status.ok()) sending.text = found->second.text;
    }
  }
  ASSERT_TRUE(sending.lease->status().ok()) << sending.lease->status();
  const HandOffHeader& first = sending.lease->header();
  for (const ExportedPage& page : sending.lease->TakeReady()) {
    const HandOffPage& of = first.pages[page.page];
    const ModelCache& cache = caches_[sending.cache];
    const bool raw = cache.codec->info().keeps_raw(int(of.layer), uint64_t{of.block} * cache.config.layout.page_tokens);
    sending.sent.push_back({of, !raw, false, page});
    counts.sent_early += !sending.lease->finished();
    const Text& text = sending.lease->finished() || found == sequences_.end() ? sending.text : found->second.text;
    ASSERT_NO_FATAL_FAILURE(ExpectSent(sending, text, sending.sent.back()));
  }
  if (sending.lease->trailer() == nullptr) return;
  // Everything was offered, and nothing has changed since.
  const HandOffTrailer& last = *sending.lease->trailer();
  ASSERT_EQ(sending.sent.size() + last.withdrawn.size(), first.pages.size());
  counts.withdrawn += last.withdrawn.size();
  testing::CopyOpenPages(*sending.lease);
  for (size_t i = 0; i < last.pages.size(); ++i) {
    sending.sent.push_back({last.pages[i], false, false, sending.lease->trailer_pages()[i]});
  }
  for (const testing::SentPage& page : sending.sent) {
    ASSERT_NO_FATAL_FAILURE(ExpectSent(sending, sending.text, page));
  }
  ++(sending.by_host ? counts.sent_by_host : counts.sent);
  sendings_.erase(sendings_.begin() + index);
}

void DeviceWalk::ExpectSent(const Sending& sending, const Text& text, const testing::SentPage& sent) {
  const ModelCache& cache = caches_[sending.cache];
  const PageLayout& layout = cache.config.layout;
  const uint64_t begin = uint64_t{sent.page.block} * layout.page_tokens;
  const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, sending.tokens - begin));
  ASSERT_LE(begin + tokens, text.ids.size());
  const int layer = static_cast<int>(sent.page.layer);
  std::vector<uint8_t> expected = testing::MakeRawPage(layout, text, sent.page.block, tokens, layer);
  if (sent.encoded) expected = testing::MakeEncodedPage(*cache.codec, expected, sent.page.block, layer);
  ASSERT_EQ(sent.bytes.bytes.size(), expected.size());
  ASSERT_EQ(std::memcmp(sent.bytes.bytes.data(), expected.data(), expected.size()), 0)
      << "page " << sent.page.block << " of layer " << layer << (sending.by_host ? ", on the host" : "");
  if (sending.by_host) {
    ASSERT_EQ(sent.bytes.checksum, testing::Checksum(expected));
  }
}

}  // namespace kvmanager::device_walk
