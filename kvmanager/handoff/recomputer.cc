#include "kvmanager/handoff/recomputer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/plan.h"

namespace kvmanager {

using recompute::ProjectionModel;

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

}  // namespace

// ---- sets ----

Recomputer::Recomputer(WorkerPool* workers, MessageQueue* queue, const Clock* clock, RecomputeMetrics* metrics,
                       uint64_t bytes_max, const Gpus& gpus)
    : workers_(workers),
      queue_(queue),
      clock_(clock),
      metrics_(metrics),
      host_("--recompute-bytes", bytes_max, ShowIn(&metrics->weight_bytes)) {
  for (RecomputeDevice* device : gpus.devices) {
    gpus_.push_back(
        std::make_unique<RecomputeGpu>(device, gpus.bytes_max_each, &metrics->DeviceBytes(device->ordinal())));
  }
  if (gpus_.empty()) metrics->DeviceBytes(0);  // a series that is there, at zero, where no GPU is used
  thread_ = std::thread([this] { Work(); });
}

RecomputeGpu* Recomputer::GpuFor(int device) const {
  RecomputeGpu* chosen = nullptr;
  for (const auto& gpu : gpus_) {
    if (gpu->device->ordinal() == device) return gpu.get();
    if (chosen == nullptr || gpu->budget.used() < chosen->budget.used()) chosen = gpu.get();
  }
  return chosen;
}

absl::Status Recomputer::PlaceOnCpu(ProjectionSet& set) {
  ProjectionSet::Place place;
  KV_ASSIGN_OR_RETURN(place.buffers, host_.Take(set.payer, "buffers", BufferBytes(set.model)));
  place.chunk_rows = kChunkRows;
  recompute::CpuExecutorOptions options;
  options.chunk_rows = kChunkRows;
  options.buffers = kBuffers;
  KV_ASSIGN_OR_RETURN(place.executor, MakeCpuExecutor(set.model, options, &set.link, workers_, clock_));
  set.place = std::move(place);
  return absl::OkStatus();
}

absl::Status Recomputer::PlaceOnGpu(ProjectionSet& set, RecomputeGpu* gpu) {
  ProjectionSet::Place place;
  place.gpu = gpu;
  place.chunk_rows = gpu->device->chunk_rows();
  KV_ASSIGN_OR_RETURN(place.buffers,
                      gpu->budget.Take(set.payer, absl::StrCat("buffers on GPU ", gpu->device->ordinal()),
                                       gpu->device->ExecutorBytes(set.model)));
  if (!gpu->device->CanMake(set.model)) {
    return FieldError(absl::StatusCode::kUnavailable, absl::StrCat("GPU ", gpu->device->ordinal()),
                      "at work for clients, which loading cuBLAS's kernels for this shape would wait for",
                      "idle for a moment: try again, or register before engines serve");
  }
  KV_ASSIGN_OR_RETURN(place.executor, gpu->device->MakeExecutor(set.model));
  set.place = std::move(place);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ProjectionSet>> Recomputer::Open(const CacheDigest& digest, absl::string_view payer,
                                                                const ProjectionModel& model, int device) {
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
  auto set = std::make_shared<ProjectionSet>(digest, std::string(payer), model, clock_, &host_);
  RecomputeGpu* const gpu = GpuFor(device);
  KV_RETURN_IF_ERROR(gpu == nullptr ? PlaceOnCpu(*set) : PlaceOnGpu(*set, gpu));
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
  const int64_t position_min = model.rope.rotary_dims > 0 ? ProjectionSet::kProofPositionMin : 0;
  if (r.tokens < 1 || r.tokens > model.layout.page_tokens) {
    return done(InvalidField("proof.tokens", r.tokens, absl::StrCat("1..", model.layout.page_tokens)));
  }
  if (r.position < position_min || r.position > recompute::RopeFacts::kPositionMax - r.tokens) {
    return done(InvalidField("proof.position", r.position,
                             absl::StrCat(position_min, "..", recompute::RopeFacts::kPositionMax - r.tokens)));
  }
  // A GPU multiplies what has the type of X; and where a set is, it stays.
  if (set->place.gpu != nullptr && !set->begun && r.weights.dtype != model.layout.dtype) {
    if (absl::Status status = PlaceOnCpu(*set); !status.ok()) return done(std::move(status));
  }
  set->begun = true;
  RecomputeGpu* const gpu = set->place.gpu;
  const std::string what = absl::StrCat("layer ", r.layer);
  absl::StatusOr<ByteBudget::Charge> weights = ByteBudget::Charge(), copies = ByteBudget::Charge();
  const bool known = set->ready[r.layer];
  if (!known && gpu != nullptr) {
    weights = gpu->budget.Take(set->payer, absl::StrCat(what, " on GPU ", gpu->device->ordinal()),
                               gpu->device->LayerBytes(model));
  } else if (!known) {
    weights = host_.Take(set->payer, what, LayerBytes(model));
  }
  if (!weights.ok()) return done(weights.status());
  // What waits here until it is copied. On a CPU it is no more than the weights.
  if (known || gpu != nullptr) copies = host_.Take(set->payer, absl::StrCat("a copy of ", what), r.copied_bytes);
  if (!copies.ok()) return done(copies.status());
  const std::string payer = set->payer;
  absl::AnyInvocable<void()> registration = [this, set = std::move(set), r = std::move(r),
                                             weights = *std::move(weights), copies = *std::move(copies),
                                             done = std::move(done)]() mutable {
    absl::Status status = set->Register(r, std::move(weights));
    queue_->Post([set = std::move(set), layer = r.layer, keep = std::move(r.keep), copies = std::move(copies),
                  status = std::move(status), done = std::move(done)]() mutable {
      if (status.ok()) {
        set->ready[layer] = true;
        set->failed.clear();
      }
      done(std::move(status));
    });
  };
  MutexLock lock(mutex_);
  registrations_.Push(payer, std::move(registration));
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
  const RecomputeGpu* const gpu = set->place.gpu;
  if (gpu != nullptr && !gpu->device->reaches_pool()) return answer(metrics_->not_pinned, 0);
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
  shape.chunk_tokens = set->place.chunk_rows;
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
    info.chunk_tokens = set->place.chunk_rows;
    if (set->place.gpu != nullptr) info.device = set->place.gpu->device->ordinal();
    if (const auto flops = set->profile.FlopsPerSecond(set->shape())) {
      info.flops = {flops->value, flops->samples, flops->stale};
    }
    info.failed = set->failed;
    all.push_back(std::move(info));
  }
  std::sort(all.begin(), all.end(), [](const SetInfo& a, const SetInfo& b) { return a.digest < b.digest; });
  return all;
}

std::vector<Recomputer::GpuInfo> Recomputer::GpuInfos() const {
  std::vector<GpuInfo> all;
  for (const auto& gpu : gpus_) {
    const ByteBudget& budget = gpu->budget;
    all.push_back({gpu->device->ordinal(), budget.used(), budget.max(), budget.most_of_payer()});
  }
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
  for (const RecomputePage& page : pages) pages_.Push(set->payer, {set, owner, page});
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
        jobs = pages_.TakeTogether(kPagesAtOnce, [](const PageJob& first, const PageJob& job) {
          return job.owner == first.owner && job.page.layer == first.page.layer;
        });
      } else {
        registration = registrations_.Take();
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
  pages.reserve(jobs.size());
  for (const PageJob& job : jobs) pages.push_back(job.page);
  jobs.clear();
  const int64_t begin_ns = clock_->NowNs();
  absl::StatusOr<std::vector<ArrivedPage>> done =
      set->Run(static_cast<int>(pages[0].layer), pages, &owner->cancelled, workers_);
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
    pages_.ForEach([](const PageJob& job) { job.owner->cancelled = true; });
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  // They end without the lock.
  Pages pages;
  Registrations registrations;
  MutexLock lock(mutex_);
  std::swap(pages, pages_);
  std::swap(registrations, registrations_);
}

}  // namespace kvmanager
