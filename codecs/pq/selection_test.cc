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
    for (const size_t n : {1, 31, 63, 64, 65, 1000, 2085}) {
      for (const int m : {1, 2, 4}) {
        for (const int rows : {1, 2, 3, 4}) {
          const size_t stride = n + 7, table_stride = m * kTableBytes + 64, sums_stride = n + kPadding;
          std::vector<uint8_t> codes(m * stride), tables(rows * table_stride);
          for (uint8_t& c : codes) c = uint8_t(random() % (1 << bits));
          for (uint8_t& t : tables) t = uint8_t(random());
          for (int i = 0; i < rows * m; ++i) {
            uint8_t* low = &tables[i / m * table_stride + i % m * kTableBytes];
            for (int c = 0; c < 256; ++c) low[c] &= (1 << kTableLowBits) - 1;
            // The high bytes of up to four add up to a byte.
            for (int c = 0; c < 256; ++c) low[256 + c] = uint8_t(low[256 + c] % (255 / m + 1));
          }
          std::vector<uint16_t> before(rows * sums_stride);
          for (uint16_t& v : before) v = uint16_t(random() % 40000);
          for (const bool first : {true, false}) {
            std::vector<uint16_t> wanted;
            for (int r = 0; r < rows; ++r) {
              for (size_t i = 0; i < n; ++i) {
                uint16_t sum = first ? 0 : before[r * sums_stride + i];
                for (int s = 0; s < m; ++s) {
                  const uint8_t* low = &tables[r * table_stride + s * kTableBytes];
                  const uint8_t code = codes[s * stride + i];
                  sum = uint16_t(sum + low[code] + 64 * low[256 + code]);
                }
                wanted.push_back(sum);
              }
            }
            for (const Kernels* kernels : AllKernels()) {
              std::vector<uint16_t> sums = before, got;
              kernels->look_up({codes.data(), codes.data(), stride, n, bits, m, tables.data(), table_stride, rows,
                                first, sums.data(), sums_stride});
              for (int r = 0; r < rows; ++r) {
                got.insert(got.end(), &sums[r * sums_stride], &sums[r * sums_stride] + n);
              }
              ASSERT_EQ(got, wanted) << bits << " bits, " << n << " tokens, " << m << " sub-vectors, " << rows
                                     << " rows";
            }
          }
        }
      }
    }
  }
}

TEST(Kernels, WeightsArePowersOfTwoAndEqualOnEveryInstructionSet) {
  std::mt19937 random(8);
  for (const size_t n : {1, 5, 31, 32, 33, 64, 1000}) {
    for (const int shift : {0, 1, 5, kShiftMax}) {
      for (const int spread : {1, 300, 12900, 60000}) {
        constexpr int kRows = 3;
        std::vector<std::vector<uint16_t>> sums(kRows, std::vector<uint16_t>(n));
        for (auto& row : sums) {
          for (uint16_t& v : row) v = uint16_t(5000 + random() % spread);
        }
        std::vector<float> wanted_sums, wanted_out;
        std::vector<std::vector<uint16_t>> wanted_bits;
        for (const Kernels* kernels : AllKernels()) {
          std::vector<std::vector<uint16_t>> e = sums;
          std::vector<float> totals, out(n);
          const float weight[kRows] = {0.25f, 1.0f / 3 - std::fmod(1.0f / 3, 0x1p-17f), 1.0f};
          const uint16_t* rows[kRows];
          for (int r = 0; r < kRows; ++r) {
            const uint16_t least = kernels->least(e[r].data(), n);
            ASSERT_EQ(least, *std::min_element(sums[r].begin(), sums[r].end()));
            totals.push_back(kernels->exponentials(e[r].data(), n, least, shift));
            double total = 0;
            for (size_t i = 0; i < n; ++i) {
              const double octaves =
                  std::min(double(kOctavesKept), std::ldexp(sums[r][i] - least, shift) / kUnitsPerOctave);
              const double got = BFloat16ToFloat(e[r][i]);
              ASSERT_NEAR(got / std::exp2(-octaves), 1, 0.009) << octaves;
              total += got;
            }
            EXPECT_NEAR(totals.back() / total, 1, 1e-5);
            rows[r] = e[r].data();
          }
          kernels->weigh(rows, kRows, n, weight, out.data());
          for (size_t i = 0; i < n; ++i) {
            double sum = 0;
            for (int r = 0; r < kRows; ++r) sum += double(BFloat16ToFloat(e[r][i])) * weight[r];
            ASSERT_NEAR(out[i] / sum, 1, 1e-6);
          }
          if (wanted_bits.empty()) {
            wanted_bits = e;
            wanted_sums = totals;
            wanted_out = out;
          }
          ASSERT_EQ(e, wanted_bits);
          ASSERT_EQ(totals, wanted_sums);
          ASSERT_EQ(out, wanted_out);
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
        std::vector<uint32_t> out(k + kPadding), candidates(x.size() + kPadding), indices(x.size() + kPadding);
        kernels->select(x.data(), x.size(), k, 32, out.data(), candidates.data(), indices.data());
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
        // Two scores are off by at most m / 2 units each, two weights by 0.9%.
        const double tolerance = std::expm1(m * std::log(2) / kUnitsPerOctave + 2 * 0.009);
        std::vector<uint32_t> first;
        for (const Kernels* kernels : AllKernels()) {
          for (const size_t run : {size_t{1024}, size_t{100}}) {
            const std::vector<uint32_t> chosen = coded.Select(*kernels, task, run);
            ExpectBest(chosen, weights, task, tolerance);
            if (first.empty()) first = chosen;
            EXPECT_EQ(chosen, first) << "of another instruction set, or other runs";
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

TEST(Selection, ScoresOfAnySpreadAreTold) {
  std::mt19937 random(9);
  for (const int m : {1, 4, 32}) {
    const size_t tokens = 1500;
    const Coded coded(m, 8, 128 / m, tokens, random);
    for (const float deviation : {1e-20f, 1e-3f, 20.0f, 300.0f, 1e5f, 1e20f}) {
      const std::vector<float> q = Normal(128, deviation, random);
      const SelectionTask task{q.data(), 1, 1.0f, 0, 0, tokens, 1};
      std::vector<double> weights = coded.Weights(task);
      std::vector<uint32_t> first;
      for (const Kernels* kernels : AllKernels()) {
        const std::vector<uint32_t> chosen = coded.Select(*kernels, task, 1024);
        ASSERT_EQ(chosen.size(), 1u);
        if (first.empty()) first = chosen;
        EXPECT_EQ(chosen, first);
      }
      // The best is within rounding of the best: a unit grows with the spread beyond 88 nats.
      const double spread = 12 * std::sqrt(128.0) * deviation;
      const double unit = std::max(1.0, spread / 40) * std::log(2) / kUnitsPerOctave;
      const double top = *std::max_element(weights.begin(), weights.end());
      ASSERT_GT(top, 0);
      EXPECT_GE(std::log(weights[first[0]] / top), -m * unit - 0.02) << m << " " << deviation;
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
