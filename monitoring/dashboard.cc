#include "monitoring/dashboard.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

namespace kvmanager {
namespace {

using nlohmann::json;

// Five places are more than a chart shows; JSON has no NaN.
json Number(double value) {
  if (!std::isfinite(value)) return nullptr;
  if (value == std::floor(value) && std::abs(value) < 9e15) return static_cast<int64_t>(value);
  const double scale = std::pow(10, 4 - std::floor(std::log10(std::abs(value))));
  return std::isfinite(scale) && scale > 0 ? std::round(value * scale) / scale : 0.0;
}

json TimesJson(const Frame::Times& times) {
  return {{"per_s", Number(times.per_s)}, {"p50_s", Number(times.p50_s)}, {"p99_s", Number(times.p99_s)}};
}

json DiskJson(const Frame::Disk& disk) {
  return {{"used", Number(disk.used_bytes)},    {"capacity", Number(disk.capacity_bytes)},
          {"blocks", Number(disk.blocks)},      {"unwritten_blocks", Number(disk.unwritten_blocks)},
          {"write", TimesJson(disk.write)},     {"read", TimesJson(disk.read)},
          {"errors", Number(disk.errors)},      {"unwritten_evictions", Number(disk.unwritten_evictions)},
          {"set_aside", Number(disk.set_aside)}};
}

json KeptJson(const Frame::Kept& kept) {
  return {{"recorded_blocks", Number(kept.recorded_blocks)},
          {"unclaimed_blocks", Number(kept.unclaimed_blocks)},
          {"recovered_blocks", Number(kept.recovered_blocks)},
          {"unclaimed_lost_blocks", Number(kept.unclaimed_lost_blocks)},
          {"unrecovered_blocks", Number(kept.unrecovered_blocks)},
          {"unrecorded_blocks", Number(kept.unrecorded_blocks)}};
}

json NowJson(const Frame& frame) {
  json tiers = json::array(), forms = json::array(), tenants = json::array(), quality = json::array();
  for (const Frame::Tier& tier : frame.tiers) {
    tiers.push_back(
        {{"name", tier.name}, {"used", Number(tier.used_bytes)}, {"capacity", Number(tier.capacity_bytes)}});
  }
  for (const Frame::Form& form : frame.forms) {
    if (forms.size() == Dashboard::kRowsMax) break;
    forms.push_back({{"tier", form.tier}, {"codec", form.codec}, {"form", form.form}, {"bytes", Number(form.bytes)}});
  }
  for (const Frame::Tenant& tenant : frame.tenants) {
    if (tenants.size() == Dashboard::kRowsMax) break;
    tenants.push_back({{"name", tenant.name},
                       {"bytes", Number(tenant.bytes)},
                       {"sequences", Number(tenant.sequences)},
                       {"published_blocks", Number(tenant.published_blocks)}});
  }
  for (const Frame::Quality& codec : frame.quality) {
    if (quality.size() == Dashboard::kRowsMax) break;
    quality.push_back({{"codec", codec.codec},
                       {"pages", Number(codec.pages)},
                       {"p50", Number(codec.p50)},
                       {"p99", Number(codec.p99)}});
  }
  return {{"tiers", tiers},
          {"disk", frame.disk.has_value() ? DiskJson(*frame.disk) : json()},
          {"kept", frame.kept.has_value() ? KeptJson(*frame.kept) : json()},
          {"forms", forms},
          {"tenants", tenants},
          {"quality", quality},
          {"evictable", Number(frame.evictable_bytes)},
          {"sequences", Number(frame.sequences)},
          {"connections", Number(frame.connections)},
          {"caches", Number(frame.caches)},
          {"published_blocks", Number(frame.published_blocks)},
          {"tickets", Number(frame.tickets)},
          {"draining", frame.draining},
          {"waiting_pages", Number(frame.waiting_pages)},
          {"active_transfers", Number(frame.active_transfers)},
          {"transfers_ok", Number(frame.transfers_ok)},
          {"transfers_failed", Number(frame.transfers_failed)},
          {"attend_loop", TimesJson(frame.attend_loop)},
          {"attend_workers", TimesJson(frame.attend_workers)},
          {"encode", TimesJson(frame.encode)},
          {"appended_tokens_per_s", Number(frame.appended_tokens_per_s)},
          {"attended_tokens_per_s", Number(frame.attended_tokens_per_s)},
          {"refused_full", Number(frame.refused_full)}};
}

}  // namespace

void Dashboard::Sample(int64_t now_ns, int64_t unix_ms) {
  Readings now = Readings::Parse(metrics_->Text());
  const double seconds = std::max(1e-3, static_cast<double>(now_ns - last_ns_) * 1e-9);
  history_.push_back({unix_ms, FrameOf(last_.has_value() ? *last_ : now, now, seconds)});
  if (history_.size() > kHistoryMax) history_.pop_front();
  last_ = std::move(now);
  last_ns_ = now_ns;

  const auto series = [this](auto value) {
    json values = json::array();
    for (const Moment& moment : history_) values.push_back(Number(value(moment)));
    return values;
  };
  json errors = json::array();
  for (const RecentError& error : errors_->List()) {
    errors.push_back({{"code", error.code},
                      {"method", error.method},
                      {"field", error.field},
                      {"message", error.message},
                      {"count", error.count},
                      {"age_s", Number(static_cast<double>(std::max<int64_t>(0, now_ns - error.last_ns)) * 1e-9)}});
  }
  json state = {
      {"daemon",
       {{"version", facts_.version},
        {"listen", facts_.listen},
        {"peer_listen", facts_.peer_listen},
        {"metrics_listen", facts_.metrics_listen},
        {"cpu_target", facts_.cpu_target},
        {"gpus", facts_.gpus},
        {"threads", facts_.threads},
        {"uptime_s", Number(static_cast<double>(now_ns - facts_.start_ns) * 1e-9)}}},
      {"now", NowJson(history_.back().frame)},
      {"errors", errors},
      {"history",
       {{"unix_ms", series([](const Moment& m) { return static_cast<double>(m.unix_ms); })},
        {"used", series([](const Moment& m) { return m.frame.tiers.front().used_bytes; })},
        {"evictable", series([](const Moment& m) { return m.frame.evictable_bytes; })},
        {"asked_blocks", series([](const Moment& m) { return m.frame.asked_blocks; })},
        {"hit_blocks", series([](const Moment& m) { return m.frame.hit_blocks; })},
        {"hit_host_blocks", series([](const Moment& m) { return m.frame.hit_tiers.host; })},
        {"hit_device_blocks", series([](const Moment& m) { return m.frame.hit_tiers.device; })},
        {"hit_disk_blocks", series([](const Moment& m) { return m.frame.hit_tiers.disk; })},
        {"sent", series([](const Moment& m) { return m.frame.sent_bytes_per_s; })},
        {"received", series([](const Moment& m) { return m.frame.received_bytes_per_s; })},
        {"attend_per_s",
         series([](const Moment& m) { return m.frame.attend_loop.per_s + m.frame.attend_workers.per_s; })},
        {"loop_p50", series([](const Moment& m) { return m.frame.attend_loop.p50_s; })},
        {"loop_p99", series([](const Moment& m) { return m.frame.attend_loop.p99_s; })},
        {"workers_p50", series([](const Moment& m) { return m.frame.attend_workers.p50_s; })},
        {"workers_p99", series([](const Moment& m) { return m.frame.attend_workers.p99_s; })},
        {"waiting_pages", series([](const Moment& m) { return m.frame.waiting_pages; })},
        {"encoded_per_s", series([](const Moment& m) { return m.frame.encode.per_s; })},
        {"evicted_per_s", series([](const Moment& m) { return m.frame.evicted_blocks_per_s; })},
        {"calls_per_s", series([](const Moment& m) { return m.frame.calls_per_s; })},
        {"errors_per_s", series([](const Moment& m) { return m.frame.errors_per_s; })}}},
  };
  if (history_.back().frame.disk.has_value()) {
    const auto of_disk = [&series](double Frame::Disk::*value) {
      return series([value](const Moment& m) { return m.frame.disk.has_value() ? (*m.frame.disk).*value : NAN; });
    };
    state["history"]["disk_written"] = of_disk(&Frame::Disk::written_bytes_per_s);
    state["history"]["disk_read"] = of_disk(&Frame::Disk::read_bytes_per_s);
  }
  json_ = std::make_shared<const std::string>(state.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace kvmanager
