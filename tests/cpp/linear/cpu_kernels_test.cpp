#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "linear/cpu/kernels.h"

namespace nwor::cpu {
namespace {

std::vector<const LinearKernels*> AllKernels() {
  std::vector<const LinearKernels*> kernels = {&kGenericLinearKernels, &ChooseLinearKernels()};
#if defined(__x86_64__)
  const bool wider = &ChooseLinearKernels() == &kAvx512LinearKernels;
  if (wider && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    kernels.push_back(&kAvx2LinearKernels);
  }
#endif
  return kernels;
}

struct Problem {
  Problem(int64_t num_rows, int64_t num_outputs, int64_t num_channels, uint32_t seed)
      : rows(num_rows),
        outputs(num_outputs),
        depth(num_channels),
        x(num_rows * num_channels),
        weight(num_outputs * num_channels),
        out(num_rows * num_outputs + 1, std::numeric_limits<float>::quiet_NaN()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : x) value = normal(random);
    for (float& value : weight) value = normal(random);
  }

  // Weights of two bytes; `weight` becomes what they hold.
  template <typename T>
  void Narrow(DType type) {
    dtype = type;
    narrow.clear();
    for (float& value : weight) {
      const T half(value);
      narrow.push_back(half.x);
      value = static_cast<float>(half);
    }
  }

  LinearTask Task() {
    LinearTask task;
    task.x = x.data();
    task.rows = rows;
    task.depth = depth;
    task.dtype = dtype;
    task.weight =
        dtype == DType::kFloat32 ? static_cast<const void*>(weight.data()) : narrow.data();
    task.last = outputs;
    task.out = out.data();
    task.out_stride = outputs;
    return task;
  }

  int64_t rows, outputs, depth;
  std::vector<float> x, weight, out;
  std::vector<uint16_t> narrow;
  DType dtype = DType::kFloat32;
};

class LinearTypes : public testing::TestWithParam<DType> {
 protected:
  static Problem Make(int64_t rows, int64_t outputs, int64_t depth, uint32_t seed) {
    Problem problem(rows, outputs, depth, seed);
    if (GetParam() == DType::kFloat16) problem.Narrow<c10::Half>(GetParam());
    if (GetParam() == DType::kBFloat16) problem.Narrow<c10::BFloat16>(GetParam());
    return problem;
  }
};

INSTANTIATE_TEST_SUITE_P(Weights, LinearTypes,
                         testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16));

TEST_P(LinearTypes, EqualSumsInDouble) {
  for (const LinearKernels* kernels : AllKernels()) {
    for (int64_t rows = 1; rows <= 14; ++rows) {
      for (const auto& [outputs, depth] : {std::pair{1, 1}, {7, 3}, {41, 64}, {83, 37}, {8, 130}}) {
        Problem problem = Make(rows, outputs, depth, 7 + rows);
        kernels->linear(problem.Task());
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t n = 0; n < outputs; ++n) {
            double expected = 0, size = 0;
            for (int64_t k = 0; k < depth; ++k) {
              const double term = double{problem.x[r * depth + k]} * problem.weight[n * depth + k];
              expected += term;
              size += std::abs(term);
            }
            ASSERT_NEAR(problem.out[r * outputs + n], expected, 1e-6 * size + 1e-9)
                << kernels->name << " rows " << rows << " outputs " << outputs;
          }
        }
        EXPECT_TRUE(std::isnan(problem.out.back())) << "wrote beyond the last output";
      }
    }
  }
}

TEST_P(LinearTypes, GiveARowTheSameBitsWhateverIsBesideIt) {
  for (const LinearKernels* kernels : AllKernels()) {
    for (int64_t rows = 2; rows <= 14; ++rows) {
      Problem all = Make(rows, 83, 70, 5);
      kernels->linear(all.Task());
      for (int64_t r = 0; r < rows; ++r) {
        Problem one(1, 83, 70, 5);
        one.weight = all.weight, one.narrow = all.narrow, one.dtype = all.dtype;
        one.x.assign(all.x.begin() + r * 70, all.x.begin() + (r + 1) * 70);
        kernels->linear(one.Task());
        for (int64_t n = 0; n < 83; ++n) ASSERT_EQ(one.out[n], all.out[r * 83 + n]);
      }
    }
  }
}

TEST_P(LinearTypes, TouchOnlyTheOutputsAskedFor) {
  for (const LinearKernels* kernels : AllKernels()) {
    Problem problem = Make(3, 50, 20, 9);
    LinearTask task = problem.Task();
    task.first = 11;
    task.last = 37;
    kernels->linear(task);
    for (int64_t i = 0; i < 150; ++i) {
      const bool asked = i % 50 >= 11 && i % 50 < 37;
      EXPECT_EQ(std::isnan(problem.out[i]), !asked) << i;
    }
  }
}

TEST(LinearKernels, GateAsInDouble) {
  for (const LinearKernels* kernels : AllKernels()) {
    for (const int64_t count : {1, 3, 8, 41}) {
      std::mt19937 random(static_cast<uint32_t>(count));
      std::normal_distribution<float> normal(0, 30);
      std::vector<float> gate(count + 1), up(count + 1);
      for (int64_t i = 0; i <= count; ++i) gate[i] = normal(random), up[i] = normal(random);
      std::vector<float> out = gate;
      kernels->gate(out.data(), up.data(), count);
      for (int64_t i = 0; i < count; ++i) {
        const double expected = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
        // The exponent is rounded to float, which tells in proportion to its size.
        const double part = 4e-7 + 1.2e-7 * std::abs(gate[i]);
        ASSERT_NEAR(out[i], expected, part * std::abs(expected) + 1e-30) << kernels->name;
      }
      EXPECT_EQ(out[count], gate[count]) << "wrote beyond the last value";
    }
  }
}

TEST(LinearKernels, GateAtTheEdgesAsTorchDoes) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const LinearKernels* kernels : AllKernels()) {
    std::vector<float> none = {-87.5f, -88.0f, -88.5f, -89.0f, -200.0f, -1e30f, -3e38f};
    std::vector<float> ones(none.size(), 1.0f);
    kernels->gate(none.data(), ones.data(), static_cast<int64_t>(none.size()));
    for (const float value : none) EXPECT_NEAR(value, 0, 1e-36) << kernels->name;
    // However large what it is multiplied with: nothing of it comes through.
    std::vector<float> far = {-200.0f, -1e30f, -3e38f};
    const std::vector<float> large(far.size(), 3e38f);
    kernels->gate(far.data(), large.data(), static_cast<int64_t>(far.size()));
    for (const float value : far) EXPECT_EQ(value, 0) << kernels->name;

    std::vector<float> edges = {1e30f, 3e38f, kInf, 0.0f, -kInf, std::nanf(""), -std::nanf("")};
    ones.assign(edges.size(), 1.0f);
    kernels->gate(edges.data(), ones.data(), static_cast<int64_t>(edges.size()));
    EXPECT_EQ(edges[0], 1e30f);
    EXPECT_EQ(edges[1], 3e38f);
    EXPECT_EQ(edges[2], kInf);
    EXPECT_EQ(edges[3], 0);
    for (size_t i = 4; i < edges.size(); ++i) {
      EXPECT_TRUE(std::isnan(edges[i])) << kernels->name << " " << i;
    }
  }
}

}  // namespace
}  // namespace nwor::cpu
