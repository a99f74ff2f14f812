#include "attention/merge/merge_rows.h"

#include <c10/core/DeviceGuard.h>

#include "attention/row_checks.h"
#include "base/check.h"
#include "base/profiling.h"
#include "base/tensor_layout.h"

namespace nwor {
namespace {

constexpr int64_t kMaxHeadDim = 256;

void CheckState(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  NWOR_CHECK(tensor.defined() && tensor.sizes() == query.sizes() &&
                 tensor.scalar_type() == query.scalar_type(),
             name, ": got ", tensor.defined() ? Describe(tensor) : "nothing", ", expected ",
             Describe(query), " as query");
  CheckDevice(tensor, name, query.device());
  NWOR_CHECK(tensor.stride(2) == 1, name, ": got a stride of ", tensor.stride(2),
             " between channels, expected 1 (contiguous channels)");
  NWOR_CHECK(!tensor.is_cuda() || IsAligned(tensor), name,
             ": got rows that are not 16-byte aligned, expected 16-byte alignment on cuda");
}

void CheckQuery(const at::Tensor& query, MergeRowsParams* params) {
  NWOR_CHECK(query.defined() && query.dim() == 3 && query.size(1) > 0, "query: got ",
             query.defined() ? Describe(query) : "nothing", ", expected [rows, heads, channels]");
  params->dtype = RowDType(query, "query");
  NWOR_CHECK(!query.is_cuda() || params->dtype != DType::kFloat32,
             "query: got float32 on cuda, expected float16 or bfloat16");
  NWOR_CHECK(query.size(2) > 0 && query.size(2) % 8 == 0 && query.size(2) <= kMaxHeadDim,
             "query: got ", query.size(2), " channels, expected a multiple of 8 up to ",
             kMaxHeadDim);
  NWOR_CHECK(query.size(0) * query.size(1) <= INT32_MAX, "query: got ", query.size(0),
             " rows, expected fewer");
  params->num_rows = static_cast<int32_t>(query.size(0));
  params->num_heads = static_cast<int32_t>(query.size(1));
  params->head_dim = static_cast<int32_t>(query.size(2));
}

void CheckKeys(const MergeRowsArguments& arguments, const at::Tensor& key, const at::Tensor& value,
               MergeRowsParams* params) {
  const at::Tensor& query = arguments.query;
  const int64_t rows_of_key = arguments.token_lens && key.dim() == 3 ? key.size(0) : query.size(0);
  NWOR_CHECK(key.dim() == 3 && key.size(0) == rows_of_key && key.size(1) > 0 &&
                 query.size(1) % key.size(1) == 0,
             "key: got ", Describe(key), ", expected [", rows_of_key,
             ", heads, channels] with heads dividing the ", query.size(1), " of query");
  NWOR_CHECK(key.scalar_type() == query.scalar_type(), "key: got dtype ",
             c10::toString(key.scalar_type()), ", expected ", Name(params->dtype), " as query");
  CheckDevice(key, "key", query.device());
  const KvRowsView rows = DescribeRows(key, value, "key", "value", key.size(1), params->head_dim);
  NWOR_CHECK(value.size(0) == rows_of_key, "value: got ", value.size(0), " rows, expected ",
             rows_of_key, " as ", arguments.token_lens ? "key" : "query");
  params->num_kv_heads = static_cast<int32_t>(key.size(1));
  params->key = rows.key;
  params->value = rows.value;
  params->key_strides = {rows.key_row, rows.key_head};
  params->value_strides = {rows.value_row, rows.value_head};
}

// REQUIRES: num_requests is known.
void CheckTokens(const MergeRowsArguments& arguments, MergeRowsParams* params) {
  const int64_t requests = params->num_requests, tokens = arguments.key.size(0);
  CheckIndex(*arguments.token_lens, "token_lens", at::kInt, {requests}, arguments.query.device());
  NWOR_CHECK(!arguments.tree_mask.has_value() && arguments.rows_per_request == 0,
             "token_lens: got tree_mask or rows_per_request as well, expected neither");
  NWOR_CHECK(tokens <= INT32_MAX && (requests == 0 ? tokens == 0 : tokens % requests == 0),
             "key: got ", tokens, " tokens, expected the same number for each of the ", requests,
             " requests");
  params->token_lens = static_cast<const int32_t*>(arguments.token_lens->const_data_ptr());
  params->token_room = requests == 0 ? 0 : static_cast<int32_t>(tokens / requests);
}

void CheckLengths(const MergeRowsArguments& arguments, MergeRowsParams* params) {
  const at::Device device = arguments.query.device();
  const at::Tensor& start = arguments.query_start;
  CheckIndex(start, "query_start", at::kInt, {-1}, device);
  NWOR_CHECK(start.size(0) >= 1, "query_start: got nothing, expected one more than requests");
  params->num_requests = static_cast<int32_t>(start.size(0) - 1);
  params->query_start = static_cast<const int32_t*>(start.const_data_ptr());
  if (arguments.tree_mask.has_value()) {
    CheckIndex(*arguments.tree_mask, "tree_mask", at::kLong, {params->num_rows, -1}, device);
    NWOR_CHECK(arguments.tree_mask->size(1) >= 1 && arguments.tree_mask->size(1) <= INT32_MAX,
               "tree_mask: got ", arguments.tree_mask->size(1),
               " words per row, expected at least 1");
    params->tree_mask = reinterpret_cast<const uint64_t*>(arguments.tree_mask->const_data_ptr());
    params->mask_words = static_cast<int32_t>(arguments.tree_mask->size(1));
  }
  NWOR_CHECK(arguments.rows_per_request >= 0 && arguments.rows_per_request <= INT32_MAX &&
                 (arguments.rows_per_request == 0 || !arguments.tree_mask.has_value()),
             "rows_per_request: got ", arguments.rows_per_request,
             ", expected 0, or a number of rows and no tree_mask");
  params->rows_per_request = static_cast<int32_t>(arguments.rows_per_request);
  if (arguments.token_lens.has_value()) CheckTokens(arguments, params);
  const at::Tensor& lse = arguments.prefix_lse;
  NWOR_CHECK(lse.defined() && lse.dim() == 2 && lse.size(0) == params->num_rows &&
                 lse.size(1) == params->num_heads && lse.scalar_type() == at::kFloat,
             "prefix_lse: got ", lse.defined() ? Describe(lse) : "nothing", ", expected [",
             params->num_rows, ", ", params->num_heads, "] Float");
  CheckDevice(lse, "prefix_lse", device);
  params->prefix_lse = static_cast<const float*>(lse.const_data_ptr());
  params->prefix_lse_strides = {lse.stride(0), lse.stride(1)};
  const LogitScalars scalars = CheckLogitScalars(arguments.scale, arguments.softcap);
  params->scale = scalars.scale;
  params->softcap = scalars.softcap;
}

// Checks query_start, on the CPU. Rows before the first start and from the last one on belong to no
// request.
void CheckStarts(const MergeRowsParams& params) {
  if (params.rows_per_request > 0) return;
  int32_t before = 0;
  for (int32_t b = 0; b <= params.num_requests; ++b) {
    const int32_t start = params.query_start[b];
    NWOR_CHECK(start >= before && start <= params.num_rows, "query_start[", b, "]: got ", start,
               ", expected ", before, " to ", params.num_rows, ", the rows of query");
    const int32_t rows = b > 0 ? start - before : 0;
    NWOR_CHECK(params.tree_mask == nullptr || rows <= int64_t{64} * params.mask_words,
               "tree_mask: got ", params.mask_words, " words per row, expected at least ",
               (int64_t{rows} + 63) / 64, " for the ", rows, " rows of request ", b - 1);
    before = start;
  }
}

// Rows attend to each other's K and V, so `out` must not overlap them. It may be prefix_out: each
// row and head reads its element before it writes it.
void CheckOut(const MergeRowsArguments& arguments, const at::Tensor& out) {
  CheckNoSelfOverlap(out);
  for (const auto& [input, name] :
       {std::pair{&arguments.query, "query"}, std::pair{&arguments.key, "key"},
        std::pair{&arguments.value, "value"}}) {
    NWOR_CHECK(!MayOverlap(out, *input), "out: got memory that overlaps ", name,
               ", expected memory that overlaps no input, or prefix_out itself");
  }
  NWOR_CHECK(IsSameMemory(out, arguments.prefix_out) || !MayOverlap(out, arguments.prefix_out),
             "out: got memory that overlaps prefix_out, expected prefix_out itself or memory that "
             "does not "
             "overlap it");
}

}  // namespace

void MergeRows(const MergeRowsArguments& arguments, const at::Tensor& out, const at::Tensor& lse) {
  MergeAndWriteRows(arguments, out, lse, nullptr);
}

void MergeAndWriteRows(const MergeRowsArguments& arguments, const at::Tensor& out,
                       const at::Tensor& lse, const StageParams* write) {
  MergeRowsParams params;
  const at::Tensor& query = arguments.query;
  CheckQuery(query, &params);
  const at::Device device = query.device();
  const at::Tensor readable_query = AlignedRows(query);
  const at::Tensor key = AlignedRows(arguments.key), value = AlignedRows(arguments.value);
  CheckKeys(arguments, key, value, &params);
  CheckLengths(arguments, &params);
  CheckState(arguments.prefix_out, "prefix_out", query);
  CheckState(out, "out", query);
  CheckOut(arguments, out);
  if (lse.defined()) {
    CheckIndex(lse, "lse", at::kFloat, {params.num_rows, params.num_heads}, device);
    params.lse = static_cast<float*>(lse.mutable_data_ptr());
  }
  // Copies made just now are not ready.
  NWOR_CHECK(!arguments.rows_ready || !arguments.ordered,
             "ordered: got rows_ready as well, expected one of them");
  params.ordered = arguments.ordered;
  params.rows_ready = arguments.rows_ready &&
                      readable_query.const_data_ptr() == query.const_data_ptr() &&
                      key.const_data_ptr() == arguments.key.const_data_ptr() &&
                      value.const_data_ptr() == arguments.value.const_data_ptr();
  params.query = readable_query.const_data_ptr();
  params.query_strides = {readable_query.stride(0), readable_query.stride(1)};
  params.prefix_out = arguments.prefix_out.const_data_ptr();
  params.prefix_strides = {arguments.prefix_out.stride(0), arguments.prefix_out.stride(1)};
  params.out = out.mutable_data_ptr();
  params.out_strides = {out.stride(0), out.stride(1)};
  params.stream = CurrentStream(device);

  const c10::DeviceGuard guard(device);
  const ScopedProfileRange range(ProfileRange::kAttend);
  if (device.is_cpu()) {
    CheckStarts(params);
    if (write != nullptr) StageCpu(*write);
    MergeRowsCpu(params);
    return;
  }
#ifdef NWOR_WITH_CUDA
  LaunchMergeAndWriteRows(params, write);
#endif
}

}  // namespace nwor
