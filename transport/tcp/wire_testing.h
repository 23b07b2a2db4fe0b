// For tests that change frames on purpose: what follows looks at the change, not at the check.
#pragma once

#include <xxhash.h>

#include <string>

#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

/// `frame`, a hello or a header with what its check covers, with the check that wire.h says it has.
inline std::string WithGoodCheck(std::string frame) {
  const bool hello = frame.compare(0, sizeof(kMagic), std::string(kMagic, sizeof(kMagic))) == 0;
  const size_t at = hello ? 12 : 4;
  if (frame.size() < at + 4) return frame;
  uint32_t seed = 0;
  for (int i = 0; i < 4; ++i) seed |= static_cast<uint32_t>(static_cast<uint8_t>(frame[at - 4 + i])) << (8 * i);
  const uint64_t check = XXH3_64bits_withSeed(frame.data() + at + 4, frame.size() - at - 4, seed);
  for (int i = 0; i < 4; ++i) frame[at + i] = static_cast<char>(check >> (8 * i));
  return frame;
}

/// The same of each frame of what one side says on a connection, as far as frames follow one another: a hello and
/// frames, up to the first PAGES.
inline std::string WithGoodChecks(const std::string& stream) {
  if (stream.size() < kHelloBytes) return stream;
  std::string out = WithGoodCheck(stream.substr(0, kHelloBytes));
  while (out.size() + kHeaderBytes <= stream.size()) {
    uint64_t body = 0;
    for (int i = 7; i >= 0; --i) body = body << 8 | static_cast<uint8_t>(stream[out.size() + 8 + i]);
    if (body > stream.size() - out.size() - kHeaderBytes) break;
    const bool pages = stream[out.size()] == static_cast<char>(FrameType::kPages);
    out += WithGoodCheck(stream.substr(out.size(), kHeaderBytes + body));
    if (pages) break;
  }
  return out + stream.substr(out.size());
}

}  // namespace kvmanager::tcp
