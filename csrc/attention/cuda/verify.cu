#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/verify.h"
#include "attention/plan.h"
#include "base/check.h"

namespace nwor {
namespace {

template <typename T, bool kFloat8>
void DispatchHeadDim(const VerifyArgs& args, const VerifyConfig& config) {
  switch (args.params.head_dim) {
    case 64:
      return VerifyLauncher<T, kFloat8, 64>::Launch(args, config);
    case 80:
      return VerifyLauncher<T, kFloat8, 80>::Launch(args, config);
    case 96:
      return VerifyLauncher<T, kFloat8, 96>::Launch(args, config);
    case 128:
      return VerifyLauncher<T, kFloat8, 128>::Launch(args, config);
    case 192:
      return VerifyLauncher<T, kFloat8, 192>::Launch(args, config);
    case 256:
      return VerifyLauncher<T, kFloat8, 256>::Launch(args, config);
  }
  NWOR_CHECK(false, "head_dim: got ", args.params.head_dim,
             ", expected 64, 80, 96, 128, 192 or 256");
}

template <typename T>
void DispatchCache(const VerifyArgs& args, const VerifyConfig& config) {
  const DType cache = args.params.cache.geometry.dtype;
  if (cache == DType::kFloat8E4M3) return DispatchHeadDim<T, true>(args, config);
  NWOR_CHECK(cache == args.params.dtype, "cache: got ", Name(cache), ", expected ",
             Name(args.params.dtype), " or float8_e4m3fn");
  DispatchHeadDim<T, false>(args, config);
}

int Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, attribute, device);
  NWOR_CHECK(error == cudaSuccess, "device: got ", device, ": ", cudaGetErrorString(error));
  return value;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Finds the driver function at run time: the library is not linked against the driver.
EncodeTiled FindEncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  NWOR_CHECK(error == cudaSuccess && found == cudaDriverEntryPointSuccess,
             "driver: got none with cuTensorMapEncodeTiled, expected CUDA 12 or newer");
  return reinterpret_cast<EncodeTiled>(function);
}

// A [pages, tokens, heads, channels] tensor, strides in elements, as TMA reads it: boxes of 16
// tokens of one page and head, one swizzle atom wide.
struct PagedTensor {
  const char* name;  // the argument, for error messages
  const void* data;
  DType dtype;
  int64_t pages, tokens, heads;
  KvStrides strides;
};
void EncodeTensorMap(const PagedTensor& tensor, const VerifyParams& params, CUtensorMap* map) {
  static const EncodeTiled encode = FindEncodeTiled();
  const int dim = params.head_dim;
  const int element_bytes = ElementBytes(tensor.dtype);
  const int row_bytes = dim * element_bytes;
  const int atom_bytes = row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
  const auto swizzle = atom_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : atom_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  const auto unsigned64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[4] = {unsigned64(dim), unsigned64(tensor.tokens), unsigned64(tensor.heads),
                               unsigned64(tensor.pages)};
  // The stride of a dimension of size 1 is not used and may be anything.
  const auto bytes = [&](int64_t size, int64_t stride) {
    return unsigned64((size > 1 ? stride : dim) * element_bytes);
  };
  const cuuint64_t strides[3] = {bytes(tensor.tokens, tensor.strides.token),
                                 bytes(tensor.heads, tensor.strides.head),
                                 bytes(tensor.pages, tensor.strides.page)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(atom_bytes / element_bytes), 16, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : tensor.dtype == DType::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(tensor.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  NWOR_CHECK(result == CUDA_SUCCESS, tensor.name, ": got strides ", tensor.strides.page, ", ",
             tensor.strides.token, ", ", tensor.strides.head,
             " between pages or requests, tokens and heads, expected strides that TMA supports "
             "(cuTensorMapEncodeTiled returned ",
             static_cast<int>(result), ")");
}

void EncodeTensorMaps(const VerifyParams& params, CUtensorMap (&maps)[4]) {
  const CacheGeometry& cache = params.cache.geometry;
  if (cache.num_pages > 0) {
    const int64_t heads = params.num_kv_heads;
    EncodeTensorMap({"key_cache", params.cache.key, cache.dtype, cache.num_pages, cache.page_size,
                     heads, cache.key},
                    params, &maps[0]);
    EncodeTensorMap({"value_cache", params.cache.value, cache.dtype, cache.num_pages,
                     cache.page_size, heads, cache.value},
                    params, &maps[1]);
  }
  // Beside float8 pages a compact view is not read by TMA.
  const CompactViewParams& compact = params.compact;
  if (compact.lens != nullptr && compact.max_tokens > 0 && cache.dtype == params.dtype) {
    const KvStrides strides{compact.batch_stride, compact.token_stride, compact.head_stride};
    EncodeTensorMap({"view.keys", compact.keys, params.dtype, params.num_requests,
                     compact.max_tokens, params.num_kv_heads, strides},
                    params, &maps[2]);
    EncodeTensorMap({"view.values", compact.values, params.dtype, params.num_requests,
                     compact.max_tokens, params.num_kv_heads, strides},
                    params, &maps[3]);
  }
}

void SetDevice(int device) {
  const cudaError_t error = cudaSetDevice(device);
  NWOR_CHECK(error == cudaSuccess, "device: got ", device, ": ", cudaGetErrorString(error));
}

// The runtime reports kernel attributes for the current device only.
bool HasWarpgroupKernelOn(int device) {
  int current = device;
  if (cudaGetDevice(&current) != cudaSuccess || current == device) {
    return VerifyLauncher<__nv_bfloat16, false, 128>::HasWarpgroupKernel();
  }
  SetDevice(device);
  const bool has = VerifyLauncher<__nv_bfloat16, false, 128>::HasWarpgroupKernel();
  SetDevice(current);
  return has;
}

}  // namespace

DeviceProps QueryDeviceProps(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceProps, kMaxDevices> known;
  static std::mutex mutex;
  NWOR_CHECK(device >= 0 && device < kMaxDevices, "device: got ", device, ", expected 0..",
             kMaxDevices - 1);
  const std::lock_guard lock(mutex);
  DeviceProps& props = known[device];
  if (props.num_sms == 0) {
    props.compute_capability = 10 * Attribute(cudaDevAttrComputeCapabilityMajor, device) +
                               Attribute(cudaDevAttrComputeCapabilityMinor, device);
    props.smem_per_block_bytes = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    props.smem_per_sm_bytes = Attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    props.warpgroup_mma = props.compute_capability == 90 && HasWarpgroupKernelOn(device);
    props.num_sms = Attribute(cudaDevAttrMultiProcessorCount, device);
  }
  return props;
}

void LaunchVerify(const VerifyParams& params, const VerifyConfig& config, const void* plan,
                  void* workspace) {
  NWOR_CHECK(config.unsupported == nullptr, "verify attention needs ", config.unsupported);
  const PlanOffsets plan_at = LocatePlan(params.num_requests, config);
  const WorkspaceOffsets at = LocateWorkspace(params.head_dim, config);
  const auto* plan_bytes = static_cast<const uint8_t*>(plan);
  auto* bytes = static_cast<uint8_t*>(workspace);
  VerifyArgs args;
  args.params = params;
  args.plan = reinterpret_cast<const PlanHeader*>(plan_bytes);
  args.work_tiles = reinterpret_cast<const WorkTile*>(plan_bytes + plan_at.work_tiles);
  args.split_outputs = reinterpret_cast<const WorkTile*>(plan_bytes + plan_at.split_outputs);
  args.counters = reinterpret_cast<SchedulerCounters*>(bytes);
  args.states = reinterpret_cast<float2*>(bytes + at.states);
  args.outputs = reinterpret_cast<float*>(bytes + at.outputs);
  args.stages = config.stages;
  args.prefetch_stages = config.prefetch_stages;
  args.raw_stages = config.raw_stages;
  args.max_slots = config.max_slots;
  args.row_tile = config.row_tile;
  args.group = FastDivisor::Of(params.num_heads / params.num_kv_heads);
  const int page_size = params.cache.geometry.page_size;
  args.page_tokens = FastDivisor::Of(page_size);
  if (params.view.num_blocks != nullptr) {
    args.block_tokens = FastDivisor::Of(params.view.block_size);
    args.blocks_per_page = FastDivisor::Of(page_size / params.view.block_size);
  }
  if (config.warpgroup) EncodeTensorMaps(params, args.maps);
  if (params.dtype == DType::kFloat16) return DispatchCache<__half>(args, config);
  NWOR_CHECK(params.dtype == DType::kBFloat16, "dtype: got ", Name(params.dtype),
             ", expected float16 or bfloat16");
  DispatchCache<__nv_bfloat16>(args, config);
}

}  // namespace nwor
