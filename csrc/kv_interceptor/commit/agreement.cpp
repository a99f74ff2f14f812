#include "kv_interceptor/commit/agreement.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/check.h"

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

}  // namespace nwor
