// A walk's sequences between the GPU and the host.
#include <algorithm>
#include <cstring>

#include "kvmanager/store/device_walk.h"

namespace kvmanager::device_walk {

void DeviceWalk::Await(Arrival arrival) {
  arrival.lease->OnReady([called = arrival.called] { *called = true; });
  counts.waited_arrivals += !arrival.lease->ready();
  arrivals_.push_back(std::move(arrival));
}

void DeviceWalk::CopyOne() {
  auto it = Pick();
  if (it == sequences_.end() || it->second.client->dead || arrivals_.size() >= kWaitingMax) return;
  const ModelSequence& model = it->second;
  if (model.client->stream.ran() < model.written_by)
    model.client->stream.Run(model.written_by - model.client->stream.ran());
  if (::testing::Test::HasFatalFailure()) return;
  auto lease = store().Copy(it->first, CacheConfig::kHost);
  if (model.TokensInEveryLayer() != model.TokensInSomeLayer()) {
    ASSERT_EQ(lease.status().code(), absl::StatusCode::kFailedPrecondition) << lease.status();
    return;
  }
  if (!lease.ok()) {
    ASSERT_EQ(lease.status().code(), absl::StatusCode::kResourceExhausted) << lease.status();
    ++counts.exhausted;
    return;
  }
  Await({model.cache, {}, *std::move(lease), model, 0});
  // Others come and go, and the sequence itself goes on.
  if (Below(4) == 0) Drop(it->first);
}

void DeviceWalk::CommitArrivals() {
  for (size_t i = 0; i < arrivals_.size();) {
    ASSERT_EQ(arrivals_[i].lease->ready(), *arrivals_[i].called);
    if (Below(40) == 0) {  // given up
      Arrival gone = std::move(arrivals_[i]);
      arrivals_.erase(arrivals_.begin() + i);
      if (gone.on_host != 0) store().Drop(gone.on_host);
      continue;
    }
    if (!*arrivals_[i].called) {
      ++i;
      continue;
    }
    if (arrivals_[i].lease->awaits_room() && Below(4) > 0) {
      ++counts.tried_again;
      *arrivals_[i].called = false;
      arrivals_[i].lease->TryAgain();
      arrivals_[i].lease->OnReady([called = arrivals_[i].called] { *called = true; });
      ++i;
      continue;
    }
    Arrival arrival = std::move(arrivals_[i]);
    arrivals_.erase(arrivals_.begin() + i);
    const auto made = arrival.lease->Commit();
    arrival.lease = nullptr;
    if (arrival.on_host != 0) store().Drop(arrival.on_host);
    if (made.status().code() == absl::StatusCode::kResourceExhausted) {
      ++counts.exhausted;
      continue;
    }
    ASSERT_TRUE(made.ok()) << made.status();
    if (!arrival.copied.has_value()) {
      AddSequence(arrival.cache, arrival.text, *made);
    } else if (arrival.on_host == 0) {
      ASSERT_NO_FATAL_FAILURE(CheckOnHost(made->sequence, *arrival.copied));
      ++counts.copied_out;
      auto back = store().Copy(made->sequence, TestDevice::kOrdinal);
      if (back.ok()) {
        Await({arrival.cache, {}, *std::move(back), arrival.copied, made->sequence});
      } else {
        ASSERT_EQ(back.status().code(), absl::StatusCode::kResourceExhausted) << back.status();
        ++counts.exhausted;
        store().Drop(made->sequence);
      }
    } else {
      ++counts.copied_back;
      ModelSequence model = *arrival.copied;
      model.client = clients_[Below(kClients)];
      model.written_by = 0;
      model.text.Truncate(model.tokens[0]);
      std::fill(model.waiting.begin(), model.waiting.end(), 0);
      if (Below(2)) model.text.Add(1000 + static_cast<uint32_t>(Below(1000)));
      sequences_.emplace(made->sequence, model);
    }
  }
}

void DeviceWalk::CheckOnHost(SequenceId id, const ModelSequence& model) {
  const auto lease = store().exports().Whole(id);
  if (lease.status().code() == absl::StatusCode::kResourceExhausted) return;  // of the open page's copy
  ASSERT_TRUE(lease.ok()) << lease.status();
  ASSERT_NE((*lease)->trailer(), nullptr);
  const uint64_t all_tokens = (*lease)->header().tokens;
  const ModelCache& cache = caches_[model.cache];
  const PageLayout& layout = cache.config.layout;
  ASSERT_EQ(all_tokens, model.tokens[0]);
  for (const testing::SentPage& sent : testing::TakeAll(**lease)) {
    const HandOffPage& page = sent.page;
    const uint64_t begin = uint64_t{page.block} * layout.page_tokens;
    const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, all_tokens - begin));
    const int layer = static_cast<int>(page.layer);
    std::vector<uint8_t> expected = testing::MakeRawPage(layout, model.text, page.block, tokens, layer);
    if (sent.encoded) expected = testing::MakeEncodedPage(*cache.codec, expected, page.block, layer);
    ASSERT_EQ(page.bytes, expected.size());
    ASSERT_EQ(std::memcmp(sent.bytes.bytes.data(), expected.data(), expected.size()), 0)
        << "page " << page.block << " of layer " << page.layer;
    ASSERT_EQ(sent.bytes.checksum, testing::Checksum(expected));
  }
}

}  // namespace kvmanager::device_walk
