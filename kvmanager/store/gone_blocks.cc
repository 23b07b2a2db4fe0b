#include "kvmanager/store/gone_blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/hash/hash.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

}  // namespace

GoneBlocks::GoneBlocks(const Clock* clock, size_t blocks_max)
    : clock_(clock), made_ns_(clock->NowNs()), ring_(blocks_max), heads_(blocks_max, kNone), next_(blocks_max, kNone) {
  KV_CHECK(std::has_single_bit(blocks_max) && blocks_max < kNone);
}

std::array<uint8_t, 16> GoneBlocks::KeyOf(const BlockKey& key) {
  std::array<uint8_t, 16> half;
  std::memcpy(half.data(), key.bytes.data(), half.size());
  return half;
}

// Whose values clients cannot foresee.
size_t GoneBlocks::BucketOf(const std::array<uint8_t, 16>& key) const {
  return absl::HashOf(key) & (heads_.size() - 1);
}

const uint32_t* GoneBlocks::LinkOf(const std::array<uint8_t, 16>& key) const {
  const uint32_t* link = &heads_[BucketOf(key)];
  while (*link != kNone && ring_[*link].key != key) link = &next_[*link];
  return link;
}

void GoneBlocks::Unlink(uint32_t* link) {
  const uint32_t at = *link;
  *link = next_[at];
  ring_[at].linked = false;
  --linked_;
}

void GoneBlocks::Add(const BlockKey& key, const Note& note) {
  const uint32_t at = static_cast<uint32_t>(added_++ & (ring_.size() - 1));
  Entry& entry = ring_[at];
  if (entry.linked) Unlink(const_cast<uint32_t*>(LinkOf(entry.key)));
  const auto half = KeyOf(key);
  // Of one key that goes again and again one entry counts, so that no chain grows long.
  if (auto* const link = const_cast<uint32_t*>(LinkOf(half)); *link != kNone) Unlink(link);
  const auto label = [](absl::string_view text) {
    Label out{};
    text.copy(out.data(), out.size());
    return out;
  };
  entry = {.key = half,
           .gone_ns = clock_->NowNs(),
           .owner = label(note.owner),
           .taker = label(note.taker),
           .cache = note.cache,
           .tier = static_cast<int16_t>(note.tier),
           .reason = note.reason,
           .linked = true};
  uint32_t& head = heads_[BucketOf(half)];
  next_[at] = head;
  head = at;
  ++linked_;
}

std::optional<GoneBlock> GoneBlocks::Find(const BlockKey& key) const {
  const uint32_t at = *LinkOf(KeyOf(key));
  if (at == kNone) return std::nullopt;
  const Entry& entry = ring_[at];
  const auto text = [](const Label& label) { return std::string(label.data(), strnlen(label.data(), label.size())); };
  return GoneBlock{.reason = entry.reason,
                   .tier = entry.tier,
                   .cache = entry.cache,
                   .owner = text(entry.owner),
                   .taker = text(entry.taker),
                   .seconds_ago = Seconds(clock_->NowNs() - entry.gone_ns)};
}

double GoneBlocks::seconds() const {
  const bool overwritten = added_ > ring_.size();
  return Seconds(clock_->NowNs() - (overwritten ? ring_[added_ & (ring_.size() - 1)].gone_ns : made_ns_));
}

void GoneBlocks::CheckInvariants() const {
  size_t chained = 0;
  for (size_t bucket = 0; bucket < heads_.size(); ++bucket) {
    for (uint32_t at = heads_[bucket]; at != kNone; at = next_[at]) {
      KV_CHECK(++chained <= linked_ && ring_[at].linked && BucketOf(ring_[at].key) == bucket);
      KV_CHECK(*LinkOf(ring_[at].key) == at);
    }
  }
  KV_CHECK(chained == linked_);
  KV_CHECK(linked_ == static_cast<size_t>(
                          std::count_if(ring_.begin(), ring_.end(), [](const Entry& entry) { return entry.linked; })));
}

}  // namespace kvmanager
