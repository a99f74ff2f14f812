#include "base/tensor_layout.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "base/check.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace nwor {
namespace {

DType ToDType(at::ScalarType type, const char* name, bool cache) {
  if (cache && type == at::ScalarType::Float8_e4m3fn) return DType::kFloat8E4M3;
  const std::optional<DType> found = FloatDType(type);
  NWOR_CHECK(found.has_value(), name, ": got dtype ", c10::toString(type),
             ", expected float32, float16 or bfloat16", cache ? " or float8_e4m3fn" : "");
  return *found;
}

// Below 0: any size.
bool HasSizes(const at::Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (size >= 0 && tensor.size(dim) != size) return false;
    ++dim;
  }
  return true;
}

std::string ExpectedSizes(at::IntArrayRef sizes) {
  std::string text = "[";
  const char* separator = "";
  for (const int64_t size : sizes) {
    text += separator + (size < 0 ? std::string("any") : std::to_string(size));
    separator = ", ";
  }
  return text + "]";
}

// Of a tensor that is traced with symbolic sizes numel() throws, while sizes() become numbers.
int64_t NumElements(const at::Tensor& tensor) { return c10::multiply_integers(tensor.sizes()); }

void CheckChannels(const at::Tensor& tensor, const char* name) {
  NWOR_CHECK(NumElements(tensor) == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1, name,
             ": got a stride of ", tensor.stride(-1),
             " between channels, expected 1 (contiguous channels)");
}

struct StridedDim {
  int64_t stride, size;
  auto operator<=>(const StridedDim&) const = default;
};

// The dimensions that decide where elements are, dense from the inside.
std::vector<StridedDim> DimsOf(const at::Tensor& cache) {
  std::vector<StridedDim> dims;
  for (int64_t dim = 0; dim < cache.dim(); ++dim) {
    if (cache.size(dim) > 1) dims.push_back({cache.stride(dim), cache.size(dim)});
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

// Whether two elements of such a cache are `offset` apart. REQUIRES: no two are in one place, so
// that inner dimensions reach less far than one step of the next.
bool HasDistance(const std::vector<StridedDim>& dims, size_t num_dims, int64_t offset) {
  if (num_dims == 0) return offset == 0;
  const auto [stride, size] = dims[num_dims - 1];
  offset = std::abs(offset);
  for (const int64_t steps : {offset / stride, offset / stride + 1}) {
    if (steps < size && HasDistance(dims, num_dims - 1, offset - steps * stride)) return true;
  }
  return false;
}

// From the first element of such a cache to behind its last.
int64_t SpanOf(const std::vector<StridedDim>& dims) {
  int64_t span = 1;
  for (const auto& [stride, size] : dims) span += stride * (size - 1);
  return span;
}

// Two slots that share memory would make "no other byte changes" meaningless.
void CheckNoOverlap(const at::Tensor& cache, const char* name) {
  int64_t span = 1;  // elements covered so far
  for (const auto& [stride, size] : DimsOf(cache)) {
    NWOR_CHECK(stride >= span, name, ": got overlapping strides ", cache.strides(), " for sizes ",
               cache.sizes(), ", expected one place per element");
    span = stride * (size - 1) + span;
  }
}

void CheckScale(const std::optional<at::Tensor>& scale, const char* name, const at::Tensor& cache,
                const float** data, int32_t* count) {
  *data = nullptr;
  *count = 0;
  if (!scale.has_value() || !scale->defined()) return;
  NWOR_CHECK(cache.scalar_type() == at::ScalarType::Float8_e4m3fn, name,
             ": got a scale for a cache of dtype ", c10::toString(cache.scalar_type()),
             ", expected none (scales belong to float8_e4m3fn caches)");
  NWOR_CHECK(scale->scalar_type() == at::kFloat, name, ": got dtype ",
             c10::toString(scale->scalar_type()), ", expected float32");
  NWOR_CHECK(NumElements(*scale) == 1 || (scale->dim() == 1 && scale->size(0) == cache.size(2)),
             name, ": got sizes ", scale->sizes(), ", expected one element or one per KV head [",
             cache.size(2), "]");
  NWOR_CHECK(scale->is_contiguous(), name, ": got strides ", scale->strides(),
             ", expected contiguous");
  if (!IsFake(*scale)) *data = static_cast<const float*>(scale->const_data_ptr());
  *count = static_cast<int32_t>(NumElements(*scale));
}

KvStrides StridesOf(const at::Tensor& cache) {
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

}  // namespace

std::optional<DType> FloatDType(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

DType RowDType(const at::Tensor& tensor, const char* name) {
  return ToDType(tensor.scalar_type(), name, /*cache=*/false);
}

DType CacheDType(const at::Tensor& tensor, const char* name) {
  return ToDType(tensor.scalar_type(), name, /*cache=*/true);
}

at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat8E4M3:
      return at::ScalarType::Float8_e4m3fn;
  }
  return at::ScalarType::Undefined;
}

std::string Describe(const at::Tensor& tensor) {
  return Concat(tensor.sizes(), " ", c10::toString(tensor.scalar_type()), " on ",
                tensor.device().str());
}

bool IsFake(const at::Tensor& tensor) {
  return tensor.is_meta() || tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

bool HasStorage(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.storage().nbytes() > 0 &&
         tensor.numel() > 0;
}

void CheckDevice(const at::Tensor& tensor, const char* name, at::Device expected) {
  NWOR_CHECK(tensor.device() == expected, name, ": got a tensor on ", tensor.device().str(),
             ", expected ", expected.str());
}

void CheckIndex(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                std::initializer_list<int64_t> sizes, at::Device device) {
  NWOR_CHECK(tensor.defined(), name, ": got nothing, expected a tensor");
  NWOR_CHECK(tensor.scalar_type() == dtype, name, ": got dtype ",
             c10::toString(tensor.scalar_type()), ", expected ", c10::toString(dtype));
  NWOR_CHECK(HasSizes(tensor, sizes), name, ": got sizes ", tensor.sizes(), ", expected ",
             ExpectedSizes(sizes));
  NWOR_CHECK(tensor.is_contiguous(), name, ": got strides ", tensor.strides(),
             ", expected contiguous");
  CheckDevice(tensor, name, device);
}

KvScales DescribeScales(const at::Tensor& cache, const std::optional<at::Tensor>& k_scale,
                        const std::optional<at::Tensor>& v_scale) {
  KvScales scales;
  CheckScale(k_scale, "k_scale", cache, &scales.key, &scales.key_count);
  CheckScale(v_scale, "v_scale", cache, &scales.value, &scales.value_count);
  return scales;
}

CacheLayout DescribeCache(const at::Tensor& key_cache, const at::Tensor& value_cache,
                          const std::optional<at::Tensor>& k_scale,
                          const std::optional<at::Tensor>& v_scale) {
  for (const auto& [cache, name] :
       {std::pair{&key_cache, "key_cache"}, std::pair{&value_cache, "value_cache"}}) {
    NWOR_CHECK(cache->defined(), name, ": got nothing, expected a tensor");
    NWOR_CHECK(cache->dim() == 4, name, ": got ", cache->dim(), " dimensions ", cache->sizes(),
               ", expected 4 [pages, page size, KV heads, channels]");
    NWOR_CHECK(cache->size(1) > 0 && cache->size(2) > 0 && cache->size(3) > 0, name, ": got sizes ",
               cache->sizes(), ", expected none of the last three zero");
    CheckChannels(*cache, name);
    CheckNoOverlap(*cache, name);
  }
  NWOR_CHECK(key_cache.sizes() == value_cache.sizes(), "value_cache: got sizes ",
             value_cache.sizes(), ", expected those of key_cache ", key_cache.sizes());
  NWOR_CHECK(key_cache.scalar_type() == value_cache.scalar_type(), "value_cache: got dtype ",
             c10::toString(value_cache.scalar_type()), ", expected that of key_cache ",
             c10::toString(key_cache.scalar_type()));
  CheckDevice(value_cache, "value_cache", key_cache.device());

  CacheLayout layout;
  CacheGeometry& geometry = layout.geometry;
  geometry.dtype = CacheDType(key_cache, "key_cache");
  geometry.num_pages = key_cache.size(0);
  geometry.page_size = static_cast<int32_t>(key_cache.size(1));
  geometry.num_heads = static_cast<int32_t>(key_cache.size(2));
  geometry.head_dim = static_cast<int32_t>(key_cache.size(3));
  geometry.key = StridesOf(key_cache);
  geometry.value = StridesOf(value_cache);
  layout.scales = DescribeScales(key_cache, k_scale, v_scale);
  for (const auto& [scale, name] :
       {std::pair{&k_scale, "k_scale"}, std::pair{&v_scale, "v_scale"}}) {
    if (scale->has_value() && (*scale)->defined()) CheckDevice(**scale, name, key_cache.device());
  }
  if (!IsFake(key_cache) && HasStorage(key_cache)) {
    layout.key = key_cache.mutable_data_ptr();
    layout.value = value_cache.mutable_data_ptr();
  }
  return layout;
}

void CheckApart(const at::Tensor& key_cache, const at::Tensor& value_cache) {
  const std::vector<StridedDim> dims = DimsOf(key_cache), value_dims = DimsOf(value_cache);
  const int64_t bytes = static_cast<const std::byte*>(value_cache.const_data_ptr()) -
                        static_cast<const std::byte*>(key_cache.const_data_ptr());
  const int64_t offset = bytes / key_cache.element_size();
  if (dims != value_dims) {
    NWOR_CHECK(offset >= SpanOf(dims) || -offset >= SpanOf(value_dims), "value_cache: got strides ",
               value_cache.strides(), " in memory of key_cache, whose strides are ",
               key_cache.strides(), ", expected the same strides or memory of its own");
    return;
  }
  NWOR_CHECK(!HasDistance(dims, dims.size(), offset), "value_cache: got memory of key_cache, ",
             offset, " elements from its first, expected places of its own");
}

KvRowsView DescribeRows(const at::Tensor& key, const at::Tensor& value, const char* key_name,
                        const char* value_name, int64_t num_heads, int64_t head_dim) {
  for (const auto& [rows, name] : {std::pair{&key, key_name}, std::pair{&value, value_name}}) {
    NWOR_CHECK(rows->dim() == 3 && rows->size(1) == num_heads && rows->size(2) == head_dim, name,
               ": got sizes ", rows->sizes(), ", expected [rows, ", num_heads, ", ", head_dim, "]");
    CheckChannels(*rows, name);
  }
  NWOR_CHECK(key.size(0) == value.size(0), value_name, ": got ", value.size(0), " rows, expected ",
             key.size(0), " as ", key_name);
  NWOR_CHECK(key.scalar_type() == value.scalar_type(), value_name, ": got dtype ",
             c10::toString(value.scalar_type()), ", expected ", c10::toString(key.scalar_type()),
             " as ", key_name);
  CheckDevice(value, value_name, key.device());
  KvRowsView view;
  if (!IsFake(key) && HasStorage(key)) {
    // One struct serves sources and destinations; sources are only read.
    view.key = const_cast<void*>(key.const_data_ptr());
    view.value = const_cast<void*>(value.const_data_ptr());
  }
  view.key_row = key.stride(0);
  view.key_head = key.stride(1);
  view.value_row = value.stride(0);
  view.value_head = value.stride(1);
  return view;
}

at::Tensor ContiguousChannels(const at::Tensor& tensor) {
  return tensor.dim() == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1 ? tensor
                                                                             : tensor.contiguous();
}

bool IsAligned(const at::Tensor& tensor) {
  constexpr int64_t kAlignBytes = 16;
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignBytes != 0) return false;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) * tensor.element_size() % kAlignBytes != 0) {
      return false;
    }
  }
  return true;
}

at::Tensor AlignedRows(const at::Tensor& rows) {
  at::Tensor contiguous = ContiguousChannels(rows);
  if (!rows.is_cuda() || IsAligned(contiguous)) return contiguous;
  return contiguous.clone(at::MemoryFormat::Contiguous);
}

StreamHandle CurrentStream(at::Device device) {
#ifdef NWOR_WITH_CUDA
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  NWOR_CHECK(device.is_cpu(), "device: got ", device.str(),
#ifdef NWOR_WITH_CUDA
             ", expected cpu or cuda"
#else
             ", expected cpu (this library was built without CUDA)"
#endif
  );
  return nullptr;
}

}  // namespace nwor
