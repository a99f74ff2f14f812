#include "kv_interceptor/round.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace nwor {

void CheckPlan(const RoundPlan& plan) {
  const size_t num_requests = plan.query_lens.size();
  NWOR_CHECK(plan.num_drafts.size() == num_requests, "num_drafts: got ", plan.num_drafts.size(),
             " requests, expected ", num_requests, " as query_lens");
  NWOR_CHECK(plan.parents.empty() || plan.parents.size() == num_requests, "parents: got ",
             plan.parents.size(), " requests, expected ", num_requests, " as query_lens, or none");
  NWOR_CHECK(!plan.ascending || plan.parents.empty(),
             "ascending: got true and parents, expected one of them");
  for (size_t b = 0; b < num_requests; ++b) {
    const int32_t rows = plan.query_lens[b], drafts = plan.num_drafts[b];
    NWOR_CHECK(rows >= 0, "query_lens: got ", rows, " for request ", b, ", expected 0 or more");
    NWOR_CHECK(drafts >= 0 && (drafts == 0 || drafts < rows), "num_drafts: got ", drafts,
               " for request ", b, ", expected 0 to ", std::max(0, rows - 1), " of its ", rows,
               " rows (the root is no draft)");
    if (plan.parents.empty()) continue;
    const std::vector<int32_t>& parents = plan.parents[b];
    NWOR_CHECK(parents.size() == static_cast<size_t>(drafts), "parents: got ", parents.size(),
               " for request ", b, ", expected one for each of its ", drafts, " drafts");
    for (int32_t i = 0; i < drafts; ++i) {
      const int32_t row = rows - drafts + i;
      NWOR_CHECK(parents[i] >= rows - drafts - 1 && parents[i] < row, "parents: got ", parents[i],
                 " for row ", row, " of request ", b, ", expected a row from the root ",
                 rows - drafts - 1, " to ", row - 1);
    }
  }
}

namespace {

// Pinned memory comes from torch's cache, which reuses it only after a copy from it has run.
at::Tensor ToHost(const std::vector<int32_t>& values, bool pinned) {
  const auto size = static_cast<int64_t>(values.size());
  at::Tensor host = at::empty({size}, at::TensorOptions().dtype(at::kInt).pinned_memory(pinned));
  std::memcpy(host.mutable_data_ptr(), values.data(), values.size() * sizeof(int32_t));
  return host;
}

}  // namespace

at::Tensor ToDevice(const std::vector<int32_t>& values, at::Device device) {
  const at::Tensor host = ToHost(values, device.is_cuda());
  return device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);
}

RoundTables::RoundTables(const RoundPlan& plan, bool stage, at::Device device,
                         const at::Tensor& fixed, int64_t fixed_rows)
    : num_requests_(static_cast<int32_t>(plan.query_lens.size())) {
  CheckPlan(plan);
  stage_rows_.reserve(plan.num_rows());
  std::vector<int32_t> row_base, request_rows{0}, parents;
  for (int32_t b = 0; b < num_requests_; ++b) {
    const int32_t rows = plan.query_lens[b];
    const int32_t first_draft = rows - plan.num_drafts[b];
    row_base.push_back(num_rows());
    for (int32_t row = 0; row < rows; ++row) {
      if (row < first_draft || !stage) {
        stage_rows_.push_back(-1);
        continue;
      }
      const int32_t parent = plan.parents.empty() ? row - 1 : plan.parents[b][row - first_draft];
      parents.push_back(parent < first_draft ? -1 : request_rows.back() + parent - first_draft);
      stage_rows_.push_back(num_staging_rows_++);
    }
    request_rows.push_back(num_staging_rows_);
  }
  in_place_ = fixed.defined() && num_rows() <= fixed_rows && num_requests_ <= fixed_rows;
  table_rows_ = in_place_ ? fixed_rows : num_rows();
  std::vector<int32_t> tables = stage_rows_;
  tables.resize(table_rows_, -1);
  tables.insert(tables.end(), row_base.begin(), row_base.end());
  tables.insert(tables.end(), request_rows.begin(), request_rows.end());
  tables.insert(tables.end(), parents.begin(), parents.end());
  tables.insert(tables.end(), num_requests_, -1);  // tips
  if (in_place_) {
    // Ordered after the kernels of the round before, which read what is overwritten here.
    device_ = fixed.narrow(0, 0, static_cast<int64_t>(tables.size()));
    device_.copy_(ToHost(tables, device.is_cuda()), /*non_blocking=*/true);
  } else {
    device_ = ToDevice(tables, device);
  }
}

int32_t* RoundTables::At(int64_t offset) const {
  return static_cast<int32_t*>(device_.mutable_data_ptr()) + offset;
}

}  // namespace nwor
