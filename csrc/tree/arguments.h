#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

// Tensor arguments of the tree ops. Small tensors may have any strides, and int32 or int64 where
// they hold integers: what is given is converted when it must be, on the device.

namespace nwor {

// Checks that `tensor` holds integers, has these sizes (-1 = any) and this device; returns it
// contiguous in `dtype` (int32 or int64). What int32 cannot hold becomes its nearest number.
at::Tensor IntegerArgument(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                           std::initializer_list<int64_t> sizes, at::Device device);

// The same for float32.
at::Tensor FloatArgument(const at::Tensor& tensor, const char* name,
                         std::initializer_list<int64_t> sizes, at::Device device);

// An undefined tensor where nothing was given.
at::Tensor OptionalFloatArgument(const std::optional<at::Tensor>& tensor, const char* name,
                                 std::initializer_list<int64_t> sizes, at::Device device);

// The status words a caller may pass: int64 [batch], contiguous. Null where nothing was given.
int64_t* StatusArgument(const std::optional<at::Tensor>& status, int64_t batch, at::Device device);

void CheckTreeRows(int64_t rows, const char* name);

}  // namespace nwor
