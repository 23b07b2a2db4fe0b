#include "client/cli/measured_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

std::string Samples(const RecomputeDescription::Rate& rate) {
  return absl::StrCat("the median of ", rate.samples, rate.stale ? ", none of the last minute" : "");
}

template <typename T>
void Fill(T* value, T from) {
  if (*value == 0) *value = from;
}

}  // namespace

absl::StatusOr<std::string> FillFromDaemon(Client& client, uint32_t cache_id, const std::string& peer,
                                           recompute::PlanArguments* plan) {
  KV_ASSIGN_OR_RETURN(const std::vector<CacheDescription> caches, client.Caches());
  KV_ASSIGN_OR_RETURN(const RecomputeDescription measured, client.Recompute());
  const auto cache = std::find_if(caches.begin(), caches.end(), [&](const auto& each) { return each.id == cache_id; });
  if (cache == caches.end()) {
    return FieldError(absl::StatusCode::kNotFound, "--cache", absl::StrCat(cache_id),
                      "an id that `kvctl caches` shows");
  }
  const auto set = std::find_if(measured.sets.begin(), measured.sets.end(),
                                [&](const auto& each) { return each.digest == cache->digest; });
  if (set == measured.sets.end()) {
    return FieldError(absl::StatusCode::kNotFound, "--cache", absl::StrCat(cache_id),
                      "a cache whose projections some client has registered");
  }
  if (set->layers_ready == 0 || set->flops.samples == 0) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "layers registered", absl::StrCat(set->layers_ready),
                      absl::StrCat("1..", set->layers));
  }
  const CacheOptions& o = cache->options;
  Fill<int64_t>(&plan->shape.hidden, set->hidden_size);
  Fill<int64_t>(&plan->shape.kv_heads, o.kv_heads);
  Fill<int64_t>(&plan->shape.query_heads, o.query_heads);
  plan->shape.head_dim = o.head_dim;
  Fill<int64_t>(&plan->shape.kv_token_bytes, int64_t(cache->encoded_page_bytes + o.page_tokens - 1) / o.page_tokens);
  plan->shape.chunk_tokens = set->chunk_tokens;
  plan->shape.split_multiple = o.page_tokens;
  Fill(&plan->tflops, set->flops.per_second * 1e-12);
  std::string text = absl::StrFormat("projections: %.4g GFLOP/s%s, %s", set->flops.per_second * 1e-9,
                                     set->device < 0 ? "" : absl::StrCat(" on GPU ", set->device), Samples(set->flops));
  if (!set->failed.empty()) {
    absl::StrAppend(&text, "\nnothing is recomputed any more, until weights are registered anew: ", set->failed);
  }
  if (plan->link_gbps != 0) return text + "\n";
  std::string hosts;
  const RecomputeDescription::Link* link = nullptr;
  for (const auto& each : measured.links) {
    absl::StrAppend(&hosts, hosts.empty() ? "" : ", ", each.peer);
    if (each.peer == peer || (peer.empty() && measured.links.size() == 1)) link = &each;
  }
  if (link == nullptr || link->bytes.samples == 0) {
    return FieldError(absl::StatusCode::kNotFound, "--peer", peer.empty() ? "missing" : peer,
                      hosts.empty() ? "a host that pages came from; none did so far: give --link-gbps"
                                    : absl::StrCat("one of ", hosts, ", or --link-gbps"));
  }
  plan->link_gbps = link->bytes.per_second * 8e-9;
  absl::StrAppendFormat(&text, "\nlink from %s: %.4g MB/s, %s\n", link->peer, link->bytes.per_second * 1e-6,
                        Samples(link->bytes));
  return text;
}

}  // namespace kvmanager::client::cli
