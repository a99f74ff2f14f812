#include "attention/routes/flash_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "attention/routes/route.h"

namespace nwor {
namespace {

constexpr int64_t kGapRows = 256;  // more than a tile of any of FlashAttention-3's kernels

at::Tensor Lengths(const at::Tensor& query_start) { return query_start.diff(); }

// Per row the first request that ends behind it; the number of requests where none does.
at::Tensor FirstEndingBehind(const at::Tensor& query_start, int64_t rows) {
  const at::Tensor ends = query_start.slice(0, 1).to(at::kLong);
  const at::Tensor row = at::arange(rows, ends.options());
  return at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true);
}

}  // namespace

at::Tensor RequestOfRows(const at::Tensor& query_start, int64_t rows) {
  const int64_t requests = query_start.size(0) - 1;
  return FirstEndingBehind(query_start, rows).clamp_max(requests - 1);
}

at::Tensor IsPrefill(const at::Tensor& query_start) {
  return Lengths(query_start).gt(kPrefillRows);
}

SpacedRows SpaceRows(const VerifyArguments& arguments, bool only_prefill) {
  const at::Tensor& starts = arguments.query_start;
  const int64_t requests = starts.size(0) - 1;
  const int64_t rows = arguments.key.size(0);
  const at::Tensor lens = Lengths(starts);
  const at::Tensor spaced = lens.gt(only_prefill ? kPrefillRows : 0);
  const int64_t gaps = std::min(requests, only_prefill ? rows / (kPrefillRows + 1) : rows);
  // By how much each request moves, and the rows behind the last.
  const at::Tensor shift =
      at::cat({at::zeros({1}, starts.options().dtype(at::kLong)), spaced.cumsum(0)}).mul(kGapRows);

  const at::Tensor moved = shift.index_select(0, FirstEndingBehind(starts, rows));
  const at::Tensor place = at::arange(rows, shift.options()).add(moved);
  const auto spread = [&](const at::Tensor& from) {
    return at::zeros({rows + gaps * kGapRows, from.size(1), from.size(2)}, from.options())
        .index_copy_(0, place, from);
  };
  return {spread(arguments.key), spread(arguments.value), starts.add(shift).to(at::kInt), lens};
}

}  // namespace nwor
