#include "kv_interceptor/commit/summary_tensors.h"

#include "base/check.h"
#include "base/tensor_layout.h"

namespace nwor {
namespace {

template <typename T>
const T* Data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

}  // namespace

CommitSummaries DescribeSummaries(const SummaryTensors& tensors, const CommitParams& params,
                                  int64_t num_requests, at::Device device) {
  CommitSummaries summaries;
  if (!tensors.kmax.defined()) return summaries;
  NWOR_CHECK(params.num_groups == 1, "summaries: got ", params.num_groups,
             " cache groups, expected 1");
  const CacheGeometry& geometry = params.groups[0].geometry;
  const at::Tensor& kmax = tensors.kmax;
  NWOR_CHECK(kmax.dim() == 5 && kmax.size(0) == params.num_layers &&
                 kmax.size(3) == geometry.num_heads && kmax.size(4) == geometry.head_dim &&
                 kmax.stride(4) == 1,
             "kmax: got ", Describe(kmax), " strides ", kmax.strides(), ", expected [",
             params.num_layers, ", rows, blocks, ", geometry.num_heads, ", ", geometry.head_dim,
             "] with contiguous channels");
  NWOR_CHECK(tensors.kmin.defined() && tensors.kmin.sizes() == kmax.sizes() &&
                 tensors.kmin.strides() == kmax.strides() &&
                 tensors.kmin.scalar_type() == kmax.scalar_type(),
             "kmin: got ", tensors.kmin.defined() ? Describe(tensors.kmin) : "nothing",
             ", expected sizes, strides and dtype of kmax ", Describe(kmax));
  CheckDevice(kmax, "kmax", device);
  CheckDevice(tensors.kmin, "kmin", device);
  CheckIndex(tensors.block_table, "block_table", at::kInt, {num_requests, -1}, device);
  CheckIndex(tensors.full_lens, "full_lens", at::kInt, {num_requests}, device);
  CheckIndex(tensors.cached_lens, "cached_lens", at::kInt, {num_requests}, device);
  NWOR_CHECK(tensors.rows.has_value() || kmax.size(1) == num_requests, "kmax: got ", kmax.size(1),
             " rows, expected one for each of the ", num_requests, " requests");
  if (tensors.rows.has_value()) {
    CheckIndex(*tensors.rows, "summary_rows", at::kInt, {num_requests}, device);
  }
  NWOR_CHECK(tensors.block_size >= 1 && tensors.block_size <= INT32_MAX, "block_size: got ",
             tensors.block_size, ", expected at least 1");
  NWOR_CHECK(tensors.start_token >= 0 && tensors.start_token <= INT32_MAX, "start_token: got ",
             tensors.start_token, ", expected 0 or more");
  summaries.dtype = RowDType(kmax, "kmax");
  summaries.layer_stride = kmax.stride(0);
  summaries.row_stride = kmax.stride(1);
  summaries.block_stride = kmax.stride(2);
  summaries.head_stride = kmax.stride(3);
  summaries.table_stride = tensors.block_table.size(1);
  summaries.max_pages = static_cast<int32_t>(tensors.block_table.size(1));
  summaries.max_blocks = static_cast<int32_t>(kmax.size(2));
  summaries.num_rows = static_cast<int32_t>(kmax.size(1));
  summaries.start_token = static_cast<int32_t>(tensors.start_token);
  summaries.block_size = static_cast<int32_t>(tensors.block_size);
  if (IsFake(kmax)) return summaries;
  summaries.kmax = kmax.mutable_data_ptr();
  summaries.kmin = tensors.kmin.mutable_data_ptr();
  summaries.block_table = Data<int32_t>(tensors.block_table);
  summaries.full_lens = Data<int32_t>(tensors.full_lens);
  summaries.cached_lens = Data<int32_t>(tensors.cached_lens);
  if (tensors.rows.has_value()) summaries.rows = Data<int32_t>(*tensors.rows);
  return summaries;
}

}  // namespace nwor
