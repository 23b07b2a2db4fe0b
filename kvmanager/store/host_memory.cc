// Host memory: the daemon's CPU copies what an append brings, looks at the copy, and trains indexes on workers.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/functional/function_ref.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/raw_page.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {
namespace {

// Tokens [first, first + count) of an entry into tokens [to_token, ...) of a raw page.
// k, v: [tokens][kv_heads][head_dim]; page: [side][kv_heads][page_tokens][head_dim].
void CopyTokens(const PageLayout& layout, const AppendEntry& entry, int first, int count, uint8_t* page, int to_token) {
  const size_t row_bytes = layout.head_dim * DTypeBytes(layout.dtype);
  const size_t token_bytes = layout.kv_heads * row_bytes;
  for (int side = 0; side < 2; ++side) {
    const uint8_t* from_side = (side == 0 ? entry.k : entry.v) + first * token_bytes;
    for (int head = 0; head < layout.kv_heads; ++head) {
      const uint8_t* from = from_side + head * row_bytes;
      uint8_t* to = page + layout.raw_offset(side, head, to_token);
      for (int t = 0; t < count; ++t) std::memcpy(to + t * row_bytes, from + t * token_bytes, row_bytes);
    }
  }
}

// Activations of the same tokens, into an activation page's tokens from `at` on.
absl::Status CopyActivations(const Cache& cache, const AppendEntry& entry, size_t i, int first, int count,
                             uint8_t* page, int at) {
  const size_t row_bytes = cache.activation_row_bytes(), hidden = cache.config.hidden;
  uint8_t* const to = page + at * row_bytes;
  std::memcpy(to, entry.x + first * row_bytes, count * row_bytes);
  const size_t wrong = FindNonFinite(cache.layout().dtype, to, count * hidden);
  if (wrong == count * hidden) return absl::OkStatus();
  return InvalidField(
      absl::StrCat("entries[", i, "].x[token ", first + wrong / hidden, "][value ", wrong % hidden, "]"), "NaN or Inf",
      "finite");
}

class HostMemory final : public MemoryBackend {
 public:
  explicit HostMemory(EncodeExecutor* executor) : executor_(executor) {}

  bool follows_tables() const override { return false; }
  bool writes_at_once() const override { return true; }
  bool keeps_activations() const override { return true; }
  absl::Status CheckTransfers(const Cache&) const override { return absl::OkStatus(); }
  DeviceIndexLayout index_layout(const Codec&) const override { return {}; }
  std::unique_ptr<SequenceIndex> NewIndex(const Codec& codec, const IndexFacts& facts) const override {
    return codec.NewIndex(facts);
  }

  absl::Status Write(const PendingAppend& append) const override {
    return ForEachPage(append, [&](const PageWrite& write) {
      return WritePage(append.cache, append.layers.first, append.entries[write.entry], write);
    });
  }
  absl::Status Plan(const PendingAppend& append, std::vector<PageWrite>* writes) const override {
    return ForEachPage(append, [writes](const PageWrite& write) {
      writes->push_back(write);
      return absl::OkStatus();
    });
  }
  // What an error leaves in an open page's unused tokens is overwritten by the next append.
  absl::Status WritePage(const Cache& cache, int layer, const AppendEntry& entry,
                         const PageWrite& write) const override {
    const PageLayout& layout = cache.layout(layer);
    CopyTokens(layout, entry, write.first, write.tokens, write.page, write.at);
    NonFinite where;
    if (FindNonFinite(layout, write.page, write.at, write.tokens, &where)) {
      return InvalidField(
          absl::StrCat("entries[", write.entry, "].", where.side == 0 ? "k" : "v", "[token ",
                       write.first + where.token - write.at, "][head ", where.head, "][channel ", where.channel, "]"),
          "NaN or Inf", "finite");
    }
    if (write.activations == nullptr) return absl::OkStatus();
    return CopyActivations(cache, entry, write.entry, write.first, write.tokens, write.activations, write.at);
  }
  void CopyOpen(const Cache& cache, uint32_t layer, const Page& from, PageId to, int tokens,
                std::vector<OpenCopy>*) const override {
    const SlotPool& pool = *cache.tier->pool();
    CopyRawPrefix(cache.layout(layer), pool.Data(from.raw.valid() ? from.raw : from.encoded), pool.Data(to), tokens);
  }
  uint64_t Checksum(const uint8_t* bytes, size_t size) const override { return kvmanager::Checksum(bytes, size); }
  absl::StatusOr<uint64_t> LookAtArrival(absl::FunctionRef<absl::StatusOr<uint64_t>()> look) const override {
    return look();
  }
  void Train(IndexTraining training) const override {
    // Shared by the job's tasks: the last of them ends it.
    auto keys = std::make_shared<const std::vector<const uint8_t*>>(std::move(training.pages));
    std::vector<absl::AnyInvocable<void()>> tasks;
    tasks.reserve(training.job->tasks());
    for (int task = 0; task < training.job->tasks(); ++task) {
      tasks.push_back([job = training.job, keys, task] { job->RunTask(task, *keys); });
    }
    executor_->Run(std::move(tasks), [done = std::move(training.done)]() mutable { done(absl::OkStatus()); });
  }

 private:
  // Calls `each` for the pages of each entry in turn, of which `append.slots` has the new ones, until it fails.
  static absl::Status ForEachPage(const PendingAppend& append,
                                  absl::FunctionRef<absl::Status(const PageWrite& write)> each) {
    if (append.layers.count != 1) {
      return InvalidField("layers", append.layers.count, "1: the K and V that are given are one layer's");
    }
    const Cache& cache = append.cache;
    const SlotPool& pool = *cache.tier->pool();
    const int page_tokens = cache.page_tokens(), layer = append.layers.first;
    size_t next_slot = 0, next_activation = 0, pages = 0;
    for (uint32_t i = append.from.entry; i < append.entries.size() && pages < append.pages; ++i) {
      const AppendEntry& entry = append.entries[i];
      if (entry.k == nullptr || entry.v == nullptr) {
        return InvalidField(absl::StrCat("entries[", i, "]"), "without K and V", "with both, in host memory");
      }
      PageWrite write{.entry = i, .first = i == append.from.entry ? append.from.first : 0};
      for (; write.first < entry.tokens && pages < append.pages; write.first += write.tokens, ++pages) {
        const uint64_t position = entry.position + write.first;
        write.at = static_cast<int>(position % page_tokens);
        write.tokens = std::min(entry.tokens - write.first, page_tokens - write.at);
        write.opens = write.at == 0;
        PageId activations;
        if (write.opens) {
          write.slot = next_slot++;
          write.page = pool.Data(append.slots.raw.ids[write.slot]);
          if (entry.x != nullptr) activations = append.slots.activations.ids[next_activation++];
        } else {
          const Block& block = *append.sequences[i]->blocks[position / page_tokens];
          write.page = pool.Data(block.pages()[layer].raw);
          if (entry.x != nullptr) activations = block.OpenActivations(layer);
        }
        write.activations = activations.valid() ? pool.Data(activations) : nullptr;
        KV_RETURN_IF_ERROR(each(write));
      }
    }
    return absl::OkStatus();
  }

  EncodeExecutor* const executor_;
};

}  // namespace

std::unique_ptr<MemoryBackend> MakeHostMemory(EncodeExecutor* executor) {
  return std::make_unique<HostMemory>(executor);
}

}  // namespace kvmanager
