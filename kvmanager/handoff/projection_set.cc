#include "kvmanager/handoff/projection_set.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/runtime.h"

namespace kvmanager {

using recompute::LayerWeights;
using recompute::ReloadRequest;
using recompute::ReloadSequence;

namespace {

constexpr size_t kPagesOfHelper = 8;  // a worker is asked for so many

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

// Each page's, by this thread and by workers that are free: one alone would take as long as a GPU takes to make them.
std::vector<ArrivedPage> Checksums(absl::Span<const RecomputePage> pages, size_t page_bytes, WorkerPool* workers) {
  struct Work {
    std::vector<RecomputePage> pages;
    std::vector<ArrivedPage> done;
    std::atomic<size_t> next{0}, finished{0};
  };
  auto work = std::make_shared<Work>();
  work->pages.assign(pages.begin(), pages.end());
  work->done.resize(pages.size());
  // Who comes late finds nothing to do, and touches no page.
  const auto help = [work, page_bytes] {
    const size_t count = work->pages.size();
    for (size_t i; (i = work->next.fetch_add(1)) < count;) {
      work->done[i] = {work->pages[i].page, XXH3_64bits(work->pages[i].raw, page_bytes)};
      if (work->finished.fetch_add(1) + 1 == count) work->finished.notify_one();
    }
  };
  const size_t helpers = std::min<size_t>(workers->threads(), pages.size() / kPagesOfHelper);
  for (size_t i = 0; i < helpers; ++i) workers->Post(WorkerPool::Priority::kEncode, help);
  help();
  for (size_t finished; (finished = work->finished.load()) < pages.size();) work->finished.wait(finished);
  return std::move(work->done);
}

}  // namespace

absl::Status ProjectionSet::Register(const LayerRegistration& registration, ByteBudget::Charge charge) {
  const int layer = registration.layer;
  const XXH128_hash_t hash = HashOf(registration.weights);
  absl::optional<XXH128_hash_t>& known = hashes_[layer];
  if (known.has_value() && !XXH128_isEqual(*known, hash)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("weights of layer ", layer),
                      "different from those that are registered", "equal to them, or those dropped first");
  }
  KV_ASSIGN_OR_RETURN(const Scratch scratch, TakeScratch());
  if (!known.has_value()) {
    KV_RETURN_IF_ERROR(place.executor->RegisterWeights(layer, registration.weights));
    layer_charges_[layer] = std::move(charge);
  }
  KV_RETURN_IF_ERROR(CheckProof(registration, scratch));
  if (!profile.FlopsPerSecond(shape()).has_value()) KV_RETURN_IF_ERROR(Measure(layer, registration.x, scratch));
  known = hash;
  return absl::OkStatus();
}

absl::StatusOr<ProjectionSet::Scratch> ProjectionSet::TakeScratch() const {
  constexpr size_t kAlign = 256;
  const auto aligned = [](size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; };
  const size_t x_bytes = aligned(model.activation_page_bytes()), page_bytes = aligned(model.layout.raw_bytes()),
               pages = place.chunk_rows / model.layout.page_tokens, bytes = x_bytes + pages * page_bytes;
  Scratch scratch;
  if (place.gpu == nullptr) {
    scratch.own.resize(bytes);
    scratch.x = scratch.own.data();
  } else {
    RecomputeDevice& device = *place.gpu->device;
    if (device.scratch_bytes() < bytes) {
      // Twice as much as before, which stays: so all of it is at most twice what is needed.
      const size_t wanted = std::max(bytes, 2 * device.scratch_bytes());
      KV_ASSIGN_OR_RETURN(ByteBudget::Charge charge, host_->Take(payer, "pinned memory for proofs on a GPU", wanted));
      KV_RETURN_IF_ERROR(device.Scratch(wanted).status());
      place.gpu->scratch.push_back(std::move(charge));
    }
    KV_ASSIGN_OR_RETURN(const absl::Span<uint8_t> memory, device.Scratch(bytes));
    scratch.x = memory.data();
  }
  for (size_t i = 0; i < pages; ++i) scratch.pages.push_back(scratch.x + x_bytes + i * page_bytes);
  return scratch;
}

absl::Status ProjectionSet::CheckProof(const LayerRegistration& r, const Scratch& scratch) {
  const PageLayout& layout = model.layout;
  std::memcpy(scratch.x, r.x.data(), r.x.size());
  const uint8_t* const x = scratch.x;
  uint8_t* const to = scratch.pages[0];
  ReloadSequence sequence;
  sequence.tokens = sequence.split_tokens = r.tokens;
  sequence.first_position = r.position;
  sequence.activations = absl::MakeConstSpan(&x, 1);
  sequence.pages = absl::MakeConstSpan(&to, 1);
  ReloadRequest request;
  request.layer = r.layer;
  request.kv_page_bytes = layout.raw_bytes();
  request.sequences = absl::MakeConstSpan(&sequence, 1);
  recompute::ReloadRuntime runtime(place.executor.get(), clock_, nullptr);
  KV_RETURN_IF_ERROR(runtime.Run(request).status());
  for (int side = 0; side < 2; ++side) {
    const uint8_t* const theirs = (side == 0 ? r.k : r.v).data();
    double error = 0, norm = 0;
    for (int t = 0; t < r.tokens; ++t) {
      for (int head = 0; head < layout.kv_heads; ++head) {
        const uint8_t* const mine = to + layout.raw_offset(side, head, t);
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
    if (!(off <= kProofErrorMax)) {
      return InvalidField(field,
                          absl::StrCat("off by ", off, " of its norm from what these weights",
                                       side == 0 ? " and RoPE facts" : "", " make of proof.x"),
                          absl::StrCat("at most ", kProofErrorMax));
    }
  }
  return absl::OkStatus();
}

absl::Status ProjectionSet::Measure(int layer, absl::Span<const uint8_t> x, const Scratch& scratch) {
  const size_t pages = scratch.pages.size(), bytes = model.activation_page_bytes();
  for (size_t at = 0; at < bytes; at += x.size()) {
    std::memcpy(scratch.x + at, x.data(), std::min(x.size(), bytes - at));
  }
  const std::vector<const uint8_t*> from(pages, scratch.x);
  ReloadSequence sequence;
  sequence.tokens = sequence.split_tokens = int64_t(pages) * model.layout.page_tokens;
  sequence.activations = from;
  sequence.pages = scratch.pages;
  ReloadRequest request;
  request.layer = layer;
  request.kv_page_bytes = model.layout.raw_bytes();
  request.sequences = absl::MakeConstSpan(&sequence, 1);
  recompute::ReloadRuntime runtime(place.executor.get(), clock_, &profile);
  // The first one finds cold caches.
  KV_RETURN_IF_ERROR(runtime.Run(request).status());
  return runtime.Run(request).status();
}

absl::StatusOr<std::vector<ArrivedPage>> ProjectionSet::Run(int layer, absl::Span<const RecomputePage> pages,
                                                            const std::atomic<bool>* cancelled, WorkerPool* workers) {
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
  recompute::ReloadRuntime runtime(place.executor.get(), clock_, &profile);
  KV_RETURN_IF_ERROR(runtime.Run(request).status());
  return Checksums(pages, model.layout.raw_bytes(), workers);
}

}  // namespace kvmanager
