// A walk's hand-offs: out of both memories, and into both, each from either.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kvmanager/base/status.h"
#include "kvmanager/store/backends_walk.h"

namespace kvmanager::backends_walk {

using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::SentPage;

void BackendsWalk::StartSend() {
  const auto it = Pick();
  if (it == sequences_.end() || sends_.size() >= kSendsMax) return;
  Send send;
  send.client = it->second.client;
  send.model = it->second;
  send.will_append = Below(2) == 0;
  const ExportOptions options{.will_append = send.will_append,
                              .kept_raw = Below(2) ? KeptRaw::kWithHeader : KeptRaw::kWithTrailer};
  RunWrites(send.model);
  absl::Status statuses[2];
  for (const Memory memory : kMemories) {
    auto lease = store(memory).exports().Whole(send.model.ids[memory], options);
    statuses[memory] = lease.status();
    if (lease.ok()) send.leases[memory] = *std::move(lease);
  }
  const Answer answer = Compare(statuses[kHost], statuses[kGpu]);
  ASSERT_EQ(answer == Answer::kRefused, send.model.TokensInEveryLayer() != send.model.TokensInSomeLayer())
      << statuses[kHost];
  if (answer != Answer::kOk) return;
  send.model.text.Truncate(send.model.tokens[0]);
  sends_.push_back(std::move(send));
}

BackendsWalk::SentPages BackendsWalk::CheckSent(const Send& send, const Packet& packet) const {
  const WalkedCache& cache = caches_[send.model.cache];
  const PageLayout& layout = cache.config.layout;
  const HandOffHeader& first = packet.header;
  const uint64_t all_tokens = send.model.tokens[0];
  EXPECT_EQ(first.tokens, all_tokens);
  const uint64_t newest = all_tokens > 0 && !send.will_append ? all_tokens - 1 : all_tokens;
  SentPages pages;
  for (const SentPage& each : packet.pages) {
    const HandOffPage& page = each.page;
    const int layer = static_cast<int>(page.layer);
    const uint64_t begin = uint64_t{page.block} * layout.page_tokens;
    const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, all_tokens - begin));
    const std::vector<uint8_t> bytes(each.bytes.bytes.begin(), each.bytes.bytes.end());
    EXPECT_EQ(bytes.size(), page.bytes);
    if (each.bytes.checksum != 0) {  // 0: on a GPU
      EXPECT_EQ(each.bytes.checksum, testing::Checksum(bytes));
    }
    if (each.activations) {
      EXPECT_TRUE(bytes == testing::MakeActivations(cache.config.hidden, send.model.text, begin, tokens, layer));
      continue;
    }
    const bool aged = page.block < send.model.AgedBy(layer, newest, cache.config);
    EXPECT_EQ(aged, page.block < first.aged[page.layer]);
    const std::vector<uint8_t> raw = MakeRawPage(layout, send.model.text, page.block, tokens, layer);
    const std::vector<uint8_t> encoded =
        aged ? MakeEncodedPage(*cache.codec, raw, page.block, layer) : std::vector<uint8_t>();
    EXPECT_EQ(each.encoded, !encoded.empty());
    EXPECT_TRUE(bytes == (each.encoded ? encoded : raw)) << "page " << page.block << " of layer " << layer;
    EXPECT_TRUE(pages.try_emplace({page.layer, page.block}, each.encoded, bytes).second);
  }
  return pages;
}

void BackendsWalk::FinishSend() {
  if (sends_.empty()) return;
  const size_t index = Below(sends_.size());
  for (const auto& lease : sends_[index].leases) {
    if (lease->trailer() == nullptr) return;
  }
  const Send send = std::move(sends_[index]);
  sends_.erase(sends_.begin() + index);
  testing::CopyOpenPages(*send.leases[kGpu]);
  const WalkedCache& cache = caches_[send.model.cache];
  Transfer transfer{send.model, {}};
  SentPages pages[2];
  for (const Memory memory : kMemories) {
    Packet& packet = transfer.packets[memory];
    packet.header = send.leases[memory]->header();
    packet.trailer = *send.leases[memory]->trailer();
    packet.pages = testing::TakeAll(*send.leases[memory]);
    packet.bytes.reserve(packet.pages.size());
    for (SentPage& page : packet.pages) {
      packet.bytes.emplace_back(page.bytes.bytes.begin(), page.bytes.bytes.end());
      page.bytes.bytes = packet.bytes.back();
    }
    pages[memory] = CheckSent(send, packet);
  }
  if (::testing::Test::HasFailure()) return;
  const HandOffHeader& host = transfer.packets[kHost].header;
  const HandOffHeader& gpu = transfer.packets[kGpu].header;
  const size_t per_layer = host.blocks.size() + (host.tokens % cache.config.layout.page_tokens != 0);
  ASSERT_EQ(pages[kHost].size(), per_layer * cache.config.layers);
  ASSERT_TRUE(pages[kHost] == pages[kGpu]);
  ASSERT_EQ(host.aged, gpu.aged);
  ASSERT_EQ(host.blocks.size(), gpu.blocks.size());
  ASSERT_TRUE(gpu.activations.empty());
  ++counts.sent;
  counts.activations += host.activations.size();
  if (transfers_.size() < kSendsMax) transfers_.push_back(std::move(transfer));
}

void BackendsWalk::ReceiveOne() {
  if (transfers_.empty() || sequences_.size() >= kSequencesMax) return;
  const size_t index = Below(transfers_.size());
  const Transfer transfer = std::move(transfers_[index]);
  transfers_.erase(transfers_.begin() + index);
  WalkedCache& cache = caches_[transfer.model.cache];
  const bool breaks_off = Below(6) == 0;
  absl::StatusOr<SequenceId> ids[2];
  for (const Memory memory : kMemories) {
    const Packet& packet = transfer.packets[Below(2)];  // from either memory
    ids[memory] = Receive(memory, transfer.model, packet, breaks_off);
  }
  const bool received = ids[kHost].ok() || ids[kGpu].ok();
  // Names arrive with what was received. They may be known in one memory alone, or be of a block that serves one of
  // them.
  for (size_t i = 0; i < transfer.packets[kHost].header.blocks.size() && !breaks_off && received; ++i) {
    const HandOffBlock* named[2];
    for (const Memory memory : kMemories) {
      const Packet& packet = transfer.packets[memory];
      named[memory] = packet.header.blocks[i].named ? &packet.header.blocks[i] : &packet.trailer.blocks[i];
      if (!named[memory]->named) continue;
      counts.named += cache.published.insert(named[memory]->name.key).second;
      const std::vector<uint32_t>& aged = packet.header.aged;
      cache.names_differ |= i >= *std::min_element(aged.begin(), aged.end()) || ids[kHost].ok() != ids[kGpu].ok();
    }
    cache.names_differ |= named[kHost]->named != named[kGpu]->named;
  }
  WalkedSequence model = transfer.model;
  model.ids = {ids[kHost].value_or(0), ids[kGpu].value_or(0)};
  const Answer answer = Compare(ids[kHost].status(), ids[kGpu].status());
  ASSERT_NE(answer, Answer::kRefused) << ids[kHost].status();
  if (answer != Answer::kOk || breaks_off) return DropMade(model.ids);
  model.client = clients_[Below(kClients)];
  model.aged = transfer.packets[kHost].header.aged;
  model.written_by = 0;
  ++counts.received;
  AddSequence(std::move(model));
}

absl::StatusOr<SequenceId> BackendsWalk::Receive(Memory to, const WalkedSequence& model, const Packet& packet,
                                                 bool breaks_off) {
  HandOffHeader first = packet.header;
  first.config.device = to == kHost ? CacheConfig::kHost : TestDevice::kOrdinal;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<ImportLease> import,
                      store(to).imports().Import(first, nullptr, [this](uint32_t, uint32_t, uint32_t with_activations) {
                        const auto chosen = static_cast<uint32_t>(Below(with_activations + 1));
                        counts.recomputed += chosen;
                        return chosen;
                      }));
  store(to).report().CheckInvariants();
  if (breaks_off) return 0;
  KV_RETURN_IF_ERROR(import->Extend(packet.trailer));
  for (const SentPage& page : packet.pages) {
    const absl::Span<uint8_t> target = import->target(page.bytes.page);
    if (target.empty()) continue;
    KV_CHECK(target.size() == page.bytes.bytes.size());
    std::memcpy(target.data(), page.bytes.bytes.data(), target.size());
    KV_ASSIGN_OR_RETURN(const uint64_t looked, import->Validate(page.bytes.page));
    EXPECT_EQ(looked != 0, to == kHost);
    if (looked != 0 && page.bytes.checksum != 0) {
      EXPECT_EQ(looked, page.bytes.checksum);
    }
    const ArrivedPage arrived{page.bytes.page, looked != 0 ? looked : page.bytes.checksum};
    KV_RETURN_IF_ERROR(import->Arrived({&arrived, 1}));
    if (to == kGpu) NoteJobs(nullptr, 0);
  }
  KV_RETURN_IF_ERROR(testing::Recompute(*import, caches_[model.cache].config, model.text));
  KV_ASSIGN_OR_RETURN(const SequenceId sequence, import->Show());
  KV_RETURN_IF_ERROR(import->Commit());
  EXPECT_FALSE(import->Commit().ok());
  return sequence;
}

}  // namespace kvmanager::backends_walk
