#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/interceptor.h"

// An interceptor's tests: layers with random caches, and whether anything in them has changed.

namespace nwor {

class InterceptorTest : public ::testing::Test {
 protected:
  static constexpr int kLayers = 3, kPages = 8, kPageSize = 4, kHeads = 2, kDim = 8;

  void Bind(Interceptor& interceptor, int layers = kLayers) {
    keys_.clear();
    values_.clear();
    for (int layer = 0; layer < layers; ++layer) {
      keys_.push_back(at::randn({kPages, kPageSize, kHeads, kDim}));
      values_.push_back(at::randn({kPages, kPageSize, kHeads, kDim}));
      interceptor.BindLayer(Layer(layer), keys_[layer], values_[layer]);
    }
    before_keys_ = at::stack(keys_);
    before_values_ = at::stack(values_);
  }

  static std::string Layer(int layer) { return Concat("layer.", layer); }
  static at::Tensor Rows(int64_t rows) { return at::randn({rows, kHeads, kDim}); }
  static at::Tensor Slots(std::vector<int64_t> slots) { return at::tensor(slots, at::kLong); }
  static at::Tensor Ints(std::vector<int> values) { return at::tensor(values, at::kInt); }
  at::Tensor KeySlot(int layer, int64_t slot) {
    return keys_[layer].reshape({-1, kHeads, kDim})[slot];
  }
  static int64_t Failures(const Interceptor& interceptor, CommitError error) {
    return interceptor.stats().commit_failures[static_cast<size_t>(error)];
  }
  bool Unchanged() {
    return at::equal(at::stack(keys_), before_keys_) &&
           at::equal(at::stack(values_), before_values_);
  }

  std::vector<at::Tensor> keys_, values_;
  at::Tensor before_keys_, before_values_;
};

}  // namespace nwor
