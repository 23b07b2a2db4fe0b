// Copies bytes and computes their checksum in one pass: a local data connection does this with each page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvmanager::tcp {

/// One thread at a time; allocates once.
class CopyHash {
 public:
  CopyHash();
  ~CopyHash();
  /// Copies `bytes` bytes, past the caches (they are read much later), and returns the XXH3-64 of what it has stored,
  /// also if somebody writes to `from` meanwhile: each byte there is read once.
  uint64_t Copy(const uint8_t* from, uint8_t* to, size_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvmanager::tcp
