#include "kvmanager/store/block_pages.h"

#include <new>
#include <type_traits>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

void BlockPages::Delete::operator()(Memory* memory) const { ::operator delete(memory); }

// What lies behind the header is made by the caller, and is never destroyed.
BlockPages::Owned BlockPages::Allocate(const Memory& header, size_t bytes) {
  static_assert(std::is_trivially_destructible_v<Memory> && std::is_trivially_destructible_v<Page> &&
                std::is_trivially_destructible_v<Resting>);
  static_assert(sizeof(Memory) == 8 && sizeof(Resting) == 16);
  static_assert(alignof(Page) <= alignof(Memory) && alignof(Resting) <= alignof(Memory));
  return Owned(new (::operator new(sizeof(Memory) + bytes)) Memory(header));
}

BlockPages::BlockPages(uint32_t layers, bool activations) {
  KV_CHECK(layers <= UINT16_MAX / 2);
  Memory header;
  header.layers = static_cast<uint16_t>(layers);
  header.activations = activations;
  header.awake = true;
  memory_ = Allocate(header, sizeof(Page) * layers * (activations ? 2 : 1));
  for (uint32_t at = 0; at < count(); ++at) new (awake_pages() + at) Page;
}

bool BlockPages::MayRest(const Page& page, bool activations) {
  if (page.pins > 0 || page.raw_holds > 0 || page.busy) return false;
  if (activations && page.state == PageState::kFree) return true;
  return page.state == PageState::kResident && page.raw.valid() != page.encoded.valid() &&
         page.raw.valid() == page.declined;
}

Page BlockPages::At(uint32_t at) const {
  KV_CHECK(at < count());
  if (memory_->awake) return awake_pages()[at];
  const Resting& resting = resting_pages()[at];
  Page page;
  if (!resting.slot.valid()) return page;
  page.state = PageState::kResident;
  page.checksum = resting.checksum;
  if ((raw_bits()[at / 8] >> at % 8 & 1) != 0) {
    page.declined = true;
    page.raw = resting.slot;
  } else {
    page.encoded = resting.slot;
    if (at < layers()) page.rung = memory_->rung;
  }
  return page;
}

Page& BlockPages::Wake(uint32_t at) {
  KV_CHECK(at < count());
  if (!memory_->awake) {
    Memory header = *memory_;
    header.awake = true;
    BlockPages awake;
    awake.memory_ = Allocate(header, sizeof(Page) * count());
    for (uint32_t i = 0; i < count(); ++i) new (awake.awake_pages() + i) Page(At(i));
    *this = std::move(awake);
  }
  return awake_pages()[at];
}

void BlockPages::Rest() {
  if (memory_ == nullptr || !memory_->awake) return;
  Memory header = *memory_;
  header.awake = false;
  for (uint32_t i = 0; i < count(); ++i) {
    const Page& page = awake_pages()[i];
    if (!MayRest(page, i >= layers())) return;
    if (i < layers() && page.encoded.valid()) header.rung = page.rung;
  }
  const size_t bits = (count() + 7) / 8;
  BlockPages resting;
  resting.memory_ = Allocate(header, sizeof(Resting) * count() + bits);
  for (size_t i = 0; i < bits; ++i) resting.raw_bits()[i] = 0;
  for (uint32_t i = 0; i < count(); ++i) {
    const Page& page = awake_pages()[i];
    new (resting.resting_pages() + i) Resting{page.declined ? page.raw : page.encoded, page.checksum};
    if (page.declined) resting.raw_bits()[i / 8] = static_cast<uint8_t>(resting.raw_bits()[i / 8] | 1 << i % 8);
  }
  *this = std::move(resting);
}

}  // namespace kvmanager
