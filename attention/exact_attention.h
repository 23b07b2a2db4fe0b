// Attention in plain loops and doubles: what attention's tests compare with.
//
// Free functions over values; any thread.
#pragma once

#include <functional>
#include <vector>

#include "attention/attention.h"

namespace kvmanager {

/// K (side 0) or V (side 1), [head_dim], of one KV head at a position of the context, as the query token at `query`
/// reads it.
using ContextRow = std::function<const float*(int side, int kv_head, uint64_t position, uint64_t query)>;

struct ExactResult {
  std::vector<double> out;  // [tokens][query_heads][head_dim]
  std::vector<double> lse;  // [tokens][query_heads]
};

/// q: [tokens][query_heads][head_dim].
ExactResult ExactAttention(const PageLayout& layout, int query_heads, double scale, uint64_t first_position, int tokens,
                           const std::vector<double>& q, const ContextRow& row_of);

/// Largest relative L2 error of any row of `head_dim` elements.
double LargestRowError(const std::vector<double>& expected, const std::vector<double>& got, int head_dim);

}  // namespace kvmanager
