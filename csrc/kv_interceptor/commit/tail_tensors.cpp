#include "kv_interceptor/commit/tail_tensors.h"

#include <ATen/MemoryOverlap.h>

#include "base/check.h"
#include "base/tensor_layout.h"

namespace nwor {

CommitTail DescribeTail(const TailTensors& tensors, const CommitParams& params,
                        int64_t num_requests, at::Device device) {
  CommitTail tail;
  const at::Tensor& keys = tensors.keys;
  if (!keys.defined()) return tail;
  NWOR_CHECK(params.num_groups == 1, "tail: got ", params.num_groups, " cache groups, expected 1");
  const CommitGroup& group = params.groups[0];
  const CacheGeometry& geometry = group.geometry;
  NWOR_CHECK(geometry.dtype == group.dtype, "tail: got a cache of ", Name(geometry.dtype),
             ", expected ", Name(group.dtype), " as the staged rows");
  NWOR_CHECK(keys.dim() == 5 && keys.size(0) == params.num_layers && keys.size(1) == num_requests &&
                 keys.size(2) == geometry.num_heads && keys.size(4) == geometry.head_dim &&
                 keys.stride(4) == 1,
             "tail_keys: got ", Describe(keys), " strides ", keys.strides(), ", expected [",
             params.num_layers, ", ", num_requests, ", ", geometry.num_heads, ", tokens, ",
             geometry.head_dim, "] with contiguous channels");
  NWOR_CHECK(RowDType(keys, "tail_keys") == group.dtype, "tail_keys: got dtype ",
             c10::toString(keys.scalar_type()), ", expected ", Name(group.dtype),
             " as the staged rows");
  NWOR_CHECK(keys.size(3) <= INT32_MAX, "tail_keys: got ", keys.size(3),
             " tokens, expected below 2^31");
  NWOR_CHECK(tensors.values.defined() && tensors.values.sizes() == keys.sizes() &&
                 tensors.values.strides() == keys.strides() &&
                 tensors.values.scalar_type() == keys.scalar_type(),
             "tail_values: got ", tensors.values.defined() ? Describe(tensors.values) : "nothing",
             ", expected sizes, strides and dtype of tail_keys ", Describe(keys));
  CheckDevice(keys, "tail_keys", device);
  CheckDevice(tensors.values, "tail_values", device);
  CheckIndex(tensors.begin, "tail_begin", at::kInt, {num_requests}, device);
  CheckIndex(tensors.root_slots, "root_slots", at::kLong, {num_requests}, device);
  CheckIndex(tensors.held, "tail_held", at::kInt, {num_requests}, device);
  tail.layer_stride = keys.stride(0);
  tail.request_stride = keys.stride(1);
  tail.head_stride = keys.stride(2);
  tail.token_stride = keys.stride(3);
  tail.capacity = static_cast<int32_t>(keys.size(3));
  if (IsFake(keys)) return tail;
  tail.keys = keys.mutable_data_ptr();
  tail.values = tensors.values.mutable_data_ptr();
  tail.begin = static_cast<const int32_t*>(tensors.begin.const_data_ptr());
  tail.root_slots = static_cast<const int64_t*>(tensors.root_slots.const_data_ptr());
  NWOR_CHECK(at::get_overlap_status(tensors.held, tensors.begin) == at::MemOverlapStatus::No,
             "tail_held: got the memory of tail_begin, expected memory of its own, because one is "
             "read while the other is written");
  tail.held = static_cast<int32_t*>(tensors.held.mutable_data_ptr());
  return tail;
}

}  // namespace nwor
