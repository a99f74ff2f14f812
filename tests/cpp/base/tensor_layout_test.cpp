#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "kv_interceptor/interceptor.h"
#include "message_of.h"

namespace nwor {
namespace {

constexpr int kPages = 8, kPageSize = 4, kHeads = 2, kDim = 8;

TEST(TensorLayout, KeysAndValuesAreInPlacesOfTheirOwn) {
  Interceptor interceptor{NworConfig{}};
  const auto problem = [&](const at::Tensor& key, const at::Tensor& value) {
    return MessageOf([&] { interceptor.BindLayer("layer", key, value); });
  };
  const std::string nothing = "nothing was thrown";
  const at::Tensor cache = at::zeros({kPages, kPageSize, kHeads, kDim});
  EXPECT_EQ(problem(cache, cache),
            "value_cache: got memory of key_cache, 0 elements from its first, expected places of "
            "its own");
  EXPECT_NE(problem(cache, cache.view(cache.sizes())), nothing);
  // One piece of memory for both, however they share it: by layer, by page, by head or by token.
  const at::Tensor memory = at::zeros({2 * kPages, 2 * kPageSize, 2 * kHeads, 2 * kDim});
  const at::Tensor part =
      memory.narrow(0, 0, kPages).narrow(1, 0, kPageSize).narrow(2, 0, kHeads).narrow(3, 0, kDim);
  const int64_t sizes[] = {kPages, kPageSize, kHeads, kDim};
  for (int64_t dim = 0; dim < 4; ++dim) {
    for (int64_t by = 1; by <= sizes[dim]; ++by) {
      at::Tensor other = memory;
      for (int64_t d = 0; d < 4; ++d) other = other.narrow(d, d == dim ? by : 0, sizes[d]);
      EXPECT_EQ(problem(part, other) == nothing, by == sizes[dim]) << dim << ", " << by;
      EXPECT_EQ(problem(other, part) == nothing, by == sizes[dim]) << dim << ", " << by;
    }
  }
  for (int64_t dim = 0; dim < 3; ++dim) {  // every other page, token or head
    const auto half = [&](int64_t first) {
      at::Tensor found = memory.slice(dim, first, std::nullopt, 2).narrow(3, 0, kDim);
      for (int64_t d = 0; d < 3; ++d) found = found.narrow(d, 0, sizes[d]);
      return found;
    };
    EXPECT_EQ(problem(half(0), half(1)), nothing) << dim;
    EXPECT_EQ(problem(half(1), half(0)), nothing) << dim;
  }
}

TEST(TensorLayout, KeysAndValuesOfOtherStridesHaveMemoryOfTheirOwn) {
  Interceptor interceptor{NworConfig{}};
  const at::Tensor memory = at::zeros({2, kPages, kPageSize, kHeads, kDim});
  const auto by_head = [](const at::Tensor& half) {
    return half.view({kPages, kHeads, kPageSize, kDim}).transpose(1, 2);
  };
  const auto problem = [&](const at::Tensor& key, const at::Tensor& value) {
    return MessageOf([&] { interceptor.BindLayer("layer", key, value); });
  };
  EXPECT_EQ(problem(memory[0], by_head(memory[0])),
            "value_cache: got strides [64, 8, 32, 1] in memory of key_cache, whose strides are "
            "[64, 16, 8, 1], expected the same strides or memory of its own");
  EXPECT_NE(problem(by_head(memory[0]), memory[0]), "nothing was thrown");
  const at::Tensor beside =
      memory.view({-1}).narrow(0, memory[0].numel() - 1, memory[0].numel());  // one element shared
  EXPECT_NE(problem(memory[0], by_head(beside)), "nothing was thrown");
  EXPECT_EQ(problem(memory[0], by_head(memory[1])), "nothing was thrown");
  EXPECT_EQ(problem(by_head(memory[1]), memory[0]), "nothing was thrown");
}

}  // namespace
}  // namespace nwor
