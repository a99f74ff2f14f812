#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "base/cache_layout.h"
#include "base/export.h"

// The boundary between torch tensors and the plain structs kernels take. Every check of a tensor
// argument lives here, so every entry says the same things about it: name, got, expected.

namespace nwor {

// The most that the second dimension of a CUDA grid takes.
inline constexpr int64_t kMaxGridRows = 65535;

// float32, float16 and bfloat16; nothing for other types.
NWOR_EXPORT std::optional<DType> FloatDType(at::ScalarType type);
// The same, with an error for other types; caches also float8_e4m3fn.
NWOR_EXPORT DType RowDType(const at::Tensor& tensor, const char* name);
NWOR_EXPORT DType CacheDType(const at::Tensor& tensor, const char* name);
// And back.
NWOR_EXPORT at::ScalarType ToScalarType(DType dtype);

// "[4, 16, 8, 128] bfloat16 on cuda:0", for messages.
NWOR_EXPORT std::string Describe(const at::Tensor& tensor);

// True for tensors that carry shapes only: meta tensors and Python-dispatched (fake) ones.
NWOR_EXPORT bool IsFake(const at::Tensor& tensor);
// True when memory stands behind the tensor.
NWOR_EXPORT bool HasStorage(const at::Tensor& tensor);

NWOR_EXPORT void CheckDevice(const at::Tensor& tensor, const char* name, at::Device expected);
// An index tensor: dtype, rank and sizes (-1 = any), contiguous. Zero-sized is legal.
NWOR_EXPORT void CheckIndex(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                            std::initializer_list<int64_t> sizes, at::Device device);

// Checks a [P, S, H, D] pair of cache views (same sizes, dtype and device, contiguous channels, no
// overlapping elements) and its scales. `name` prefixes messages.
NWOR_EXPORT CacheLayout DescribeCache(const at::Tensor& key_cache, const at::Tensor& value_cache,
                                      const std::optional<at::Tensor>& k_scale = std::nullopt,
                                      const std::optional<at::Tensor>& v_scale = std::nullopt);

// Checks that K and V of a described cache share no element. They may lie in one piece of memory,
// by turns of any kind; views with other strides than each other's, one after the other only.
NWOR_EXPORT void CheckApart(const at::Tensor& key_cache, const at::Tensor& value_cache);

// Checks scales for a cache of these sizes and dtype, but not where they lie.
NWOR_EXPORT KvScales DescribeScales(const at::Tensor& cache,
                                    const std::optional<at::Tensor>& k_scale,
                                    const std::optional<at::Tensor>& v_scale);

// Checks [rows, H, D] pairs. Channels must be contiguous.
NWOR_EXPORT KvRowsView DescribeRows(const at::Tensor& key, const at::Tensor& value,
                                    const char* key_name, const char* value_name, int64_t num_heads,
                                    int64_t head_dim);

// The tensor itself, or a copy with contiguous channels. For inputs only.
NWOR_EXPORT at::Tensor ContiguousChannels(const at::Tensor& tensor);

// Whether every row begins at a multiple of 16 bytes, as CUDA kernels that read vectors want it.
NWOR_EXPORT bool IsAligned(const at::Tensor& tensor);
// Contiguous channels, and on CUDA aligned rows: the tensor itself, or a copy. For inputs only.
NWOR_EXPORT at::Tensor AlignedRows(const at::Tensor& rows);

// The current stream of the tensor's device; null on the CPU.
NWOR_EXPORT StreamHandle CurrentStream(at::Device device);

}  // namespace nwor
