#include "kvmanager/store/simulated_gpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kvmanager/base/status.h"

namespace kvmanager::testing {
namespace {

void CopyTokens(const PageLayout& layout, const uint8_t* from, uint8_t* to, int first, int count) {
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      const size_t at = layout.raw_offset(side, head, first);
      std::memcpy(to + at, from + at, size_t(count) * layout.head_dim * 2);
    }
  }
}

void NoteBytes(const SimulatedRows& rows, size_t first, bool encoded, uint64_t bytes) {
  for (size_t i = first; i < rows.reads->size(); ++i) {
    if ((*rows.reads)[i].encoded == encoded) (*rows.reads)[i].bytes = bytes;
  }
}

}  // namespace

uint64_t RawBytesRead(const PageLayout& layout, const uint8_t* page, int tokens) {
  std::vector<uint8_t> rows(layout.raw_bytes(), 0);
  CopyTokens(layout, page, rows.data(), 0, tokens);
  return Checksum(rows);
}

void CopyOpenPages(const ExportLease& lease) {
  const PageLayout& layout = lease.header().config.layout;
  const int tokens = static_cast<int>(lease.header().tokens % layout.page_tokens);
  for (const ExportedOpenPage& page : lease.open_pages()) {
    std::memset(page.to, 0, layout.raw_bytes());
    CopyTokens(layout, page.from, page.to, 0, tokens);
  }
}

SimulatedStream::SimulatedStream(TestDevice* device, Counts* counts)
    : device_(device), counts_(counts), holder_(*device->epochs.AddHolder(&counter_)) {}

uint64_t SimulatedStream::Submit(SimulatedSubmission submission) {
  KV_CHECK(!closed_);
  queue_.push_back(std::move(submission));
  return ++submitted_;
}

void SimulatedStream::Run(uint64_t count) {
  for (; count > 0 && !queue_.empty(); --count) {
    ASSERT_NO_FATAL_FAILURE(RunOne(queue_.front()));
    ++ran_;
    counter_.released.store(queue_.front().epoch, std::memory_order_release);
    queue_.pop_front();
  }
}

void SimulatedStream::Abandon() {
  queue_.clear();
  ran_ = submitted_;
}

void SimulatedStream::Close() {
  KV_CHECK(queue_.empty() && !closed_);
  device_->epochs.RemoveHolder(holder_);
  tables_.clear();
  closed_ = true;
}

void SimulatedStream::RunOne(const SimulatedSubmission& submission) {
  for (const auto& truncate : submission.truncates) {
    for (int layer = 0; layer < submission.config.layers; ++layer) {
      auto& table = tables_[{truncate.sequence, layer}];
      table.resize(std::min(table.size(), truncate.pages));
    }
  }
  for (const auto& update : submission.updates) {
    auto& table = tables_[{update.sequence, update.layer}];
    for (const PagePlace& place : update.pages) {
      if (place.page >= table.size()) table.resize(place.page + 1);
      table[place.page] = place;
    }
  }
  for (const OpenCopy& copy : submission.copies) {
    uint8_t *from, *to;
    ASSERT_NO_FATAL_FAILURE(Bytes(copy.from, &from));
    ASSERT_NO_FATAL_FAILURE(Bytes(copy.to, &to));
    CopyTokens(submission.config.layout, from, to, 0, copy.tokens);
  }
  for (const SimulatedRows& rows : submission.writes) ASSERT_NO_FATAL_FAILURE(Write(submission, rows));
  for (const SimulatedRows& rows : submission.queries) ASSERT_NO_FATAL_FAILURE(Query(submission, rows));
}

// Of a slot that a kernel touches: nobody may have got it in the meantime.
void SimulatedStream::Bytes(PageId slot, uint8_t** bytes) const {
  ASSERT_TRUE(slot.valid());
  ASSERT_TRUE(device_->pool->IsCurrent(slot)) << "slot " << slot.slot << " was freed under a kernel";
  *bytes = device_->pool->Data(slot);
}

void SimulatedStream::Write(const SimulatedSubmission& submission, const SimulatedRows& rows) {
  const PageLayout& layout = submission.config.layout;
  const auto& table = tables_[{rows.sequence, rows.layer}];
  const uint64_t end = rows.position + rows.tokens;
  for (uint64_t position = rows.position; position < end;) {
    const uint32_t index = static_cast<uint32_t>(position / layout.page_tokens);
    const uint64_t begin = uint64_t{index} * layout.page_tokens;
    const int first = static_cast<int>(position - begin);
    const int last = static_cast<int>(std::min<uint64_t>(end - begin, layout.page_tokens));
    ASSERT_LT(index, table.size());
    uint8_t* page;
    ASSERT_NO_FATAL_FAILURE(Bytes(table[index].raw, &page));
    CopyTokens(layout, MakeRawPage(layout, rows.text, index, last, rows.layer).data(), page, first, last - first);
    position = begin + last;
  }
}

// Reads what the queries read, as a kernel chooses it, and compares both choice and bytes with rule 2 of page_store.h.
void SimulatedStream::Query(const SimulatedSubmission& submission, const SimulatedRows& rows) {
  const PageLayout& layout = submission.config.layout;
  const uint32_t lag_pages = static_cast<uint32_t>(submission.config.lag_pages);
  const bool identity = submission.codec->info().identity;
  const auto& table = tables_[{rows.sequence, rows.layer}];
  const uint32_t first_own = static_cast<uint32_t>(rows.position / layout.page_tokens);
  const uint32_t last_own = static_cast<uint32_t>((rows.position + rows.tokens - 1) / layout.page_tokens);
  ASSERT_LT(last_own, table.size());
  ++counts_->queries;
  for (uint32_t index = 0; index <= last_own; ++index) {
    SCOPED_TRACE(::testing::Message() << "page " << index << " of " << last_own);
    const PagePlace& place = table[index];
    const uint64_t begin = uint64_t{index} * layout.page_tokens;
    const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, rows.text.ids.size() - begin));
    const std::vector<uint8_t> raw = MakeRawPage(layout, rows.text, index, tokens, rows.layer);
    const std::vector<uint8_t> encoded = MakeEncodedPage(*submission.codec, raw, index, rows.layer);
    bool reads_raw = false, reads_encoded = false;
    const size_t noted = rows.reads == nullptr ? 0 : rows.reads->size();
    for (uint32_t own = std::max(index, first_own); own <= last_own; ++own) {
      const bool in_lag = index >= rows.aged && own - index <= lag_pages;
      const bool kernel_reads_raw = identity || !place.encoded.valid() || in_lag || (own == index && place.raw.valid());
      ASSERT_EQ(kernel_reads_raw, identity || in_lag || encoded.empty());
      (kernel_reads_raw ? reads_raw : reads_encoded) = true;
      counts_->declined += !identity && !in_lag && encoded.empty();
      if (rows.reads != nullptr) rows.reads->push_back({own, index, !kernel_reads_raw, 0});
    }
    uint8_t* bytes;
    if (reads_raw) {
      ++counts_->raw;
      ASSERT_NO_FATAL_FAILURE(Bytes(place.raw, &bytes));
      ASSERT_TRUE(RawPrefixEquals(layout, bytes, raw, tokens));
      if (rows.reads != nullptr) NoteBytes(rows, noted, false, RawBytesRead(layout, bytes, tokens));
    }
    if (reads_encoded) {
      ++counts_->encoded;
      ASSERT_EQ(tokens, layout.page_tokens);
      ASSERT_NO_FATAL_FAILURE(Bytes(place.encoded, &bytes));
      ASSERT_EQ(std::memcmp(bytes, encoded.data(), encoded.size()), 0);
      if (rows.reads != nullptr) NoteBytes(rows, noted, true, Checksum({bytes, bytes + encoded.size()}));
    }
  }
}

}  // namespace kvmanager::testing
