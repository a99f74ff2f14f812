#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "base/export.h"

namespace nwor {

// Makes `digest` ({d, ~d}, int64[2]) the maximum over all ranks of a torch.distributed process
// group, named as torch registered it. Every rank must call it. On CUDA groups it only enqueues.
// Throws Error when there is no such group.
NWOR_EXPORT void AgreeOnDigest(const std::string& group_name, at::Tensor& digest);

// One rank's part in the ranks' agreement on one commit: every rank answers exactly once.
class NWOR_EXPORT RankAnswer {
 public:
  // `group_name` empty: there is no agreement.
  explicit RankAnswer(std::string group_name)
      : group_name_(std::move(group_name)), owed_(!group_name_.empty()) {}

  // Whether the other ranks still wait for it.
  bool owed() const { return owed_; }
  // See AgreeOnDigest. REQUIRES: it is owed.
  void Give(at::Tensor& digest);
  // Makes all ranks disagree, if the answer is still owed: none waits for a commit that threw.
  void Refuse(at::Device device) noexcept;

 private:
  std::string group_name_;
  bool owed_;
};

}  // namespace nwor
