#include "attention/routes/flash_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "attention/routes/route.h"

namespace nwor {
namespace {

constexpr int64_t kPaddingRows = 256;  // more than any KV tile of FlashAttention-3

at::Tensor Lengths(const at::Tensor& query_start) { return query_start.diff(); }

// For each row, the first request that ends after it; the number of requests if there is none.
at::Tensor RequestEndingAfter(const at::Tensor& query_start, int64_t rows) {
  const at::Tensor ends = query_start.slice(0, 1).to(at::kLong);
  const at::Tensor row = at::arange(rows, ends.options());
  return at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true);
}

}  // namespace

at::Tensor RequestOfRows(const at::Tensor& query_start, int64_t rows) {
  const int64_t requests = query_start.size(0) - 1;
  return RequestEndingAfter(query_start, rows).clamp_max(requests - 1);
}

at::Tensor IsPrefill(const at::Tensor& query_start) {
  return Lengths(query_start).gt(kPrefillRows);
}

PaddedRows PadRows(const VerifyArguments& arguments, bool only_prefill) {
  const at::Tensor& starts = arguments.query_start;
  const int64_t requests = starts.size(0) - 1;
  const int64_t rows = arguments.key.size(0);
  const at::Tensor lens = Lengths(starts);
  const at::Tensor is_padded = lens.gt(only_prefill ? kPrefillRows : 0);
  const int64_t paddings = std::min(requests, only_prefill ? rows / (kPrefillRows + 1) : rows);
  // By how much each request moves, and the rows after the last request.
  const at::Tensor shift =
      at::cat({at::zeros({1}, starts.options().dtype(at::kLong)), is_padded.cumsum(0)})
          .mul(kPaddingRows);

  const at::Tensor moved = shift.index_select(0, RequestEndingAfter(starts, rows));
  const at::Tensor place = at::arange(rows, shift.options()).add(moved);
  const auto pad = [&](const at::Tensor& from) {
    return at::zeros({rows + paddings * kPaddingRows, from.size(1), from.size(2)}, from.options())
        .index_copy_(0, place, from);
  };
  return {pad(arguments.key), pad(arguments.value), starts.add(shift).to(at::kInt), lens};
}

}  // namespace nwor
