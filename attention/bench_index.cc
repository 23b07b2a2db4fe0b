#include "attention/bench_index.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {

std::unique_ptr<BenchIndex> BenchIndex::Make(const Codec& codec, int layers, absl::Span<const uint8_t* const> pages,
                                             uint64_t tokens) {
  constexpr uint32_t kIterations = 3;
  constexpr uint64_t kPromptTokens = 2048;
  std::unique_ptr<SequenceIndex> index = codec.NewIndex({std::min(tokens / 2, kPromptTokens), kIterations});
  if (index == nullptr) return nullptr;
  index->OnTokens(tokens);
  for (int layer = 0; layer < layers; ++layer) {
    IndexJobs jobs;
    index->Need(layer, tokens - 1, tokens - 1, &jobs, nullptr);
    for (const auto& job : jobs) {
      for (int task = 0; task < job->tasks(); ++task) job->RunTask(task, pages);
      job->Finish();
    }
    const std::unique_ptr<TokenSelector> selector = index->Select(layer, tokens - 1, tokens - 1);
    KV_CHECK(selector != nullptr);
    for (int i = 0; i < selector->preparations(); ++i) selector->Prepare(i, pages);
    index->TakeBack(*selector);
  }
  return std::unique_ptr<BenchIndex>(new BenchIndex(std::move(index), layers, tokens));
}

std::unique_ptr<TokenSelector> BenchIndex::Select() {
  std::unique_ptr<TokenSelector> selector = index_->Select(next_, tokens_ - 1, tokens_ - 1);
  next_ = (next_ + 1) % layers_;
  return selector;
}

}  // namespace kvmanager
