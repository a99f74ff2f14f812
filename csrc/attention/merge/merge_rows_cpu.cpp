#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "attention/merge/merge_rows.h"
#include "attention/merge/merge_state_params.h"
#include "base/parallel.h"

namespace nwor {
namespace {

template <typename T>
const T* At(const void* base, const RowStrides& strides, int64_t row, int64_t head) {
  return static_cast<const T*>(base) + row * strides.row + head * strides.head;
}

struct RowSpan {
  int32_t begin, end;
};

int32_t NumRequests(const MergeRowsParams& params) {
  const int32_t each = params.rows_per_request;
  if (each == 0) return params.num_requests;
  return params.num_rows / each + (params.num_rows % each > 0 ? 1 : 0);
}

RowSpan RowsOf(const MergeRowsParams& params, int32_t request) {
  const int32_t each = params.rows_per_request;
  if (each == 0) return {params.query_start[request], params.query_start[request + 1]};
  const int32_t begin = request * each;
  return {begin, begin + std::min(each, params.num_rows - begin)};
}

// The rows of K and V that row `row` of request `b` sees.
void FindVisible(const MergeRowsParams& params, int32_t b, RowSpan request, int32_t row,
                 std::vector<int32_t>* visible) {
  visible->clear();
  if (params.token_lens != nullptr) {
    const int32_t count = std::clamp(params.token_lens[b], 0, params.token_room);
    for (int32_t i = 0; i < count; ++i) visible->push_back(b * params.token_room + i);
    return;
  }
  for (int32_t other = request.begin; other < request.end; ++other) {
    const int32_t bit = other - request.begin;
    const bool sees =
        params.tree_mask == nullptr
            ? other <= row
            : bit / 64 < params.mask_words &&
                  (params.tree_mask[int64_t{row} * params.mask_words + bit / 64] >> (bit % 64) &
                   1) != 0;
    if (sees) visible->push_back(other);
  }
}

template <typename T>
void MergeHead(const MergeRowsParams& params, int32_t row, int32_t head,
               const std::vector<int32_t>& visible, std::vector<float>* scores,
               std::vector<float>* total) {
  const int32_t kv_head = head / (params.num_heads / params.num_kv_heads);
  const T* query = At<T>(params.query, params.query_strides, row, head);
  const float given =
      params
          .prefix_lse[row * params.prefix_lse_strides.row + head * params.prefix_lse_strides.head];
  const float prefix_lse = std::isinf(given) ? kEmptyLse : given;
  float max = prefix_lse;
  scores->clear();
  for (const int32_t other : visible) {
    const T* key = At<T>(params.key, params.key_strides, other, kv_head);
    float score = 0.0f;
    for (int32_t d = 0; d < params.head_dim; ++d) {
      score += static_cast<float>(query[d]) * static_cast<float>(key[d]);
    }
    score *= params.scale;
    if (params.softcap > 0.0f) score = params.softcap * std::tanh(score / params.softcap);
    scores->push_back(score);
    max = std::max(max, score);
  }
  const float base = max == kEmptyLse ? 0.0f : max;
  float sum = 0.0f;
  std::fill(total->begin(), total->end(), 0.0f);
  const auto add = [&](float weight, const T* from) {
    sum += weight;
    for (int32_t d = 0; d < params.head_dim; ++d) {
      (*total)[d] += weight * static_cast<float>(from[d]);
    }
  };
  if (prefix_lse != kEmptyLse) {
    add(std::exp(prefix_lse - base), At<T>(params.prefix_out, params.prefix_strides, row, head));
  }
  for (size_t i = 0; i < visible.size(); ++i) {
    add(std::exp((*scores)[i] - base),
        At<T>(params.value, params.value_strides, visible[i], kv_head));
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  T* out =
      static_cast<T*>(params.out) + row * params.out_strides.row + head * params.out_strides.head;
  for (int32_t d = 0; d < params.head_dim; ++d) out[d] = static_cast<T>((*total)[d] * inverse);
  if (params.lse != nullptr) {
    params.lse[int64_t{row} * params.num_heads + head] =
        sum == 0.0f ? kEmptyLse : base + std::log(sum);
  }
}

template <typename T>
void MergeAs(const MergeRowsParams& params) {
  std::atomic<int32_t> next{0};
  const int64_t products = int64_t{params.num_rows} * params.num_heads * params.head_dim;
  RunOnTorchThreads(1 + products / 65536, [&] {
    std::vector<int32_t> visible;
    std::vector<float> scores, total(params.head_dim);
    for (int32_t b = next.fetch_add(1); b < NumRequests(params); b = next.fetch_add(1)) {
      const RowSpan request = RowsOf(params, b);
      for (int32_t row = request.begin; row < request.end; ++row) {
        FindVisible(params, b, request, row, &visible);
        for (int32_t head = 0; head < params.num_heads; ++head) {
          MergeHead<T>(params, row, head, visible, &scores, &total);
        }
      }
    }
  });
}

}  // namespace

void MergeRowsCpu(const MergeRowsParams& params) {
  switch (params.dtype) {
    case DType::kFloat16:
      return MergeAs<c10::Half>(params);
    case DType::kBFloat16:
      return MergeAs<c10::BFloat16>(params);
    default:
      return MergeAs<float>(params);
  }
}

}  // namespace nwor
