#include "client/cli/top.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

using nlohmann::json;

constexpr int kColumns = 80;  // where nobody says how wide it is
constexpr int kColumnsMin = 40;
constexpr int kBarColumns = 24;
constexpr size_t kRowsMax = 8;  // of a table
constexpr char kHomeAndClear[] = "\x1b[H\x1b[J";

struct Reader {
  Readings readings;
  std::chrono::steady_clock::time_point at;
};

absl::StatusOr<Reader> Read(Client& client) {
  KV_ASSIGN_OR_RETURN(const std::string text, client.MetricsText());
  return Reader{Readings::Parse(text), std::chrono::steady_clock::now()};
}

absl::StatusOr<TopPicture> Look(Client& client, const Reader& before, const Reader& after) {
  TopPicture picture;
  KV_ASSIGN_OR_RETURN(picture.status, client.Status());
  KV_ASSIGN_OR_RETURN(picture.caches, client.Caches());
  KV_ASSIGN_OR_RETURN(picture.sequences, client.Sequences());
  KV_ASSIGN_OR_RETURN(picture.peers, client.Peers());
  const double seconds = std::chrono::duration<double>(after.at - before.at).count();
  picture.frame = FrameOf(before.readings, after.readings, std::max(1e-3, seconds));
  for (const Reading& reading : after.readings.Of("kvmanager_rpc_errors_total")) {
    if (reading.value == 0) continue;
    const auto label = [&](const char* name) {
      const auto found = reading.labels.find(name);
      return found == reading.labels.end() ? "" : found->second;
    };
    picture.errors.push_back({label("method"), label("code"), reading.value});
  }
  std::stable_sort(picture.errors.begin(), picture.errors.end(),
                   [](const auto& a, const auto& b) { return a.count > b.count; });
  return picture;
}

std::string Count(double value) {
  constexpr const char* kUnits[] = {"", " k", " M", " G"};
  size_t unit = 0;
  for (; value >= 999.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1000;
  const bool whole = unit == 0 && value == std::floor(value);
  return absl::StrFormat("%.*f%s", whole ? 0 : 1, value, kUnits[unit]);
}

std::string Time(double seconds) {
  if (std::isnan(seconds)) return "-";
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return FormatSeconds(seconds);
}

std::string Share(double part, double whole) { return whole > 0 ? absl::StrFormat("%.1f%%", 100 * part / whole) : "-"; }

std::string Bytes(double bytes) { return FormatBytes(uint64_t(std::max(0.0, bytes))); }

std::string Bar(double share) {
  const int full = int(std::lround(std::clamp(share, 0.0, 1.0) * kBarColumns));
  return absl::StrCat("[", std::string(full, '#'), std::string(kBarColumns - full, '.'), "]");
}

std::string Line(absl::string_view name, const std::string& value) {
  return absl::StrCat(absl::StrFormat("%-10s", std::string(name)), value, "\n");
}

std::string Times(const Frame::Times& times) {
  return absl::StrCat(Count(times.per_s), "/s, p50 ", Time(times.p50_s), ", p99 ", Time(times.p99_s));
}

// The end of a name says most where it is too long: a model's path, an address.
std::string Tail(const std::string& text, size_t columns) {
  return text.size() <= columns ? text : absl::StrCat("~", text.substr(text.size() - columns + 1));
}
std::string Head(const std::string& text, size_t columns) {
  return text.size() <= columns ? text : absl::StrCat(text.substr(0, columns - 1), "~");
}

std::string DiskLines(const Frame::Disk& disk) {
  return absl::StrCat(
      Line("disk",
           absl::StrCat(Bar(disk.used_bytes / disk.capacity_bytes), " ", Share(disk.used_bytes, disk.capacity_bytes),
                        " of ", Bytes(disk.capacity_bytes), ", ", Count(disk.blocks), " blocks")),
      Line("", absl::StrCat("write ", Bytes(disk.written_bytes_per_s), "/s, read ", Bytes(disk.read_bytes_per_s),
                            "/s; ", Count(disk.unwritten_blocks), " unwritten, ", Count(disk.errors), " errors")));
}

std::string Gauges(const TopPicture& picture) {
  const Frame& frame = picture.frame;
  std::string text;
  for (const Frame::Tier& tier : frame.tiers) {
    const bool host = &tier == &frame.tiers.front();
    absl::StrAppend(
        &text,
        Line(tier.name, absl::StrCat(Bar(tier.capacity_bytes > 0 ? tier.used_bytes / tier.capacity_bytes : 0), " ",
                                     Share(tier.used_bytes, tier.capacity_bytes), " of ", Bytes(tier.capacity_bytes),
                                     host ? ", evictable " + Bytes(frame.evictable_bytes) : "")));
  }
  if (frame.disk.has_value()) absl::StrAppend(&text, DiskLines(*frame.disk));
  absl::StrAppend(
      &text, Line("hits", absl::StrCat(Bar(frame.asked_blocks > 0 ? frame.hit_blocks / frame.asked_blocks : 0), " ",
                                       Share(frame.hit_blocks, frame.asked_blocks), " of ", Count(frame.asked_blocks),
                                       " blocks asked for")));
  if (frame.disk.has_value()) {
    absl::StrAppend(
        &text, Line("", absl::StrCat("from host ", Count(frame.hit_tiers.host), ", GPU ", Count(frame.hit_tiers.device),
                                     ", disk ", Count(frame.hit_tiers.disk))));
  }
  absl::StrAppend(&text, Line("load", absl::StrCat(Count(frame.appended_tokens_per_s), " tokens/s appended, ",
                                                   Count(frame.calls_per_s), " calls/s, ", Count(frame.errors_per_s),
                                                   " errors/s")));
  absl::StrAppend(&text, Line("attention", absl::StrCat("workers ", Times(frame.attend_workers))));
  absl::StrAppend(&text, Line("", absl::StrCat("loop    ", Times(frame.attend_loop))));
  absl::StrAppend(&text,
                  Line("encoding", absl::StrCat(Count(frame.waiting_pages), " pages wait, ", Times(frame.encode))));
  absl::StrAppend(
      &text,
      Line("transfer", absl::StrCat("out ", Bytes(frame.sent_bytes_per_s), "/s, in ", Bytes(frame.received_bytes_per_s),
                                    "/s; ", Count(frame.active_transfers), " active, ", Count(frame.transfers_ok),
                                    " ok, ", Count(frame.transfers_failed), " not")));
  if (frame.quality.empty()) {
    absl::StrAppend(&text, Line("quality", "no page was sampled yet (kvmanagerd --quality-sample)"));
  }
  for (const Frame::Quality& quality : frame.quality) {
    absl::StrAppend(&text, Line(&quality == &frame.quality.front() ? "quality" : "",
                                absl::StrFormat("%s: error median %.2f%%, p99 %.2f%% of %s pages", quality.codec,
                                                100 * quality.p50, 100 * quality.p99, Count(quality.pages))));
  }
  return text;
}

std::string Tables(const TopPicture& picture) {
  std::string text;
  std::vector<CacheDescription> caches = picture.caches;
  const auto bytes_of = [](const CacheDescription& c) {
    return c.resident_raw_bytes + c.resident_encoded_bytes + c.resident_activation_bytes;
  };
  std::stable_sort(caches.begin(), caches.end(),
                   [&](const auto& a, const auto& b) { return bytes_of(a) > bytes_of(b); });
  std::vector<std::vector<std::string>> rows;
  for (const CacheDescription& c : caches) {
    if (rows.size() == kRowsMax) break;
    rows.push_back({absl::StrCat(c.id), Tail(c.options.model, 13),
                    Head(c.options.tenant.empty() ? "-" : c.options.tenant, 9), Head(c.options.codec, 14),
                    FormatBytes(c.resident_raw_bytes), FormatBytes(c.resident_encoded_bytes), absl::StrCat(c.sequences),
                    absl::StrCat(c.published_blocks)});
  }
  if (!rows.empty()) {
    absl::StrAppend(&text, "\n",
                    FormatTable({"ID", "MODEL", "TENANT", "CODEC", "RAW", "ENCODED", "SEQS", "BLOCKS"}, rows));
  }
  struct Holder {
    uint64_t sequences = 0, tokens = 0, bytes = 0;
  };
  std::map<std::pair<std::string, uint32_t>, Holder> holders;
  for (const SequenceDescription& s : picture.sequences) {
    Holder& holder = holders[{s.client, s.pid}];
    ++holder.sequences;
    holder.tokens += s.tokens;
    holder.bytes += s.bytes;
  }
  std::vector<std::pair<std::pair<std::string, uint32_t>, Holder>> by_size(holders.begin(), holders.end());
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  rows.clear();
  for (const auto& [who, holder] : by_size) {
    if (rows.size() == kRowsMax) break;
    rows.push_back({Head(who.first.empty() ? "(waits for its engine)" : who.first, 24),
                    who.second == 0 ? "-" : absl::StrCat(who.second), absl::StrCat(holder.sequences),
                    absl::StrCat(holder.tokens), FormatBytes(holder.bytes)});
  }
  if (!rows.empty()) {
    absl::StrAppend(&text, "\n", FormatTable({"CLIENT", "PID", "SEQS", "TOKENS", "BYTES, SHARED IN FULL"}, rows));
  }
  rows.clear();
  for (const PeerDescription& p : picture.peers) {
    if (rows.size() == kRowsMax) break;
    rows.push_back({Tail(p.peer, 22), p.incoming ? "in" : "out", absl::StrCat(p.active), absl::StrCat(p.transfers),
                    absl::StrCat(p.failures), FormatBytes(p.bytes),
                    Head(p.last_error.empty() ? "-" : p.last_error, 18)});
  }
  if (!rows.empty()) {
    absl::StrAppend(&text, "\n", FormatTable({"PEER", "WAY", "NOW", "DONE", "FAILED", "BYTES", "LAST ERROR"}, rows));
  }
  rows.clear();
  for (const TopPicture::Errors& errors : picture.errors) {
    if (rows.size() == kRowsMax) break;
    rows.push_back({absl::StrFormat("%.0f", errors.count), errors.method, errors.code});
  }
  if (!rows.empty()) absl::StrAppend(&text, "\n", FormatTable({"ERRORS", "CALL", "CODE"}, rows));
  return text;
}

json TimesJson(const Frame::Times& times) {
  const auto number = [](double value) { return std::isnan(value) ? json() : json(value); };
  return {{"per_second", times.per_s}, {"p50_seconds", number(times.p50_s)}, {"p99_seconds", number(times.p99_s)}};
}

json DiskJson(const Frame::Disk& disk) {
  return {{"used_bytes", disk.used_bytes},
          {"capacity_bytes", disk.capacity_bytes},
          {"blocks", disk.blocks},
          {"unwritten_blocks", disk.unwritten_blocks},
          {"written_bytes_per_second", disk.written_bytes_per_s},
          {"read_bytes_per_second", disk.read_bytes_per_s},
          {"write", TimesJson(disk.write)},
          {"read", TimesJson(disk.read)},
          {"errors", disk.errors},
          {"unwritten_evictions", disk.unwritten_evictions},
          {"set_aside", disk.set_aside}};
}

json KeptJson(const Frame::Kept& kept) {
  return {{"recorded_blocks", kept.recorded_blocks},       {"unclaimed_blocks", kept.unclaimed_blocks},
          {"recovered_blocks", kept.recovered_blocks},     {"unclaimed_lost_blocks", kept.unclaimed_lost_blocks},
          {"unrecovered_blocks", kept.unrecovered_blocks}, {"unrecorded_blocks", kept.unrecorded_blocks}};
}

json ToJson(const TopPicture& picture) {
  const Frame& frame = picture.frame;
  json tiers = json::array(), tenants = json::array(), quality = json::array(), errors = json::array();
  for (const auto& tier : frame.tiers) {
    tiers.push_back({{"tier", tier.name}, {"used_bytes", tier.used_bytes}, {"capacity_bytes", tier.capacity_bytes}});
  }
  for (const auto& tenant : frame.tenants) {
    tenants.push_back({{"label", tenant.name}, {"bytes", tenant.bytes}, {"sequences", tenant.sequences}});
  }
  for (const auto& codec : frame.quality) {
    quality.push_back(
        {{"codec", codec.codec}, {"pages", codec.pages}, {"error_p50", codec.p50}, {"error_p99", codec.p99}});
  }
  for (const auto& error : picture.errors) {
    errors.push_back({{"method", error.method}, {"code", error.code}, {"count", error.count}});
  }
  return {{"status", cli::ToJson(picture.status)},
          {"caches", cli::ToJson(picture.caches)["caches"]},
          {"sequences", cli::ToJson(picture.sequences)["sequences"]},
          {"peers", cli::ToJson(picture.peers)["peers"]},
          {"tiers", tiers},
          {"disk", frame.disk.has_value() ? DiskJson(*frame.disk) : json()},
          {"kept", frame.kept.has_value() ? KeptJson(*frame.kept) : json()},
          {"tenants", tenants},
          {"quality", quality},
          {"errors", errors},
          {"asked_blocks", frame.asked_blocks},
          {"hit_blocks", frame.hit_blocks},
          {"hit_blocks_by_tier",
           {{"host", frame.hit_tiers.host}, {"device", frame.hit_tiers.device}, {"disk", frame.hit_tiers.disk}}},
          {"waiting_pages", frame.waiting_pages},
          {"sent_bytes_per_second", frame.sent_bytes_per_s},
          {"received_bytes_per_second", frame.received_bytes_per_s},
          {"appended_tokens_per_second", frame.appended_tokens_per_s},
          {"calls_per_second", frame.calls_per_s},
          {"errors_per_second", frame.errors_per_s},
          {"attend_loop", TimesJson(frame.attend_loop)},
          {"attend_workers", TimesJson(frame.attend_workers)},
          {"encode", TimesJson(frame.encode)}};
}

struct Screen {
  bool terminal = false;
  int columns = kColumns, lines = 0;
};

Screen TheScreen() {
  Screen screen;
  winsize size{};
  screen.terminal = isatty(STDOUT_FILENO) == 1;
  if (screen.terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    screen.columns = std::max<int>(kColumnsMin, size.ws_col);
    screen.lines = size.ws_row;
  }
  return screen;
}

}  // namespace

std::string FormatTop(const TopPicture& picture, int columns, int lines) {
  const DaemonDescription& d = picture.status;
  const std::string all = absl::StrCat("kvmanagerd ", d.version, d.draining ? "  DRAINING" : "  serving", "  up ",
                                       FormatSeconds(d.uptime_seconds), "  ", d.connections, " connections  ", d.leases,
                                       " leases  ", d.published_blocks, " blocks\n", Gauges(picture), Tables(picture));
  std::string text;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(absl::StripSuffix(all, "\n"), '\n')) {
    if (lines > 0 && ++line_number >= lines) break;  // the last line is the cursor's
    std::string shown(line.substr(0, size_t(columns)));
    for (char& c : shown) {
      if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
    }
    absl::StrAppend(&text, shown, "\n");
  }
  return text;
}

absl::Status RunTop(Client& client, const TopArguments& arguments, const std::string& address, bool as_json) {
  absl::StatusOr<Reader> before = Read(client);
  if (!before.ok()) return before.status();
  const auto wait_ms = int(std::lround(arguments.interval_s * 1000));
  for (bool first = true;; first = false) {
    poll(nullptr, 0, wait_ms);
    absl::StatusOr<Reader> after = before.ok() ? Read(client) : before.status();
    absl::StatusOr<TopPicture> picture = after.ok() ? Look(client, *before, *after) : after.status();
    if (!picture.ok() && (first || arguments.once)) return picture.status();
    const Screen screen = TheScreen();
    std::string text;
    if (!picture.ok()) {
      text = absl::StrCat(address, ": ", std::string(picture.status().message()), "\n");
    } else if (as_json) {
      text =
          ToJson(*picture).dump(arguments.once ? 2 : -1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    } else {
      text = FormatTop(*picture, screen.columns, screen.lines);
      if (!screen.terminal && !arguments.once) text += "\n";
    }
    std::cout << (screen.terminal && !arguments.once && !as_json ? kHomeAndClear : "") << text << std::flush;
    if (!std::cout.good()) return absl::OkStatus();  // whoever read this has gone
    if (arguments.once) return absl::OkStatus();
    before = std::move(after);
    if (!picture.ok()) before = client.Reconnect().ok() ? Read(client) : picture.status();
  }
}

}  // namespace kvmanager::client::cli
