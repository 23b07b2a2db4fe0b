#include "codecs/pq/codebook.h"

#include <algorithm>
#include <cstring>

namespace kvmanager::pq {

CodeChunk& Codes::LastForAppend() {
  const uint64_t used = tokens_ % CodeChunk::kTokens;
  if (used == 0) {
    chunks_.push_back(std::make_shared<CodeChunk>(rows_, CodeChunk::kTokens));
  } else if (chunks_.back()->written != used) {
    // Another list went on from here.
    auto copy = std::make_shared<CodeChunk>(rows_, CodeChunk::kTokens);
    for (size_t r = 0; r < rows_; ++r) std::memcpy(copy->row(r), chunks_.back()->row(r), used);
    chunks_.back() = std::move(copy);
  }
  return *chunks_.back();
}

void Codes::Extend(uint64_t tokens) {
  while (tokens > 0) {
    CodeChunk& chunk = LastForAppend();
    const uint64_t used = tokens_ % CodeChunk::kTokens, count = std::min(tokens, CodeChunk::kTokens - used);
    chunk.written = used + count;
    tokens_ += count;
    tokens -= count;
  }
}

void Codes::Append(const CodeChunk& from, uint64_t first, uint64_t count) {
  while (count > 0) {
    CodeChunk& chunk = LastForAppend();
    const uint64_t used = tokens_ % CodeChunk::kTokens, now = std::min(count, CodeChunk::kTokens - used);
    for (size_t r = 0; r < rows_; ++r) std::memcpy(chunk.row(r) + used, from.row(r) + first, now);
    chunk.written = used + now;
    tokens_ += now;
    first += now;
    count -= now;
  }
}

void Codes::Truncate(uint64_t tokens) {
  if (tokens >= tokens_) return;
  tokens_ = tokens;
  chunks_.resize((tokens + CodeChunk::kTokens - 1) / CodeChunk::kTokens);
}

}  // namespace kvmanager::pq
