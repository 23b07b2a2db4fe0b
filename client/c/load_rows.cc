// Blocks that are each the first of a sequence of its own, brought from the daemon's memory to rows of tokens and heads
// in this process's memory: for engines with a pool of pages in host memory.
//
// The caller's thread asks the daemon, and holds the leases. Threads of the call's own take mapped blocks in turn: each
// page is copied, its copy compared with the checksum, decoded, and spread over its rows.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/c/object.h"
#include "client/c/page_codec.h"
#include "codecs/codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/checksum.h"

namespace kvmanager::client::c {
namespace {

constexpr size_t kAhead = 16;      // calls to the daemon that are under way
constexpr uint32_t kHeldMax = 64;  // blocks, of the leases that a connection may have
constexpr uint32_t kThreadsMax = 64;

/// Rows of a side of a page, [heads][tokens] one behind the other, to where the caller wants them.
struct Spread {
  uint32_t heads, tokens, row_bytes;
  int64_t token_stride, head_stride;

  void Run(const uint8_t* from, uint8_t* to) const {
    switch (row_bytes) {  // sizes that compilers know are copied without a call
      case 128:
        return Rows<128>(from, to);
      case 256:
        return Rows<256>(from, to);
      default:
        return Rows<0>(from, to);
    }
  }

 private:
  template <size_t kBytes>
  void Rows(const uint8_t* from, uint8_t* to) const {
    const size_t bytes = kBytes != 0 ? kBytes : row_bytes;
    for (uint32_t token = 0; token < tokens; ++token) {
      for (uint32_t head = 0; head < heads; ++head) {
        std::memcpy(to + token * token_stride + head * head_stride, from + (size_t{head} * tokens + token) * bytes,
                    bytes);
      }
    }
  }
};

struct Scratch {
  AlignedBuffer stored, raw;  // a page's
};

/// One call. Its Run is the caller's thread's.
class RowsLoad {
 public:
  RowsLoad(const PageCodecObject& codec, Cache* cache, const kvm_rows& rows, absl::Span<const BlockName> names,
           uint8_t* results)
      : codec_(codec), cache_(cache), rows_(rows), names_(names), results_(results), blocks_(names.size()) {
    const PageLayout& layout = codec.codec->layout();
    spread_ = {layout.kv_heads, layout.page_tokens, uint32_t(layout.raw_head_bytes() / layout.page_tokens),
               rows.token_stride, rows.head_stride};
    std::fill_n(results, names.size(), uint8_t{KVM_ROWS_MISSING});
  }

  absl::Status Run(uint32_t threads) {
    std::vector<Scratch> scratches(std::min<size_t>(threads, names_.size()));
    for (Scratch& each : scratches) {
      const size_t raw_bytes = codec_.codec->layout().raw_bytes();
      KV_ASSIGN_OR_RETURN(each.stored,
                          AlignedBuffer::Make("a page", std::max(raw_bytes, codec_.codec->info().encoded_bytes)));
      if (identity()) continue;
      KV_ASSIGN_OR_RETURN(each.raw, AlignedBuffer::Make("a page", raw_bytes));
    }
    absl::Status status;
    {
      std::vector<std::thread> workers;
      const absl::Cleanup join = [&] {
        stopped_ = stopped_ || !status.ok();
        ready_.store(uint32_t(blocks_.size()), std::memory_order_release);
        ready_.notify_all();
        for (std::thread& each : workers) each.join();
      };
      workers.reserve(scratches.size());
      for (Scratch& each : scratches) workers.emplace_back([this, scratch = &each] { Work(scratch); });
      status = MapAll();
    }
    KV_RETURN_IF_ERROR(status);  // leases end with the blocks
    while (released_ < blocks_.size()) Release(released_++);
    for (auto& [block, pending] : releases_) {
      if (pending.Wait().ok() && !blocks_[block].corrupt) results_[block] = KVM_ROWS_LOADED;
    }
    return absl::OkStatus();
  }

 private:
  struct Block {
    MappedBlocks mapped;   // the caller's thread; workers read it once ready_ is beyond
    bool corrupt = false;  // of the worker that has it, until `done`
    std::atomic<bool> done = false;
  };

  bool identity() const { return codec_.codec->info().identity; }

  absl::Status MapAll() {
    std::deque<Pending<absl::StatusOr<MappedBlocks>>> asked;
    uint32_t next = 0;
    for (uint32_t at = 0; at < blocks_.size(); ++at) {
      for (; next < blocks_.size() && asked.size() < kAhead; ++next) {
        asked.push_back(cache_->MapBlocksAsync({0, names_.subspan(next, 1), {}}, nullptr));
      }
      absl::StatusOr<MappedBlocks> found = asked.front().Wait();
      asked.pop_front();
      KV_RETURN_IF_ERROR(found.status());
      // Kept in memory that is not shown, or still to be encoded.
      const bool there = found->reason == Miss::kNone || found->reason == Miss::kIncomplete;
      if (found->blocks == 0 && there) results_[at] = KVM_ROWS_UNMAPPED;
      if (found->blocks != 0 && found->pages.size() != static_cast<size_t>(codec_.layers)) {
        return absl::InternalError(
            absl::StrCat("the daemon says ", found->pages.size(), " pages of a block of ", codec_.layers, " layers"));
      }
      blocks_[at].mapped = *std::move(found);
      ready_.store(at + 1, std::memory_order_release);
      ready_.notify_all();
      while (released_ <= at &&
             (at - released_ >= kHeldMax || blocks_[released_].done.load(std::memory_order_acquire))) {
        blocks_[released_].done.wait(false, std::memory_order_acquire);
        Release(released_++);
      }
    }
    return absl::OkStatus();
  }

  // Of a block that no worker will touch any more.
  void Release(uint32_t at) {
    const MappedBlocks& mapped = blocks_[at].mapped;
    if (mapped.blocks == 0 || mapped.lease == nullptr) return;
    const auto corrupt = blocks_[at].corrupt ? std::optional<uint32_t>(0) : std::nullopt;
    releases_.emplace_back(at, mapped.lease->ReleaseAsync(corrupt));
  }

  void Work(Scratch* scratch) {
    for (;;) {
      const uint32_t at = next_.fetch_add(1, std::memory_order_relaxed);
      if (at >= blocks_.size()) return;
      for (uint32_t ready; (ready = ready_.load(std::memory_order_acquire)) <= at;) ready_.wait(ready);
      Block& block = blocks_[at];
      if (block.mapped.blocks != 0 && !stopped_) block.corrupt = !Unpack(block.mapped, at, scratch);
      block.done.store(true, std::memory_order_release);
      block.done.notify_one();
    }
  }

  /// False: a page's bytes have not their checksum, or are none of the codec's.
  bool Unpack(const MappedBlocks& mapped, uint32_t at, Scratch* scratch) const {
    const PageLayout& layout = codec_.codec->layout();
    for (int layer = 0; layer < codec_.layers; ++layer) {
      const bool raw = mapped.raw[layer] != 0;
      const size_t bytes = StoredBytes(codec_, raw, static_cast<uint32_t>(layer));
      const uint8_t* page = scratch->stored.data();
      std::memcpy(scratch->stored.data(), reinterpret_cast<const void*>(mapped.pages[layer]), bytes);
      if (Checksum(page, bytes) != mapped.checksums[layer]) return false;
      if (!raw && !identity()) {
        if (!codec_.codec->Validate(layer, {page, bytes}).ok()) return false;
        const DecodeItem item = {page, scratch->raw.data(), static_cast<uint32_t>(layer)};
        codec_.codec->Decode({&item, 1});
        page = scratch->raw.data();
      }
      const int64_t to = layer * rows_.layer_stride;
      spread_.Run(page, static_cast<uint8_t*>(rows_.k[at]) + to);
      spread_.Run(page + layout.raw_bytes() / 2, static_cast<uint8_t*>(rows_.v[at]) + to);
    }
    return true;
  }

  const PageCodecObject& codec_;
  Cache* const cache_;
  const kvm_rows& rows_;
  const absl::Span<const BlockName> names_;
  uint8_t* const results_;
  Spread spread_;
  std::vector<Block> blocks_;
  std::atomic<uint32_t> ready_{0};  // blocks that were mapped, or are not there
  std::atomic<uint32_t> next_{0};   // that no worker has taken
  std::atomic<bool> stopped_{false};
  uint32_t released_ = 0;
  std::vector<std::pair<uint32_t, Pending<absl::Status>>> releases_;
};

}  // namespace
}  // namespace kvmanager::client::c

using namespace kvmanager;             // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_load_rows(kvm_object* codec, kvm_object* cache, const kvm_rows* rows, const uint8_t* names, uint32_t blocks,
                  uint32_t threads, uint8_t* results) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(CacheObject * of, Use<CacheObject>(cache));
    if (object.on_device) return absl::FailedPreconditionError("the codec is a GPU's, and rows are in host memory");
    if (of->session != object.session || of->handle->description().digest != object.digest) {
      return InvalidField("cache", "another one", "that which the codec was made for");
    }
    if (threads == 0 || threads > kThreadsMax) {
      return InvalidField("threads", threads, absl::StrCat("1..", kThreadsMax));
    }
    if (blocks == 0) return absl::OkStatus();
    const absl::Span<const BlockName> of_blocks(reinterpret_cast<const BlockName*>(names), blocks);
    return RowsLoad(object, of->handle.get(), *rows, of_blocks, results).Run(threads);
  });
}

}  // extern "C"
