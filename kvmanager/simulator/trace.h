// A trace of requests: what each asked for, in blocks of equal token counts, by the hash of all tokens up to the
// block's end.
//
// A value; reading it is the only effect on files. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <istream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager::simulator {

struct TraceRequest {
  double at_s = 0;  // since the trace's beginning
  uint64_t input_tokens = 0, output_tokens = 0;
  size_t first = 0;  // of its blocks in Trace::blocks
  size_t blocks = 0;
};

struct Trace {
  static constexpr size_t kRequestsMax = 100'000'000;
  static constexpr size_t kRequestBlocksMax = 1 << 20;
  static constexpr size_t kLineBytesMax = 64 << 20;
  static constexpr double kTimeMsMax = 1e15;     // 31,700 years
  static constexpr uint64_t kBlockTokens = 512;  // of the published traces of conversations
  static constexpr uint64_t kBlockTokensMax = uint64_t{1} << 20;

  std::vector<TraceRequest> requests;  // by time
  std::vector<uint32_t> blocks;        // numbers from 0 on, one for each hash, of all requests
  size_t distinct = 0;                 // numbers

  absl::Span<const uint32_t> BlocksOf(const TraceRequest& request) const {
    return absl::MakeConstSpan(blocks).subspan(request.first, request.blocks);
  }
};

/// Reads JSON, a request a line. All lines of a file have one of two formats:
///   a request:    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [integer, ...]}
///   of an agent:  the same with "session_id" (a text or an integer), and with "delay" (ms) instead of "timestamp":
///                 it begins so long after the session's request before, whose line is further up.
/// Integers have 64 bits, with a sign or without. Other fields are ignored; "output_length" may be missing.
///
/// What the fields say together must be possible: timestamps never go back, of agents within a session (equal ones are
/// fine), and hash_ids has a block for each block_tokens of input_length. A last block that is not full may be named or
/// left out.
///
/// block_tokens: of the trace's blocks, 1..kBlockTokensMax. progress: told bytes read, now and then; may be empty.
/// Errors: INVALID_ARGUMENT naming line and field.
absl::StatusOr<Trace> ReadTrace(std::istream& in, uint64_t block_tokens, const std::function<void(size_t)>& progress);
/// The same of a file, which errors name too. Errors: NOT_FOUND too.
absl::StatusOr<Trace> ReadTraceFile(const std::string& path, uint64_t block_tokens,
                                    const std::function<void(size_t)>& progress);

/// Leaves out what a daemon would not name: the last block of a request, where its tokens do not fill it.
Trace WithFullBlocks(const Trace& trace, uint64_t block_tokens);

/// A trace of conversations, made up from a seed, for tests: turns that come back after a while, a first block that all
/// share, last blocks that no one asks for again.
Trace MakeTrace(uint64_t seed, size_t requests);

}  // namespace kvmanager::simulator
