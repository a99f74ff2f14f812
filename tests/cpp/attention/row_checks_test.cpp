#include "attention/row_checks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <string>

#include "attention/verify_step.h"
#include "base/check.h"
#include "message_of.h"
#include "test_seed.h"

namespace nwor {
namespace {

std::set<int64_t> Places(const at::Tensor& tensor) {
  std::set<int64_t> places;
  for (int64_t i = 0; i < tensor.size(0); ++i) {
    for (int64_t j = 0; j < tensor.size(1); ++j) {
      for (int64_t k = 0; k < tensor.size(2); ++k) {
        places.insert(tensor.storage_offset() + i * tensor.stride(0) + j * tensor.stride(1) +
                      k * tensor.stride(2));
      }
    }
  }
  return places;
}

bool HaveCommonPlace(const at::Tensor& a, const at::Tensor& b) {
  const std::set<int64_t> places = Places(a);
  for (const int64_t place : Places(b)) {
    if (places.contains(place)) return true;
  }
  return false;
}

// What has a place in common is always found, and slices of one buffer are never taken for it.
TEST(MayOverlap, IsNeverWrongAboutSlicesAndNeverMissesAPlace) {
  const uint32_t seed = TestSeed();
  std::mt19937 random(seed);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int overlapping = 0, apart = 0;
  for (int i = 0; i < 4000; ++i) {
    const at::Tensor buffer = at::empty({draw(1, 5), draw(1, 6), draw(1, 4)});
    const auto slice = [&] {
      at::Tensor part = buffer;
      for (int64_t dim = 0; dim < 3; ++dim) {
        const int64_t first = draw(0, buffer.size(dim) - 1);
        part = part.narrow(dim, first, draw(1, buffer.size(dim) - first));
      }
      return part;
    };
    const at::Tensor a = slice(), b = slice();
    const bool common = HaveCommonPlace(a, b);
    EXPECT_EQ(MayOverlap(a, b), common) << a.sizes() << b.sizes() << buffer.sizes();
    EXPECT_EQ(MayOverlap(b, a), common);
    ++(common ? overlapping : apart);

    const at::Tensor memory = at::empty({400});
    const auto strided = [&] {
      return memory.as_strided({draw(1, 4), draw(1, 4), draw(1, 4)},
                               {draw(0, 30), draw(0, 12), draw(0, 5)}, draw(0, 100));
    };
    const at::Tensor c = strided(), d = strided();
    if (HaveCommonPlace(c, d)) {
      EXPECT_TRUE(MayOverlap(c, d)) << c.sizes() << c.strides() << d.sizes() << d.strides();
    }
  }
  EXPECT_GT(overlapping, 500);
  EXPECT_GT(apart, 500);
}

TEST(MayOverlap, KnowsNothingOfEmptyTensorsAndOtherMemory) {
  const at::Tensor rows = at::empty({4, 3, 8});
  EXPECT_TRUE(MayOverlap(rows, rows));
  EXPECT_TRUE(MayOverlap(rows, rows.expand({2, 4, 3, 8})));
  EXPECT_TRUE(MayOverlap(rows, rows.view(at::kInt)));
  EXPECT_FALSE(MayOverlap(rows, rows.narrow(0, 1, 0)));
  EXPECT_FALSE(MayOverlap(rows, at::empty({4, 3, 8})));
}

TEST(IsSameMemory, LooksAtStridesThatMeanSomething) {
  const at::Tensor rows = at::empty({4, 3, 8});
  EXPECT_TRUE(IsSameMemory(rows, rows.view({4, 3, 8})));
  EXPECT_FALSE(IsSameMemory(rows, rows.narrow(0, 0, 3)));
  EXPECT_FALSE(IsSameMemory(rows.narrow(0, 0, 3), rows.narrow(0, 1, 3)));
  EXPECT_FALSE(IsSameMemory(rows.transpose(0, 1).narrow(1, 0, 3), rows.narrow(0, 0, 3)));
  EXPECT_TRUE(
      IsSameMemory(rows.narrow(0, 0, 1), rows.narrow(0, 0, 1).as_strided({1, 3, 8}, {5, 8, 1})));
}

TEST(CheckNoSelfOverlap, RefusesRowsThatReachIntoOthers) {
  const at::Tensor memory = at::empty({200});
  CheckNoSelfOverlap(memory.as_strided({4, 3, 8}, {24, 8, 1}));
  CheckNoSelfOverlap(memory.as_strided({4, 3, 8}, {8, 40, 1}));
  CheckNoSelfOverlap(memory.as_strided({1, 3, 8}, {0, 8, 1}));
  EXPECT_EQ(
      MessageOf([&] {
        CheckNoSelfOverlap(memory.as_strided({4, 3, 8}, {16, 8, 1}));
      }),
      "out: got overlapping strides [16, 8, 1] for sizes [4, 3, 8], expected elements that do not "
      "overlap");
  EXPECT_THROW(CheckNoSelfOverlap(memory.as_strided({4, 3, 8}, {0, 8, 1})), Error);
}

TEST(CheckLogitScalars, SaysWhatFloat32CanServe) {
  for (const double scale : {-1e30, 0.0, 1e-60, 1e30}) {
    EXPECT_EQ(CheckLogitScalars(scale, 0.0).scale, static_cast<float>(scale));
  }
  for (const double softcap : {0.0, 1e-6, 50.0, 1000.0}) {
    EXPECT_EQ(CheckLogitScalars(1.0, softcap).softcap, static_cast<float>(softcap));
  }
  EXPECT_EQ(MessageOf([] { CheckLogitScalars(1e39, 0.0); }),
            "scale: got 1e+39, expected -1e+30 to 1e+30");
  EXPECT_EQ(MessageOf([] { CheckLogitScalars(1.0, 1e-50); }),
            "softcap: got 1e-50, expected 0 (none) or 1e-06 to 1000");
  EXPECT_THROW(CheckLogitScalars(1.0, 1001.0), Error);
  EXPECT_THROW(CheckLogitScalars(1.0, -1.0), Error);
}

}  // namespace
}  // namespace nwor
