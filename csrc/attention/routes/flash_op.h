#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/routes/route.h"

namespace nwor {

struct AttentionState {
  at::Tensor out;  // [T, Hq, D]
  at::Tensor lse;  // [T, Hq] float32, natural log; infinite, of either sign: no token seen
};

// One variable-length call of a FlashAttention kernel.
struct FlashCall {
  at::Tensor query;                       // [T, Hq, D]
  at::Tensor key, value;                  // [tokens, Hkv, D], or pages [P, S, Hkv, D]
  at::Tensor query_start;                 // [B + 1] int32
  at::Tensor key_start;                   // [B + 1] int32; not used with pages
  std::optional<at::Tensor> key_lens;     // [B] int32; absent: differences of key_start
  std::optional<at::Tensor> block_table;  // [B, pages] int32; key and value are then pages
  int64_t max_query = 0;
  int64_t max_key = 0;
  double scale = 1.0;
  double softcap = 0.0;
  bool causal = false;
  int64_t num_splits = 0;  // split-KV: splits of a prefix; 0: the kernel's heuristic
};

// A FlashAttention op registered with torch by another package.
struct FlashOp {
  c10::OperatorHandle handle;
  std::string name;           // "_vllm_fa3_C::fwd"
  int32_t page_multiple = 0;  // it takes page sizes that are multiples of this
};

// The op of a route, if a package has registered one whose schema we can fill. Schemas differ
// between versions: arguments are matched by name, and unknown ones must have a neutral value.
std::optional<FlashOp> FindFlashOp(Route route);

// The op names of a route, best first.
std::vector<std::string> FlashOpNames(Route route);

AttentionState CallFlashOp(const FlashOp& op, const FlashCall& call);

// FlashAttention-2 inside LibTorch; no pages, no softcap.
bool HasTorchFlash();
AttentionState CallTorchFlash(const FlashCall& call);

}  // namespace nwor
