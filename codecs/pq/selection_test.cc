#include "codecs/pq/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::pq {
namespace {

/// Every set of kernels that this processor runs.
std::vector<const Kernels*> AllKernels() {
  std::vector<const Kernels*> all = {&kKernelsPortable};
#if defined(__x86_64__)
  if (BestIsa() >= Isa::kAvx2) all.push_back(&kKernelsAvx2);
  if (BestIsa() >= Isa::kAvx512) all.push_back(&kKernelsAvx512);
  if (BestIsa() >= Isa::kAvx512 && __builtin_cpu_supports("avx512vbmi")) all.push_back(&kKernelsVbmi);
#endif
  return all;
}

std::vector<float> Normal(size_t n, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

/// The k largest, ties to the lower index, ascending: by sorting.
std::vector<uint32_t> ReferenceTop(const std::vector<double>& values, size_t k, uint32_t first) {
  std::vector<uint32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return values[a] > values[b]; });
  order.resize(k);
  std::sort(order.begin(), order.end());
  for (uint32_t& i : order) i += first;
  return order;
}

TEST(Kernels, NearestIsTheLowestOfTheNearestOnEveryInstructionSet) {
  std::mt19937 random(1);
  for (const auto& [width, count] : {std::pair(32, 256), std::pair(64, 64), std::pair(3, 16), std::pair(16, 128)}) {
    for (const size_t n : {1, 3, 4, 61}) {
      const std::vector<float> x = Normal(n * width, 1, random);
      std::vector<float> c = Normal(size_t(width) * count, 1, random), half(count);
      // Equal centroids: the first counts.
      for (int j = 0; j < width; ++j) c[j * count + count - 1] = c[j * count + 2];
      for (int i = 0; i < count; ++i) {
        for (int j = 0; j < width; ++j) half[i] += c[j * count + i] * c[j * count + i] / 2;
      }
      std::vector<uint8_t> wanted;
      for (const Kernels* kernels : AllKernels()) {
        std::vector<uint8_t> codes(n);
        kernels->nearest(x.data(), n, width, c.data(), half.data(), count, codes.data());
        if (wanted.empty()) {
          wanted = codes;
          for (size_t t = 0; t < n; ++t) {
            std::vector<double> distance(count);
            for (int i = 0; i < count; ++i) {
              for (int j = 0; j < width; ++j) {
                distance[i] += std::pow(double(x[t * width + j]) - c[j * count + i], 2);
              }
            }
            EXPECT_NEAR(distance[codes[t]], *std::min_element(distance.begin(), distance.end()), 1e-4);
            EXPECT_NE(codes[t], count - 1);
          }
        }
        EXPECT_EQ(codes, wanted);
      }
    }
  }
}

TEST(Kernels, LookUpAddsTableEntriesInOrder) {
  std::mt19937 random(2);
  for (int bits = kBitsMin; bits <= kBitsMax; ++bits) {
    for (const size_t n : {1, 63, 64, 65, 1000}) {
      for (const int m : {1, 2, 5}) {
        std::vector<std::vector<uint8_t>> codes(m, std::vector<uint8_t>(n));
        std::vector<std::vector<uint8_t>> tables(m, std::vector<uint8_t>(kTableBytes));
        std::vector<uint16_t> wanted(n);
        for (int s = 0; s < m; ++s) {
          for (uint8_t& c : codes[s]) c = uint8_t(random() % (1 << bits));
          for (int i = 0; i < 1 << bits; ++i) {
            const uint32_t entry = random() % (65535 / m + 1);
            tables[s][i] = uint8_t(entry);
            tables[s][256 + i] = uint8_t(entry >> 8);
          }
          for (size_t i = 0; i < n; ++i) {
            wanted[i] = uint16_t(wanted[i] + tables[s][codes[s][i]] + 256 * tables[s][256 + codes[s][i]]);
          }
        }
        for (const Kernels* kernels : AllKernels()) {
          std::vector<uint16_t> sums(n + kSumsPadding);
          for (int s = 0; s < m; ++s) {
            kernels->look_up(codes[s].data(), n, tables[s].data(), bits, s == 0, s == m - 1, sums.data());
          }
          sums.resize(n);
          ASSERT_EQ(sums, wanted) << bits << " bits, " << n << " tokens, " << m << " sub-vectors";
        }
      }
    }
  }
}

TEST(Kernels, SelectTakesTheLargestAndOfTiesTheFirst) {
  std::mt19937 random(3);
  std::vector<std::vector<float>> cases;
  for (const size_t n : {1, 2, 15, 16, 17, 100, 5000}) {
    std::vector<float> x(n);
    for (float& v : x) v = std::exp(-20 * float(random()) / float(UINT32_MAX));
    cases.push_back(x);
    cases.push_back(std::vector<float>(n, 0.25f));  // all equal
    cases.push_back(std::vector<float>(n, 0.0f));
    for (float& v : x) v = float(random() % 3);  // many ties, zeros among them
    cases.push_back(x);
    std::fill(x.begin(), x.end(), 1e-30f);  // one-hot
    x[n / 2] = 4;
    cases.push_back(x);
    for (size_t i = 0; i < n; ++i) x[i] = 1 + float(i % 7) * 1.2e-7f;  // differ in the last bits alone
    cases.push_back(x);
    for (size_t i = 0; i < n; ++i) x[i] = 1e-42f * float(i % 5);  // denormal
    cases.push_back(x);
  }
  for (const std::vector<float>& x : cases) {
    const std::vector<double> values(x.begin(), x.end());
    for (const size_t k : {size_t{1}, x.size() / 3, x.size() - 1, x.size()}) {
      if (k == 0) continue;
      const std::vector<uint32_t> wanted = ReferenceTop(values, k, 32);
      for (const Kernels* kernels : AllKernels()) {
        std::vector<uint32_t> out(k + 16), candidates(x.size()), histogram(kHistograms * kHistogramBins);
        kernels->select(x.data(), x.size(), k, 32, out.data(), candidates.data(), histogram.data());
        out.resize(k);
        ASSERT_EQ(out, wanted) << k << " of " << x.size();
      }
    }
  }
}

/// Codes of one KV head's tokens and their codebook, at random.
struct Coded {
  Parameters parameters;
  Codebook codebook;
  std::vector<uint8_t> codes;  // [m][tokens]
  size_t tokens;

  Coded(int m, int bits, int width, size_t tokens, std::mt19937& random)
      : codebook(1, m, 1 << bits, width), codes(m * tokens), tokens(tokens) {
    parameters.m = m;
    parameters.bits = bits;
    codebook.centroids = Normal(codebook.centroids.size(), 1, random);
    for (uint8_t& c : codes) c = uint8_t(random() % (1 << bits));
  }

  /// Probability of each token, summed over the rows, in double from fp32 products.
  std::vector<double> Weights(const SelectionTask& task) const {
    const int width = codebook.width;
    std::vector<double> weights(task.middle);
    for (int r = 0; r < task.rows; ++r) {
      std::vector<double> score(task.middle);
      for (size_t i = 0; i < task.middle; ++i) {
        for (int s = 0; s < codebook.m; ++s) {
          const int code = codes[s * tokens + task.first + i];
          for (int j = 0; j < width; ++j) {
            score[i] += double(task.q[(r * codebook.m + s) * width + j]) *
                        codebook.centroids_of(0, s)[j * codebook.count + code] * task.scale;
          }
        }
      }
      const double top = *std::max_element(score.begin(), score.end());
      double sum = 0;
      for (double& s : score) sum += s = std::exp(s - top);
      for (size_t i = 0; i < task.middle; ++i) weights[i] += score[i] / sum;
    }
    return weights;
  }

  std::vector<uint32_t> Select(const Kernels& kernels, const SelectionTask& task, size_t run_tokens) const {
    std::vector<CodeRun> runs;
    for (size_t at = 0; at < task.middle; at += run_tokens) {
      runs.push_back({codes.data() + task.first + at, tokens, std::min(run_tokens, task.middle - at)});
    }
    const SelectionScratch scratch(parameters, task.rows, task.middle, task.chosen);
    std::vector<uint8_t> workspace(scratch.bytes + 64);
    uint8_t* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    const auto chosen = SelectByCodes(kernels, codebook, task, runs, scratch, aligned);
    return {chosen.begin(), chosen.end()};
  }
};

/// What was chosen weighs, token by token, at least what was not, but for the rounding of scores.
void ExpectBest(const std::vector<uint32_t>& chosen, const std::vector<double>& weights, const SelectionTask& task,
                double tolerance) {
  ASSERT_EQ(chosen.size(), task.chosen);
  ASSERT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
  ASSERT_EQ(std::adjacent_find(chosen.begin(), chosen.end()), chosen.end());
  if (chosen.empty()) return;
  ASSERT_GE(chosen.front(), task.first);
  ASSERT_LT(chosen.back(), task.first + task.middle);
  std::vector<bool> in(task.middle);
  double least = 1e300, most = 0;
  for (const uint32_t t : chosen) {
    in[t - task.first] = true;
    least = std::min(least, weights[t - task.first]);
  }
  for (size_t i = 0; i < task.middle; ++i) {
    if (!in[i]) most = std::max(most, weights[i]);
  }
  EXPECT_GE(least * (1 + tolerance) + 1e-30, most);
}

TEST(Selection, TakesTheMostProbableOfTheGroup) {
  std::mt19937 random(4);
  for (const auto& [m, bits] : {std::pair(4, 8), std::pair(2, 6), std::pair(8, 7), std::pair(1, 4), std::pair(32, 5)}) {
    for (int rows = 1; rows <= 16; ++rows) {
      const size_t tokens = 700 + random() % 600;
      const Coded coded(m, bits, 128 / m, tokens, random);
      for (const float deviation : {0.1f, 1.0f, 4.0f}) {
        const std::vector<float> q = Normal(size_t(rows) * 128, deviation, random);
        SelectionTask task;
        task.q = q.data();
        task.rows = rows;
        task.scale = 1 / std::sqrt(128.0f);
        task.first = random() % 64;
        task.middle = tokens - task.first - random() % 64;
        task.chosen = 1 + random() % task.middle;
        const std::vector<double> weights = coded.Weights(task);
        // A score is off by at most m / 2 units of (range / (65535 / m)); ranges are below 40 standard deviations.
        const double tolerance = 4.0 * m * m * 40 * deviation / 65535 + 1e-4;
        std::vector<uint32_t> first;
        for (const Kernels* kernels : AllKernels()) {
          for (const size_t run : {size_t{1024}, size_t{100}}) {
            const std::vector<uint32_t> chosen = coded.Select(*kernels, task, run);
            ExpectBest(chosen, weights, task, tolerance);
            if (kernels == AllKernels().front() && !first.empty()) {
              EXPECT_EQ(chosen, first) << "of other runs";
            }
            if (first.empty()) first = chosen;
          }
        }
      }
    }
  }
}

TEST(Selection, TiesGoToTheLowerToken) {
  std::mt19937 random(5);
  Coded coded(4, 8, 32, 500, random);
  std::fill(coded.codes.begin(), coded.codes.end(), uint8_t{7});
  const std::vector<float> q = Normal(4 * 128, 1, random), zero(4 * 128, 0.0f), huge(4 * 128, 3e37f);
  for (const std::vector<float>* query : {&q, &zero, &huge}) {
    for (const size_t k : {size_t{1}, size_t{37}, size_t{450}}) {
      SelectionTask task{query->data(), 4, 1.0f, 0, 32, 450, k};
      std::vector<uint32_t> wanted(k);
      std::iota(wanted.begin(), wanted.end(), 32);
      for (const Kernels* kernels : AllKernels()) EXPECT_EQ(coded.Select(*kernels, task, 128), wanted);
    }
  }
}

TEST(Selection, OneTokenThatTakesAllIsFound) {
  std::mt19937 random(6);
  Coded coded(4, 8, 32, 4096, random);
  for (const size_t at : {size_t{0}, size_t{1023}, size_t{4095}}) {
    // Centroid 255 lies along the query, and one token alone has it.
    for (uint8_t& c : coded.codes) c = c == 255 ? 0 : c;
    std::vector<float> q = Normal(128, 1, random);
    for (int s = 0; s < 4; ++s) {
      coded.codes[s * coded.tokens + at] = 255;
      for (int j = 0; j < 32; ++j) coded.codebook.centroids_of(0, s)[j * 256 + 255] = 8 * q[s * 32 + j];
    }
    const SelectionTask task{q.data(), 1, 1.0f, 0, 0, 4096, 1};
    for (const Kernels* kernels : AllKernels()) {
      EXPECT_EQ(coded.Select(*kernels, task, 1024), std::vector<uint32_t>{uint32_t(at)});
    }
  }
}

TEST(Rows, AttentionOverScatteredRowsIsExact) {
  std::mt19937 random(7);
  for (const int d : {16, 80, 128, 256}) {
    for (const int rows : {1, 2, 3, 4, 5, 8, 16}) {
      for (const size_t tokens : {size_t{1}, size_t{5}, size_t{128}, size_t{129}, size_t{300}}) {
        for (const bool bfloat16 : {false, true}) {
          const std::vector<float> q = Normal(size_t(rows) * d, 1, random);
          const std::vector<float> values = Normal(2 * tokens * d, 1, random);
          std::vector<uint16_t> stored(values.size());
          for (size_t i = 0; i < values.size(); ++i) {
            stored[i] = bfloat16 ? FloatToBFloat16(values[i]) : FloatToHalf(values[i]);
          }
          const auto at = [&](size_t row, int c) {
            return double(bfloat16 ? BFloat16ToFloat(stored[row * d + c]) : HalfToFloat(stored[row * d + c]));
          };
          std::vector<size_t> order(tokens);
          std::iota(order.begin(), order.end(), 0);
          std::shuffle(order.begin(), order.end(), random);
          std::vector<const uint8_t*> k, v;
          for (const size_t t : order) {
            k.push_back(reinterpret_cast<const uint8_t*>(&stored[t * d]));
            v.push_back(reinterpret_cast<const uint8_t*>(&stored[(tokens + t) * d]));
          }
          std::vector<float> max, sum, acc;
          for (const Kernels* kernels : AllKernels()) {
            max.assign(rows, -INFINITY);
            sum.assign(rows, 0);
            acc.assign(size_t(rows) * d, 0);
            const RowArguments a{q.data(), rows,   d,          bfloat16,   0.3f,      k.data(),
                                 v.data(), tokens, max.data(), sum.data(), acc.data()};
            kernels->attend_rows(a);
            std::vector<float> scores(rows * tokens);
            kernels->score_rows(a, scores.data(), tokens);
            for (int r = 0; r < rows; ++r) {
              std::vector<double> score(tokens);
              double top = -1e300, total = 0;
              for (size_t t = 0; t < tokens; ++t) {
                for (int c = 0; c < d; ++c) score[t] += 0.3f * double(q[r * d + c]) * at(order[t], c);
                EXPECT_NEAR(scores[r * tokens + t], score[t], 1e-4 * (1 + std::fabs(score[t])));
                top = std::max(top, score[t]);
              }
              for (double& s : score) total += s = std::exp(s - top);
              for (int c = 0; c < d; ++c) {
                double wanted = 0;
                for (size_t t = 0; t < tokens; ++t) wanted += score[t] / total * at(tokens + order[t], c);
                ASSERT_NEAR(acc[r * d + c] / sum[r], wanted, 1e-4);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager::pq
