#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "bindings/ops.h"
#include "drafters/certain_logits.h"
#include "drafters/ngram_lookup.h"

// The torch ops of drafters that need no model.

namespace nwor {
namespace {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

TwoTensors NgramLookupOp(const at::Tensor& text, const at::Tensor& rows, const at::Tensor& lens,
                         int64_t min_tokens, int64_t max_tokens, int64_t count) {
  return WithTorchErrors([&]() -> TwoTensors {
    return NgramLookup(text, rows, lens, {min_tokens, max_tokens}, count);
  });
}

TwoTensors NgramLookupFake(const at::Tensor& text, const at::Tensor& rows, const at::Tensor& lens,
                           int64_t min_tokens, int64_t max_tokens, int64_t count) {
  TORCH_CHECK_VALUE(rows.dim() == 1, "rows: got ", rows.dim(), " dimensions, expected 1");
  return {at::empty_symint({rows.sym_size(0), count}, rows.options().dtype(at::kLong)),
          at::empty_symint({rows.sym_size(0)}, rows.options())};
}

void CertainLogitsOp(at::Tensor logits, const at::Tensor& rows, const at::Tensor& starts,
                     const at::Tensor& tokens) {
  WithTorchErrors([&] { CertainLogits(logits, rows, starts, tokens); });
}

void CertainLogitsFake(at::Tensor logits, const at::Tensor& rows, const at::Tensor& starts,
                       const at::Tensor& tokens) {}

}  // namespace

void RegisterDraftersSchemas(torch::Library& library) {
  library.def(
      "ngram_lookup(Tensor text, Tensor rows, Tensor lens, int min_tokens, int max_tokens, "
      "int count) -> (Tensor, Tensor)");
  library.def("certain_logits(Tensor(a!) logits, Tensor rows, Tensor starts, Tensor tokens) -> ()");
}

void RegisterDraftersKernels(torch::Library& library) {
  library.impl("ngram_lookup", &NgramLookupOp);
  library.impl("certain_logits", &CertainLogitsOp);
}

void RegisterDraftersFakes(torch::Library& library) {
  library.impl("ngram_lookup", FakeKernel<&NgramLookupFake>());
  library.impl("certain_logits", FakeKernel<&CertainLogitsFake>());
}

}  // namespace nwor
