// Codes as planes of bits, and back. Included by hack_kernels_impl.h, once per instruction set inside its namespace,
// hence no include guard.

/// Bytes [16 rows][16 channels] -> words [j][r] of hack_format.h: K's lanes are 4 channels of row r, V's are rows
/// 4j..4j+3 of channel r.
KV_KERNEL_INLINE void Spread(const uint8_t* rows, bool is_v, uint32_t* words) {
  for (int j = 0; j < 4; ++j) {
    if (!is_v) {
      for (int r = 0; r < 16; ++r) std::memcpy(words + 16 * j + r, rows + 16 * r + 4 * j, 4);
      continue;
    }
    for (int r = 0; r < 16; r += kLanes) {
      U word = {};
      for (int lane = 0; lane < 4; ++lane) {
        word |= __builtin_convertvector(Load<B>(rows + (4 * j + lane) * 16 + r), U) << (8 * lane);
      }
      Store(words + 16 * j + r, word);
    }
  }
}

/// The inverse of Spread.
KV_KERNEL_INLINE void Gather(const uint32_t* words, bool is_v, uint8_t* rows) {
  for (int j = 0; j < 4; ++j) {
    if (!is_v) {
      for (int r = 0; r < 16; ++r) std::memcpy(rows + 16 * r + 4 * j, words + 16 * j + r, 4);
      continue;
    }
    for (int r = 0; r < 16; r += kLanes) {
      const U word = Load<U>(words + 16 * j + r);
      for (int lane = 0; lane < 4; ++lane) {
        Store(rows + (4 * j + lane) * 16 + r, __builtin_convertvector(word >> (8 * lane) & 0xffu, B));
      }
    }
  }
}

/// Where tile i of a 1-bit plane starts in a byte.
constexpr int OneBitShift(int i) { return (i & 1) + 4 * (i >> 1); }

/// Packs one segment of one strip. codes: [64 tokens][16 channels].
static void PackSegment(const uint8_t* codes, int width, bool is_v, uint8_t* out) {
  alignas(64) uint8_t rows[256];
  alignas(64) uint32_t words[kPlaneWords];
  if (width == 8) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 256; k += kVectorBytes) {
        Store(rows + k, Load<U>(codes + 256 * i + k) ^ (is_v ? 0x80808080u : 0u));
      }
      Spread(rows, is_v, words);
      for (int j = 0; j < 4; ++j) std::memcpy(out + 256 * j + 64 * i, words + 16 * j, 64);
    }
    return;
  }
  int low = 0;
  for (; width - low >= 2; low += 2, out += 256) {
    for (int k = 0; k < 256; k += kVectorBytes) {
      U bits = {};
      for (int i = 0; i < 4; ++i) bits |= (Load<U>(codes + 256 * i + k) >> low & 0x03030303u) << (2 * i);
      Store(rows + k, bits);
    }
    Spread(rows, is_v, words);
    std::memcpy(out, words, 256);
  }
  if (width == low) return;
  for (int k = 0; k < 256; k += kVectorBytes) {
    U bits = {};
    for (int i = 0; i < 4; ++i) bits |= (Load<U>(codes + 256 * i + k) >> low & 0x01010101u) << OneBitShift(i);
    Store(rows + k, bits);
  }
  Spread(rows, is_v, words);
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < 16; r += kLanes) {
      Store(out + 64 * h + 4 * r, Load<U>(words + 32 * h + r) | Load<U>(words + 32 * h + 16 + r) << 2);
    }
  }
}

/// The inverse of PackSegment.
static void UnpackSegment(const uint8_t* in, int width, bool is_v, uint8_t* codes) {
  alignas(64) uint8_t rows[256];
  alignas(64) uint32_t words[kPlaneWords];
  if (width == 8) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) std::memcpy(words + 16 * j, in + 256 * j + 64 * i, 64);
      Gather(words, is_v, rows);
      for (int k = 0; k < 256; k += kVectorBytes) {
        Store(codes + 256 * i + k, Load<U>(rows + k) ^ (is_v ? 0x80808080u : 0u));
      }
    }
    return;
  }
  std::memset(codes, 0, kStripTokens * kSegmentChannels);
  int low = 0;
  for (; width - low >= 2; low += 2, in += 256) {
    std::memcpy(words, in, 256);
    Gather(words, is_v, rows);
    for (int k = 0; k < 256; k += kVectorBytes) {
      const U bits = Load<U>(rows + k);
      for (int i = 0; i < 4; ++i) {
        uint8_t* at = codes + 256 * i + k;
        Store(at, Load<U>(at) | (bits >> (2 * i) & 0x03030303u) << low);
      }
    }
  }
  if (width == low) return;
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < 16; r += kLanes) {
      const U word = Load<U>(in + 64 * h + 4 * r);
      Store(words + 32 * h + r, word & 0x33333333u);
      Store(words + 32 * h + 16 + r, word >> 2 & 0x33333333u);
    }
  }
  Gather(words, is_v, rows);
  for (int k = 0; k < 256; k += kVectorBytes) {
    const U bits = Load<U>(rows + k);
    for (int i = 0; i < 4; ++i) {
      uint8_t* at = codes + 256 * i + k;
      Store(at, Load<U>(at) | (bits >> OneBitShift(i) & 0x01010101u) << low);
    }
  }
}
