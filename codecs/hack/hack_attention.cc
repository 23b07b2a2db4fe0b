#include "codecs/hack/hack_attention.h"

#include <algorithm>
#include <vector>

#include "codecs/hack/hack_attention_kernel.h"
#include "codecs/workspace_cutter.h"
#include "kvmanager/base/status.h"

namespace kvmanager::hack {
namespace {

using AttendFunction = void (*)(HackArguments&);
using RotateFunction = void (*)(const float*, int, int, float*);

AttendFunction AttendOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kHackAttendAvx512;
  if (isa == Isa::kAvx2) return kHackAttendAvx2;
#endif
  return kHackAttendPortable;
}

RotateFunction RotateOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kHackRotateAvx512;
  if (isa == Isa::kAvx2) return kHackRotateAvx2;
#endif
  return kHackRotatePortable;
}

/// Fills in what loops over mixed widths go by.
void MixRuns(HackSide& side, bool is_k) {
  side.mixes = side.run_count > 1;
  for (int i = 0; i < side.run_count; ++i) {
    side.mixes &= (side.runs[i].bits <= 4 || is_k) && side.runs[i].partition == 0;
  }
  if (!side.mixes) return;
  int waiting = -1;
  for (int i = 0; i < side.run_count; ++i) {
    const HackRun& run = side.runs[i];
    if (run.bits == 8) {
      side.wide[side.wide_count++] = run;
      continue;
    }
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

HackSide SideOf(const SideLayout& layout, bool is_k, bool along_channels) {
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
  MixRuns(side, is_k);
  side.two_byte_q = layout.two_byte_q;
  side.strip_bytes = layout.strip_bytes;
  side.partitions = layout.partitions;
  side.partition = layout.partition;
  side.meta_entries = layout.meta_entries;
  side.codes = layout.codes;
  side.tops = layout.tops;
  side.steps = layout.steps;
  side.minima = layout.minima;
  side.sums = layout.sums;
  side.norms = layout.norms;
  side.norm_top = layout.norm_top;
  side.end = layout.end;
  return side;
}

class HackAttention final : public PageAttention {
 public:
  HackAttention(const HackFormat* format, Isa isa)
      : format_(*format),
        along_channels_(format->parameters.k_axis == Axis::kToken),
        attend_(AttendOf(isa)),
        rotate_(RotateOf(isa)) {
    for (const HeadLayout& head : format->heads) {
      heads_.push_back({head.offset, SideOf(head.side[0], true, along_channels_), SideOf(head.side[1], false, false)});
      partitions_max_ = std::max({partitions_max_, head.side[0].partitions, head.side[1].partitions});
      two_byte_q_ |= head.side[0].two_byte_q;
    }
  }

  size_t workspace_bytes(int rows) const override {
    WorkspaceCutter cutter(nullptr);
    CutScratch(cutter, rows);
    return cutter.used();
  }

  size_t head_bytes(int layer, int kv_head) const override { return heads_[kv_head].v.end; }

  bool maps(int layer) const override { return format_.parameters.rotation == Rotation::kHadamard; }
  absl::string_view space(int layer) const override { return maps(layer) ? "hadamard" : ""; }
  void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const override {
    rotate_(q, rows, format_.layout.head_dim, mapped);
  }
  void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const override {
    rotate_(acc, rows, format_.layout.head_dim, out);
  }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    KV_CHECK(task.visible == nullptr);
    WorkspaceCutter cutter(workspace.data());
    HackArguments a;
    a.scratch = CutScratch(cutter, task.rows);
    KV_CHECK(cutter.used() <= workspace.size());
    a.q = task.q;
    a.rows = task.rows;
    a.head_dim = format_.layout.head_dim;
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
  HackScratch CutScratch(WorkspaceCutter& cutter, size_t rows) const {
    const size_t d = format_.layout.head_dim, tokens = format_.layout.page_tokens, entries = std::max(d, tokens);
    HackScratch s;
    s.steps = cutter.Cut<float>(entries);
    s.minima = cutter.Cut<float>(entries);
    s.v_steps = cutter.Cut<float>(d);
    s.v_minima = cutter.Cut<float>(d);
    s.v_norms = cutter.Cut<float>(tokens);
    s.sums = cutter.Cut<float>(entries);
    s.q8 = cutter.Cut<int8_t>(rows * d);
    s.q_low = cutter.Cut<int8_t>(two_byte_q_ ? rows * d : 0);
    s.q_step = cutter.Cut<float>(rows * partitions_max_);
    s.q_min = cutter.Cut<float>(rows * partitions_max_);
    s.q_sums = cutter.Cut<float>(rows * partitions_max_);
    s.scores = cutter.Cut<float>(rows * tokens);
    s.p8 = cutter.Cut<uint8_t>(rows * tokens);
    s.p_step = cutter.Cut<float>(rows * partitions_max_);
    s.p_sum = cutter.Cut<float>(rows * partitions_max_);
    return s;
  }

  const HackFormat& format_;
  const bool along_channels_;
  const AttendFunction attend_;
  const RotateFunction rotate_;
  std::vector<HackHead> heads_;
  int partitions_max_ = 1;
  bool two_byte_q_ = false;  // of any head
};

}  // namespace

std::unique_ptr<PageAttention> MakeHackAttention(const HackFormat* format, Isa isa) {
  KV_CHECK(isa <= BestIsa());
  KV_CHECK(format->layout.page_tokens % kStripTokens == 0);
  return std::make_unique<HackAttention>(format, isa);
}

}  // namespace kvmanager::hack
