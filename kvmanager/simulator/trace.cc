#include "kvmanager/simulator/trace.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <queue>
#include <random>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/json_text.h"
#include "kvmanager/base/status.h"

namespace kvmanager::simulator {
namespace {

class Reader {
 public:
  /// file: its path and ", ", for errors; or empty.
  Reader(std::string file, uint64_t block_tokens) : file_(std::move(file)), block_tokens_(block_tokens) {}

  std::string At(size_t number) const { return absl::StrCat(file_, "line ", number); }

  absl::Status AddLine(const std::string& line, size_t number) {
    constexpr size_t kShown = 40;
    const std::string at = At(number);
    const nlohmann::json read = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!read.is_object()) {
      return InvalidField(at, JsonText(nlohmann::json(line.substr(0, kShown))), "a JSON object: one request a line");
    }
    if (trace_.requests.size() == Trace::kRequestsMax) {
      return InvalidField(at, "one more request", absl::StrCat("at most ", Trace::kRequestsMax));
    }
    TraceRequest request;
    double ms = 0;
    KV_RETURN_IF_ERROR(CheckFormat(read, at, number));
    KV_RETURN_IF_ERROR(ReadTime(read, at, number, &ms));
    request.at_s = ms / 1000;
    KV_RETURN_IF_ERROR(ReadCount(read, at, "input_length", /*required=*/true, &request.input_tokens));
    KV_RETURN_IF_ERROR(ReadCount(read, at, "output_length", /*required=*/false, &request.output_tokens));
    const auto ids = read.find("hash_ids");
    if (ids == read.end() || !ids->is_array() || ids->size() > Trace::kRequestBlocksMax) {
      return InvalidField(absl::StrCat(at, ": hash_ids"),
                          ids == read.end() ? "missing"
                          : ids->is_array() ? absl::StrCat("of ", ids->size(), " blocks")
                                            : JsonText(*ids),
                          absl::StrCat("an array of at most ", Trace::kRequestBlocksMax, " integers, one for a block"));
    }
    KV_RETURN_IF_ERROR(CheckLength(request.input_tokens, ids->size(), at));
    request.first = trace_.blocks.size();
    for (const nlohmann::json& id : *ids) {
      if (!id.is_number_integer()) return InvalidField(absl::StrCat(at, ": hash_ids"), JsonText(id), "integers");
      const auto [place, is_new] =
          numbers_.try_emplace(id.get<int64_t>(), Seen{static_cast<uint32_t>(numbers_.size()), SIZE_MAX});
      if (std::exchange(place->second.line, number) == number) {
        return InvalidField(absl::StrCat(at, ": hash_ids"), JsonText(id),
                            "named once in a line, as it stands for all tokens up to the block's end");
      }
      trace_.blocks.push_back(place->second.number);
    }
    request.blocks = trace_.blocks.size() - request.first;
    trace_.requests.push_back(request);
    return absl::OkStatus();
  }
  Trace Finish() {
    // Sessions may follow one another in the file whenever they began.
    std::stable_sort(trace_.requests.begin(), trace_.requests.end(),
                     [](const TraceRequest& a, const TraceRequest& b) { return a.at_s < b.at_s; });
    trace_.distinct = numbers_.size();
    return std::move(trace_);
  }

 private:
  struct Seen {
    uint32_t number;
    size_t line;  // the last that named it
  };
  struct Begun {
    double ms = 0;
    size_t line = 0;  // 0: none has begun
  };

  absl::Status CheckFormat(const nlohmann::json& read, const std::string& at, size_t number) {
    const auto session = read.find("session_id");
    const bool of_agent = session != read.end();
    if (first_line_ == 0) {
      first_line_ = number;
      of_agents_ = of_agent;
    }
    if (of_agent == of_agents_) return absl::OkStatus();
    return InvalidField(absl::StrCat(at, ": session_id"), of_agent ? JsonText(*session) : "missing",
                        absl::StrCat(of_agents_ ? "given, as on line " : "absent, as on line ", first_line_,
                                     ": a file has lines of one format; put those with session_id and those without "
                                     "into files of their own"));
  }
  absl::Status ReadTime(const nlohmann::json& read, const std::string& at, size_t number, double* ms) {
    const auto session = read.find("session_id"), stamp = read.find("timestamp"), delay = read.find("delay");
    const auto is_time = [&](auto field) {
      return field != read.end() && field->is_number() && field->template get<double>() >= 0;
    };
    Begun* last = &request_;
    if (of_agents_) {
      if (!session->is_string() && !session->is_number_integer()) {
        return InvalidField(absl::StrCat(at, ": session_id"), JsonText(*session), "a text or an integer");
      }
      last = &sessions_[session->dump()];
    }
    if (is_time(stamp)) {
      *ms = stamp->get<double>();
    } else if (of_agents_ && stamp == read.end() && (delay == read.end() || is_time(delay))) {
      *ms = last->ms + (delay == read.end() ? 0 : delay->get<double>());
    } else {
      return InvalidField(absl::StrCat(at, ": timestamp"), stamp == read.end() ? "missing" : JsonText(*stamp),
                          "milliseconds, or none with session_id and delay");
    }
    if (*ms > Trace::kTimeMsMax) {
      return InvalidField(absl::StrCat(at, ": timestamp"), *ms, absl::StrCat("at most ", Trace::kTimeMsMax));
    }
    if (last->line > 0 && *ms < last->ms) {
      const std::string before = absl::StrFormat("%.15g or more, ", last->ms);
      return InvalidField(absl::StrCat(at, ": timestamp"), JsonText(*stamp),
                          of_agents_
                              ? absl::StrCat(before, "when the request before of this session_id begins, on line ",
                                             last->line, ": put the lines of a session in order of time")
                              : absl::StrCat(before, "the timestamp of line ", last->line,
                                             ": put the lines in order of time (jq -s -c 'sort_by(.timestamp)[]')"));
    }
    *last = {*ms, number};
    return absl::OkStatus();
  }
  static bool Fits(uint64_t tokens, uint64_t blocks, uint64_t block_tokens) {
    const uint64_t full = tokens / block_tokens;
    return full == blocks || (tokens % block_tokens > 0 && full + 1 == blocks);
  }
  absl::Status CheckLength(uint64_t tokens, uint64_t blocks, const std::string& at) const {
    if (Fits(tokens, blocks, block_tokens_)) return absl::OkStatus();
    uint64_t other = Trace::kBlockTokensMax;
    while (other > 0 && !Fits(tokens, blocks, other)) other /= 2;
    return InvalidField(
        absl::StrCat(at, ": input_length"), tokens,
        absl::StrCat(blocks == 0 ? 0 : (blocks - 1) * block_tokens_ + 1, "..", (blocks + 1) * block_tokens_ - 1,
                     ", as hash_ids has ", blocks, " blocks of ", block_tokens_,
                     " tokens: correct the line, or give --trace-block-tokens, the tokens of the trace's blocks",
                     other > 1 && blocks > 1 ? absl::StrCat(" (", other, " would fit this line)") : ""));
  }
  static absl::Status ReadCount(const nlohmann::json& read, const std::string& at, const char* name, bool required,
                                uint64_t* count) {
    const auto field = read.find(name);
    if (field == read.end() && !required) return absl::OkStatus();
    if (field == read.end() || !field->is_number_unsigned()) {
      return InvalidField(absl::StrCat(at, ": ", name), field == read.end() ? "missing" : JsonText(*field),
                          "a number of tokens");
    }
    *count = field->get<uint64_t>();
    return absl::OkStatus();
  }

  const std::string file_;
  const uint64_t block_tokens_;
  Trace trace_;
  size_t first_line_ = 0;  // 0: there was none yet
  bool of_agents_ = false;
  Begun request_;  // the last one without session_id
  absl::flat_hash_map<int64_t, Seen> numbers_;
  absl::flat_hash_map<std::string, Begun> sessions_;  // their last requests
};

absl::StatusOr<Trace> ReadLines(std::istream& in, Reader reader, const std::function<void(size_t)>& progress) {
  constexpr size_t kLinesBetween = 4096;
  std::string line;
  size_t bytes = 0;
  for (size_t number = 1; std::getline(in, line); ++number) {
    bytes += line.size() + 1;
    if (line.size() > Trace::kLineBytesMax) {
      return InvalidField(reader.At(number), absl::StrCat(line.size(), " bytes"),
                          absl::StrCat("at most ", Trace::kLineBytesMax));
    }
    if (line.find_first_not_of(" \t\r") != std::string::npos) KV_RETURN_IF_ERROR(reader.AddLine(line, number));
    if (progress && number % kLinesBetween == 0) progress(bytes);
  }
  return reader.Finish();
}

}  // namespace

absl::StatusOr<Trace> ReadTrace(std::istream& in, uint64_t block_tokens, const std::function<void(size_t)>& progress) {
  return ReadLines(in, Reader("", block_tokens), progress);
}

absl::StatusOr<Trace> ReadTraceFile(const std::string& path, uint64_t block_tokens,
                                    const std::function<void(size_t)>& progress) {
  std::ifstream in(path);
  if (!in.is_open()) return absl::NotFoundError(absl::StrCat("--trace: ", path, " cannot be read"));
  KV_ASSIGN_OR_RETURN(Trace trace, ReadLines(in, Reader(absl::StrCat(path, ", "), block_tokens), progress));
  if (trace.blocks.empty()) return InvalidField("--trace", path, "a file with at least one request that has hash_ids");
  return trace;
}

Trace MakeTrace(uint64_t seed, size_t requests) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return random() % n; };
  struct Conversation {
    double at_s;
    std::vector<uint32_t> blocks;  // without the last, which the next turn has in full
    bool operator>(const Conversation& other) const { return at_s > other.at_s; }
  };
  std::priority_queue<Conversation, std::vector<Conversation>, std::greater<>> waiting;
  Trace trace;
  uint32_t next = 1;  // 0 is everybody's first
  double now_s = 0, begins_s = 0;
  while (trace.requests.size() < requests) {
    Conversation one{begins_s, {0}};
    if (!waiting.empty() && waiting.top().at_s < begins_s) {
      one = waiting.top();
      waiting.pop();
    } else {
      begins_s += 0.4 * static_cast<double>(1 + below(2));
      for (uint64_t i = 0, n = 1 + below(12); i < n; ++i) one.blocks.push_back(next++);
    }
    now_s = one.at_s;
    TraceRequest request{.at_s = now_s, .output_tokens = 1, .first = trace.blocks.size()};
    for (uint64_t i = 0, n = below(3); i < n; ++i) one.blocks.push_back(next++);
    trace.blocks.insert(trace.blocks.end(), one.blocks.begin(), one.blocks.end());
    trace.blocks.push_back(next++);
    request.blocks = trace.blocks.size() - request.first;
    request.input_tokens = request.blocks * 512;
    trace.requests.push_back(request);
    // A third of those that begin come back; who came back does so more often.
    const bool came_back = one.blocks.size() > 14;
    if (below(3) == 0 || came_back || below(4) == 0) {
      one.at_s = now_s + 20 + static_cast<double>(below(came_back ? 60 : 120));
      if (one.blocks.size() < 40) waiting.push(std::move(one));
    }
  }
  trace.distinct = next;
  return trace;
}

Trace WithFullBlocks(const Trace& trace, uint64_t block_tokens) {
  Trace full;
  constexpr uint32_t kNone = UINT32_MAX;
  std::vector<uint32_t> numbers(trace.distinct, kNone);  // of those that are left
  for (TraceRequest request : trace.requests) {
    const auto blocks =
        trace.BlocksOf(request).first(std::min<size_t>(request.blocks, request.input_tokens / block_tokens));
    request.first = full.blocks.size();
    request.blocks = blocks.size();
    for (const uint32_t block : blocks) {
      if (numbers[block] == kNone) numbers[block] = static_cast<uint32_t>(full.distinct++);
      full.blocks.push_back(numbers[block]);
    }
    full.requests.push_back(request);
  }
  return full;
}

}  // namespace kvmanager::simulator
