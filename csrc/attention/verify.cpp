#include "attention/verify.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "attention/cpu/verify.h"
#include "attention/routes/flash.h"
#include "attention/routes/route.h"
#include "attention/verify_arguments.h"
#include "base/check.h"
#include "base/profiling.h"
#include "base/tensor_layout.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "attention/cuda/verify.h"
#include "attention/plan_users.h"
#include "attention/unsupported.h"
#include "base/cuda/launch_check.h"
#endif

namespace nwor {
namespace {

constexpr const char* kRouteVariable = "NWOR_SPECPV_ATTENTION_ROUTE";

// The latest choice, for status reports. Set is called on every step, so it copies the reason only
// if it changed.
class LatestChoice {
 public:
  void Set(const RouteChoice& choice) {
    const std::lock_guard lock(mutex_);
    if (route_ == choice.route && reason_ == choice.reason) return;
    route_ = choice.route;
    reason_ = choice.reason;
  }
  std::string Text() const {
    const std::lock_guard lock(mutex_);
    return route_.has_value() ? Concat(Name(*route_), " (", reason_, ")") : "none";
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Route> route_;
  std::string reason_;
};

LatestChoice& Latest() {
  static LatestChoice latest;
  return latest;
}

RouteAvailability FindRoutes(at::Device device) {
  RouteAvailability available;
  available.Set(Route::kCpu, true);
#ifdef NWOR_WITH_CUDA
  available.Set(Route::kCuda, true);
#endif
  FindFlashRoutes(&available, ComputeCapability(device));
  return available;
}

RouteChoice Choose(const VerifyArguments& arguments, const RouteRequest& request) {
  std::string wanted = arguments.route;
  if (wanted.empty()) {
    const char* variable = std::getenv(kRouteVariable);
    wanted = variable != nullptr ? variable : "";
  }
  // Looking up the ops of other packages is slow, and the common cases do not need it.
  RouteAvailability available;
  available.Set(Route::kCpu, true);
  const bool cpu_only = !request.cuda && (wanted.empty() || wanted == "auto" || wanted == "cpu");
#ifdef NWOR_WITH_CUDA
  available.Set(Route::kCuda, true);
  const bool verification = request.cuda && request.max_rows <= kPrefillRows &&
                            (wanted.empty() || wanted == "auto" || wanted == "cuda") &&
                            MissingFeatures(Route::kCuda, request, available).empty();
#else
  const bool verification = false;
#endif
  if (!cpu_only && !verification) available = FindRoutes(arguments.query.device());
  RouteChoice choice = ChooseRoute(request, available, wanted);
  NWOR_CHECK(choice.ok, choice.reason);
  return choice;
}

#ifdef NWOR_WITH_CUDA

constexpr int64_t kPlanAlign = 256;
// Assumed rows of the other requests in a batch with prefills; chooses the row tile.
constexpr int32_t kRowsBesidePrefill = 16;

struct CudaPlan {
  VerifyConfig config;
  int64_t plan_bytes = 0;
  int64_t total_bytes = 0;  // plan, then workspace
};

// No request attends to more prefix tokens, unless it does not use the step's view.
int64_t MaxPrefixTokens(const VerifyParams& params) {
  if (params.view.num_blocks != nullptr) {
    return int64_t{params.view.max_blocks} * params.view.block_size;
  }
  if (params.compact.lens != nullptr) return params.compact.max_tokens;
  return int64_t{params.max_pages} * params.cache.geometry.page_size;
}

CudaPlan ShapePlan(const VerifyParams& params, const RouteRequest& request, int device) {
  VerifyShape shape;
  shape.num_requests = params.num_requests;
  shape.num_rows = params.num_rows;
  if (params.max_request_rows > 0) {
    const int64_t most = int64_t{params.max_request_rows} * params.num_requests;
    shape.num_rows = static_cast<int32_t>(std::min<int64_t>(shape.num_rows, most));
  }
  shape.num_heads = params.num_heads;
  shape.num_kv_heads = params.num_kv_heads;
  shape.head_dim = params.head_dim;
  shape.dtype = params.dtype;
  shape.cache_dtype = params.cache.geometry.dtype;
  shape.page_size = params.cache.geometry.page_size;
  shape.block_size = params.view.block_size;
  shape.rows_hint = params.max_request_rows > 0 ? kRowsBesidePrefill : request.max_rows;
  shape.max_prefix_tokens = MaxPrefixTokens(params);
  CudaPlan plan;
  const DeviceProps props = QueryDeviceProps(device);
  plan.config = ChooseVerifyConfig(shape, props);
  NWOR_CHECK(plan.config.unsupported == nullptr, DescribeUnsupported(shape, props));
  plan.plan_bytes =
      (VerifyPlanBytes(shape, plan.config) + kPlanAlign - 1) / kPlanAlign * kPlanAlign;
  plan.total_bytes = plan.plan_bytes + VerifyWorkspaceBytes(shape, plan.config);
  return plan;
}

void CheckPlan(const at::Tensor& plan, const CudaPlan& expected, at::Device device) {
  CheckIndex(plan, "plan", at::kByte, {-1}, device);
  NWOR_CHECK(plan.size(0) == expected.total_bytes, "plan: got ", plan.size(0), " bytes, expected ",
             expected.total_bytes, " (a plan made for these shapes)");
  NWOR_CHECK(reinterpret_cast<uintptr_t>(plan.const_data_ptr()) % kPlanAlign == 0,
             "plan: got memory at ", plan.const_data_ptr(), ", expected 256-byte alignment");
}

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CheckCuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Before a stream uses a plan of the caller's: what another stream still does with it comes first.
// Neither can be waited for in a capture, where the caller orders what shares a plan.
void TakePlan(const at::Tensor& plan, StreamHandle handle) {
  static PlanUsers users;
  const std::optional<StreamHandle> had = users.Enter(plan.const_data_ptr(), handle);
  if (!had.has_value()) return;
  const auto before = static_cast<cudaStream_t>(*had), stream = static_cast<cudaStream_t>(handle);
  if (IsCapturing(stream) || IsCapturing(before)) return;
  cudaEvent_t event = nullptr;
  CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  const cudaError_t recorded = cudaEventRecord(event, before);
  const cudaError_t waits =
      recorded == cudaSuccess ? cudaStreamWaitEvent(stream, event, 0) : recorded;
  CheckCuda(cudaEventDestroy(event), "cudaEventDestroy");  // once it has come
  CheckCuda(waits, "waiting for the stream that had the plan");
}

void LaunchPlan(const VerifyParams& params, const CudaPlan& shape, const at::Tensor& plan) {
  auto* memory = static_cast<std::byte*>(plan.mutable_data_ptr());
  LaunchVerifyPlan(params, shape.config, memory, memory + shape.plan_bytes);
}

// Whether this call has copied the view, by a launch that may be the one ahead.
bool CopiesView(const VerifyArguments& arguments, const CheckedVerify& checked) {
  if (!arguments.compact_view.has_value()) return false;
  const CompactViewTensors& view = *arguments.compact_view;
  return checked.compact_keys.const_data_ptr() != view.keys.const_data_ptr() ||
         checked.compact_values.const_data_ptr() != view.values.const_data_ptr();
}

void VerifyCuda(const VerifyArguments& arguments, const CheckedVerify& checked) {
  VerifyParams params = checked.params;
  const CudaPlan shape = ShapePlan(params, checked.request, checked.device.index());
  at::Tensor plan;
  if (arguments.plan.has_value() && params.max_request_rows == 0) {
    plan = *arguments.plan;
    CheckPlan(plan, shape, checked.device);
    TakePlan(plan, params.stream);
    params.prefix_ready = arguments.prefix_ready && !CopiesView(arguments, checked);
  } else {
    plan = at::empty({shape.total_bytes}, arguments.query.options().dtype(at::kByte));
    LaunchPlan(params, shape, plan);
  }
  auto* memory = static_cast<std::byte*>(plan.mutable_data_ptr());
  LaunchVerify(params, shape.config, memory, memory + shape.plan_bytes);
}

#endif

void Run(const RouteChoice& choice, const VerifyArguments& arguments, CheckedVerify& checked,
         const VerifyOutputs& outputs) {
  const ScopedProfileRange range(ProfileRange::kAttend);
  if (choice.route == Route::kCpu) {
    CheckVerifyValues(checked.params);
    VerifyAttentionCpu(checked.params);
    return;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(checked.device);
  checked.params.stream = CurrentStream(checked.device);
  if (choice.route == Route::kCuda) {
    VerifyCuda(arguments, checked);
    return;
  }
#endif
  FlashVerify(choice.route, arguments, checked, outputs, choice.only_prefill);
#ifdef NWOR_WITH_CUDA
  if (choice.only_prefill) {
    checked.params.max_request_rows = kPrefillRows;
    VerifyCuda(arguments, checked);
  }
#endif
}

}  // namespace

void VerifyAttention(const VerifyArguments& arguments, const VerifyOutputs& outputs) {
  CheckedVerify checked = CheckVerifyArguments(arguments, &outputs, /*plan_only=*/false);
  const RouteChoice choice = Choose(arguments, checked.request);
  // The CPU route checks values even if there are no rows.
  if (checked.params.num_rows > 0 || choice.route == Route::kCpu) {
    Run(choice, arguments, checked, outputs);
  }
  Latest().Set(choice);
}

VerifyOutputs MakeVerifyOutputs(const at::Tensor& query, bool with_lse) {
  NWOR_CHECK(query.defined() && query.dim() == 3, "query: got ",
             query.defined() ? Describe(query) : "nothing", ", expected [rows, heads, channels]");
  VerifyOutputs outputs;
  outputs.out = at::empty(query.sizes(), query.options());
  if (with_lse) {
    outputs.lse = at::empty({query.size(0), query.size(1)}, query.options().dtype(at::kFloat));
  }
  return outputs;
}

void PlanVerify(const VerifyArguments& arguments, at::Tensor plan) {
  CheckedVerify checked = CheckVerifyArguments(arguments, nullptr, /*plan_only=*/true);
#ifdef NWOR_WITH_CUDA
  if (checked.device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(checked.device);
    const CudaPlan shape = ShapePlan(checked.params, checked.request, checked.device.index());
    CheckPlan(plan, shape, checked.device);
    checked.params.stream = CurrentStream(checked.device);
    TakePlan(plan, checked.params.stream);
    if (checked.params.num_rows > 0) LaunchPlan(checked.params, shape, plan);
    return;
  }
#endif
  CheckIndex(plan, "plan", at::kByte, {0}, checked.device);
}

int64_t PlanBytes(const VerifyArguments& arguments, int64_t block_size) {
  CheckedVerify checked = CheckVerifyArguments(arguments, nullptr, /*plan_only=*/true);
  checked.params.view.block_size = static_cast<int32_t>(block_size);
#ifdef NWOR_WITH_CUDA
  if (checked.device.is_cuda()) {
    return ShapePlan(checked.params, checked.request, checked.device.index()).total_bytes;
  }
#endif
  return 0;
}

std::string LastRoute() { return Latest().Text(); }

std::string DescribeRoutes() {
  std::string sets;
  for (const std::string& name : VerifyCpuInstructionSets(128)) sets += " " + name;
  at::Device device = at::kCPU;
#ifdef NWOR_WITH_CUDA
  const bool found = c10::cuda::device_count() > 0;
  const char* cuda = found ? "present" : "built in, but no CUDA device";
  if (found) device = at::Device(at::kCUDA, c10::cuda::current_device());
#else
  const char* cuda = "absent: this library was built without CUDA";
#endif
  std::string text =
      Concat(Name(Route::kCpu), ": present:", sets, "\n", Name(Route::kCuda), ": ", cuda);
  for (const Route route : {Route::kTorchFlash, Route::kFlash2, Route::kFlash3}) {
    text += Concat("\n", Name(route), ": ", DescribeFlashRoute(route, ComputeCapability(device)));
  }
  return text;
}

}  // namespace nwor
