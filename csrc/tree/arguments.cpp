#include "tree/arguments.h"

#include <ATen/ops/empty.h>

#include <limits>
#include <string>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "tree/tree_params.h"

namespace nwor {
namespace {

void CheckSizes(const at::Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes,
                at::Device device) {
  NWOR_CHECK(tensor.defined(), name, ": got nothing, expected a tensor");
  bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
  std::string expected;
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    same = same && (size < 0 || tensor.size(dim) == size);
    expected += (dim == 0 ? "" : ", ") + (size < 0 ? std::string("any") : std::to_string(size));
    ++dim;
  }
  NWOR_CHECK(same, name, ": got sizes ", tensor.sizes(), ", expected [", expected, "]");
  CheckDevice(tensor, name, device);
}

// Too large for int32 stays too large: wrapped around, it could be a number that is fine.
at::Tensor Narrowed(const at::Tensor& tensor) {
  using Limits = std::numeric_limits<int32_t>;
  return tensor.clamp(Limits::min(), Limits::max()).to(at::kInt);
}

}  // namespace

at::Tensor IntegerArgument(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                           std::initializer_list<int64_t> sizes, at::Device device) {
  CheckSizes(tensor, name, sizes, device);
  NWOR_CHECK(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, name,
             ": got dtype ", c10::toString(tensor.scalar_type()), ", expected int32 or int64");
  if (tensor.scalar_type() == dtype) {
    return tensor.is_contiguous() ? tensor : tensor.contiguous();
  }
  return (dtype == at::kInt ? Narrowed(tensor) : tensor.to(dtype)).contiguous();
}

at::Tensor FloatArgument(const at::Tensor& tensor, const char* name,
                         std::initializer_list<int64_t> sizes, at::Device device) {
  CheckSizes(tensor, name, sizes, device);
  NWOR_CHECK(tensor.scalar_type() == at::kFloat, name, ": got dtype ",
             c10::toString(tensor.scalar_type()), ", expected float32");
  return tensor.is_contiguous() ? tensor : tensor.contiguous();
}

at::Tensor OptionalFloatArgument(const std::optional<at::Tensor>& tensor, const char* name,
                                 std::initializer_list<int64_t> sizes, at::Device device) {
  return tensor.has_value() ? FloatArgument(*tensor, name, sizes, device) : at::Tensor();
}

int64_t* StatusArgument(const std::optional<at::Tensor>& status, int64_t batch, at::Device device) {
  if (!status.has_value()) return nullptr;
  CheckIndex(*status, "status", at::kLong, {batch}, device);
  return static_cast<int64_t*>(status->mutable_data_ptr());
}

void CheckTreeRows(int64_t rows, const char* name) {
  NWOR_CHECK(rows >= 1 && rows <= kMaxTreeRows, name, ": got ", rows, " rows, expected 1 .. ",
             kMaxTreeRows);
}

}  // namespace nwor
