// The readable reference of HACK: every step of codec and attention as plain loops over one head's side.
//
// Tests compare the fast paths with it: encoded bytes bit by bit, attention within rounding. Nothing else uses it. Free
// functions over values, so any thread may call them. Arithmetic of the codec is IEEE fp32 with round to nearest even
// and no contraction (this library is built with -ffp-contract=off), which every fast path repeats exactly.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "codecs/hack/hack_format.h"
#include "codecs/page_attention.h"

namespace kvmanager::hack {

inline constexpr int kSideK = 0;
inline constexpr int kSideV = 1;
/// A row's largest |value| at or below this quantises to zeros (its inverse would overflow, its product is below fp32's
/// noise).
inline constexpr float kNegligible = 0x1p-100f;

/// One side of one head of an encoded page, unpacked. `entry` of (token, channel) is the channel where partitions run
/// along tokens and the token where they run along channels; its partition is element / partition, element being the
/// other one.
struct HackCodes {
  int tokens = 0;
  int channels = 0;
  int partition = 0;           // elements of a partition
  int partitions = 0;          // of a page
  bool along_tokens = true;    // V always; K with k_axis=channel
  std::vector<uint8_t> codes;  // [tokens][channels], 0..2^width - 1 (also of V in 8 bits: the page's s8 plus 128)
  std::vector<float> steps;    // [partitions][entries] as attention reads them: after the rounding of the metadata
  std::vector<float> minima;   // [partitions][entries]
  std::vector<uint16_t>
      tops;  // 8-bit metadata: fp16 bits, (largest step, largest |minimum|) of each partition, or of the page
  std::vector<uint16_t> stored_steps;   // [partitions][entries] as stored: u8, or fp16 bits
  std::vector<uint16_t> stored_minima;  // [partitions][entries] as stored: s8 as its byte, or fp16 bits
  std::vector<uint16_t> sums;           // [partitions][tokens] sums of codes; empty unless stored
  uint16_t norm_top = 0;                // fp16 bits
  std::vector<uint8_t> stored_norms;    // [tokens] as stored, of norm_top; empty unless stored
  std::vector<float> norms;             // [tokens] what they stand for; likewise

  int entries() const { return along_tokens ? channels : tokens; }
  size_t meta_index(int token, int channel) const {
    return along_tokens ? size_t(token / partition) * channels + channel : size_t(channel / partition) * tokens + token;
  }
  uint8_t code(int token, int channel) const { return codes[size_t(token) * channels + channel]; }
  float step(int token, int channel) const { return steps[meta_index(token, channel)]; }
  float minimum(int token, int channel) const { return minima[meta_index(token, channel)]; }
  /// What the code stands for: (code * step + minimum) * norm (of rotated K and V with rotation=hadamard).
  float value(int token, int channel) const {
    const float unit = float(code(token, channel)) * step(token, channel) + minimum(token, channel);
    return norms.empty() ? unit : unit * norms[token];
  }
};

/// x <- H x / sqrt(n): the normalised Walsh-Hadamard transform, its own inverse. values.size() is a power of two.
void Hadamard(absl::Span<float> values);

/// Uniform in [0, 1), a multiple of 2^-24: what stochastic rounding adds before it truncates. A pure function of its
/// arguments.
float RoundingNoise(uint32_t layer, int head, int side, uint64_t token, int channel);

/// Quantises one side of one head of a raw page. false: declined, a value is not finite, or a norm, step or minimum
/// does not fit fp16. In fp32, in this order: the row (-0 becomes 0), its Hadamard transform, and of V with v_norm=1
///   n_t = max |v_t[c]|, exact; top = max n_t of the page and head, rounded up to fp16;
///   u_t = ceil(n_t * 255 / top), the product first, then the quotient, clamped to 1..255 (0 where top is 0);
///   m_t = top * u_t / 255, the product first; y_t[c] = v_t[c] * (1 / m_t) + 0, the inverse first (0 where m_t is at
///   most kNegligible), so that -0 becomes 0.
/// What is quantised then is y.
bool QuantizeHead(const HackFormat& format, const uint8_t* raw_page, int head, int side, uint32_t layer,
                  uint64_t first_token, HackCodes* out);
/// Writes `codes` into an encoded page (padding is not touched).
void PackHead(const HackFormat& format, const HackCodes& codes, int head, int side, uint8_t* page);
/// Reads one side of one head of an encoded page; the inverse of PackHead.
HackCodes UnpackHead(const HackFormat& format, const uint8_t* page, int head, int side);

/// Encodes a page, padding zeroed. false: declined, and the page's bytes are all zero.
bool ReferenceEncode(const HackFormat& format, const uint8_t* raw_page, uint32_t layer, uint64_t first_token,
                     uint8_t* page);
/// Decodes a page to the layout's dtype (values beyond its range become its largest finite value).
void ReferenceDecode(const HackFormat& format, const uint8_t* page, uint8_t* raw_page);

/// HACK attention (paper section 5; task.visible must be nullptr). Rounding decisions are made in fp32, sums in double:
///  - K along tokens: per partition and row f_c = q_c * step_c (fp32), amax = max |f_c|, f'_c = rint(f_c * (127 /
///    amax)) in s8;
///    score = scale * (amax / 127 * sum_c f'_c code_c + sum_c q_c minimum_c). amax <= kNegligible gives f' = 0.
///    With SideLayout::two_byte_q, f' has a second byte where the width is 8: x = f_c * (127 / amax) (fp32), f'_c =
///    rint(x), f''_c = rint((x - f'_c) * 254) in s8, and f'_c + f''_c / 254 stands for f'_c in the score.
///  - K along channels, q=symmetric: per partition and row amax = max |q_c|, q'_c = rint(q_c * (127 / amax)) in s8, a =
///    amax / 127;
///    score = scale * sum over partitions of a * (step * sum q' code + minimum * sum q').
///    q=asymmetric: z = min q_c, range = max q_c - z, q'_c = rint((q_c - z) * (255 / range)) in u8, a = range / 255;
///    the term is a * step * sum q' code + z * step * sum code + minimum * (a * sum q' + partition * z).
///  - P, page by page: max <- max(max, the page's largest score), p = exp(score - max), sum += p (not quantised); per
///    partition of V and row r = p (fp32), with v_norm=1 r = p * u (fp32; u: the stored norm, 0..255), rmax = max r (a
///    partition with rmax <= kNegligible adds nothing to acc), r' = rint(r * (255 / rmax)) in u8; with unit = 1, or top
///    / 255 of the norms, acc_c += rmax / 255 * unit * (step_c * sum r' code_c + minimum_c * sum r').
///  - rotation=hadamard: task.q and state.acc are rows in the rotated space; the caller maps them.
void ReferenceAttend(const HackFormat& format, const PageAttentionTask& task, const SoftmaxRows& state);

}  // namespace kvmanager::hack
