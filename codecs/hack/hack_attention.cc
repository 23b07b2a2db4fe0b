#include "codecs/hack/hack_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "codecs/hack/hack_attention_kernel.h"
#include "codecs/workspace_cutter.h"
#include "kvmanager/base/status.h"

namespace kvmanager::hack {
namespace {

using AttendFunction = void (*)(HackArguments&);

AttendFunction AttendOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kHackAttendAvx512;
  if (isa == Isa::kAvx2) return kHackAttendAvx2;
#endif
  return kHackAttendPortable;
}

/// Fills in what loops over mixed widths go by.
void MixRuns(HackSide& side) {
  side.mixes = side.run_count > 1;
  for (int i = 0; i < side.run_count; ++i) side.mixes &= side.runs[i].bits <= 4 && side.runs[i].partition == 0;
  if (!side.mixes) return;
  int waiting = -1;
  for (int i = 0; i < side.run_count; ++i) {
    const HackRun& run = side.runs[i];
    const int quads = run.count / 4 * 4;
    if (quads > 0) side.quads[side.quad_count++] = {run.bits, run.first, quads, 0};
    for (int s = run.first; s < run.first + run.count; ++s) {
      side.of_width[run.bits][side.width_count[run.bits]++] = uint8_t(s);
      if (s < run.first + quads) continue;
      if (waiting < 0) {
        waiting = s;
        continue;
      }
      const bool falls = side.bits[waiting] >= side.bits[s];
      side.pairs[side.pair_count][0] = uint8_t(falls ? waiting : s);
      side.pairs[side.pair_count++][1] = uint8_t(falls ? s : waiting);
      waiting = -1;
    }
  }
  if (waiting >= 0) side.last = {side.bits[waiting], waiting, 1, 0};
}

HackSide SideOf(const SideLayout& layout, bool along_channels) {
  HackSide side = {};
  for (int s = 0; s < layout.segments; ++s) {
    side.segment_offset[s] = layout.segment_offset[s];
    const int bits = side.bits[s] = layout.segment_bits[s];
    const int partition = along_channels ? s * kSegmentChannels / layout.partition : 0;
    if (bits == 0) {
      side.empty[side.empty_count++] = uint8_t(s);
      continue;
    }
    HackRun* last = side.run_count == 0 ? nullptr : &side.runs[side.run_count - 1];
    if (last != nullptr && last->bits == bits && last->partition == partition && last->first + last->count == s) {
      ++last->count;
    } else {
      side.runs[side.run_count++] = {bits, s, 1, partition};
    }
  }
  MixRuns(side);
  side.strip_bytes = layout.strip_bytes;
  side.partitions = layout.partitions;
  side.partition = layout.partition;
  side.meta_entries = layout.meta_entries;
  side.codes = layout.codes;
  side.tops = layout.tops;
  side.steps = layout.steps;
  side.minima = layout.minima;
  side.sums = layout.sums;
  side.end = layout.end;
  return side;
}

/// x <- H x / sqrt(n), the normalised Walsh-Hadamard transform; n is a power of two.
void Rotate(float* x, int n) {
  for (int half = 1; half < n; half *= 2) {
    for (int base = 0; base < n; base += 2 * half) {
      for (int i = base; i < base + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float factor = 1 / std::sqrt(float(n));
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

class HackAttention final : public PageAttention {
 public:
  HackAttention(const HackFormat* format, Isa isa)
      : format_(*format), along_channels_(format->parameters.k_axis == Axis::kToken), attend_(AttendOf(isa)) {
    for (const HeadLayout& head : format->heads) {
      heads_.push_back({head.offset, SideOf(head.side[0], along_channels_), SideOf(head.side[1], false)});
      partitions_max_ = std::max({partitions_max_, head.side[0].partitions, head.side[1].partitions});
    }
  }

  size_t workspace_bytes(int rows) const override {
    WorkspaceCutter cutter(nullptr);
    float* rotated;
    CutScratch(cutter, rows, &rotated);
    return cutter.used();
  }

  size_t head_bytes(int layer, int kv_head) const override { return heads_[kv_head].v.end; }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    KV_CHECK(task.visible == nullptr);
    const int d = format_.layout.head_dim;
    WorkspaceCutter cutter(workspace.data());
    HackArguments a;
    float* rotated;
    a.scratch = CutScratch(cutter, task.rows, &rotated);
    KV_CHECK(cutter.used() <= workspace.size());
    a.q = task.q;
    if (format_.parameters.hadamard) {
      std::memcpy(rotated, task.q, size_t(task.rows) * d * sizeof(float));
      for (int r = 0; r < task.rows; ++r) Rotate(rotated + size_t(r) * d, d);
      a.q = rotated;
    }
    a.rows = task.rows;
    a.head_dim = d;
    a.page_tokens = format_.layout.page_tokens;
    a.scale = task.scale;
    a.pages = task.pages.data();
    a.page_count = task.pages.size();
    a.head = &heads_[task.kv_head];
    a.next_pages = task.next_pages.data();
    a.next_count = task.next_pages.size();
    a.next_offset = heads_[task.next_kv_head].offset;
    a.ahead = nullptr;
    a.meta8 = format_.parameters.meta_bits == 8;
    a.along_channels = along_channels_;
    a.asymmetric = format_.parameters.query == QueryCode::kAsymmetric;
    a.max = state.max;
    a.sum = state.sum;
    a.acc = state.acc;
    attend_(a);
  }

 private:
  HackScratch CutScratch(WorkspaceCutter& cutter, size_t rows, float** rotated) const {
    const size_t d = format_.layout.head_dim, tokens = format_.layout.page_tokens, entries = std::max(d, tokens);
    HackScratch s;
    s.steps = cutter.Cut<float>(entries);
    s.minima = cutter.Cut<float>(entries);
    s.v_steps = cutter.Cut<float>(d);
    s.v_minima = cutter.Cut<float>(d);
    s.sums = cutter.Cut<float>(entries);
    s.q8 = cutter.Cut<int8_t>(rows * d);
    s.q_step = cutter.Cut<float>(rows * partitions_max_);
    s.q_min = cutter.Cut<float>(rows * partitions_max_);
    s.q_sums = cutter.Cut<float>(rows * partitions_max_);
    s.scores = cutter.Cut<float>(rows * tokens);
    s.p8 = cutter.Cut<uint8_t>(rows * tokens);
    s.p_step = cutter.Cut<float>(rows * partitions_max_);
    s.p_sum = cutter.Cut<float>(rows * partitions_max_);
    *rotated = format_.parameters.hadamard ? cutter.Cut<float>(rows * d) : nullptr;
    return s;
  }

  const HackFormat& format_;
  const bool along_channels_;
  const AttendFunction attend_;
  std::vector<HackHead> heads_;
  int partitions_max_ = 1;
};

}  // namespace

std::unique_ptr<PageAttention> MakeHackAttention(const HackFormat* format, Isa isa) {
  KV_CHECK(isa <= BestIsa());
  KV_CHECK(format->layout.page_tokens % kStripTokens == 0);
  return std::make_unique<HackAttention>(format, isa);
}

}  // namespace kvmanager::hack
