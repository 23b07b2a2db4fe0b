#include "client/c/paged_blocks.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/object.h"
#include "kvmanager/memory/page_copy.h"
#include "kvmanager/memory/page_hash.h"

namespace kvmanager::client::c {
namespace {

// What kernels read of a load or a save: items to decode or encode, and block ids. Written to host memory and copied to
// the GPU at once, since small reads of host memory by kernels hold up the copies of pages.
template <typename Item>
class ItemList {
 public:
  /// ids: [groups][blocks]. Items come first in the list: kernels read 16 bytes of them at a time.
  ItemList(void* list, void* list_device, const int64_t* ids, uint32_t groups, uint32_t blocks)
      : list_(static_cast<uint8_t*>(list)),
        device_list_(static_cast<uint8_t*>(list_device)),
        ids_(ids),
        ids_bytes_(size_t{groups} * blocks * sizeof(int64_t)),
        blocks_(blocks) {}

  void Add(const Item& item) { reinterpret_cast<Item*>(list_)[count_++] = item; }
  uint32_t count() const { return count_; }
  const Item* items() const { return reinterpret_cast<const Item*>(list_); }
  /// The same on the GPU, once all items are there and Send() was called.
  const Item* device_items() const { return reinterpret_cast<const Item*>(device_list_); }
  const int64_t* device_ids() const { return reinterpret_cast<const int64_t*>(device_list_ + items_bytes()); }
  uint32_t ids_stride() const { return blocks_; }
  /// Behind it.
  uint8_t* device_end() const { return device_list_ + items_bytes() + ids_bytes_; }
  absl::Status Send(const Device& device, CUstream_st* stream) const {
    std::memcpy(list_ + items_bytes(), ids_, ids_bytes_);
    return device.EnqueueCopy(stream, device_list_, list_, items_bytes() + ids_bytes_);
  }

 private:
  size_t items_bytes() const { return count_ * sizeof(Item); }

  uint8_t *const list_, *const device_list_;
  const int64_t* const ids_;
  const size_t ids_bytes_;
  const uint32_t blocks_;
  uint32_t count_ = 0;
};

// Copies on the GPU, of which those that lie side by side on both sides are one: a launch takes as long as a small
// copy.
class JoinedCopies {
 public:
  JoinedCopies(const Device& device, CUstream_st* stream) : device_(device), stream_(stream) {}

  absl::Status Add(uint8_t* to, const uint8_t* from, size_t bytes) {
    if (to != to_ + bytes_ || from != from_ + bytes_) {
      KV_RETURN_IF_ERROR(Enqueue());
      to_ = to;
      from_ = from;
    }
    bytes_ += bytes;
    return absl::OkStatus();
  }
  /// What was added.
  absl::Status Enqueue() {
    const size_t bytes = std::exchange(bytes_, 0);
    return bytes == 0 ? absl::OkStatus() : device_.EnqueueCopy(stream_, to_, from_, bytes);
  }

 private:
  const Device& device_;
  CUstream_st* const stream_;
  uint8_t* to_ = nullptr;
  const uint8_t* from_ = nullptr;
  size_t bytes_ = 0;
};

// Some blocks of a load, in one of its stagings.
class ExtentLoad {
 public:
  ExtentLoad(const PageCodecObject& object, const MappedBlocks& mapped, const PagedLoad& load, uint32_t count,
             uint32_t at, uint32_t staging, ItemList<DeviceDecodeItem>& list)
      : object_(object), mapped_(mapped), load_(load), list_(list), at_(at), count_(count) {
    const uint32_t layers = object.paged.layers;
    first_item_ = list.count();
    begin_ = size_t{at} * layers;
    pages_ = size_t{count} * layers;
    raw_ = static_cast<uint8_t*>(load.raw[staging]);
    stored_ = static_cast<uint8_t*>(load.stored[staging]);
    sizes_.reserve(pages_);
    stored_pages_.reserve(pages_);
    for (size_t i = 0; i < pages_; ++i) {
      const uint32_t layer = static_cast<uint32_t>(i % layers);
      sizes_.push_back(StoredBytes(object, raw(i), layer));
      uint8_t* const page = stored_ + bytes_;
      stored_pages_.push_back({page, static_cast<uint32_t>(sizes_.back())});
      bytes_ += AlignedPage(sizes_.back());
      if (!raw(i) && !object.codec->info().identity) list.Add({page, raw_page(i), layer});
    }
    last_item_ = list.count();
  }

  uint64_t bytes() const { return bytes_; }
  absl::Status Fetch() const {
    return CopyPages(object_, mapped_.pages.data() + begin_, sizes_.data(), static_cast<uint32_t>(pages_), stored_,
                     load_.fetch)
        .status();
  }
  absl::Status Unpack() const {
    CUstream_st* const stream = load_.load;
    KV_RETURN_IF_ERROR(EnqueuePageHashes(stored_pages_, load_.sums + size_t{at_} * object_.paged.layers, stream));
    if (!object_.codec->info().identity) KV_RETURN_IF_ERROR(Decode(stream));
    const PagedBlocks blocks{raw_, list_.device_ids() + at_, list_.ids_stride(), count_};
    return EnqueuePagedCopy(object_.paged, object_.paged_layers, blocks, /*into_cache=*/true, stream);
  }

 private:
  bool raw(size_t page) const { return mapped_.raw[begin_ + page] != 0; }
  uint8_t* raw_page(size_t page) const { return raw_ + page * object_.codec->layout().raw_bytes(); }

  absl::Status Decode(CUstream_st* stream) const {
    JoinedCopies copies(*object_.device, stream);
    for (size_t i = 0; i < pages_; ++i) {
      if (raw(i)) KV_RETURN_IF_ERROR(copies.Add(raw_page(i), stored_pages_[i].data, stored_pages_[i].bytes));
    }
    KV_RETURN_IF_ERROR(copies.Enqueue());
    const DeviceDecodeItem* const to_device = list_.device_items() + first_item_;
    return ForEachRun(*object_.device_codec, list_.items() + first_item_, last_item_ - first_item_,
                      [&](const DeviceCodec& of, uint32_t begin, uint32_t pages) {
                        return of.Decode(to_device + begin, pages, stream);
                      });
  }

  const PageCodecObject& object_;
  const MappedBlocks& mapped_;
  const PagedLoad& load_;
  const ItemList<DeviceDecodeItem>& list_;
  const uint32_t at_, count_;
  size_t begin_, pages_;
  uint8_t *raw_, *stored_;
  uint64_t bytes_ = 0;
  std::vector<uint64_t> sizes_;
  std::vector<PageBytes> stored_pages_;
  uint32_t first_item_, last_item_;  // of the list
};

// Some blocks of the engine's that are copied, encoded and brought to host memory.
class Saving {
 public:
  static constexpr uint32_t kWordsAlign = 16;  // of what the kernel copies that brings words to host memory

  Saving(const PageCodecObject& object, const kvm_save& save)
      : object_(object), save_(save), list_(save.list, save.list_device, save.ids, save.groups, save.count) {
    const uint32_t pages = save.count * object.paged.layers;
    offsets_.reserve(pages + 1);
    for (uint32_t i = 0; i < pages; ++i) {
      offsets_.push_back(bytes_);
      bytes_ += AlignedPage(StoredBytes(object, keeps_raw(i), layer(i)));
      if (encodes(i)) list_.Add({raw_page(i), stored_page(i), token(i), layer(i)});
    }
    offsets_.push_back(bytes_);
    declined_ = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(list_.device_end()) + kWordsAlign - 1) /
                                            kWordsAlign * kWordsAlign);
  }

  uint64_t bytes() const { return bytes_; }
  absl::Status Begin() {
    const Device& device = *object_.device;
    CUstream_st *const save = StreamOf(save_.save), *const send = StreamOf(save_.send);
    auto* const host = static_cast<uint8_t*>(save_.host);
    KV_RETURN_IF_ERROR(list_.Send(device, save));
    for (uint32_t at = 0; at < save_.count; at += save_.part) {
      const uint32_t count = std::min(save_.part, save_.count - at);
      KV_RETURN_IF_ERROR(Make(at, count, save));
      KV_RETURN_IF_ERROR(device.Follow(send, save));
      if (host == nullptr) continue;
      const uint64_t begin = offsets_[at * layers()], end = offsets_[(at + count) * layers()];
      KV_RETURN_IF_ERROR(device.EnqueueCopy(send, host + begin, stored_page(at * layers()), end - begin));
    }
    const uint32_t declined_bytes = encoded_ * sizeof(uint32_t);
    if (encoded_ == 0) return absl::OkStatus();
    if (host != nullptr) return device.EnqueueCopy(send, save_.declined, declined_, declined_bytes);
    // By a kernel: the copy engine is the daemon's, which copies what was saved before.
    const PageCopy copy{reinterpret_cast<uint8_t*>(declined_), reinterpret_cast<uint8_t*>(save_.declined),
                        (declined_bytes + kWordsAlign - 1) / kWordsAlign * kWordsAlign};
    return EnqueuePageCopies(PageDirection::kDemote, {&copy, 1}, send, PageCopyMethod::kKernel);
  }

 private:
  uint32_t layers() const { return object_.paged.layers; }
  uint32_t layer(uint32_t page) const { return page % layers(); }
  uint64_t token(uint32_t page) const { return (uint64_t{save_.first_block} + page / layers()) * object_.paged.tokens; }
  bool identity() const { return object_.codec->info().identity; }
  bool keeps_raw(uint32_t page) const { return KeepsRaw(object_, save_.first_block + page / layers(), layer(page)); }
  bool encodes(uint32_t page) const { return !identity() && !keeps_raw(page); }
  uint8_t* raw_page(uint32_t page) const {
    return static_cast<uint8_t*>(save_.raw) + page * object_.codec->layout().raw_bytes();
  }
  uint8_t* stored_page(uint32_t page) const { return static_cast<uint8_t*>(save_.stored) + offsets_[page]; }

  // Makes what is stored of `count` blocks, from block `at` on.
  absl::Status Make(uint32_t at, uint32_t count, CUstream_st* stream) {
    const PagedBlocks blocks{raw_page(at * layers()), list_.device_ids() + at, list_.ids_stride(), count};
    KV_RETURN_IF_ERROR(EnqueuePagedCopy(object_.paged, object_.paged_layers, blocks, /*into_cache=*/false, stream));
    const uint32_t first = encoded_;
    JoinedCopies copies(*object_.device, stream);
    for (uint32_t i = at * layers(); i < (at + count) * layers(); ++i) {
      if (encodes(i)) {
        ++encoded_;
      } else if (!identity()) {
        KV_RETURN_IF_ERROR(copies.Add(stored_page(i), raw_page(i), object_.codec->layout().raw_bytes()));
      }
    }
    KV_RETURN_IF_ERROR(copies.Enqueue());
    if (encoded_ > first) {
      const DeviceEncodeItem* const to_device = list_.device_items() + first;
      KV_RETURN_IF_ERROR(ForEachRun(*object_.device_codec, list_.items() + first, encoded_ - first,
                                    [&](const DeviceCodec& of, uint32_t begin, uint32_t pages) {
                                      return of.Encode(to_device + begin, pages, declined_ + first + begin, stream);
                                    }));
    }
    if (save_.sums == nullptr) return absl::OkStatus();
    std::vector<PageBytes> made;
    made.reserve(size_t{count} * layers());
    for (uint32_t i = at * layers(); i < (at + count) * layers(); ++i) {
      made.push_back({stored_page(i), static_cast<uint32_t>(StoredBytes(object_, keeps_raw(i), layer(i)))});
    }
    return EnqueuePageHashes(made, save_.sums + size_t{at} * layers(), stream);
  }

  const PageCodecObject& object_;
  const kvm_save& save_;
  ItemList<DeviceEncodeItem> list_;
  std::vector<uint64_t> offsets_;  // [pages + 1], of stored pages
  uint64_t bytes_ = 0;
  uint32_t* declined_;    // on the GPU, [pages that are encoded]
  uint32_t encoded_ = 0;  // of them, begun
};

}  // namespace

absl::Status CheckPaged(const PageCodecObject& object) {
  if (object.paged.layers == 0) return absl::FailedPreconditionError("kvm_set_paged was not called");
  return UseDevice(object);
}

absl::StatusOr<uint64_t> EnqueueLoad(const PageCodecObject& object, const MappedBlocks& mapped, const PagedLoad& load) {
  const Device& device = *object.device;
  const uint32_t count = mapped.blocks;
  ItemList<DeviceDecodeItem> list(load.list, load.list_device, load.ids, load.groups, count);
  std::vector<ExtentLoad> extents;
  extents.reserve((count + load.blocks - 1) / load.blocks);
  for (uint32_t at = 0, staging = load.extents % 2; at < count; at += load.blocks, staging ^= 1) {
    extents.emplace_back(object, mapped, load, std::min(load.blocks, count - at), at, staging, list);
  }
  uint64_t bytes = 0;
  // What was loaded before may still be read from the stagings.
  if (load.extents == 0) KV_RETURN_IF_ERROR(device.Follow(load.fetch, load.load));
  for (size_t i = 0; i < extents.size(); ++i) {
    KV_RETURN_IF_ERROR(extents[i].Fetch());
    if (i == 0) KV_RETURN_IF_ERROR(list.Send(device, load.fetch));
    // The next but one is fetched into this staging, behind what now follows of the one before.
    if (load.extents + i > 0) KV_RETURN_IF_ERROR(device.Follow(load.fetch, load.load));
    KV_RETURN_IF_ERROR(device.Follow(load.load, load.fetch));
    KV_RETURN_IF_ERROR(extents[i].Unpack());
    bytes += extents[i].bytes();
  }
  return bytes;
}

absl::StatusOr<bool> StreamCount::Pass(const Device& device, CUstream_st* stream) {
  if (Read() > passed_) {
    ++passed_;
    return true;
  }
  if (++asked_ % kAskEvery == 0) KV_RETURN_IF_ERROR(device.IsIdle(stream).status());
  return false;
}

void RestOnStream() {
  // Timers of a thread are up to 50 us late by default.
  thread_local const int precise = prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  static_cast<void>(precise);
  std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void DrainStreams(const Device& device, std::initializer_list<CUstream_st*> streams) {
  for (CUstream_st* const stream : streams) {
    for (auto idle = device.IsIdle(stream); idle.ok() && !*idle; idle = device.IsIdle(stream)) RestOnStream();
  }
}

absl::StatusOr<uint64_t> EnqueueSave(const PageCodecObject& object, const kvm_save& save) {
  Saving saving(object, save);
  KV_RETURN_IF_ERROR(saving.Begin());
  return saving.bytes();
}

}  // namespace kvmanager::client::c

using namespace kvmanager;             // NOLINT: the interface's functions are in no namespace
using namespace kvmanager::client;     // NOLINT
using namespace kvmanager::client::c;  // NOLINT

extern "C" {

int kvm_set_paged(kvm_object* codec, const kvm_paged* paged) {
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    if (!object.on_device) return absl::FailedPreconditionError("paged caches of a GPU alone are copied so");
    KV_RETURN_IF_ERROR(object.device_error);
    if (paged->layers != static_cast<uint32_t>(object.layers)) {
      return InvalidField("paged.layers", paged->layers, absl::StrCat(object.layers, ", the cache's"));
    }
    const PageLayout& layout = object.codec->layout();
    if (paged->heads != layout.kv_heads || paged->tokens != layout.page_tokens ||
        uint64_t{2} * paged->heads * paged->tokens * paged->row_bytes != layout.raw_bytes()) {
      return InvalidField("paged (heads, tokens, row_bytes)",
                          absl::StrCat(paged->heads, ", ", paged->tokens, ", ", paged->row_bytes), "the cache's pages");
    }
    object.paged = {.layers = paged->layers,
                    .heads = paged->heads,
                    .tokens = paged->tokens,
                    .piece_tokens = paged->piece_tokens,
                    .row_bytes = paged->row_bytes,
                    .block_stride = paged->block_stride,
                    .piece_stride = paged->piece_stride,
                    .token_stride = paged->token_stride,
                    .head_stride = paged->head_stride};
    object.paged_layers = static_cast<const PagedLayer*>(paged->layer_table);
    return absl::OkStatus();
  });
}

int kvm_save_blocks(kvm_object* codec, const kvm_save* save, uint64_t* stored_bytes) {
  *stored_bytes = 0;
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckPaged(object));
    if (save->part == 0) return InvalidField("save.part", 0, "at least 1");
    KV_ASSIGN_OR_RETURN(*stored_bytes, EnqueueSave(object, *save));
    return absl::OkStatus();
  });
}

}  // extern "C"
