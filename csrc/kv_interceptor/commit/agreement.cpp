#include "kv_interceptor/commit/agreement.h"

#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/commit/digest.h"

namespace nwor {

void AgreeOnDigest(const std::string& group_name, at::Tensor& digest) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(group_name);
  } catch (const c10::Error&) {
    throw Error(Concat("agreement_group: got '", group_name,
                       "', expected the name of an initialised torch.distributed process group"));
  }
  std::vector<at::Tensor> tensors{digest};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(tensors, options)->wait();
}

void RankAnswer::Give(at::Tensor& digest) {
  owed_ = false;
  AgreeOnDigest(group_name_, digest);
}

void RankAnswer::Refuse(at::Device device) noexcept {
  if (!owed_) return;
  try {
    const c10::DeviceGuard guard(device);
    at::Tensor digest = at::full({2}, kDigestRefusal, at::dtype(at::kLong).device(device));
    Give(digest);
  } catch (const std::exception&) {
    return;  // what the commit threw is the one to tell
  }
}

}  // namespace nwor
