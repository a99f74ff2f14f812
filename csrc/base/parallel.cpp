#include "base/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

namespace nwor {

void RunOnTorchThreads(int64_t workers, const std::function<void()>& work) {
  if (workers <= 1 || at::get_num_threads() == 1) {
    work();
    return;
  }
  // An iterator over `workers` elements with a grain of one: libtorch_cpu calls the loop in
  // parallel.
  const at::Tensor elements = at::empty({workers}, at::TensorOptions().dtype(at::kByte));
  at::TensorIterator iterator = at::TensorIteratorConfig().add_const_input(elements).build();
  iterator.for_each([&](char**, const int64_t*, int64_t, int64_t) { work(); }, /*grain_size=*/1);
}

}  // namespace nwor
