// Whole blocks between the daemon's memory and an engine's paged caches, by the engine's GPU: all that is enqueued for
// many blocks, in one call.
#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/object.h"
#include "client/c/page_codec.h"
#include "kvmanager/memory/page_hash.h"

namespace kvmanager::client::c {
namespace {

absl::Status CheckPaged(const PageCodecObject& object) {
  if (object.paged.layers == 0) return absl::FailedPreconditionError("kvm_set_paged was not called");
  return UseDevice(object);
}

absl::Status CheckMapped(const MappedBlocks& mapped, uint32_t first, uint32_t count) {
  if (count <= mapped.blocks && first <= mapped.blocks - count) return absl::OkStatus();
  return InvalidField("blocks", absl::StrCat(count, " from ", first),
                      absl::StrCat("of the ", mapped.blocks, " mapped"));
}

uint64_t StoredBytes(const PageCodecObject& object, bool raw, uint32_t layer) {
  return raw ? object.codec->layout().raw_bytes() : object.codec->info().page_bytes(static_cast<int>(layer));
}

// What kernels read of a load: block ids, and items to decode. Written to host memory and copied to the GPU at once,
// since small reads of host memory by kernels hold up the copies of pages.
class LoadList {
 public:
  LoadList(const kvm_load& load, uint32_t blocks) : load_(load), blocks_(blocks) {
    const size_t ids = size_t{load.groups} * blocks;
    std::memcpy(load.list, load.ids, ids * sizeof(int64_t));
    items_ = reinterpret_cast<DeviceDecodeItem*>(static_cast<int64_t*>(load.list) + ids);
    device_items_ = reinterpret_cast<DeviceDecodeItem*>(static_cast<int64_t*>(load.list_device) + ids);
  }

  void Add(const DeviceDecodeItem& item) { items_[count_++] = item; }
  uint32_t count() const { return count_; }
  const DeviceDecodeItem* items() const { return items_; }
  /// The same on the GPU, once Send() was called.
  const DeviceDecodeItem* device_items() const { return device_items_; }
  const int64_t* device_ids() const { return static_cast<const int64_t*>(load_.list_device); }
  uint32_t ids_stride() const { return blocks_; }
  absl::Status Send(const Device& device) const {
    const auto* const end = reinterpret_cast<const uint8_t*>(items_ + count_);
    return device.EnqueueCopy(StreamOf(load_.fetch), load_.list_device, load_.list,
                              static_cast<size_t>(end - static_cast<const uint8_t*>(load_.list)));
  }

 private:
  const kvm_load& load_;
  const uint32_t blocks_;
  DeviceDecodeItem *items_, *device_items_;
  uint32_t count_ = 0;
};

// Some blocks of a load, in one of its stagings.
class ExtentLoad {
 public:
  ExtentLoad(const PageCodecObject& object, const MappedBlocks& mapped, const kvm_load& load, uint32_t first,
             uint32_t count, uint32_t at, uint32_t staging, LoadList& list)
      : object_(object), mapped_(mapped), load_(load), list_(list), at_(at), count_(count) {
    const uint32_t layers = object.paged.layers;
    first_item_ = list.count();
    begin_ = size_t{first + at} * layers;
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
                     StreamOf(load_.fetch))
        .status();
  }
  absl::Status Unpack() const {
    CUstream_st* const stream = StreamOf(load_.load);
    KV_RETURN_IF_ERROR(EnqueuePageHashes(stored_pages_, load_.sums + size_t{at_} * object_.paged.layers, stream));
    if (!object_.codec->info().identity) KV_RETURN_IF_ERROR(Decode(stream));
    const PagedBlocks blocks{raw_, list_.device_ids() + at_, list_.ids_stride(), count_};
    return EnqueuePagedCopy(object_.paged, object_.paged_layers, blocks, /*into_cache=*/true, stream);
  }

 private:
  bool raw(size_t page) const { return mapped_.raw[begin_ + page] != 0; }
  uint8_t* raw_page(size_t page) const { return raw_ + page * object_.codec->layout().raw_bytes(); }

  absl::Status Decode(CUstream_st* stream) const {
    const size_t raw_bytes = object_.codec->layout().raw_bytes();
    for (size_t i = 0; i < pages_; ++i) {
      if (!raw(i)) continue;
      KV_RETURN_IF_ERROR(object_.device->EnqueueCopy(stream, raw_page(i), stored_pages_[i].data, raw_bytes));
    }
    const DeviceDecodeItem* const to_device = list_.device_items() + first_item_;
    return ForEachRun(*object_.device_codec, list_.items() + first_item_, last_item_ - first_item_,
                      [&](const DeviceCodec& of, uint32_t begin, uint32_t pages) {
                        return of.Decode(to_device + begin, pages, stream);
                      });
  }

  const PageCodecObject& object_;
  const MappedBlocks& mapped_;
  const kvm_load& load_;
  const LoadList& list_;
  const uint32_t at_, count_;
  size_t begin_, pages_;
  uint8_t *raw_, *stored_;
  uint64_t bytes_ = 0;
  std::vector<uint64_t> sizes_;
  std::vector<PageBytes> stored_pages_;
  uint32_t first_item_, last_item_;  // of the list
};

}  // namespace
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

int kvm_load_blocks(kvm_object* codec, kvm_object* mapped, uint32_t first, uint32_t count, const kvm_load* load,
                    uint64_t* stored_bytes) {
  *stored_bytes = 0;
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const MappedBlocksObject* blocks, Use<MappedBlocksObject>(mapped));
    KV_RETURN_IF_ERROR(CheckPaged(object));
    KV_RETURN_IF_ERROR(CheckMapped(blocks->blocks, first, count));
    if (load->blocks == 0) return InvalidField("load.blocks", 0, "at least 1");
    const Device& device = *object.device;
    LoadList list(*load, count);
    std::vector<ExtentLoad> extents;
    extents.reserve((count + load->blocks - 1) / load->blocks);
    for (uint32_t at = 0, staging = load->extents % 2; at < count; at += load->blocks, staging ^= 1) {
      extents.emplace_back(object, blocks->blocks, *load, first, std::min(load->blocks, count - at), at, staging, list);
    }
    // What was loaded before may still be read from the stagings.
    if (load->extents == 0) KV_RETURN_IF_ERROR(device.Follow(StreamOf(load->fetch), StreamOf(load->load)));
    for (size_t i = 0; i < extents.size(); ++i) {
      KV_RETURN_IF_ERROR(extents[i].Fetch());
      if (i == 0) KV_RETURN_IF_ERROR(list.Send(device));
      // The next but one is fetched into this staging, behind what now follows of the one before.
      if (load->extents + i > 0) KV_RETURN_IF_ERROR(device.Follow(StreamOf(load->fetch), StreamOf(load->load)));
      KV_RETURN_IF_ERROR(device.Follow(StreamOf(load->load), StreamOf(load->fetch)));
      KV_RETURN_IF_ERROR(extents[i].Unpack());
      *stored_bytes += extents[i].bytes();
    }
    return absl::OkStatus();
  });
}

int kvm_compare_blocks(kvm_object* mapped, uint32_t first, uint32_t count, const uint64_t* sums, uint32_t* corrupt) {
  *corrupt = UINT32_MAX;
  return Guard([&]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(const MappedBlocksObject* object, Use<MappedBlocksObject>(mapped));
    const MappedBlocks& blocks = object->blocks;
    KV_RETURN_IF_ERROR(CheckMapped(blocks, first, count));
    const size_t layers = blocks.blocks == 0 ? 1 : blocks.pages.size() / blocks.blocks;
    for (size_t i = 0; i < count * layers; ++i) {
      if (sums[i] == blocks.checksums[first * layers + i]) continue;
      *corrupt = first + static_cast<uint32_t>(i / layers);
      break;
    }
    return absl::OkStatus();
  });
}

int kvm_save_blocks(kvm_object* codec, const kvm_save* save, uint64_t* stored_bytes) {
  *stored_bytes = 0;
  return AskCodec(codec, [&](PageCodecObject& object) -> absl::Status {
    KV_RETURN_IF_ERROR(CheckPaged(object));
    CUstream_st* const stream = StreamOf(save->stream);
    auto *const raw = static_cast<uint8_t*>(save->raw), *const stored = static_cast<uint8_t*>(save->stored);
    const PagedBlocks blocks{raw, save->ids, save->ids_stride, save->count};
    KV_RETURN_IF_ERROR(EnqueuePagedCopy(object.paged, object.paged_layers, blocks, /*into_cache=*/false, stream));
    const CodecInfo& info = object.codec->info();
    const uint64_t raw_bytes = object.codec->layout().raw_bytes();
    auto* const items = reinterpret_cast<DeviceEncodeItem*>(save->items);
    const uint32_t layers = object.paged.layers;
    uint64_t bytes = 0;
    uint32_t encoded = 0;
    for (uint32_t i = 0; i < save->count * layers; ++i) {
      const uint32_t layer = i % layers;
      const uint64_t token = (uint64_t{save->first_block} + i / layers) * object.paged.tokens;
      const bool keeps_raw = !info.identity && info.keeps_raw(static_cast<int>(layer), token);
      if (keeps_raw) {
        KV_RETURN_IF_ERROR(object.device->EnqueueCopy(stream, stored + bytes, raw + i * raw_bytes, raw_bytes));
      } else if (!info.identity) {
        items[encoded++] = {raw + i * raw_bytes, stored + bytes, token, layer};
      }
      bytes += AlignedPage(StoredBytes(object, keeps_raw, layer));
    }
    if (encoded > 0) {
      KV_RETURN_IF_ERROR(
          ForEachRun(*object.device_codec, items, encoded, [&](const DeviceCodec& of, uint32_t begin, uint32_t pages) {
            return of.Encode(items + begin, pages, save->declined + begin, stream);
          }));
    }
    KV_RETURN_IF_ERROR(object.device->EnqueueCopy(stream, save->host, stored, bytes));
    *stored_bytes = bytes;
    return absl::OkStatus();
  });
}

}  // extern "C"
