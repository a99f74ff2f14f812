#include "attention/routes/flash_bounds.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "attention/cuda/verify.h"

namespace nwor {
namespace {

// Reports the first request that is `bad` [B], unless there is an error already.
void Report(const std::optional<at::Tensor>& status, VerifyStatus code, const at::Tensor& bad,
            const at::Tensor& values) {
  if (!status.has_value() || bad.numel() == 0) return;
  const at::Tensor request = bad.to(at::kInt).argmax(0, /*keepdim=*/true);
  const at::Tensor found = at::stack({at::full_like(request, static_cast<int64_t>(code)), request,
                                      values.index_select(0, request).to(at::kLong)})
                               .view({3});
  at::Tensor first_error = status->narrow(0, 0, 3);
  const at::Tensor is_first = bad.any().logical_and(first_error.select(0, 0).eq(0));
  first_error.copy_(at::where(is_first, found, first_error));
}

// Clamps `lens` to 0 .. room.
at::Tensor ClampLengths(const at::Tensor& lens, int64_t room, VerifyStatus code,
                        const std::optional<at::Tensor>& status) {
  Report(status, code, lens.lt(0).logical_or(lens.gt(room)), lens);
  return lens.clamp(0, room);
}

at::Tensor ClampStarts(const VerifyArguments& arguments) {
  const at::Tensor& starts = arguments.query_start;
  const int64_t rows = arguments.query.size(0);
  const at::Tensor ends = starts.narrow(0, 1, starts.size(0) - 1);
  const at::Tensor begins = starts.narrow(0, 0, starts.size(0) - 1);
  const at::Tensor bad = ends.lt(begins).logical_or(begins.lt(0)).logical_or(ends.gt(rows));
  Report(arguments.status, VerifyStatus::kBadRowRange, bad, ends);
  return std::get<0>(at::cummax(starts.clamp(0, rows), 0));
}

// Entries past a length, and those of requests without rows, may hold anything and are not
// reported.
at::Tensor ClampPages(const VerifyArguments& arguments, const at::Tensor& starts,
                      const at::Tensor& lens) {
  const at::Tensor& table = arguments.block_table;
  const int64_t num_pages = arguments.key_cache.size(0);
  if (arguments.status.has_value() && table.size(1) > 0) {
    const int64_t page_size = arguments.key_cache.size(1);
    const at::Tensor pages = lens.add(page_size - 1).floor_divide(page_size);
    const at::Tensor used = pages.mul(starts.diff().gt(0)).unsqueeze(1);
    const at::Tensor bad = at::arange(table.size(1), lens.options())
                               .lt(used)
                               .logical_and(table.lt(0).logical_or(table.ge(num_pages)));
    const at::Tensor first = bad.to(at::kInt).argmax(1, /*keepdim=*/true);
    Report(arguments.status, VerifyStatus::kBadPage, bad.any(1),
           table.gather(1, first).select(1, 0));
  }
  return table.clamp(0, std::max<int64_t>(num_pages - 1, 0));
}

// Rows that the mask has no bits for are not seen.
void ReportRowsBeyondMask(const VerifyArguments& arguments, const at::Tensor& starts) {
  if (!arguments.status.has_value() || !arguments.tree_mask.has_value()) return;
  const at::Tensor rows = starts.diff();
  Report(arguments.status, VerifyStatus::kTooManyRows, rows.gt(64 * arguments.tree_mask->size(1)),
         rows);
}

}  // namespace

VerifyArguments ClampToBounds(const VerifyArguments& arguments) {
  VerifyArguments safe = arguments;
  safe.query_start = ClampStarts(arguments);
  ReportRowsBeyondMask(arguments, safe.query_start);
  const bool any_pages = arguments.key_cache.size(0) > 0;
  const int64_t room = any_pages ? arguments.block_table.size(1) * arguments.key_cache.size(1) : 0;
  if (arguments.compact_view.has_value()) {
    safe.compact_view->lens =
        ClampLengths(arguments.compact_view->lens, arguments.compact_view->keys.size(2),
                     VerifyStatus::kViewTooLong, arguments.status);
    return safe;
  }
  safe.prefix_lens =
      ClampLengths(arguments.prefix_lens, room, VerifyStatus::kPrefixTooLong, arguments.status);
  safe.block_table = ClampPages(arguments, safe.query_start, safe.prefix_lens);
  return safe;
}

}  // namespace nwor
