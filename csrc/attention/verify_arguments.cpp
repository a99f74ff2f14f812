#include "attention/verify_arguments.h"

#include <limits>

#include "attention/row_checks.h"
#include "base/check.h"
#include "base/tensor_layout.h"

namespace nwor {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

template <typename T>
const T* Data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

void CheckQuery(const at::Tensor& query, VerifyParams* params) {
  NWOR_CHECK(query.defined() && query.dim() == 3, "query: got ",
             query.defined() ? Describe(query) : "nothing", ", expected [rows, heads, channels]");
  params->dtype = RowDType(query, "query");
  const int64_t head_dim = query.size(2);
  NWOR_CHECK(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim, "query: got ", head_dim,
             " channels, expected a multiple of 8 up to ", kMaxHeadDim);
  NWOR_CHECK(query.size(1) > 0, "query: got no heads, expected at least one");
  NWOR_CHECK(query.size(0) <= kMaxInt, "query: got ", query.size(0), " rows, expected at most ",
             kMaxInt);
  params->num_rows = static_cast<int32_t>(query.size(0));
  params->num_heads = static_cast<int32_t>(query.size(1));
  params->head_dim = static_cast<int32_t>(head_dim);
}

void CheckCache(const VerifyArguments& arguments, bool plan_only, VerifyParams* params) {
  const at::Tensor& value_cache =
      plan_only && !arguments.value_cache.defined() ? arguments.key_cache : arguments.value_cache;
  params->cache =
      DescribeCache(arguments.key_cache, value_cache, arguments.k_scale, arguments.v_scale);
  const CacheGeometry& geometry = params->cache.geometry;
  NWOR_CHECK(geometry.head_dim == params->head_dim, "key_cache: got ", geometry.head_dim,
             " channels, expected ", params->head_dim, " as query");
  NWOR_CHECK(geometry.dtype == params->dtype || geometry.dtype == DType::kFloat8E4M3,
             "key_cache: got dtype ", Name(geometry.dtype), ", expected ", Name(params->dtype),
             " as query, or float8_e4m3fn");
  NWOR_CHECK(params->num_heads % geometry.num_heads == 0, "query: got ", params->num_heads,
             " heads, expected a multiple of the ", geometry.num_heads, " KV heads of key_cache");
  params->num_kv_heads = geometry.num_heads;
  CheckDevice(arguments.key_cache, "key_cache", arguments.query.device());
}

void CheckRows(const VerifyArguments& arguments, VerifyParams* params, CheckedVerify* checked) {
  for (const auto& [rows, name] :
       {std::pair{&arguments.key, "key"}, std::pair{&arguments.value, "value"}}) {
    NWOR_CHECK(rows->defined() && rows->dim() == 3 && rows->size(0) == params->num_rows, name,
               ": got ", rows->defined() ? Describe(*rows) : "nothing", ", expected [",
               params->num_rows, ", ", params->num_kv_heads, ", ", params->head_dim, "]");
  }
  checked->key = AlignedRows(arguments.key);
  checked->value = AlignedRows(arguments.value);
  const KvRowsView rows = DescribeRows(checked->key, checked->value, "key", "value",
                                       params->num_kv_heads, params->head_dim);
  NWOR_CHECK(RowDType(checked->key, "key") == params->dtype, "key: got dtype ",
             c10::toString(checked->key.scalar_type()), ", expected ", Name(params->dtype),
             " as query");
  CheckDevice(checked->key, "key", arguments.query.device());
  params->key = rows.key;
  params->value = rows.value;
  params->key_strides = {rows.key_row, rows.key_head};
  params->value_strides = {rows.value_row, rows.value_head};
}

void CheckLengths(const VerifyArguments& arguments, VerifyParams* params) {
  const at::Device device = arguments.query.device();
  const at::Tensor& table = arguments.block_table;
  NWOR_CHECK(table.defined() && table.dim() == 2, "block_table: got ",
             table.defined() ? Describe(table) : "nothing", ", expected [requests, pages]");
  NWOR_CHECK(table.scalar_type() == at::kInt, "block_table: got dtype ",
             c10::toString(table.scalar_type()), ", expected Int");
  NWOR_CHECK(table.size(1) <= 1 || table.stride(1) == 1, "block_table: got a stride of ",
             table.stride(1), " between pages, expected 1");
  CheckDevice(table, "block_table", device);
  NWOR_CHECK(table.size(0) <= kMaxInt - 1 && table.size(1) <= kMaxInt, "block_table: got sizes ",
             table.sizes(), ", expected both below 2^31");
  const int64_t requests = table.size(0);
  CheckIndex(arguments.prefix_lens, "prefix_lens", at::kInt, {requests}, device);
  CheckIndex(arguments.query_start, "query_start", at::kInt, {requests + 1}, device);
  params->num_requests = static_cast<int32_t>(requests);
  params->block_table = Data<int32_t>(table);
  params->table_stride = requests > 1 ? table.stride(0) : table.size(1);
  params->max_pages = static_cast<int32_t>(table.size(1));
  params->prefix_lens = Data<int32_t>(arguments.prefix_lens);
  params->query_start = Data<int32_t>(arguments.query_start);
  if (arguments.tree_mask.has_value()) {
    CheckIndex(*arguments.tree_mask, "tree_mask", at::kLong, {params->num_rows, -1}, device);
    NWOR_CHECK(arguments.tree_mask->size(1) >= 1 && arguments.tree_mask->size(1) <= kMaxInt,
               "tree_mask: got ", arguments.tree_mask->size(1),
               " words per row, expected at least 1");
    params->tree_mask = reinterpret_cast<const uint64_t*>(Data<int64_t>(*arguments.tree_mask));
    params->mask_words = static_cast<int32_t>(arguments.tree_mask->size(1));
  }
}

void CheckPartialView(const PartialViewTensors& view, at::Device device, VerifyParams* params) {
  const int64_t requests = params->num_requests;
  CheckIndex(view.blocks, "view.blocks", at::kInt, {requests, params->num_kv_heads, -1}, device);
  CheckIndex(view.num_blocks, "view.num_blocks", at::kInt, {requests}, device);
  CheckIndex(view.view_lens, "view.view_lens", at::kInt, {requests}, device);
  const int32_t page_size = params->cache.geometry.page_size;
  NWOR_CHECK(view.block_size > 0 && page_size % view.block_size == 0, "view.block_size: got ",
             view.block_size, ", expected a divisor of the page size ", page_size);
  NWOR_CHECK(view.blocks.size(2) <= kMaxInt, "view.blocks: got ", view.blocks.size(2),
             " blocks per head, expected at most ", kMaxInt);
  params->view = {Data<int32_t>(view.blocks), Data<int32_t>(view.num_blocks),
                  Data<int32_t>(view.view_lens), static_cast<int32_t>(view.blocks.size(2)),
                  static_cast<int32_t>(view.block_size)};
}

void CheckCompactView(const CompactViewTensors& view, at::Device device, VerifyParams* params,
                      CheckedVerify* checked) {
  for (const auto& [tensor, name] :
       {std::pair{&view.keys, "view.keys"}, std::pair{&view.values, "view.values"}}) {
    NWOR_CHECK(tensor->defined() && tensor->dim() == 4 && tensor->size(0) == params->num_requests &&
                   tensor->size(1) == params->num_kv_heads && tensor->size(3) == params->head_dim,
               name, ": got ", tensor->defined() ? Describe(*tensor) : "nothing", ", expected [",
               params->num_requests, ", ", params->num_kv_heads, ", tokens, ", params->head_dim,
               "]");
    NWOR_CHECK(RowDType(*tensor, name) == params->dtype, name, ": got dtype ",
               c10::toString(tensor->scalar_type()), ", expected ", Name(params->dtype),
               " as query");
    CheckDevice(*tensor, name, device);
    NWOR_CHECK(tensor->size(2) <= kMaxInt, name, ": got ", tensor->size(2),
               " tokens, expected at most ", kMaxInt);
  }
  NWOR_CHECK(view.keys.size(2) == view.values.size(2), "view.values: got ", view.values.size(2),
             " tokens, expected ", view.keys.size(2), " as view.keys");
  CheckIndex(view.lens, "view.lens", at::kInt, {params->num_requests}, device);
  checked->compact_keys = AlignedRows(view.keys);
  checked->compact_values = AlignedRows(view.values);
  if (checked->compact_keys.strides() != checked->compact_values.strides()) {
    checked->compact_keys = checked->compact_keys.contiguous();
    checked->compact_values = checked->compact_values.contiguous();
  }
  const at::Tensor& keys = checked->compact_keys;
  params->compact = {keys.const_data_ptr(),
                     checked->compact_values.const_data_ptr(),
                     Data<int32_t>(view.lens),
                     keys.stride(0),
                     keys.stride(1),
                     keys.stride(2),
                     static_cast<int32_t>(keys.size(2))};
}

void CheckScalars(const VerifyArguments& arguments, VerifyParams* params) {
  const LogitScalars scalars = CheckLogitScalars(arguments.scale, arguments.softcap);
  NWOR_CHECK(!arguments.query.is_cuda() || scalars.scale > 0.0f, "scale: got ", arguments.scale,
             ", expected a float32 above 0 on cuda");
  NWOR_CHECK(arguments.window >= 0 && arguments.window <= kMaxInt, "window: got ", arguments.window,
             ", expected 0 (none) to ", kMaxInt);
  const bool viewed = arguments.partial_view.has_value() || arguments.compact_view.has_value();
  NWOR_CHECK(arguments.window == 0 || !viewed, "window: got ", arguments.window,
             " together with a view, expected 0: a view's tokens have no positions");
  NWOR_CHECK(arguments.max_rows >= 0 && arguments.max_rows <= kMaxInt, "max_rows: got ",
             arguments.max_rows, ", expected 0 (unknown) or more");
  params->scale = scalars.scale;
  params->softcap = scalars.softcap;
  params->window = static_cast<int32_t>(arguments.window);
}

void CheckOutputs(const VerifyArguments& arguments, const VerifyOutputs& outputs,
                  VerifyParams* params) {
  const at::Tensor& out = outputs.out;
  const at::Tensor& query = arguments.query;
  NWOR_CHECK(out.defined() && out.sizes() == query.sizes(), "out: got ",
             out.defined() ? Describe(out) : "nothing", ", expected sizes ", query.sizes(),
             " as query");
  NWOR_CHECK(out.scalar_type() == query.scalar_type(), "out: got dtype ",
             c10::toString(out.scalar_type()), ", expected ", c10::toString(query.scalar_type()),
             " as query");
  CheckDevice(out, "out", query.device());
  NWOR_CHECK(out.stride(2) == 1, "out: got a stride of ", out.stride(2),
             " between channels, expected 1 (contiguous channels)");
  CheckNoSelfOverlap(out);
  const auto check_apart = [&](const at::Tensor& input, const char* name) {
    NWOR_CHECK(!MayOverlap(out, input), "out: got memory that overlaps ", name,
               ", expected memory that overlaps no input");
  };
  check_apart(arguments.query, "query");
  check_apart(arguments.key, "key");
  check_apart(arguments.value, "value");
  check_apart(arguments.key_cache, "key_cache");
  check_apart(arguments.value_cache, "value_cache");
  if (arguments.compact_view.has_value()) {
    check_apart(arguments.compact_view->keys, "view.keys");
    check_apart(arguments.compact_view->values, "view.values");
  }
  params->out = out.mutable_data_ptr();
  params->out_strides = {out.stride(0), out.stride(1)};
  if (outputs.lse.defined()) {
    const at::Tensor& lse = outputs.lse;
    CheckIndex(lse, "lse", at::kFloat, {params->num_rows, params->num_heads}, query.device());
    params->lse = static_cast<float*>(lse.mutable_data_ptr());
  }
}

int32_t MaxRows(const VerifyArguments& arguments, const VerifyParams& params) {
  if (arguments.max_rows > 0) return static_cast<int32_t>(arguments.max_rows);
  const int32_t requests = params.num_requests > 0 ? params.num_requests : 1;
  return (params.num_rows + requests - 1) / requests;
}

}  // namespace

CheckedVerify CheckVerifyArguments(const VerifyArguments& arguments, const VerifyOutputs* outputs,
                                   bool plan_only) {
  CheckedVerify checked;
  VerifyParams& params = checked.params;
  CheckQuery(arguments.query, &params);
  checked.device = arguments.query.device();
  CheckCache(arguments, plan_only, &params);
  if (!plan_only) CheckRows(arguments, &params, &checked);
  CheckLengths(arguments, &params);
  NWOR_CHECK(!arguments.partial_view.has_value() || !arguments.compact_view.has_value(),
             "view: got a partial and a compact view, expected one of them");
  if (arguments.partial_view.has_value()) {
    CheckPartialView(*arguments.partial_view, checked.device, &params);
  }
  if (arguments.compact_view.has_value()) {
    CheckCompactView(*arguments.compact_view, checked.device, &params, &checked);
  }
  CheckScalars(arguments, &params);
  if (arguments.status.has_value()) {
    CheckIndex(*arguments.status, "status", at::kLong, {8}, checked.device);
    params.status = static_cast<int64_t*>(arguments.status->mutable_data_ptr());
  }
  if (outputs != nullptr) CheckOutputs(arguments, *outputs, &params);
  checked.query = plan_only ? arguments.query : AlignedRows(arguments.query);
  params.query = checked.query.const_data_ptr();
  params.query_strides = {checked.query.stride(0), checked.query.stride(1)};

  RouteRequest& request = checked.request;
  request.cuda = checked.device.is_cuda();
  request.dtype = params.dtype;
  request.cache_dtype = params.cache.geometry.dtype;
  request.head_dim = params.head_dim;
  request.page_size = params.cache.geometry.page_size;
  request.block_size = params.view.block_size;
  request.compact_view = arguments.compact_view.has_value();
  request.tree_mask = params.tree_mask != nullptr;
  request.window = params.window > 0;
  request.softcap = params.softcap > 0.0f;
  request.aligned = plan_only || !request.cuda ||
                    (IsAligned(arguments.key_cache) && IsAligned(arguments.value_cache) &&
                     (outputs == nullptr || IsAligned(outputs->out)));
  request.num_requests = params.num_requests;
  request.max_rows = MaxRows(arguments, params);
  const int64_t table_tokens = int64_t{params.num_requests} * params.max_pages * request.page_size;
  request.table_bytes = int64_t{2} * table_tokens * params.num_kv_heads * params.head_dim *
                        ElementBytes(request.cache_dtype);
  return checked;
}

}  // namespace nwor
