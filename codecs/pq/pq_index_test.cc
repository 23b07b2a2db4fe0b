// The index through random operations, against one made from scratch for every query; training; hand-offs.
#include "codecs/pq/pq_index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::pq {
namespace {

constexpr int kLayers = 2, kGroup = 3;
constexpr uint32_t kIterations = 3;

/// Raw pages of one layer, each shared with whatever reads it.
using Pages = std::vector<std::shared_ptr<std::vector<uint16_t>>>;

std::vector<const uint8_t*> Addresses(const Pages& pages) {
  std::vector<const uint8_t*> addresses;
  for (const auto& page : pages) addresses.push_back(reinterpret_cast<const uint8_t*>(page->data()));
  return addresses;
}

PageLayout SmallLayout() {
  PageLayout layout;
  layout.kv_heads = 2;
  layout.head_dim = 32;
  layout.page_tokens = 16;
  return layout;
}

std::shared_ptr<const Shape> MakeShape(const std::string& text) {
  const absl::StatusOr<CodecSpec> spec = ParseCodecSpec(text);
  KV_CHECK(spec.ok());
  auto shape = std::make_shared<Shape>();
  shape->layout = SmallLayout();
  shape->layers = kLayers;
  const absl::StatusOr<Parameters> parameters = ParseParameters(shape->layout, spec->parameters);
  KV_CHECK(parameters.ok());
  shape->parameters = *parameters;
  shape->kernels = &KernelsOf(BestIsa());
  shape->model = std::make_shared<CostModel>();
  return shape;
}

struct BegunJob {
  std::shared_ptr<IndexJob> job;
  Pages pages;
};

/// One sequence: its pages, its index, and the selectors of steps that have not ended.
struct Tracked {
  std::unique_ptr<SequenceIndex> index;
  Pages pages[kLayers];
  uint64_t tokens = 0;
  uint64_t prompt = 0;  // 0: not known yet
  struct Step {
    std::unique_ptr<TokenSelector> selector;
    int layer;
    uint64_t first, last;
    Pages pages;
    uint64_t prompt;
  };
  std::vector<Step> steps;
};

class World {
 public:
  World(const std::string& spec, uint32_t seed) : shape_(MakeShape(spec)), random_(seed) {}

  void Create() {
    Tracked s;
    s.prompt = random_() % 3 == 0 ? 0 : 1 + random_() % 120;
    s.index = MakeIndex(shape_, {s.prompt, 0});
    sequences_.push_back(std::move(s));
  }

  void Append(Tracked& s) {
    const int tokens = random_() % 3 == 0 ? 1 : 1 + int(random_() % 40);
    if (s.prompt == 0 && tokens == 1 && s.tokens > 0) s.prompt = s.tokens;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int i = 0; i < tokens; ++i) WriteToken(s.pages[layer], s.tokens + i);
      s.index->OnAppend(layer, s.tokens, tokens, 0);
      IndexJobs begin;
      s.index->NeedNext(layer, &begin);
      Keep(begin, s.pages[layer]);
    }
    s.tokens += tokens;
    EXPECT_EQ(s.index->facts().prompt_tokens, s.prompt);
  }

  void Crop(Tracked& s) {
    s.tokens = s.tokens == 0 ? 0 : random_() % (s.tokens + 1);
    s.index->Crop(s.tokens);
    for (Pages& pages : s.pages) {
      pages.resize((s.tokens + 15) / 16);
      // Readers under way see the old page.
      if (s.tokens % 16 != 0) pages.back() = std::make_shared<std::vector<uint16_t>>(*pages.back());
    }
  }

  void Fork(size_t from) {
    Tracked fork;
    const Tracked& s = sequences_[from];
    fork.index = s.index->Fork();
    CopyTo(s, fork);
    sequences_.push_back(std::move(fork));
  }

  void HandOff(size_t from) {
    Tracked received;
    const Tracked& s = sequences_[from];
    received.index = MakeIndex(shape_, s.index->facts());
    received.index->OnTokens(s.tokens);
    CopyTo(s, received);
    for (int layer = 0; layer < kLayers; ++layer) {
      IndexJobs begin;
      received.index->NeedNext(layer, &begin);
      Keep(begin, received.pages[layer]);
    }
    sequences_.push_back(std::move(received));
  }

  void BeginStep(Tracked& s) {
    if (s.tokens == 0) return;
    Tracked::Step step;
    step.layer = int(random_() % kLayers);
    step.last = random_() % 4 == 0 ? random_() % s.tokens : s.tokens - 1;
    step.first = step.last - std::min<uint64_t>(step.last, random_() % 30);
    step.prompt = s.prompt;
    IndexJobs begin, wait;
    s.index->Need(step.layer, step.first, step.last, &begin, &wait);
    Keep(begin, s.pages[step.layer]);
    step.selector = s.index->Select(step.layer, step.first, step.last);
    for (const auto& job : wait) Finish(job);
    const bool selects = s.prompt != 0 && step.last >= shape_->parameters.FirstPosition(s.prompt);
    ASSERT_EQ(step.selector != nullptr, selects);
    if (!selects) return;
    step.pages = s.pages[step.layer];
    s.steps.push_back(std::move(step));
  }

  void EndStep(Tracked& s) {
    if (s.steps.empty()) return;
    const size_t which = random_() % s.steps.size();
    Tracked::Step step = std::move(s.steps[which]);
    s.steps.erase(s.steps.begin() + which);
    if (random_() % 8 == 0) return s.index->TakeBack(*step.selector);  // it was never run
    const std::vector<const uint8_t*> pages = Addresses(step.pages);
    for (int i = 0; i < step.selector->preparations(); ++i) step.selector->Prepare(i, pages);
    for (uint64_t position = std::max(step.first, step.selector->first_position()); position <= step.last;
         position += 1 + random_() % 9) {
      Check(step, position, pages);
    }
    s.index->TakeBack(*step.selector);
  }

  void FinishOneJob() {
    if (!jobs_.empty()) Finish(jobs_[random_() % jobs_.size()].job);
  }

  std::vector<Tracked>& sequences() { return sequences_; }
  std::mt19937& random() { return random_; }
  uint64_t checked() const { return checked_; }
  uint64_t cache_hits() const { return cache_hits_; }

 private:
  void CopyTo(const Tracked& from, Tracked& to) {
    to.tokens = from.tokens;
    to.prompt = from.prompt;
    for (int layer = 0; layer < kLayers; ++layer) {
      to.pages[layer] = from.pages[layer];
      if (to.tokens % 16 != 0) {
        to.pages[layer].back() = std::make_shared<std::vector<uint16_t>>(*to.pages[layer].back());
      }
    }
  }

  void WriteToken(Pages& pages, uint64_t token) {
    const PageLayout& layout = shape_->layout;
    if (token % 16 == 0) pages.push_back(std::make_shared<std::vector<uint16_t>>(layout.raw_bytes() / 2));
    std::normal_distribution<float> normal(0, 1);
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < layout.kv_heads; ++head) {
        uint16_t* to = pages[token / 16]->data() + layout.raw_offset(side, head, int(token % 16)) / 2;
        for (int c = 0; c < layout.head_dim; ++c) to[c] = FloatToHalf(normal(random_));
      }
    }
  }

  void Keep(const IndexJobs& begin, const Pages& pages) {
    for (const auto& job : begin) jobs_.push_back({job, pages});
  }

  void Finish(const std::shared_ptr<IndexJob>& job) {
    const auto found =
        std::find_if(jobs_.begin(), jobs_.end(), [&](const BegunJob& begun) { return begun.job == job; });
    if (found == jobs_.end()) {
      EXPECT_TRUE(job->done());
      return;
    }
    const BegunJob begun = *found;
    jobs_.erase(found);
    const std::vector<const uint8_t*> pages = Addresses(begun.pages);
    for (int task = begun.job->tasks(); task-- > 0;) begun.job->RunTask(task, pages);
    begun.job->Finish();
  }

  std::vector<float> Attend(TokenSelector& selector, int head, uint64_t position, const std::vector<float>& q,
                            const std::vector<const uint8_t*>& pages) {
    const int d = shape_->layout.head_dim;
    std::vector<float> state(2 * kGroup + kGroup * d);
    std::fill_n(state.begin(), kGroup, -INFINITY);
    const size_t bytes = selector.workspace_bytes(position, kGroup);
    std::vector<uint8_t> workspace(bytes + 64);
    uint8_t* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    SelectiveTask task;
    task.q = q.data();
    task.rows = kGroup;
    task.scale = 0.5f;
    task.kv_head = head;
    task.position = position;
    task.pages = pages;
    selector.Attend(task, {state.data(), state.data() + kGroup, state.data() + 2 * kGroup}, {aligned, bytes});
    return state;
  }

  // Against an index made from scratch of the same tokens.
  void Check(Tracked::Step& step, uint64_t position, const std::vector<const uint8_t*>& pages) {
    std::vector<float> q(kGroup * shape_->layout.head_dim);
    std::normal_distribution<float> normal(0, 1);
    for (float& x : q) x = normal(random_);
    const auto fresh = MakeIndex(shape_, {step.prompt, 0});
    fresh->OnTokens(position + 1);
    IndexJobs begin;
    fresh->Need(step.layer, position, position, &begin, nullptr);
    for (const auto& job : begin) {
      for (int task = 0; task < job->tasks(); ++task) job->RunTask(task, pages);
      job->Finish();
    }
    const auto wanted = fresh->Select(step.layer, position, position);
    ASSERT_NE(wanted, nullptr);
    for (int i = 0; i < wanted->preparations(); ++i) wanted->Prepare(i, pages);
    for (int head = 0; head < shape_->layout.kv_heads; ++head) {
      ASSERT_EQ(Attend(*step.selector, head, position, q, pages), Attend(*wanted, head, position, q, pages))
          << "position " << position << " of a prompt of " << step.prompt;
    }
    cache_hits_ += step.selector->counts().cache_hits;
    ++checked_;
  }

  const std::shared_ptr<const Shape> shape_;
  std::mt19937 random_;
  std::vector<Tracked> sequences_;
  std::vector<BegunJob> jobs_;
  uint64_t checked_ = 0, cache_hits_ = 0;
};

class IndexTest : public ::testing::TestWithParam<const char*> {};

TEST_P(IndexTest, EveryQueryReadsAsIfItsIndexWereMadeFromScratch) {
  World world(GetParam(), 1);
  world.Create();
  for (int i = 0; i < 600; ++i) {
    if (world.sequences().empty()) world.Create();
    const size_t at = world.random()() % world.sequences().size();
    Tracked& s = world.sequences()[at];
    const uint32_t dice = world.random()() % 100;
    if (dice < 40) {
      world.Append(s);
    } else if (dice < 62) {
      world.BeginStep(s);
    } else if (dice < 84) {
      world.EndStep(s);
    } else if (dice < 88) {
      world.FinishOneJob();
    } else if (dice < 91) {
      world.Crop(s);
    } else if (world.sequences().size() < 5) {
      if (dice < 94) world.Fork(at);
      if (dice == 94 || dice == 95) world.HandOff(at);
      if (dice > 95) world.Create();
    } else if (dice > 96) {
      world.sequences().erase(world.sequences().begin() + at);
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(world.checked(), 60u);
  if (std::string(GetParam()).find("cache_blocks") != std::string::npos) {
    EXPECT_GT(world.cache_hits(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Specs, IndexTest,
    ::testing::Values("pq:m=2,bits=4,ratio=0.3,sinks=4,iterations=3",
                      "pq:m=4,bits=5,ratio=0.1,sinks=32,iterations=2,rebuild=64",
                      "pq:m=1,bits=4,ratio=0.5,sinks=0,iterations=1,cache_blocks=1",
                      "pq:m=2,bits=4,ratio=0.4,sinks=8,iterations=1,cache_blocks=2,cache_policy=lru",
                      "pq:m=2,bits=4,ratio=0.3,sinks=4,scores=exact"));

TEST(Index, IterationsAreChosenOnceAndTravel) {
  const auto shape = MakeShape("pq:m=2,bits=4");
  shape->model->AddClustering(1000, 10, 0.010);
  shape->model->AddPrefill(1000, 0.020);
  const auto index = MakeIndex(shape, {64, 0});
  index->OnTokens(64);
  IndexJobs begin;
  index->NeedNext(0, &begin);
  ASSERT_EQ(begin.size(), 1u);
  EXPECT_EQ(begin[0]->tokens(), 64u);
  const uint32_t chosen = index->facts().iterations;
  EXPECT_EQ(chosen, 20u);
  shape->model->AddPrefill(1000, 0.200);
  index->NeedNext(1, &begin);
  EXPECT_EQ(begin.size(), 2u);
  EXPECT_EQ(index->facts().iterations, chosen);
  EXPECT_EQ(index->Fork()->facts().iterations, chosen);
  EXPECT_EQ(MakeIndex(shape, index->facts())->facts().iterations, chosen);
}

TEST(Index, AShortPromptIsExactUntilThereAreAsManyTokensAsCentroids) {
  const auto shape = MakeShape("pq:m=2,bits=6,iterations=1");
  const auto index = MakeIndex(shape, {10, 0});
  index->OnTokens(63);
  IndexJobs begin;
  index->NeedNext(0, &begin);
  EXPECT_TRUE(begin.empty());
  EXPECT_EQ(index->Select(0, 0, 63), nullptr);
  index->OnTokens(64);
  index->NeedNext(0, &begin);
  EXPECT_EQ(begin.size(), 1u);
}

}  // namespace
}  // namespace kvmanager::pq
