#include "kvmanager/server/recomputer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/link.h"
#include "transport/recompute/plan.h"
#include "transport/recompute/runtime.h"
#include "xxhash.h"

namespace kvmanager {

using recompute::LayerWeights;
using recompute::ProjectionModel;
using recompute::ProjectionShape;
using recompute::ReloadRequest;
using recompute::ReloadSequence;

namespace {

constexpr size_t kBuffers = 2;

// As CpuExecutor takes them: fp32 weights, and rows of activations and of K and V.
uint64_t LayerBytes(const ProjectionModel& model) {
  return uint64_t{8} * model.width() * model.hidden + uint64_t{8} * model.width();
}
uint64_t BufferBytes(const ProjectionModel& model) {
  return uint64_t{Recomputer::kChunkRows} *
         (uint64_t(model.hidden) * (sizeof(float) + kBuffers * DTypeBytes(model.layout.dtype)) + 8 * model.width());
}

bool SameFacts(const ProjectionModel& a, const ProjectionModel& b) {
  return a.hidden == b.hidden && a.rope.rotary_dims == b.rope.rotary_dims && a.rope.theta == b.rope.theta &&
         a.rope.pairs == b.rope.pairs && a.rope.angles == b.rope.angles;
}

XXH128_hash_t HashOf(const LayerWeights& weights) {
  XXH3_state_t* const state = XXH3_createState();
  KV_CHECK(state != nullptr);
  XXH3_128bits_reset(state);
  const auto dtype = static_cast<uint8_t>(weights.dtype);
  XXH3_128bits_update(state, &dtype, 1);
  for (const absl::Span<const uint8_t> part : {weights.k, weights.v, weights.k_bias, weights.v_bias}) {
    const uint64_t bytes = part.size();
    XXH3_128bits_update(state, &bytes, sizeof bytes);
    XXH3_128bits_update(state, part.data(), part.size());
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  return hash;
}

double ValueAt(const uint8_t* data, size_t index, DType dtype) {
  uint16_t bits;
  std::memcpy(&bits, data + 2 * index, 2);
  return dtype == DType::kFloat16 ? HalfToFloat(bits) : BFloat16ToFloat(bits);
}

}  // namespace

class ProjectionSet {
 public:
  ProjectionSet(const CacheDigest& digest, const ProjectionModel& model, const Clock* clock, Recomputer::Charge buffers)
      : digest(digest),
        model(model),
        profile(clock),
        hashes(model.layers),
        ready(model.layers, false),
        charge(std::move(buffers)),
        layer_charges(model.layers) {}

  ProjectionShape shape() const { return {model.hidden, model.width()}; }

  const CacheDigest digest;
  const ProjectionModel model;
  recompute::MemoryLink link;
  recompute::Profile profile;  // of projections; what it knows of copies is this memory's
  std::unique_ptr<recompute::ReloadExecutor> executor;

  // The recomputer's thread.
  std::vector<absl::optional<XXH128_hash_t>> hashes;  // of the layers that are registered

  // The loop's.
  std::vector<bool> ready;
  std::string failed;  // why nothing more is recomputed

  Recomputer::Charge charge;
  std::vector<Recomputer::Charge> layer_charges;  // the recomputer's thread

  /// The recomputer's thread, all of these. Registers, and projects the proof.
  absl::Status Register(const LayerRegistration& registration, const Clock* clock, Recomputer::Charge charge);
  absl::StatusOr<std::vector<ArrivedPage>> Run(int layer, absl::Span<const RecomputePage> pages,
                                               const std::atomic<bool>* cancelled, const Clock* clock);

 private:
  absl::Status CheckProof(const LayerRegistration& registration, const Clock* clock);
  /// Fills a chunk, so that there is a rate to plan with. x: rows of activations.
  absl::Status Measure(int layer, absl::Span<const uint8_t> x, const Clock* clock);
};

absl::Status ProjectionSet::Register(const LayerRegistration& registration, const Clock* clock,
                                     Recomputer::Charge charge) {
  const int layer = registration.layer;
  const XXH128_hash_t hash = HashOf(registration.weights);
  absl::optional<XXH128_hash_t>& known = hashes[layer];
  if (known.has_value() && !XXH128_isEqual(*known, hash)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("weights of layer ", layer),
                      "different from those that are registered", "equal to them, or those dropped first");
  }
  if (!known.has_value()) {
    KV_RETURN_IF_ERROR(executor->RegisterWeights(layer, registration.weights));
    layer_charges[layer] = std::move(charge);
  }
  KV_RETURN_IF_ERROR(CheckProof(registration, clock));
  if (!profile.FlopsPerSecond(shape()).has_value()) KV_RETURN_IF_ERROR(Measure(layer, registration.x, clock));
  known = hash;
  return absl::OkStatus();
}

absl::Status ProjectionSet::CheckProof(const LayerRegistration& r, const Clock* clock) {
  const PageLayout& layout = model.layout;
  std::vector<uint8_t> page(layout.raw_bytes());
  const uint8_t* const x = r.x.data();
  uint8_t* const to = page.data();
  ReloadSequence sequence;
  sequence.tokens = sequence.split_tokens = r.tokens;
  sequence.first_position = r.position;
  sequence.activations = absl::MakeConstSpan(&x, 1);
  sequence.pages = absl::MakeConstSpan(&to, 1);
  ReloadRequest request;
  request.layer = r.layer;
  request.kv_page_bytes = page.size();
  request.sequences = absl::MakeConstSpan(&sequence, 1);
  recompute::ReloadRuntime runtime(executor.get(), clock, nullptr);
  KV_RETURN_IF_ERROR(runtime.Run(request).status());
  for (int side = 0; side < 2; ++side) {
    const uint8_t* const theirs = (side == 0 ? r.k : r.v).data();
    double error = 0, norm = 0;
    for (int t = 0; t < r.tokens; ++t) {
      for (int head = 0; head < layout.kv_heads; ++head) {
        const uint8_t* const mine = page.data() + layout.raw_offset(side, head, t);
        for (int c = 0; c < layout.head_dim; ++c) {
          const size_t at = (size_t(t) * layout.kv_heads + head) * layout.head_dim + c;
          const double want = ValueAt(theirs, at, layout.dtype), got = ValueAt(mine, c, layout.dtype);
          error += (want - got) * (want - got);
          norm += want * want;
        }
      }
    }
    const char* const field = side == 0 ? "proof.k" : "proof.v";
    if (norm == 0) return InvalidField(field, "all zeros", "what the engine makes of proof.x");
    const double off = std::sqrt(error / norm);
    if (!(off <= Recomputer::kProofErrorMax)) {
      return InvalidField(field,
                          absl::StrCat("off by ", off, " of its norm from what these weights",
                                       side == 0 ? " and RoPE facts" : "", " make of proof.x"),
                          absl::StrCat("at most ", Recomputer::kProofErrorMax));
    }
  }
  return absl::OkStatus();
}

absl::Status ProjectionSet::Measure(int layer, absl::Span<const uint8_t> x, const Clock* clock) {
  const int page_tokens = model.layout.page_tokens;
  const size_t row_bytes = size_t(model.hidden) * DTypeBytes(model.layout.dtype),
               pages = Recomputer::kChunkRows / page_tokens;
  std::vector<uint8_t> rows(page_tokens * row_bytes);
  for (size_t at = 0; at < rows.size(); at += x.size()) {
    std::memcpy(rows.data() + at, x.data(), std::min(x.size(), rows.size() - at));
  }
  std::vector<std::vector<uint8_t>> scratch(pages, std::vector<uint8_t>(model.layout.raw_bytes()));
  std::vector<const uint8_t*> from(pages, rows.data());
  std::vector<uint8_t*> to;
  for (auto& page : scratch) to.push_back(page.data());
  ReloadSequence sequence;
  sequence.tokens = sequence.split_tokens = int64_t(pages) * page_tokens;
  sequence.activations = from;
  sequence.pages = to;
  ReloadRequest request;
  request.layer = layer;
  request.kv_page_bytes = model.layout.raw_bytes();
  request.sequences = absl::MakeConstSpan(&sequence, 1);
  recompute::ReloadRuntime runtime(executor.get(), clock, &profile);
  // The first one finds cold caches.
  KV_RETURN_IF_ERROR(runtime.Run(request).status());
  return runtime.Run(request).status();
}

absl::StatusOr<std::vector<ArrivedPage>> ProjectionSet::Run(int layer, absl::Span<const RecomputePage> pages,
                                                            const std::atomic<bool>* cancelled, const Clock* clock) {
  std::vector<ReloadSequence> sequences(pages.size());
  std::vector<const uint8_t*> from;
  std::vector<uint8_t*> to;
  for (const RecomputePage& page : pages) {
    from.push_back(page.activations);
    to.push_back(page.raw);
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    sequences[i].tokens = sequences[i].split_tokens = model.layout.page_tokens;
    sequences[i].first_position = static_cast<int64_t>(pages[i].first_token);
    sequences[i].activations = absl::MakeConstSpan(&from[i], 1);
    sequences[i].pages = absl::MakeConstSpan(&to[i], 1);
  }
  ReloadRequest request;
  request.layer = layer;
  request.kv_page_bytes = model.layout.raw_bytes();
  request.sequences = sequences;
  request.cancelled = cancelled;
  recompute::ReloadRuntime runtime(executor.get(), clock, &profile);
  KV_RETURN_IF_ERROR(runtime.Run(request).status());
  std::vector<ArrivedPage> done;
  for (const RecomputePage& page : pages) {
    done.push_back({page.page, XXH3_64bits(page.raw, model.layout.raw_bytes())});
  }
  return done;
}

// ---- memory ----

void Recomputer::Charge::Release() {
  if (of_ == nullptr || bytes_ == 0) return;
  of_->metrics_->weight_bytes.Decrement(double(bytes_));
  of_->bytes_.fetch_sub(std::exchange(bytes_, 0));
}

absl::StatusOr<Recomputer::Charge> Recomputer::Take(absl::string_view what, uint64_t bytes) {
  // The loop's thread alone adds.
  const uint64_t used = bytes_.load();
  if (bytes > bytes_max_ || used > bytes_max_ - bytes) {
    return FieldError(absl::StatusCode::kResourceExhausted, "--recompute-bytes",
                      absl::StrCat(used, " used, and ", bytes, " wanted for ", what),
                      absl::StrCat("at most ", bytes_max_));
  }
  bytes_.fetch_add(bytes);
  metrics_->weight_bytes.Increment(double(bytes));
  return Charge(this, bytes);
}

// ---- sets ----

Recomputer::Recomputer(WorkerPool* workers, MessageQueue* queue, const Clock* clock, RecomputeMetrics* metrics,
                       uint64_t bytes_max)
    : workers_(workers), queue_(queue), clock_(clock), metrics_(metrics), bytes_max_(bytes_max), thread_([this] {
        Work();
      }) {}

absl::StatusOr<std::shared_ptr<ProjectionSet>> Recomputer::Open(const CacheDigest& digest,
                                                                const ProjectionModel& model) {
  KV_RETURN_IF_ERROR(CheckModel(model));
  if (std::shared_ptr<ProjectionSet> known = Find(digest)) {
    if (SameFacts(known->model, model)) return known;
    return FieldError(absl::StatusCode::kFailedPrecondition, "facts", "different from those of the projections open",
                      "equal to them");
  }
  for (auto set = sets_.begin(); set != sets_.end();) {
    const auto next = std::next(set);
    if (set->second.expired()) sets_.erase(set);
    set = next;
  }
  KV_ASSIGN_OR_RETURN(Charge charge, Take("buffers", BufferBytes(model)));
  auto set = std::make_shared<ProjectionSet>(digest, model, clock_, std::move(charge));
  recompute::CpuExecutorOptions options;
  options.chunk_rows = kChunkRows;
  options.buffers = kBuffers;
  KV_ASSIGN_OR_RETURN(set->executor, MakeCpuExecutor(model, options, &set->link, workers_, clock_));
  sets_[digest] = set;
  return set;
}

std::shared_ptr<ProjectionSet> Recomputer::Find(const CacheDigest& digest) const {
  const auto found = sets_.find(digest);
  return found == sets_.end() ? nullptr : found->second.lock();
}

void Recomputer::Register(std::shared_ptr<ProjectionSet> set, LayerRegistration r,
                          absl::AnyInvocable<void(absl::Status)> done) {
  const ProjectionModel& model = set->model;
  if (r.layer < 0 || r.layer >= model.layers) {
    return done(InvalidField("layer", r.layer, absl::StrCat("0..", model.layers - 1)));
  }
  const int64_t position_min = model.rope.rotary_dims > 0 ? kProofPositionMin : 0;
  if (r.tokens < 1 || r.tokens > model.layout.page_tokens) {
    return done(InvalidField("proof.tokens", r.tokens, absl::StrCat("1..", model.layout.page_tokens)));
  }
  if (r.position < position_min || r.position > recompute::RopeFacts::kPositionMax - r.tokens) {
    return done(InvalidField("proof.position", r.position,
                             absl::StrCat(position_min, "..", recompute::RopeFacts::kPositionMax - r.tokens)));
  }
  absl::StatusOr<Charge> charge = Take(absl::StrCat("layer ", r.layer), LayerBytes(model));
  if (!charge.ok()) return done(charge.status());
  MutexLock lock(mutex_);
  registrations_.push_back(
      [this, set = std::move(set), r = std::move(r), charge = *std::move(charge), done = std::move(done)]() mutable {
        absl::Status status = set->Register(r, clock_, std::move(charge));
        queue_->Post([set = std::move(set), layer = r.layer, keep = std::move(r.keep), status = std::move(status),
                      done = std::move(done)]() mutable {
          if (status.ok()) {
            set->ready[layer] = true;
            set->failed.clear();
          }
          done(std::move(status));
        });
      });
  wake_.notify_one();
}

void Recomputer::NoteFailure(ProjectionSet& set, const absl::Status& why) {
  set.failed = std::string(why.message());
  spdlog::error("nothing more is recomputed of cache {}: {}", set.digest.ToHex(6), set.failed);
}

// ---- plans ----

std::shared_ptr<Recomputer::Link> Recomputer::LinkOf(const std::string& host, bool make) {
  MutexLock lock(mutex_);
  const auto found = links_.find(host);
  if (found != links_.end() || !make) return found == links_.end() ? nullptr : found->second;
  if (links_.size() >= kLinksMax) {
    links_.erase(std::min_element(links_.begin(), links_.end(),
                                  [](const auto& a, const auto& b) { return a.second->used_ns < b.second->used_ns; }));
  }
  auto link = std::make_shared<Link>(clock_);
  link->used_ns = clock_->NowNs();
  links_[host] = link;
  return link;
}

void Recomputer::RecordLink(const std::string& host, int64_t bytes, int64_t elapsed_ns) {
  LinkOf(host, /*make=*/true)->profile.RecordCopy(bytes, elapsed_ns);
}

uint32_t Recomputer::Choose(const ProjectionSet* set, const std::string& host, int layer, uint64_t kv_page_bytes,
                            int query_heads, uint32_t pages, uint32_t with_activations) {
  const auto answer = [&](prometheus::Counter& counter, uint32_t chosen) {
    counter.Increment();
    if (set == nullptr) return 0u;
    const double tokens = set->model.layout.page_tokens;
    metrics_->copied_tokens.Increment(tokens * (with_activations - chosen));
    return chosen;
  };
  if (set == nullptr || !set->ready[layer] || !set->failed.empty()) return answer(metrics_->no_weights, 0);
  const ProjectionModel& model = set->model;
  const std::shared_ptr<Link> link = LinkOf(host, /*make=*/false);
  const auto bytes_per_s = link == nullptr ? std::nullopt : link->profile.LinkBytesPerSecond();
  const auto flops = set->profile.FlopsPerSecond(set->shape());
  if (!bytes_per_s.has_value() || !flops.has_value()) return answer(metrics_->not_measured, 0);
  const int64_t page_tokens = model.layout.page_tokens;
  recompute::MachineRates rates;
  using recompute::MachineRates;
  rates.link_bytes_per_second =
      int64_t(std::clamp(bytes_per_s->value, 1.0, double(MachineRates::kLinkBytesPerSecondMax)));
  rates.compute_flops_per_second = int64_t(std::clamp(flops->value, 1.0, double(MachineRates::kFlopsPerSecondMax)));
  recompute::ReloadShape shape;
  shape.tokens = pages * page_tokens;
  shape.hidden = model.hidden;
  shape.kv_heads = model.layout.kv_heads;
  shape.query_heads = query_heads;
  shape.head_dim = model.layout.head_dim;
  shape.kv_token_bytes = int64_t(kv_page_bytes + page_tokens - 1) / page_tokens;
  shape.x_tokens = with_activations * page_tokens;
  shape.chunk_tokens = kChunkRows;
  shape.split_multiple = page_tokens;
  const auto costs = MakeCosts(rates, shape);
  // A cache within its bounds is within the planner's.
  if (!costs.ok()) return answer(metrics_->not_measured, 0);
  const auto split = static_cast<uint32_t>(PlanSplit(*costs).split_tokens / page_tokens);
  return answer(split == 0 ? metrics_->all_copy : split == pages ? metrics_->all_recompute : metrics_->split, split);
}

std::vector<Recomputer::SetInfo> Recomputer::Sets() const {
  std::vector<SetInfo> all;
  for (const auto& [digest, weak] : sets_) {
    const std::shared_ptr<ProjectionSet> set = weak.lock();
    if (set == nullptr) continue;
    SetInfo info;
    info.digest = digest;
    info.hidden = set->model.hidden;
    info.width = set->model.width();
    info.layers = set->model.layers;
    info.layers_ready = static_cast<int>(std::count(set->ready.begin(), set->ready.end(), true));
    info.chunk_tokens = kChunkRows;
    if (const auto flops = set->profile.FlopsPerSecond(set->shape())) {
      info.flops = {flops->value, flops->samples, flops->stale};
    }
    info.failed = set->failed;
    all.push_back(std::move(info));
  }
  std::sort(all.begin(), all.end(), [](const SetInfo& a, const SetInfo& b) { return a.digest < b.digest; });
  return all;
}

std::vector<std::pair<std::string, Recomputer::Rate>> Recomputer::Links() const {
  std::vector<std::pair<std::string, std::shared_ptr<Link>>> links;
  {
    MutexLock lock(mutex_);
    links.assign(links_.begin(), links_.end());
  }
  std::vector<std::pair<std::string, Rate>> all;
  for (const auto& [host, link] : links) {
    const auto rate = link->profile.LinkBytesPerSecond();
    all.emplace_back(host, rate.has_value() ? Rate{rate->value, rate->samples, rate->stale} : Rate{});
  }
  return all;
}

// ---- the thread ----

void Recomputer::Recompute(std::shared_ptr<ProjectionSet> set, std::shared_ptr<RecomputeOwner> owner,
                           std::vector<RecomputePage> pages) {
  MutexLock lock(mutex_);
  for (const RecomputePage& page : pages) pages_.push_back({set, owner, page});
  wake_.notify_one();
}

void Recomputer::Work() {
  while (true) {
    absl::AnyInvocable<void()> registration;
    std::vector<PageJob> jobs;
    {
      MutexLock lock(mutex_);
      while (registrations_.empty() && pages_.empty() && !stopping_) lock.Wait(wake_);
      if (stopping_) return;
      if (!pages_.empty()) {
        // Pages first: a client waits for those.
        jobs.push_back(std::move(pages_.front()));
        pages_.pop_front();
        const PageJob first = jobs.front();
        std::erase_if(pages_, [&](PageJob& job) {
          if (jobs.size() >= kPagesAtOnce || job.owner != first.owner || job.page.layer != first.page.layer)
            return false;
          jobs.push_back(std::move(job));
          return true;
        });
      } else {
        registration = std::move(registrations_.front());
        registrations_.pop_front();
      }
    }
    if (jobs.empty()) {
      registration();
    } else {
      RunPages(std::move(jobs));
    }
  }
}

void Recomputer::RunPages(std::vector<PageJob> jobs) {
  const std::shared_ptr<ProjectionSet> set = jobs[0].set;
  std::shared_ptr<RecomputeOwner> owner = jobs[0].owner;
  std::vector<RecomputePage> pages;
  for (const PageJob& job : jobs) pages.push_back(job.page);
  jobs.clear();
  const int64_t begin_ns = clock_->NowNs();
  absl::StatusOr<std::vector<ArrivedPage>> done =
      set->Run(static_cast<int>(pages[0].layer), pages, &owner->cancelled, clock_);
  if (done.ok()) {
    metrics_->seconds.Observe(double(clock_->NowNs() - begin_ns) * 1e-9);
    metrics_->recomputed_tokens.Increment(double(pages.size()) * set->model.layout.page_tokens);
  } else if (!absl::IsCancelled(done.status())) {
    metrics_->failed.Increment(double(pages.size()));
  }
  queue_->Post([owner = std::move(owner), done = std::move(done)]() mutable { owner->OnRecomputed(std::move(done)); });
}

void Recomputer::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (PageJob& job : pages_) job.owner->cancelled = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  std::deque<PageJob> pages;
  std::deque<absl::AnyInvocable<void()>> registrations;
  MutexLock lock(mutex_);
  pages.swap(pages_);
  registrations.swap(registrations_);
}

}  // namespace kvmanager
