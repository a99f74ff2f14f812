#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "specpv/cpu/kernels.h"

namespace nwor::cpu {
namespace {

std::vector<const SpecPVKernels*> AllKernels() {
  std::vector<const SpecPVKernels*> kernels = {&kGenericSpecPVKernels, &ChooseSpecPVKernels()};
#if defined(__x86_64__)
  if (kernels.back() == &kAvx512SpecPVKernels) kernels.push_back(&kAvx2SpecPVKernels);
#endif
  return kernels;
}

// Every instruction set against sums in double, for sizes around the registers' and tiles'.
TEST(SpecPVKernels, ScoresEqualSumsInDouble) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const SpecPVKernels* kernels : AllKernels()) {
    for (const auto& [rows, dim, blocks] :
         {std::tuple{1, 3, 1}, {4, 64, 5}, {9, 80, 2}, {17, 31, 7}, {40, 128, 4}}) {
      const int padded = (rows + kernels->lanes - 1) / kernels->lanes * kernels->lanes;
      std::vector<float> upper(padded * dim), other(padded * dim), kmax(blocks * dim),
          kmin(blocks * dim), scores(blocks);
      for (int c = 0; c < dim; ++c) {
        for (int r = 0; r < rows; ++r) {
          upper[c * padded + r] = normal(random);
          other[c * padded + r] = normal(random);
        }
      }
      for (float& x : kmax) x = normal(random);
      for (float& x : kmin) x = normal(random);
      // Bit 2: one set of queries for both extremes, which sums of maxima have a way of their own
      // for.
      for (const int mode : {0, 1, 2, 3, 4, 6}) {
        const std::vector<float>& lower = (mode & 4) != 0 ? upper : other;
        ScoreTask task;
        task.upper = upper.data();
        task.lower = lower.data();
        task.padded_rows = padded;
        task.num_queries = rows;
        task.num_groups = 1;
        task.add = (mode & 1) != 0;
        task.query_max = (mode & 2) != 0;
        task.kmax = reinterpret_cast<const std::byte*>(kmax.data());
        task.kmin = reinterpret_cast<const std::byte*>(kmin.data());
        task.kmax_stride_bytes = task.kmin_stride_bytes = dim * 4;
        task.head_dim = dim;
        task.num_blocks = blocks;
        task.scores = scores.data();
        kernels->score(task);
        for (int block = 0; block < blocks; ++block) {
          double expected = 0;
          for (int r = 0; r < rows; ++r) {
            double high = 0, low = 0;
            for (int c = 0; c < dim; ++c) {
              high += double{upper[c * padded + r]} * kmax[block * dim + c];
              low += double{lower[c * padded + r]} * kmin[block * dim + c];
            }
            const double score = task.add ? high + low : std::max(high, low);
            expected = r == 0           ? score
                       : task.query_max ? std::max(expected, score)
                                        : expected + score;
          }
          EXPECT_NEAR(scores[block], expected, 1e-3) << kernels->name << " mode " << mode;
        }
      }
    }
  }
}

// Infinite summaries: sums of maxima are what the maximum of each row gives, NaN or not.
TEST(SpecPVKernels, InfiniteSummariesScoreAsTheyDoRowByRow) {
  const float inf = INFINITY;
  for (const SpecPVKernels* kernels : AllKernels()) {
    const int rows = kernels->lanes;
    const std::vector<float> queries(rows, 1.0f);  // one channel
    const std::vector<float> kmax = {inf, 3.0f, -inf, inf, 2.0f, 1.0f};
    const std::vector<float> kmin = {inf, 1.0f, -inf, -inf, 2.0f, -inf};
    std::vector<float> scores(kmax.size());
    ScoreTask task;
    task.upper = task.lower = queries.data();
    task.padded_rows = task.num_queries = rows;
    task.num_groups = 1;
    task.kmax = reinterpret_cast<const std::byte*>(kmax.data());
    task.kmin = reinterpret_cast<const std::byte*>(kmin.data());
    task.kmax_stride_bytes = task.kmin_stride_bytes = 4;
    task.head_dim = 1;
    task.num_blocks = static_cast<int32_t>(kmax.size());
    task.scores = scores.data();
    kernels->score(task);
    const auto n = static_cast<float>(rows);
    EXPECT_EQ(scores, (std::vector<float>{inf, 3.0f * n, -inf, inf, 2.0f * n, n})) << kernels->name;
  }
}

// One channel each: rows of queries, and whether a maximum is taken of them.
struct RowCase {
  std::vector<float> upper, lower;
  bool add, query_max;
};

std::vector<float> ScoresOf(const SpecPVKernels& kernels, const RowCase& rows,
                            const std::vector<float>& kmax, const std::vector<float>& kmin) {
  const auto count = static_cast<int>(rows.upper.size());
  const int padded = (count + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  std::vector<float> upper = rows.upper, lower = rows.lower, scores(kmax.size());
  upper.resize(padded);
  lower.resize(padded);
  ScoreTask task;
  task.upper = upper.data();
  task.lower = rows.add ? lower.data() : upper.data();
  task.padded_rows = padded;
  task.num_queries = count;
  task.num_groups = 1;
  task.add = rows.add;
  task.query_max = rows.query_max;
  task.kmax = reinterpret_cast<const std::byte*>(kmax.data());
  task.kmin = reinterpret_cast<const std::byte*>(kmin.data());
  task.kmax_stride_bytes = task.kmin_stride_bytes = 4;
  task.head_dim = 1;
  task.num_blocks = static_cast<int32_t>(kmax.size());
  task.scores = scores.data();
  kernels.score(task);
  return scores;
}

TEST(SpecPVKernels, MaximaGoByNumbersAlone) {
  for (const SpecPVKernels* kernels : AllKernels()) {
    for (const std::vector<float>& rows :
         {std::vector<float>{NAN, 2.0f, 1.0f}, {2.0f, NAN, 1.0f}, {1.0f, 2.0f, NAN}}) {
      const std::vector<float> scores =
          ScoresOf(*kernels, {rows, rows, false, true}, {3.0f, 5.0f, 1.0f}, {1.0f, 4.0f, -1.0f});
      EXPECT_EQ(scores, (std::vector<float>{6.0f, 10.0f, 2.0f})) << kernels->name;
    }
    for (const bool query_max : {false, true}) {
      const std::vector<float> ones = {1.0f, 1.0f};
      const std::vector<float> scores =
          ScoresOf(*kernels, {ones, ones, false, query_max}, {NAN, 2.0f, 3.0f}, {7.0f, NAN, 1.0f});
      const float n = query_max ? 1.0f : 2.0f;
      EXPECT_EQ(scores, (std::vector<float>{7.0f * n, 2.0f * n, 3.0f * n})) << kernels->name;
    }
  }
}

// Sums of both products: a bound that is infinite is nothing to rows that are zero there.
TEST(SpecPVKernels, InfiniteBoundsAreNothingToZeros) {
  const float inf = INFINITY;
  const std::vector<float> kmax = {5.0f, inf, 4.0f, NAN, -inf};
  const std::vector<float> kmin = {-inf, 1.0f, 3.0f, 1.0f, -inf};
  for (const SpecPVKernels* kernels : AllKernels()) {
    for (const bool query_max : {false, true}) {
      const RowCase positive = {{1.0f, 2.0f}, {0.0f, 0.0f}, true, query_max};
      const float n = query_max ? 2.0f : 3.0f;
      std::vector<float> scores = ScoresOf(*kernels, positive, kmax, kmin);
      EXPECT_TRUE(std::isnan(scores[3])) << kernels->name;
      scores.erase(scores.begin() + 3);
      EXPECT_EQ(scores, (std::vector<float>{5.0f * n, inf, 4.0f * n, -inf})) << kernels->name;
    }
    const RowCase both = {{1.0f, 0.0f}, {0.0f, -1.0f}, true, true};
    const std::vector<float> scores = ScoresOf(*kernels, both, kmax, kmin);
    EXPECT_EQ(scores[0], inf) << kernels->name;
    EXPECT_EQ(scores[1], inf) << kernels->name;
    EXPECT_EQ(scores[2], 4.0f) << kernels->name;
  }
}

TEST(SpecPVKernels, ExtremesLeaveOutWhatIsNoNumber) {
  for (const SpecPVKernels* kernels : AllKernels()) {
    for (const int dim : {3, 37, 80}) {
      for (int place = 0; place < 3; ++place) {
        std::vector<std::vector<float>> rows(3, std::vector<float>(dim));
        std::vector<const std::byte*> pointers;
        for (int row = 0; row < 3; ++row) {
          for (int c = 0; c < dim; ++c) {
            rows[row][c] = row == place || c == 1 ? NAN : static_cast<float>(10 * row + c);
          }
          pointers.push_back(reinterpret_cast<const std::byte*>(rows[row].data()));
        }
        std::vector<float> kmax(dim), kmin(dim);
        kernels->extremes({pointers.data(), 3, dim, DType::kFloat32, DType::kFloat32, 1.0f,
                           kmax.data(), kmin.data()});
        const int highest = place == 2 ? 1 : 2, lowest = place == 0 ? 1 : 0;
        for (int c = 0; c < dim; ++c) {
          EXPECT_EQ(kmax[c], c == 1 ? -INFINITY : static_cast<float>(10 * highest + c));
          EXPECT_EQ(kmin[c], c == 1 ? INFINITY : static_cast<float>(10 * lowest + c));
        }
      }
    }
  }
}

TEST(SpecPVKernels, ExtremesTouchNothingBeyondTheChannels) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (const SpecPVKernels* kernels : AllKernels()) {
    for (const int dim : {1, 3, 4, 16, 37, 64, 80}) {
      for (const int count : {1, 2, 16}) {
        std::vector<std::vector<float>> rows(count, std::vector<float>(dim));
        std::vector<const std::byte*> pointers;
        for (auto& row : rows) {
          for (float& x : row) x = normal(random);
          pointers.push_back(reinterpret_cast<const std::byte*>(row.data()));
        }
        std::vector<float> kmax(dim + 1, 99.0f), kmin(dim + 1, 99.0f);
        kernels->extremes({pointers.data(), count, dim, DType::kFloat32, DType::kFloat32, -2.0f,
                           kmax.data(), kmin.data()});
        for (int c = 0; c < dim; ++c) {
          float high = -INFINITY, low = INFINITY;
          for (const auto& row : rows) {
            high = std::max(high, row[c] * -2.0f);
            low = std::min(low, row[c] * -2.0f);
          }
          EXPECT_EQ(kmax[c], high);
          EXPECT_EQ(kmin[c], low);
        }
        EXPECT_EQ(kmax[dim], 99.0f);
        EXPECT_EQ(kmin[dim], 99.0f);
      }
    }
  }
}

}  // namespace
}  // namespace nwor::cpu
