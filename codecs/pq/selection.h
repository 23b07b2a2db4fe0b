// Sparse selection of tokens by codes: tables of the query's products with the centroids, scores of all middle tokens,
// their softmax per query head, summed over the group, and the k largest.
//
// Scores are sums of table entries in 16 bits, in units of 1/128 of an octave (0.0054 nats): a score is off by at most
// m / 2 units; the weight of a token, a bfloat16, by another 0.9%. Where a query's scores spread wider than 88 nats
// over four sub-vectors, or 354 in all, the unit is a power of two times that. Tokens 40 octaves below the best of
// their run of 512 are alike. What is chosen by codes is the same on every instruction set, and on a GPU
// (pq_select_cuda.cu). Functions of their arguments; any thread; nothing is allocated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "codecs/cpu_isa.h"
#include "codecs/pq/codebook.h"
#include "codecs/pq/pq_kernels.h"

namespace kvmanager::pq {

/// The fastest kernels that `isa` allows on this processor.
const Kernels& KernelsOf(Isa isa);

/// Codes of consecutive tokens of one KV head.
struct CodeRun {
  const uint8_t* codes = nullptr;  // of sub-vector 0; sub-vector s is s * stride bytes on
  size_t stride = 0;
  size_t tokens = 0;
};

/// Where a selection's arrays lie in its workspace.
struct SelectionScratch {
  /// chosen_max: the largest k.
  SelectionScratch(const Parameters& parameters, int rows, size_t middle_tokens_max, size_t chosen_max);
  size_t bytes = 0;
  size_t scores_at, score_stride;  // [rows][score_stride] of uint16_t, or float with exact scores
  size_t weights_at;               // [middle] float
  size_t candidates_at;            // [middle] uint32_t
  size_t indices_at;               // [middle] uint32_t
  size_t chosen_at;                // [chosen] uint32_t
  size_t tables_at;                // [rows][m][256] float, then [rows][m][kTableBytes]
  size_t runs_at;                  // [rows][runs of kWeightRun] RunSum
};

/// Of a row's weights in a run of kWeightRun tokens.
struct RunSum {
  float sum = 0;  // relative to `least`
  uint32_t least = 0;
};

struct SelectionTask {
  const float* q = nullptr;  // [rows][head_dim]
  int rows = 0;
  float scale = 1;
  int kv_head = 0;
  uint64_t first = 0;  // token of the first middle one
  size_t middle = 0;   // tokens
  size_t chosen = 0;   // k <= middle
};

/// Scores by codes. runs: the codes of tokens first .. first + middle - 1. The result, ascending tokens, lies in the
/// workspace.
absl::Span<const uint32_t> SelectByCodes(const Kernels& kernels, const Codebook& codebook, const SelectionTask& task,
                                         absl::Span<const CodeRun> runs, const SelectionScratch& scratch,
                                         uint8_t* workspace);
/// By scores [rows][score_stride] float, already scaled, that lie at scratch.scores_at.
absl::Span<const uint32_t> SelectByScores(const Kernels& kernels, const SelectionTask& task,
                                          const SelectionScratch& scratch, uint8_t* workspace);

}  // namespace kvmanager::pq
