#include "codecs/million/million_attention.h"

#include <algorithm>

#include "codecs/million/million_attention_kernel.h"
#include "codecs/workspace_cutter.h"
#include "kvmanager/base/status.h"

namespace kvmanager::million {
namespace {

/// Tokens of one head that a call should see at least: q is folded, and tables come from further away, once per call.
constexpr int kVisitTokens = 512;

using AttendFunction = void (*)(const MillionArguments&);

AttendFunction AttendOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kMillionAttendAvx512;
  if (isa == Isa::kAvx2) return kMillionAttendAvx2;
#endif
  return kMillionAttendPortable;
}

class MillionAttention final : public PageAttention {
 public:
  MillionAttention(const MillionFormat* format, const MillionTables* tables, Isa isa, LookUps look_ups)
      : format_(*format), tables_(*tables), attend_(AttendOf(isa)) {
    const auto permutes = [&](int side) {
      return look_ups == LookUps::kBest && isa == Isa::kAvx512 && PermutesServe(format->side[side].bits);
    };
    look_up_k_ = permutes(kSideK) ? LookUpKByPermute(format->side[kSideK]) : LookUpKByAddress;
    look_up_v_ = permutes(kSideV) ? LookUpVByPermute(format->side[kSideV]) : LookUpVByAddress;
    const int d = format->layout.head_dim;
    const int part = d % kPermuteChannels == 0 ? kPermuteChannels : d;
    k_channels_ = permutes(kSideK) ? part : d;
    v_channels_ = permutes(kSideV) ? part : d;
    for (int side = 0; side < 2; ++side) {
      KV_CHECK(permutes(side) || tables->at(side, 0, 0).by_index != nullptr);
    }
  }

  size_t workspace_bytes(int rows) const override {
    WorkspaceCutter cutter(nullptr);
    CutScratch(cutter, rows);
    return cutter.used();
  }

  int visit_pages_min(int layer) const override { return std::max(kVisitTokens / format_.layout.page_tokens, 1); }

  void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const override {
    KV_CHECK(task.visible == nullptr);
    WorkspaceCutter cutter(workspace.data());
    MillionArguments a;
    a.scratch = CutScratch(cutter, task.rows);
    KV_CHECK(cutter.used() <= workspace.size());
    a.q = task.q;
    a.rows = task.rows;
    a.head_dim = format_.layout.head_dim;
    a.strips = format_.layout.page_tokens / kStripTokens;
    a.scale = task.scale;
    a.pages = task.pages.data();
    a.page_count = task.pages.size();
    a.record_offset = size_t(task.kv_head) * format_.record_bytes;
    a.next_pages = task.next_pages.data();
    a.next_count = task.next_pages.size();
    a.next_offset = size_t(task.next_kv_head) * format_.record_bytes;
    a.k = &format_.side[kSideK];
    a.v = &format_.side[kSideV];
    a.k_table = &tables_.at(kSideK, task.layer, task.kv_head);
    a.v_table = &tables_.at(kSideV, task.layer, task.kv_head);
    a.look_up_k = look_up_k_;
    a.look_up_v = look_up_v_;
    a.k_channels = k_channels_;
    a.v_channels = v_channels_;
    a.max = state.max;
    a.sum = state.sum;
    a.acc = state.acc;
    attend_(a);
  }

 private:
  MillionScratch CutScratch(WorkspaceCutter& cutter, size_t rows) const {
    const size_t d = format_.layout.head_dim;
    MillionScratch s;
    s.words = cutter.Cut<uint32_t>(kGroupStrips * StripWords(std::max(k_channels_, v_channels_)));
    s.q_high = cutter.Cut<int8_t>(rows * d);
    s.q_low = cutter.Cut<int8_t>(rows * d);
    s.q_wide = cutter.Cut<int32_t>(rows * kWideMax);
    s.q_wides = cutter.Cut<int32_t>(rows);
    s.q_start = cutter.Cut<int32_t>(rows);
    s.q_unit = cutter.Cut<float>(rows);
    s.q_offset = cutter.Cut<float>(rows);
    s.scores = cutter.Cut<float>(kGroupStrips * rows * kStripTokens);
    s.p8 = cutter.Cut<uint8_t>(kGroupStrips * rows * kStripTokens);
    s.p_unit = cutter.Cut<float>(kGroupStrips * rows);
    s.p_sum = cutter.Cut<float>(kGroupStrips * rows);
    s.rescale = cutter.Cut<float>(kGroupStrips * rows);
    return s;
  }

  const MillionFormat& format_;
  const MillionTables& tables_;
  const AttendFunction attend_;
  LookUpFunction look_up_k_;
  LookUpFunction look_up_v_;
  int k_channels_;
  int v_channels_;
};

}  // namespace

TableOrder TableOrderFor(int bits) {
  return BestIsa() == Isa::kAvx512 && PermutesServe(bits) ? TableOrder::kByChannel : TableOrder::kBoth;
}

std::unique_ptr<PageAttention> MakeMillionAttention(const MillionFormat* format, const MillionTables* tables, Isa isa,
                                                    LookUps look_ups) {
  KV_CHECK(isa <= BestIsa());
  return std::make_unique<MillionAttention>(format, tables, isa, look_ups);
}

}  // namespace kvmanager::million
