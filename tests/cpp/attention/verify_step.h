#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/params.h"
#include "test_seed.h"

// A verification step in plain memory, and fp64 loops over what each row sees.

namespace nwor::testing {

struct StepShape {
  std::vector<int> rows;
  std::vector<int> prefix;
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 64;
  int page_size = 16;
  bool tree = false;
  int window = 0;
  float softcap = 0.0f;
};

// float32 rows over float32 pages; everything not used is NaN.
class VerifyStep {
 public:
  VerifyStep(const StepShape& shape, uint32_t seed) : shape_(shape), random_(seed) {
    const int requests = static_cast<int>(shape.rows.size());
    query_start_.push_back(0);
    for (const int rows : shape.rows) query_start_.push_back(query_start_.back() + rows);
    int pages = 2;
    for (const int length : shape.prefix) pages += PagesOf(length);
    max_pages_ = pages;
    std::vector<int> order(pages);
    for (int i = 0; i < pages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    table_.assign(static_cast<size_t>(requests) * max_pages_, -12345);
    const size_t slots = static_cast<size_t>(pages) * shape.page_size;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    keys_.assign(slots * shape.kv_heads * shape.head_dim, nan);
    values_ = keys_;
    for (int b = 0; b < requests; ++b) {
      for (int i = 0; i < PagesOf(shape.prefix[b]); ++i) {
        table_[b * max_pages_ + i] = order.back();
        order.pop_back();
      }
      for (int t = 0; t < shape.prefix[b]; ++t) {
        for (int h = 0; h < shape.kv_heads; ++h) {
          Fill(&keys_[TokenAt(b, t, h)]);
          Fill(&values_[TokenAt(b, t, h)]);
        }
      }
    }
    const int total = query_start_.back();
    query_ = Noise(total * shape.heads);
    key_ = Noise(total * shape.kv_heads);
    value_ = Noise(total * shape.kv_heads);
    if (shape.tree) MakeTree();
    out_.assign(query_.size(), nan);
    lse_.assign(static_cast<size_t>(total) * shape.heads, nan);
  }

  VerifyParams Params() {
    const int64_t dim = shape_.head_dim;
    VerifyParams params;
    params.query = query_.data();
    params.key = key_.data();
    params.value = value_.data();
    params.out = out_.data();
    params.lse = lse_.data();
    params.query_strides = params.out_strides = {shape_.heads * dim, dim};
    params.key_strides = params.value_strides = {shape_.kv_heads * dim, dim};
    const KvStrides strides{shape_.page_size * shape_.kv_heads * dim, shape_.kv_heads * dim, dim};
    params.cache.key = keys_.data();
    params.cache.value = values_.data();
    params.cache.geometry = {max_pages_,      shape_.page_size, shape_.kv_heads, shape_.head_dim,
                             DType::kFloat32, strides,          strides};
    params.block_table = table_.data();
    params.prefix_lens = shape_.prefix.data();
    params.query_start = query_start_.data();
    params.table_stride = max_pages_;
    params.max_pages = max_pages_;
    if (shape_.tree) {
      params.tree_mask = mask_.data();
      params.mask_words = mask_words_;
    }
    params.scale = 0.2f;
    params.softcap = shape_.softcap;
    params.window = shape_.window;
    params.num_requests = static_cast<int32_t>(shape_.rows.size());
    params.num_rows = query_start_.back();
    params.num_heads = shape_.heads;
    params.num_kv_heads = shape_.kv_heads;
    params.head_dim = shape_.head_dim;
    params.dtype = DType::kFloat32;
    return params;
  }

  // Largest difference of out and lse from the reference.
  double Error() const {
    double error = 0.0;
    for (size_t b = 0; b < shape_.rows.size(); ++b) {
      for (int row = 0; row < shape_.rows[b]; ++row) {
        for (int head = 0; head < shape_.heads; ++head) {
          error = std::max(error, RowError(static_cast<int>(b), row, head));
        }
      }
    }
    return error;
  }

  const std::vector<float>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }
  std::vector<int>& table() { return table_; }
  std::vector<int>& prefix() { return shape_.prefix; }

 private:
  int PagesOf(int length) const { return (length + shape_.page_size - 1) / shape_.page_size; }

  size_t TokenAt(int b, int t, int head) const {
    const int page = table_[b * max_pages_ + t / shape_.page_size];
    const size_t slot = static_cast<size_t>(page) * shape_.page_size + t % shape_.page_size;
    return (slot * shape_.kv_heads + head) * shape_.head_dim;
  }

  void Fill(float* to) {
    for (int d = 0; d < shape_.head_dim; ++d) to[d] = normal_(random_);
  }

  std::vector<float> Noise(int vectors) {
    std::vector<float> noise(static_cast<size_t>(vectors) * shape_.head_dim);
    for (float& x : noise) x = normal_(random_);
    return noise;
  }

  // Each row's parent is some row before it; a row sees its ancestors and itself.
  void MakeTree() {
    const int longest = *std::max_element(shape_.rows.begin(), shape_.rows.end());
    mask_words_ = (longest + 63) / 64;
    mask_.assign(static_cast<size_t>(query_start_.back()) * mask_words_, 0);
    for (size_t b = 0; b < shape_.rows.size(); ++b) {
      for (int row = 0; row < shape_.rows[b]; ++row) {
        uint64_t* own = &mask_[static_cast<size_t>(query_start_[b] + row) * mask_words_];
        if (row > 0) {
          const int parent = static_cast<int>(random_() % static_cast<uint32_t>(row));
          std::copy_n(&mask_[static_cast<size_t>(query_start_[b] + parent) * mask_words_],
                      mask_words_, own);
        }
        own[row / 64] |= uint64_t{1} << (row % 64);
      }
    }
  }

  bool Sees(int b, int row, int other) const {
    if (!shape_.tree) return other <= row;
    const uint64_t* own = &mask_[static_cast<size_t>(query_start_[b] + row) * mask_words_];
    return (own[other / 64] >> (other % 64) & 1) != 0;
  }

  int Position(int b, int row) const {
    int seen = 0;
    for (int other = 0; other < shape_.rows[b]; ++other) seen += Sees(b, row, other) ? 1 : 0;
    return shape_.prefix[b] + seen - 1;
  }

  double RowError(int b, int row, int head) const {
    const int dim = shape_.head_dim;
    const int kv_head = head / (shape_.heads / shape_.kv_heads);
    const int first = shape_.window > 0 ? Position(b, row) - shape_.window + 1 : 0;
    std::vector<std::pair<const float*, const float*>> tokens;
    for (int t = std::max(first, 0); t < shape_.prefix[b]; ++t) {
      tokens.emplace_back(&keys_[TokenAt(b, t, kv_head)], &values_[TokenAt(b, t, kv_head)]);
    }
    for (int other = 0; other < shape_.rows[b]; ++other) {
      if (!Sees(b, row, other)) continue;
      if (shape_.window > 0 && Position(b, other) < first) continue;
      const size_t at = static_cast<size_t>(query_start_[b] + other) * shape_.kv_heads + kv_head;
      tokens.emplace_back(&key_[at * dim], &value_[at * dim]);
    }
    const size_t index = static_cast<size_t>(query_start_[b] + row) * shape_.heads + head;
    const float* q = &query_[index * dim];
    std::vector<double> logits;
    for (const auto& [key, value] : tokens) {
      double dot = 0.0;
      for (int d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * key[d];
      dot *= static_cast<double>(0.2f);
      logits.push_back(shape_.softcap > 0 ? shape_.softcap * std::tanh(dot / shape_.softcap) : dot);
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const double logit : logits) sum += std::exp(logit - max);
    double error = std::abs(lse_[index] - (max + std::log(sum)));
    for (int d = 0; d < dim; ++d) {
      double expected = 0.0;
      for (size_t i = 0; i < tokens.size(); ++i) {
        expected += std::exp(logits[i] - max) / sum * tokens[i].second[d];
      }
      const double got = out_[index * dim + d];
      error = std::isnan(got) ? std::numeric_limits<double>::infinity()
                              : std::max(error, std::abs(got - expected));
    }
    return error;
  }

  StepShape shape_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  int max_pages_ = 0;
  int mask_words_ = 0;
  std::vector<int> query_start_, table_;
  std::vector<uint64_t> mask_;
  std::vector<float> keys_, values_, query_, key_, value_, out_, lse_;
};

}  // namespace nwor::testing
