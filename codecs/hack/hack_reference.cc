#include "codecs/hack/hack_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::hack {
namespace {

/// One partition and entry, or 0 bits: what its codes are chosen against.
struct Bounds {
  float lo = 0;
  float hi = 0;
};

/// The partitions that share a pair of tops, as values [partition][entry][element].
struct Group {
  std::vector<std::vector<float>> elements;
  std::vector<int> widths;
  std::vector<bool> least_squares;
};

/// Metadata of a group as stored and as read back.
struct GroupMeta {
  std::vector<float> steps, minima;
  std::vector<uint16_t> stored_steps, stored_minima;
  uint16_t tops[2] = {0, 0};
};

constexpr float kQueryLowLevels = 254;  // of q's second byte in a unit of its first

bool FitsHalf(float f) { return std::isfinite(HalfToFloat(FloatToHalf(f))); }
float RoundToHalf(float f) { return HalfToFloat(FloatToHalf(f)); }

float Mean(const std::vector<float>& x) {
  float sum = 0;
  for (float f : x) sum += f;
  return sum / float(x.size());
}

/// Rounds bounds to metadata. false: something does not fit fp16.
bool MakeMeta(const HackParameters& parameters, const Group& group, const std::vector<Bounds>& bounds, GroupMeta* out) {
  const size_t n = bounds.size();
  std::vector<float> lo(n), step(n);
  float top_step = 0, top_min = 0;
  for (size_t i = 0; i < n; ++i) {
    const float lowest = group.widths[i] == 0 ? Mean(group.elements[i]) : bounds[i].lo;
    if (!FitsHalf(lowest)) return false;
    lo[i] = RoundToHalf(lowest);
    if (group.widths[i] > 0) {
      const float wanted = (bounds[i].hi - lo[i]) / float((1 << group.widths[i]) - 1);
      if (!FitsHalf(wanted)) return false;
      step[i] = std::max(0.0f, RoundToHalf(wanted));
    }
    top_step = std::max(top_step, step[i]);
    top_min = std::max(top_min, std::fabs(lo[i]));
  }
  out->steps.resize(n), out->minima.resize(n), out->stored_steps.resize(n), out->stored_minima.resize(n);
  out->tops[0] = FloatToHalf(top_step), out->tops[1] = FloatToHalf(top_min);
  for (size_t i = 0; i < n; ++i) {
    if (parameters.meta_bits == 16) {
      out->stored_steps[i] = FloatToHalf(step[i]), out->stored_minima[i] = FloatToHalf(lo[i]);
      out->steps[i] = step[i], out->minima[i] = lo[i];
      continue;
    }
    float u8 = 0, s8 = 0;
    if (group.widths[i] > 0) u8 = std::max(1.0f, top_step > 0 ? std::nearbyint(step[i] * 255.0f / top_step) : 0.0f);
    if (top_min > 0) s8 = std::nearbyint(lo[i] * 127.0f / top_min);
    out->stored_steps[i] = uint16_t(u8), out->stored_minima[i] = uint8_t(int8_t(s8));
    out->steps[i] = top_step * u8 / 255.0f, out->minima[i] = top_min * s8 / 127.0f;
  }
  return true;
}

/// Position of x in steps above the minimum, clamped to the codes.
float Level(float x, float step, float minimum, int width) {
  const float inverse = step > 0 ? 1.0f / step : 0.0f;
  const float level = (x - minimum) * inverse;
  return std::min(level > 0 ? level : 0.0f, float((1 << width) - 1));
}

/// Shrinks and shifts the ranges to the least squared error on a small grid.
void FitRanges(const HackParameters& parameters, const Group& group, std::vector<Bounds>* bounds) {
  const std::vector<Bounds> full = *bounds;
  std::vector<float> best(full.size(), std::numeric_limits<float>::infinity());
  for (int percent = 45; percent <= 100; percent += 5) {
    for (double shift : {-0.15, -0.05, 0.0, 0.05, 0.15}) {
      std::vector<Bounds> tried(full.size());
      for (size_t i = 0; i < full.size(); ++i) {
        const float mid = (full[i].lo + full[i].hi) / 2, half = (full[i].hi - full[i].lo) / 2;
        tried[i] = {mid + half * float(shift - percent / 100.0), mid + half * float(shift + percent / 100.0)};
      }
      GroupMeta meta;
      if (!MakeMeta(parameters, group, tried, &meta)) continue;
      for (size_t i = 0; i < full.size(); ++i) {
        if (!group.least_squares[i]) continue;
        float error = 0;
        for (float x : group.elements[i]) {
          const float code = std::nearbyint(Level(x, meta.steps[i], meta.minima[i], group.widths[i]));
          const float off = code * meta.steps[i] + meta.minima[i] - x;
          error += off * off;
        }
        if (error < best[i]) best[i] = error, (*bounds)[i] = tried[i];
      }
    }
  }
}

uint32_t Mix32(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6b;
  h ^= h >> 13;
  h *= 0xc2b2ae35;
  return h ^ (h >> 16);
}

uint64_t Mix64(uint64_t h) {
  h += 0x9e3779b97f4a7c15;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
  h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
  return h ^ (h >> 31);
}

/// Calls visit(bit of the code, byte offset from the strip's codes, bit of that byte) for every stored bit of one code.
template <typename Visit>
void ForEachBit(const SideLayout& s, int side, int token, int channel, Visit visit) {
  const int segment = channel / kSegmentChannels, c = channel % kSegmentChannels, t = token % kStripTokens;
  const int i = t / 16;
  const int j = side == kSideK ? c / 4 : t % 16 / 4;
  const int lane = side == kSideK ? c % 4 : t % 4;
  const int r = side == kSideK ? t % 16 : c;
  const int width = s.segment_bits[segment];
  uint32_t at = s.segment_offset[segment];
  if (width == 8) {
    for (int bit = 0; bit < 8; ++bit) visit(bit, at + ((j * 4 + i) * 16 + r) * 4 + lane, bit);
    return;
  }
  for (int low = 0; low < width; low += 2) {
    if (width - low >= 2) {
      for (int bit = 0; bit < 2; ++bit) visit(low + bit, at + (j * 16 + r) * 4 + lane, 2 * i + bit);
      at += 256;
    } else {
      visit(low, at + (j / 2 * 16 + r) * 4 + lane, (i & 1) + 4 * (i >> 1) + 2 * (j % 2));
    }
  }
}

/// fp16 bits of the least number that is not below f, which is 0 or more.
uint16_t RoundUpToHalf(float f) {
  const uint16_t bits = FloatToHalf(f);
  return HalfToFloat(bits) < f ? uint16_t(bits + 1) : bits;
}

void Store16(uint8_t* at, uint16_t value) { std::memcpy(at, &value, 2); }
uint16_t Load16(const uint8_t* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}

HackCodes Shape(const HackFormat& format, int head, int side) {
  const SideLayout& s = format.heads[head].side[side];
  HackCodes out;
  out.tokens = format.layout.page_tokens, out.channels = format.layout.head_dim;
  out.along_tokens = side == kSideV || format.parameters.k_axis == Axis::kChannel;
  out.partition = s.partition, out.partitions = s.partitions;
  out.codes.resize(size_t(out.tokens) * out.channels);
  const size_t meta = size_t(out.partitions) * out.entries();
  out.steps.resize(meta), out.minima.resize(meta), out.stored_steps.resize(meta), out.stored_minima.resize(meta);
  if (format.parameters.meta_bits == 8) out.tops.resize(2 * (out.along_tokens ? out.partitions : 1));
  if (s.sums) out.sums.resize(meta);
  if (s.norms) out.stored_norms.resize(out.tokens), out.norms.resize(out.tokens);
  return out;
}

float Norm(float top, uint8_t stored) { return top * float(stored) / 255.0f; }

/// Divides the rows of x [tokens][channels] by their norms, which it sets in *out. false: the largest does not fit
/// fp16.
bool FactorNorms(std::vector<float>* x, HackCodes* out) {
  std::vector<float> norms(out->tokens);
  for (size_t i = 0; i < x->size(); ++i) {
    float& norm = norms[i / out->channels];
    norm = std::max(norm, std::fabs((*x)[i]));
  }
  out->norm_top = RoundUpToHalf(*std::max_element(norms.begin(), norms.end()));
  const float top = HalfToFloat(out->norm_top);
  if (!std::isfinite(top)) return false;
  for (int t = 0; t < out->tokens; ++t) {
    if (top > 0) out->stored_norms[t] = uint8_t(std::clamp(std::ceil(norms[t] * 255.0f / top), 1.0f, 255.0f));
    out->norms[t] = Norm(top, out->stored_norms[t]);
    const float inverse = out->norms[t] > kNegligible ? 1.0f / out->norms[t] : 0.0f;
    for (int c = 0; c < out->channels; ++c) {
      float& value = (*x)[size_t(t) * out->channels + c];
      value = value * inverse + 0.0f;
    }
  }
  return true;
}

}  // namespace

void Hadamard(absl::Span<float> values) {
  const size_t n = values.size();
  KV_CHECK(n > 0 && (n & (n - 1)) == 0);
  for (size_t half = 1; half < n; half *= 2) {
    for (size_t i = 0; i < n; ++i) {
      if (i & half) continue;
      const float a = values[i], b = values[i + half];
      values[i] = a + b, values[i + half] = a - b;
    }
  }
  const float norm = float(1.0 / std::sqrt(double(n)));
  for (float& f : values) f *= norm;
}

float RoundingNoise(uint32_t layer, int head, int side, uint64_t token, int channel) {
  const uint64_t place = Mix64(uint64_t(layer) << 32 | uint64_t(head) << 1 | uint64_t(side));
  const uint32_t seed = uint32_t(Mix64(place ^ token) >> 32);
  return float(Mix32(seed + uint32_t(channel) * 0x9e3779b9) >> 8) * 0x1p-24f;
}

bool QuantizeHead(const HackFormat& format, const uint8_t* raw_page, int head, int side, uint32_t layer,
                  uint64_t first_token, HackCodes* out) {
  const PageLayout& layout = format.layout;
  const HackParameters& parameters = format.parameters;
  const SideLayout& s = format.heads[head].side[side];
  *out = Shape(format, head, side);
  std::vector<float> x(out->codes.size());
  for (int t = 0; t < out->tokens; ++t) {
    float* row = x.data() + size_t(t) * out->channels;
    for (int c = 0; c < out->channels; ++c)
      row[c] = LoadElement(raw_page + layout.raw_offset(side, head, t), layout.dtype, c) + 0.0f;
    if (parameters.rotation == Rotation::kHadamard) Hadamard({row, size_t(out->channels)});
    for (int c = 0; c < out->channels; ++c) {
      if (!std::isfinite(row[c])) return false;
    }
  }
  if (s.norms && !FactorNorms(&x, out)) return false;

  // Along tokens each partition has its own tops; along channels one pair serves the page and head.
  const int group_partitions = out->along_tokens ? 1 : out->partitions;
  for (int first = 0; first < out->partitions; first += group_partitions) {
    Group group;
    std::vector<Bounds> bounds;
    for (int p = first; p < first + group_partitions; ++p) {
      for (int e = 0; e < out->entries(); ++e) {
        std::vector<float> elements;
        for (int i = p * out->partition; i < (p + 1) * out->partition; ++i) {
          elements.push_back(out->along_tokens ? x[size_t(i) * out->channels + e] : x[size_t(e) * out->channels + i]);
        }
        const int segment = (out->along_tokens ? e : p * out->partition) / kSegmentChannels;
        group.widths.push_back(s.segment_bits[segment]);
        group.least_squares.push_back(s.segment_least_squares[segment]);
        bounds.push_back(
            {*std::min_element(elements.begin(), elements.end()), *std::max_element(elements.begin(), elements.end())});
        group.elements.push_back(std::move(elements));
      }
    }
    if (std::find(group.least_squares.begin(), group.least_squares.end(), true) != group.least_squares.end()) {
      FitRanges(parameters, group, &bounds);
    }
    GroupMeta meta;
    if (!MakeMeta(parameters, group, bounds, &meta)) return false;
    const size_t base = size_t(first) * out->entries();
    std::copy(meta.steps.begin(), meta.steps.end(), out->steps.begin() + base);
    std::copy(meta.minima.begin(), meta.minima.end(), out->minima.begin() + base);
    std::copy(meta.stored_steps.begin(), meta.stored_steps.end(), out->stored_steps.begin() + base);
    std::copy(meta.stored_minima.begin(), meta.stored_minima.end(), out->stored_minima.begin() + base);
    if (parameters.meta_bits == 8)
      std::copy(meta.tops, meta.tops + 2, out->tops.begin() + 2 * (first / group_partitions));
  }

  for (int t = 0; t < out->tokens; ++t) {
    for (int c = 0; c < out->channels; ++c) {
      const int width = s.segment_bits[c / kSegmentChannels];
      const float level = Level(x[size_t(t) * out->channels + c], out->step(t, c), out->minimum(t, c), width);
      int code = int(std::nearbyint(level));
      if (parameters.rounding == Rounding::kStochastic) {
        code = std::min(int(level + RoundingNoise(layer, head, side, first_token + t, c)), (1 << width) - 1);
      }
      out->codes[size_t(t) * out->channels + c] = uint8_t(code);
      if (s.sums) out->sums[size_t(c / out->partition) * out->tokens + t] += uint16_t(code);
    }
  }
  return true;
}

void PackHead(const HackFormat& format, const HackCodes& codes, int head, int side, uint8_t* page) {
  const SideLayout& s = format.heads[head].side[side];
  uint8_t* record = page + format.heads[head].offset;
  for (int t = 0; t < codes.tokens; ++t) {
    uint8_t* strip = record + s.codes + size_t(t / kStripTokens) * s.strip_bytes;
    for (int c = 0; c < codes.channels; ++c) {
      const bool offset = side == kSideV && s.segment_bits[c / kSegmentChannels] == 8;
      const uint8_t code = codes.code(t, c) ^ (offset ? 0x80 : 0);
      ForEachBit(s, side, t, c, [&](int bit, uint32_t at, int to) {
        strip[at] = uint8_t((strip[at] & ~(1 << to)) | (code >> bit & 1) << to);
      });
    }
  }
  for (size_t i = 0; i < codes.tops.size(); ++i) Store16(record + s.tops + 2 * i, codes.tops[i]);
  for (size_t i = 0; i < codes.stored_steps.size(); ++i) {
    if (format.parameters.meta_bits == 8) {
      record[s.steps + i] = uint8_t(codes.stored_steps[i]), record[s.minima + i] = uint8_t(codes.stored_minima[i]);
    } else {
      Store16(record + s.steps + 2 * i, codes.stored_steps[i]),
          Store16(record + s.minima + 2 * i, codes.stored_minima[i]);
    }
  }
  for (size_t i = 0; i < codes.sums.size(); ++i) Store16(record + s.sums + 2 * i, codes.sums[i]);
  if (s.norms) {
    Store16(record + s.norm_top, codes.norm_top);
    std::copy(codes.stored_norms.begin(), codes.stored_norms.end(), record + s.norms);
  }
}

HackCodes UnpackHead(const HackFormat& format, const uint8_t* page, int head, int side) {
  const SideLayout& s = format.heads[head].side[side];
  const uint8_t* record = page + format.heads[head].offset;
  HackCodes out = Shape(format, head, side);
  for (int t = 0; t < out.tokens; ++t) {
    const uint8_t* strip = record + s.codes + size_t(t / kStripTokens) * s.strip_bytes;
    for (int c = 0; c < out.channels; ++c) {
      int code = side == kSideV && s.segment_bits[c / kSegmentChannels] == 8 ? 0x80 : 0;
      ForEachBit(s, side, t, c, [&](int bit, uint32_t at, int from) { code ^= (strip[at] >> from & 1) << bit; });
      out.codes[size_t(t) * out.channels + c] = uint8_t(code);
    }
  }
  for (size_t i = 0; i < out.tops.size(); ++i) out.tops[i] = Load16(record + s.tops + 2 * i);
  for (size_t i = 0; i < out.steps.size(); ++i) {
    if (format.parameters.meta_bits == 8) {
      const uint16_t* tops = out.tops.data() + (out.along_tokens ? 2 * (i / out.entries()) : 0);
      out.stored_steps[i] = record[s.steps + i], out.stored_minima[i] = record[s.minima + i];
      out.steps[i] = HalfToFloat(tops[0]) * float(out.stored_steps[i]) / 255.0f;
      out.minima[i] = HalfToFloat(tops[1]) * float(int8_t(out.stored_minima[i])) / 127.0f;
    } else {
      out.stored_steps[i] = Load16(record + s.steps + 2 * i), out.stored_minima[i] = Load16(record + s.minima + 2 * i);
      out.steps[i] = HalfToFloat(out.stored_steps[i]), out.minima[i] = HalfToFloat(out.stored_minima[i]);
    }
  }
  for (size_t i = 0; i < out.sums.size(); ++i) out.sums[i] = Load16(record + s.sums + 2 * i);
  if (s.norms) out.norm_top = Load16(record + s.norm_top);
  for (size_t t = 0; t < out.norms.size(); ++t) {
    out.stored_norms[t] = record[s.norms + t];
    out.norms[t] = Norm(HalfToFloat(out.norm_top), out.stored_norms[t]);
  }
  return out;
}

bool ReferenceEncode(const HackFormat& format, const uint8_t* raw_page, uint32_t layer, uint64_t first_token,
                     uint8_t* page) {
  std::memset(page, 0, format.page_bytes);
  for (int head = 0; head < format.layout.kv_heads; ++head) {
    for (int side : {kSideK, kSideV}) {
      HackCodes codes;
      if (!QuantizeHead(format, raw_page, head, side, layer, first_token, &codes)) {
        std::memset(page, 0, format.page_bytes);
        return false;
      }
      PackHead(format, codes, head, side, page);
    }
  }
  return true;
}

void ReferenceDecode(const HackFormat& format, const uint8_t* page, uint8_t* raw_page) {
  const PageLayout& layout = format.layout;
  const float largest = layout.dtype == DType::kFloat16 ? 65504.0f : 0x1.fep127f;
  for (int head = 0; head < layout.kv_heads; ++head) {
    for (int side : {kSideK, kSideV}) {
      const HackCodes codes = UnpackHead(format, page, head, side);
      std::vector<float> row(layout.head_dim);
      for (int t = 0; t < layout.page_tokens; ++t) {
        for (int c = 0; c < layout.head_dim; ++c) row[c] = codes.value(t, c);
        if (format.parameters.rotation == Rotation::kHadamard) Hadamard(absl::MakeSpan(row));
        uint8_t* out = raw_page + layout.raw_offset(side, head, t);
        for (int c = 0; c < layout.head_dim; ++c)
          StoreElement(out, layout.dtype, c, std::clamp(row[c], -largest, largest));
      }
    }
  }
}

namespace {

/// Scores, not yet scaled, of one query row with every token of a head's K.
std::vector<double> Scores(const HackFormat& format, int head, const HackCodes& k, const float* q) {
  const SideLayout& side = format.heads[head].side[kSideK];
  std::vector<double> scores(k.tokens);
  for (int p = 0; p < k.partitions; ++p) {
    if (k.along_tokens) {
      const float* step = k.steps.data() + size_t(p) * k.channels;
      const float* minimum = k.minima.data() + size_t(p) * k.channels;
      float largest = 0;
      double constant = 0;
      for (int c = 0; c < k.channels; ++c) {
        largest = std::max(largest, std::fabs(q[c] * step[c]));
        constant += double(q[c]) * minimum[c];
      }
      std::vector<int> folded(k.channels), low(k.channels);  // a byte each
      for (int c = 0; c < k.channels && largest > kNegligible; ++c) {
        const float x = q[c] * step[c] * (127.0f / largest);
        folded[c] = int(std::nearbyint(x));
        if (side.two_byte_q && side.segment_bits[c / kSegmentChannels] == 8) {
          low[c] = int(std::nearbyint((x - float(folded[c])) * kQueryLowLevels));
        }
      }
      for (int t = p * k.partition; t < (p + 1) * k.partition; ++t) {
        int64_t dot = 0, low_dot = 0;
        for (int c = 0; c < k.channels; ++c) {
          dot += folded[c] * k.code(t, c);
          low_dot += low[c] * k.code(t, c);
        }
        scores[t] = double(largest) / 127 * (double(dot) + double(low_dot) / kQueryLowLevels) + constant;
      }
      continue;
    }
    const float* part = q + p * k.partition;
    const bool asymmetric = format.parameters.query == QueryCode::kAsymmetric;
    float zero = 0, range = 0;
    for (int c = 0; c < k.partition; ++c) range = std::max(range, std::fabs(part[c]));
    if (asymmetric) {
      zero = *std::min_element(part, part + k.partition);
      range = *std::max_element(part, part + k.partition) - zero;
    }
    const float levels = asymmetric ? 255.0f : 127.0f;
    std::vector<int> coded(k.partition);
    int64_t q_sum = 0;
    for (int c = 0; c < k.partition; ++c) {
      coded[c] = range > kNegligible ? int(std::nearbyint((part[c] - zero) * (levels / range))) : 0;
      q_sum += coded[c];
    }
    const double q_step = double(range) / levels;
    for (int t = 0; t < k.tokens; ++t) {
      int64_t dot = 0, code_sum = 0;
      for (int c = 0; c < k.partition; ++c) {
        dot += coded[c] * k.code(t, p * k.partition + c);
        code_sum += k.code(t, p * k.partition + c);
      }
      if (asymmetric) code_sum = k.sums[size_t(p) * k.tokens + t];
      const double step = k.steps[size_t(p) * k.tokens + t], minimum = k.minima[size_t(p) * k.tokens + t];
      scores[t] += q_step * step * double(dot) + zero * step * double(code_sum) +
                   minimum * (q_step * double(q_sum) + k.partition * double(zero));
    }
  }
  return scores;
}

}  // namespace

void ReferenceAttend(const HackFormat& format, const PageAttentionTask& task, const SoftmaxRows& state) {
  KV_CHECK(task.visible == nullptr);
  const int d = format.layout.head_dim;
  for (int row = 0; row < task.rows; ++row) {
    double max = state.max[row], sum = state.sum[row];
    std::vector<double> acc(state.acc + size_t(row) * d, state.acc + size_t(row + 1) * d);
    for (const uint8_t* page : task.pages) {
      const HackCodes k = UnpackHead(format, page, task.kv_head, kSideK);
      const HackCodes v = UnpackHead(format, page, task.kv_head, kSideV);
      std::vector<double> scores = Scores(format, task.kv_head, k, task.q + size_t(row) * d);
      for (double& s : scores) s *= task.scale;
      const double new_max = std::max(max, *std::max_element(scores.begin(), scores.end()));
      const double rescale = std::exp(max - new_max);
      max = new_max, sum *= rescale;
      for (double& a : acc) a *= rescale;
      std::vector<float> r(k.tokens);
      for (int t = 0; t < k.tokens; ++t) {
        sum += r[t] = float(std::exp(scores[t] - max));
        if (!v.norms.empty()) r[t] *= float(v.stored_norms[t]);
      }
      const double unit = v.norms.empty() ? 1 : double(HalfToFloat(v.norm_top)) / 255;
      for (int part = 0; part < v.partitions; ++part) {
        const int first = part * v.partition, end = first + v.partition;
        const float largest = *std::max_element(r.begin() + first, r.begin() + end);
        if (largest <= kNegligible) continue;
        std::vector<int> coded(v.partition);
        int64_t coded_sum = 0;
        for (int t = first; t < end; ++t)
          coded_sum += coded[t - first] = int(std::nearbyint(r[t] * (255.0f / largest)));
        for (int c = 0; c < d; ++c) {
          int64_t dot = 0;
          for (int t = first; t < end; ++t) dot += coded[t - first] * v.code(t, c);
          acc[c] += double(largest) / 255 * unit *
                    (double(v.step(first, c)) * double(dot) + double(v.minimum(first, c)) * double(coded_sum));
        }
      }
    }
    state.max[row] = float(max), state.sum[row] = float(sum);
    for (int c = 0; c < d; ++c) state.acc[size_t(row) * d + c] = float(acc[c]);
  }
}

}  // namespace kvmanager::hack
