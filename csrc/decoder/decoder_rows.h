#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "base/export.h"

// A decoder layer of the Llama family for the few rows of a verification step: what is before
// attention, and what is after it. Between them the caller stages K/V and attends.
//
// On the CPU in float32 each half is one call that reads every matrix once, as it lies, and a row's
// result does not depend on how many rows there are, nor on how rows and vectors lie; the matrices
// must be contiguous and may be float16 or bfloat16.
// On CUDA products are torch's, and what stands between two of them is one kernel; results are
// rounded where torch's operations one by one round them, but for the last residual connection,
// which is added before its product is rounded. In other types, and on the CPU for matrices that
// are not contiguous, all of it is put together from torch's own operations, whose results do
// depend on the number of rows.
//
// Results are contiguous, whatever the arguments' layouts.
//
// Thread-safety: const arguments; run on torch's threads. Throw Error for wrong shapes and types.

namespace nwor {

// weight [outputs, inputs], bias [outputs] or none.
struct LinearLayer {
  at::Tensor weight;
  std::optional<at::Tensor> bias;
};

struct AttentionInputWeights {
  at::Tensor norm;  // root mean square, [hidden]; [parts, hidden / parts]: every part of its own
  double epsilon = 0;
  LinearLayer query;
  LinearLayer key;
  LinearLayer value;
  // [head_dim]: queries and keys of each head are normalized before they are rotated, if given.
  std::optional<at::Tensor> query_norm;
  std::optional<at::Tensor> key_norm;
};

// hidden [T, hidden] -> query [T, Hq, D], key [T, Hkv, D], rotated by `cos` and `sin` [T, D]
// (halves against halves), and value [T, Hkv, D].
NWOR_EXPORT std::array<at::Tensor, 3> AttentionInputs(const at::Tensor& hidden,
                                                      const AttentionInputWeights& weights,
                                                      const at::Tensor& cos, const at::Tensor& sin);

struct LayerOutputWeights {
  LinearLayer attention;  // [hidden, Hq * D]
  at::Tensor norm;        // [hidden]
  double epsilon = 0;
  at::Tensor gate;  // [intermediate, hidden]
  at::Tensor up;    // [intermediate, hidden]
  at::Tensor down;  // [hidden, intermediate]
};

// The layer's output [T, hidden] from its input and what was attended to, [T, Hq * D]: both
// residual connections and the gated MLP (SiLU).
NWOR_EXPORT at::Tensor LayerOutput(const at::Tensor& hidden, const at::Tensor& attended,
                                   const LayerOutputWeights& weights);

}  // namespace nwor
