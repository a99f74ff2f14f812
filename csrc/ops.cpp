#include <torch/library.h>

#include <utility>

#include "check.h"
#include "kv_interceptor/kv_ops.h"

// The torch ops: schemas, and one implementation each for CPU, CUDA and shape-only tensors. This is
// the only file that registers anything with torch; what the ops do lives in their subsystem.

namespace nwor {
namespace {

// torch knows its own exception types: Error becomes ValueError in Python, and nwor_specpv.ops
// turns that into NworError.
template <typename Function>
decltype(auto) WithTorchErrors(Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

void WriteKvOp(const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache,
               at::Tensor value_cache, const at::Tensor& slot_mapping, const at::Tensor& stage_rows,
               at::Tensor staged_key, at::Tensor staged_value,
               const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale,
               bool exclusive, const std::optional<at::Tensor>& status) {
  WithTorchErrors([&] {
    WriteKv(key, value, key_cache, value_cache, slot_mapping, stage_rows, staged_key, staged_value,
            k_scale, v_scale, exclusive, status);
  });
}

void CommitOp(const at::Tensor& staged_key, const at::Tensor& staged_value,
              const std::vector<at::Tensor>& key_caches,
              const std::vector<at::Tensor>& value_caches, const at::Tensor& path,
              const at::Tensor& counts, const at::Tensor& slots, at::Tensor status,
              const std::optional<at::Tensor>& parents,
              const std::optional<std::vector<at::Tensor>>& k_scales,
              const std::optional<std::vector<at::Tensor>>& v_scales) {
  WithTorchErrors([&] {
    CommitStaged(staged_key, staged_value, key_caches, value_caches, path, counts, slots, status,
                 parents, k_scales.value_or(std::vector<at::Tensor>{}),
                 v_scales.value_or(std::vector<at::Tensor>{}));
  });
}

// One implementation serves every device: it checks, then goes by the tensors' device.
void RegisterKernels(torch::Library& library) {
  library.impl("write_kv", &WriteKvOp);
  library.impl("commit", &CommitOp);
}

}  // namespace
}  // namespace nwor

TORCH_LIBRARY(nwor_specpv, library) {
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor stage_rows, Tensor(c!) staged_key, Tensor(d!) staged_value, "
      "Tensor? k_scale=None, Tensor? v_scale=None, bool exclusive=False, "
      "Tensor(e!)? status=None) -> ()");
  library.def(
      "commit(Tensor staged_key, Tensor staged_value, Tensor(a!)[] key_caches, "
      "Tensor(b!)[] value_caches, Tensor path, Tensor counts, Tensor slots, Tensor(c!) status, "
      "Tensor? parents=None, Tensor[]? k_scales=None, Tensor[]? v_scales=None) -> ()");
}

TORCH_LIBRARY_IMPL(nwor_specpv, CPU, library) { nwor::RegisterKernels(library); }
TORCH_LIBRARY_IMPL(nwor_specpv, Meta, library) { nwor::RegisterKernels(library); }
#ifdef NWOR_WITH_CUDA
TORCH_LIBRARY_IMPL(nwor_specpv, CUDA, library) { nwor::RegisterKernels(library); }
#endif
