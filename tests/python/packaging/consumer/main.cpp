#include <ATen/ATen.h>

#include <iostream>

#include "attention/verify.h"
#include "base/build_info.h"
#include "kv_interceptor/interceptor.h"

int main() {
  const nwor::BuildInfo& info = nwor::GetBuildInfo();
  std::cout << info.version << " " << info.torch << "\n";

  // One layer's paged cache: 8 pages of 16 tokens, 2 KV heads of 64 channels.
  const at::Tensor keys = at::zeros({8, 16, 2, 64}), values = at::zeros_like(keys);
  nwor::Interceptor interceptor(nwor::NworConfig{.strict = true});
  interceptor.BindLayer("0", keys, values);

  // A round of one request that has 32 tokens cached: its root and four drafts, a chain.
  interceptor.Begin({.query_lens = {5}, .num_drafts = {4}, .parents = {}});
  const at::Tensor query = at::randn({5, 4, 64});
  const at::Tensor key = at::randn({5, 2, 64}), value = at::randn({5, 2, 64});
  interceptor.Write("0", key, value, at::arange(32, 37));  // root to the cache, drafts to staging

  nwor::VerifyArguments step{.query = query, .key = key, .value = value};
  step.key_cache = keys;
  step.value_cache = values;
  step.block_table = at::arange(8, at::kInt).view({1, 8});
  step.prefix_lens = at::tensor({32}, at::kInt);
  step.query_start = at::tensor({0, 5}, at::kInt);
  step.scale = 0.125;
  const nwor::VerifyOutputs attended = nwor::MakeVerifyOutputs(query, /*with_lse=*/false);
  nwor::VerifyAttention(step, attended);

  // The target accepted the first two drafts: rows 1 and 2.
  const at::Tensor path = at::tensor({1, 2}, at::kInt).view({1, 2});
  const nwor::Receipt receipt = interceptor.Commit(path, at::tensor({2}, at::kInt));
  const bool rejected_untouched = !keys[2].slice(0, 3, 5).any().item<bool>();
  std::cout << receipt.committed_tokens() << " committed, rejected "
            << (rejected_untouched ? "never written" : "WRITTEN") << "\n";
  return receipt.ok() && rejected_untouched ? 0 : 1;
}
