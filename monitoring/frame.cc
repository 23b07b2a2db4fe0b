#include "monitoring/frame.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmanager {
namespace {

constexpr char kQuality[] = "kvmanager_codec_relative_error";

std::string LabelOf(const Reading& reading, const char* name) {
  const auto found = reading.labels.find(name);
  return found == reading.labels.end() ? "" : found->second;
}

// How much a counter grew. One that fell was made anew: it grew from 0.
double Grown(const Readings& before, const Readings& after, absl::string_view name, const ReadingLabels& labels = {}) {
  const double from = before.Sum(name, labels), to = after.Sum(name, labels);
  return to >= from ? to - from : to;
}

Frame::Times TimesOf(const Readings& before, const Readings& after, absl::string_view histogram,
                     const ReadingLabels& labels, double seconds) {
  std::map<double, double> buckets = after.Buckets(histogram, labels);
  for (const auto& [upper, count] : before.Buckets(histogram, labels)) {
    double& left = buckets[upper];
    left = std::max(0.0, left - count);
  }
  Frame::Times times;
  times.per_s = buckets.empty() ? 0 : buckets.rbegin()->second / seconds;
  times.p50_s = QuantileOf(buckets, 0.5);
  times.p99_s = QuantileOf(buckets, 0.99);
  return times;
}

template <typename T>
void LargestFirst(std::vector<T>* all) {
  std::stable_sort(all->begin(), all->end(), [](const T& a, const T& b) { return a.bytes > b.bytes; });
}

void AddMemory(const Readings& now, Frame* frame) {
  frame->tiers.push_back({"host", now.Sum("kvmanager_pool_used_bytes"), now.Sum("kvmanager_pool_capacity_bytes")});
  for (const Reading& pool : now.Of("kvmanager_device_pool_capacity_bytes")) {
    if (pool.value == 0) continue;
    const double used = now.Sum("kvmanager_device_pool_used_bytes", pool.labels);
    frame->tiers.push_back({absl::StrCat("gpu", LabelOf(pool, "device")), used, pool.value});
  }
  std::map<std::tuple<std::string, std::string, std::string>, double> forms;
  for (const Reading& page : now.Of("kvmanager_page_bytes")) {
    forms[{LabelOf(page, "tier"), LabelOf(page, "codec"), LabelOf(page, "form")}] += page.value;
  }
  for (const auto& [key, bytes] : forms) {
    const auto& [tier, codec, form] = key;
    if (bytes > 0) frame->forms.push_back({tier, codec, form, bytes});
  }
  LargestFirst(&frame->forms);
  std::map<std::string, Frame::Tenant> tenants;
  for (const Reading& bytes : now.Of("kvmanager_tenant_bytes")) {
    tenants[LabelOf(bytes, "tenant")].bytes += bytes.value;
  }
  for (auto& [name, tenant] : tenants) {
    tenant.name = name;
    tenant.sequences = now.Sum("kvmanager_tenant_sequences", {{"tenant", name}});
    tenant.published_blocks = now.Sum("kvmanager_tenant_published_blocks", {{"tenant", name}});
    frame->tenants.push_back(tenant);
  }
  LargestFirst(&frame->tenants);
  frame->evictable_bytes = now.Sum("kvmanager_evictable_bytes");
}

// A daemon without a disk has its metrics, too; its capacity is 0.
void AddDisk(const Readings& before, const Readings& after, double seconds, Frame* frame) {
  const double capacity_bytes = after.Sum("kvmanager_disk_capacity_bytes");
  if (!(capacity_bytes > 0)) return;
  Frame::Disk disk;
  disk.used_bytes = after.Sum("kvmanager_disk_used_bytes");
  disk.capacity_bytes = capacity_bytes;
  disk.blocks = after.Sum("kvmanager_disk_blocks");
  disk.unwritten_blocks = after.Sum("kvmanager_disk_unwritten_blocks");
  disk.written_bytes_per_s = Grown(before, after, "kvmanager_disk_written_bytes_total") / seconds;
  disk.read_bytes_per_s = Grown(before, after, "kvmanager_disk_read_bytes_total") / seconds;
  disk.write = TimesOf(before, after, "kvmanager_disk_write_seconds", {}, seconds);
  disk.read = TimesOf(before, after, "kvmanager_disk_read_seconds", {}, seconds);
  disk.errors = after.Sum("kvmanager_disk_errors_total");
  disk.unwritten_evictions = after.Sum("kvmanager_disk_unwritten_evictions_total");
  disk.set_aside = after.Sum("kvmanager_disk_set_aside_total");
  frame->disk = disk;
}

// No metric says whether there is --state-dir: blocks that it counts do.
void AddKept(const Readings& now, Frame* frame) {
  Frame::Kept kept;
  kept.recorded_blocks = now.Sum("kvmanager_recorded_blocks");
  kept.unclaimed_blocks = now.Sum("kvmanager_unclaimed_blocks");
  kept.recovered_blocks = now.Sum("kvmanager_recovered_blocks_total");
  kept.unclaimed_lost_blocks = now.Sum("kvmanager_unclaimed_lost_blocks_total");
  kept.unrecovered_blocks = now.Sum("kvmanager_unrecovered_blocks_total");
  kept.unrecorded_blocks = now.Sum("kvmanager_unrecorded_blocks_total");
  if (kept.recorded_blocks + kept.recovered_blocks + kept.unrecovered_blocks + kept.unrecorded_blocks > 0) {
    frame->kept = kept;
  }
}

void AddQuality(const Readings& now, Frame* frame) {
  std::set<std::string> codecs;
  for (const Reading& count : now.Of(absl::StrCat(kQuality, "_count"))) {
    if (count.value > 0) codecs.insert(LabelOf(count, "codec"));
  }
  for (const std::string& codec : codecs) {
    const std::map<double, double> buckets = now.Buckets(kQuality, {{"codec", codec}});
    frame->quality.push_back({codec, now.Sum(absl::StrCat(kQuality, "_count"), {{"codec", codec}}),
                              QuantileOf(buckets, 0.5), QuantileOf(buckets, 0.99)});
  }
}

}  // namespace

Frame FrameOf(const Readings& before, const Readings& after, double seconds) {
  Frame frame;
  AddMemory(after, &frame);
  AddDisk(before, after, seconds, &frame);
  AddKept(after, &frame);
  AddQuality(after, &frame);
  frame.sequences = after.Sum("kvmanager_sequences");
  frame.connections = after.Sum("kvmanager_connections");
  frame.caches = after.Sum("kvmanager_caches");
  frame.published_blocks = after.Sum("kvmanager_published_blocks");
  frame.tickets = after.Sum("kvmanager_tickets");
  frame.draining = after.Sum("kvmanager_draining") > 0;
  frame.waiting_pages =
      after.Sum("kvmanager_pages", {{"state", "sealed"}}) + after.Sum("kvmanager_pages", {{"state", "encoding"}});
  frame.asked_blocks = Grown(before, after, "kvmanager_prefix_asked_blocks_total");
  frame.hit_blocks = Grown(before, after, "kvmanager_prefix_hit_blocks_total");
  const auto hits = [&](const char* tier) {
    return Grown(before, after, "kvmanager_prefix_hit_tier_blocks_total", {{"tier", tier}});
  };
  frame.hit_tiers = {hits("host"), hits("device"), hits("disk")};
  const auto rate = [&](absl::string_view name, const ReadingLabels& labels = {}) {
    return Grown(before, after, name, labels) / seconds;
  };
  frame.sent_bytes_per_s = rate("kvmanager_transport_bytes_total", {{"direction", "sent"}});
  frame.received_bytes_per_s = rate("kvmanager_transport_bytes_total", {{"direction", "received"}});
  frame.active_transfers = after.Sum("kvmanager_transport_active_transfers");
  frame.transfers_ok = after.Sum("kvmanager_transport_transfers_total", {{"result", "ok"}});
  frame.transfers_failed = after.Sum("kvmanager_transport_transfers_total") - frame.transfers_ok;
  frame.attend_loop = TimesOf(before, after, "kvmanager_attend_seconds", {{"where", "loop"}}, seconds);
  frame.attend_workers = TimesOf(before, after, "kvmanager_attend_seconds", {{"where", "workers"}}, seconds);
  frame.encode = TimesOf(before, after, "kvmanager_encode_seconds", {}, seconds);
  frame.calls_per_s = rate("kvmanager_rpc_calls_total");
  frame.errors_per_s = rate("kvmanager_rpc_errors_total");
  frame.appended_tokens_per_s = rate("kvmanager_appended_tokens_total");
  frame.attended_tokens_per_s = rate("kvmanager_attend_tokens_total");
  frame.evicted_blocks_per_s = rate("kvmanager_evicted_blocks_total");
  frame.refused_full = after.Sum("kvmanager_pool_exhausted_total");
  return frame;
}

}  // namespace kvmanager
