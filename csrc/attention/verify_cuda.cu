#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "attention/plan.h"
#include "attention/verify_cuda.h"
#include "attention/verify_traits.cuh"
#include "check.h"

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
    props.warpgroup_mma = props.compute_capability == 90 &&
                          VerifyLauncher<__nv_bfloat16, false, 128>::HasWarpgroupKernel();
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
  args.items = reinterpret_cast<const PlanItem*>(plan_bytes + plan_at.items);
  args.counters = reinterpret_cast<WorkCounters*>(bytes);
  args.arrivals = reinterpret_cast<uint32_t*>(bytes + at.arrivals);
  args.calls = reinterpret_cast<uint32_t*>(bytes + at.calls);
  args.states = reinterpret_cast<float2*>(bytes + at.states);
  args.outputs = reinterpret_cast<float*>(bytes + at.outputs);
  args.stages = config.stages;
  args.max_slots = config.max_slots;
  const int page_size = params.cache.geometry.page_size;
  args.page_tokens = Divisor::Of(page_size);
  if (params.view.blocks != nullptr) {
    args.block_tokens = Divisor::Of(params.view.block_size);
    args.blocks_per_page = Divisor::Of(page_size / params.view.block_size);
  }
  if (params.dtype == DType::kFloat16) return DispatchCache<__half>(args, config);
  NWOR_CHECK(params.dtype == DType::kBFloat16, "dtype: got ", Name(params.dtype),
             ", expected float16 or bfloat16");
  DispatchCache<__nv_bfloat16>(args, config);
}

}  // namespace nwor
