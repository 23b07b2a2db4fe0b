#include "kvmanager/eviction/eviction_policy.h"

#include "kvmanager/base/status.h"
#include "kvmanager/eviction/cost_eviction.h"
#include "kvmanager/eviction/lru_eviction.h"
#include "kvmanager/eviction/s3_fifo_eviction.h"

namespace kvmanager {
namespace {

constexpr EvictionKind kKinds[] = {EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost};

}  // namespace

const char* EvictionKindName(EvictionKind kind) {
  switch (kind) {
    case EvictionKind::kLru:
      return "lru";
    case EvictionKind::kS3Fifo:
      return "s3fifo";
    case EvictionKind::kCost:
      return "cost";
  }
  return "";
}

absl::StatusOr<EvictionKind> ParseEvictionKind(absl::string_view field, absl::string_view text) {
  for (const EvictionKind kind : kKinds) {
    if (text == EvictionKindName(kind)) return kind;
  }
  return InvalidField(field, text, "lru, s3fifo or cost");
}

std::unique_ptr<EvictionPolicy> MakeEviction(EvictionKind kind) {
  switch (kind) {
    case EvictionKind::kLru:
      return MakeLruEviction();
    case EvictionKind::kS3Fifo:
      return MakeS3FifoEviction();
    case EvictionKind::kCost:
      return MakeCostEviction();
  }
  return nullptr;
}

}  // namespace kvmanager
