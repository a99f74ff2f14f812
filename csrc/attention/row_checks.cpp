#include "attention/row_checks.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/check.h"

namespace nwor {
namespace {

constexpr double kMaxScale = 1e30;
constexpr double kMinSoftcap = 1e-6;
constexpr double kMaxSoftcap = 1000.0;

int64_t AddressOf(const at::Tensor& tensor) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
}

// Bytes from the first to the last element, leaving out dimensions whose stride is a multiple of
// `period`. 0: no period.
int64_t ExtentBytes(const at::Tensor& tensor, int64_t period) {
  int64_t bytes = tensor.element_size();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t step = tensor.stride(dim) * tensor.element_size();
    if (period == 0 || step % period != 0) bytes += (tensor.size(dim) - 1) * step;
  }
  return bytes;
}

// Whether no byte of `a` equals a byte of `b` modulo `period`.
bool AreApart(const at::Tensor& a, const at::Tensor& b, int64_t period) {
  const int64_t distance = (AddressOf(b) - AddressOf(a)) % period;
  const int64_t from_a = distance < 0 ? distance + period : distance;
  return from_a >= ExtentBytes(a, period) && from_a + ExtentBytes(b, period) <= period;
}

}  // namespace

void CheckNoSelfOverlap(const at::Tensor& out) {
  if (out.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), from the inside
  for (int64_t dim = 0; dim < out.dim(); ++dim) {
    if (out.size(dim) > 1) dims.emplace_back(out.stride(dim), out.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;  // elements covered so far
  for (const auto& [stride, size] : dims) {
    NWOR_CHECK(stride >= span, "out: got overlapping strides ", out.strides(), " for sizes ",
               out.sizes(), ", expected elements that do not overlap");
    span += stride * (size - 1);
  }
}

bool MayOverlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const int64_t begin_a = AddressOf(a), begin_b = AddressOf(b);
  if (begin_a + ExtentBytes(a, 0) <= begin_b || begin_b + ExtentBytes(b, 0) <= begin_a) {
    return false;
  }
  for (const at::Tensor* tensor : {&a, &b}) {
    for (int64_t dim = 0; dim < tensor->dim(); ++dim) {
      const int64_t period = tensor->stride(dim) * tensor->element_size();
      if (tensor->size(dim) > 1 && period > 0 && AreApart(a, b, period)) return false;
    }
  }
  return true;
}

bool IsSameMemory(const at::Tensor& a, const at::Tensor& b) {
  if (a.const_data_ptr() != b.const_data_ptr() || a.sizes() != b.sizes() ||
      a.scalar_type() != b.scalar_type()) {
    return false;
  }
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

LogitScalars CheckLogitScalars(double scale, double softcap) {
  NWOR_CHECK(std::abs(scale) <= kMaxScale, "scale: got ", scale, ", expected -", kMaxScale, " to ",
             kMaxScale);
  NWOR_CHECK(softcap == 0.0 || (softcap >= kMinSoftcap && softcap <= kMaxSoftcap), "softcap: got ",
             softcap, ", expected 0 (none) or ", kMinSoftcap, " to ", kMaxSoftcap);
  return {static_cast<float>(scale), static_cast<float>(softcap)};
}

}  // namespace nwor
