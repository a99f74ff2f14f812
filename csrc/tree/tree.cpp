#include "tree/tree.h"

#include <ATen/ops/empty.h>

#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "tree/arguments.h"
#include "tree/fault.h"
#include "tree/tree_params.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace nwor {
namespace {

Tree AllocateTree(int64_t batch, int64_t rows, at::Device device) {
  const auto i32 = at::TensorOptions().dtype(at::kInt).device(device);
  const auto i64 = i32.dtype(at::kLong);
  Tree tree;
  tree.parents = at::empty({batch, rows}, i32);
  tree.positions = at::empty({batch, rows}, i64);
  tree.depths = at::empty({batch, rows}, i32);
  tree.mask = at::empty({batch, rows, (rows + 63) / 64}, i64);
  tree.first_child = at::empty({batch, rows}, i32);
  tree.next_sibling = at::empty({batch, rows}, i32);
  tree.status = at::empty({batch}, i64);
  return tree;
}

TreeOutputs OutputsOf(const Tree& tree) {
  TreeOutputs out;
  out.parents = static_cast<int32_t*>(tree.parents.mutable_data_ptr());
  out.positions = static_cast<int64_t*>(tree.positions.mutable_data_ptr());
  out.depths = static_cast<int32_t*>(tree.depths.mutable_data_ptr());
  out.mask = static_cast<uint64_t*>(tree.mask.mutable_data_ptr());
  out.first_child = static_cast<int32_t*>(tree.first_child.mutable_data_ptr());
  out.next_sibling = static_cast<int32_t*>(tree.next_sibling.mutable_data_ptr());
  out.status = static_cast<int64_t*>(tree.status.mutable_data_ptr());
  return out;
}

// On the host a fault is an error at once; `name` is the argument its rows are entries of.
void ThrowFaults(const Tree& tree, const char* name) {
  const auto* status = static_cast<const int64_t*>(tree.status.const_data_ptr());
  for (int64_t b = 0; b < tree.status.size(0); ++b) {
    const auto fault = static_cast<TreeFault>(status[b] & 0xFF);
    const int64_t row = status[b] >> 8 & 0xFFFFFF;
    const int64_t value = status[b] >> 32;
    switch (fault) {
      case TreeFault::kNone:
        break;
      case TreeFault::kRowCount:
        throw Error(
            Concat("num_rows[", b, "]: got ", value, ", expected 1 .. ", tree.parents.size(1)));
      case TreeFault::kPrefixLen:
        throw Error(Concat("prefix_lens[", b, "]: got ", value, ", expected 0 .. ", kMaxPrefixLen));
      case TreeFault::kScore:
        throw Error(Concat("score_steps: got NaN for candidate ", value, " of request ", b,
                           ", expected a number"));
      case TreeFault::kKeptRange:
        throw Error(Concat("parent_steps: got candidate ", value, " in request ", b,
                           ", expected candidates of the step before (",
                           Sentence(TreeFault::kKeptRange), ")"));
      default:
        throw Error(Concat(name, "[", b, ", ", row, "]: got ", value, ", expected ",
                           row == 0 ? "-1" : Concat("0 .. ", row - 1), " (", Sentence(fault), ")"));
    }
  }
}

// Finds k entries from `begin` on in the joined list, which must lie within one tensor: they do,
// however engines cut the list.
std::pair<const int64_t*, int64_t> FindEntries(const std::vector<at::Tensor>& parts, int64_t begin,
                                               int64_t k, int step) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t size = parts[i].size(1);
    if (begin < size) {
      NWOR_CHECK(begin + k <= size, "parent_steps[", i, "]: got ", size,
                 " entries per request, expected all ", k, " parents of step ", step,
                 " in one tensor");
      return {static_cast<const int64_t*>(parts[i].const_data_ptr()) + begin, size};
    }
    begin -= size;
  }
  return {nullptr, 0};
}

// Where each step's kept parents lie within the joined list.
void PlaceKept(const std::vector<at::Tensor>& parent_steps, TopKParams* params) {
  const int64_t k = params->k;
  if (k == 1 || params->num_steps == 1) return;
  int64_t width = 0;
  for (const at::Tensor& part : parent_steps) width += part.size(1);
  const int64_t needed = (params->num_steps - 1) * k;
  NWOR_CHECK(width >= needed && (width % k == 0 || width % k == 1), "parent_steps: got ", width,
             " entries per request, expected ", needed, " (", k,
             " for each step after the first), or one more with the root in front");
  for (int step = 1; step < params->num_steps; ++step) {
    TopKParams::Step& own = params->steps[step];
    const int64_t begin = width % k + (step - 1) * k;
    std::tie(own.kept, own.kept_stride) = FindEntries(parent_steps, begin, k, step);
    if (width % k == 0 && width >= needed + k) {
      std::tie(own.kept_after_roots, own.kept_after_roots_stride) =
          FindEntries(parent_steps, begin + k, k, step);
    }
  }
}

void CheckStepCounts(const std::vector<at::Tensor>& token_steps,
                     const std::vector<at::Tensor>& score_steps) {
  NWOR_CHECK(!token_steps.empty() && token_steps.size() <= kMaxTreeSteps, "token_steps: got ",
             token_steps.size(), " steps, expected 1 .. ", kMaxTreeSteps);
  NWOR_CHECK(score_steps.size() == token_steps.size(), "score_steps: got ", score_steps.size(),
             " steps, expected ", token_steps.size(), " as token_steps");
}

// Steps come as [B, n], or with the parents as a dimension of their own.
at::Tensor FlatStep(const at::Tensor& step, const std::string& name, int64_t batch, int64_t count) {
  NWOR_CHECK(step.dim() >= 2 && step.size(0) == batch && step.numel() == batch * count, name,
             ": got sizes ", step.sizes(), ", expected [", batch, ", ", count, "] in all");
  return step.reshape({batch, count});
}

}  // namespace

Tree TreeFromParents(const at::Tensor& parents, const at::Tensor& prefix_lens,
                     const std::optional<at::Tensor>& tokens,
                     const std::optional<at::Tensor>& num_rows) {
  const at::Device device = parents.device();
  const at::Tensor given = IntegerArgument(parents, "parents", at::kInt, {-1, -1}, device);
  const int64_t batch = given.size(0);
  const int64_t rows = given.size(1);
  CheckTreeRows(rows, "parents");
  const at::Tensor lens = IntegerArgument(prefix_lens, "prefix_lens", at::kInt, {batch}, device);
  const at::Tensor counts = num_rows.has_value()
                                ? IntegerArgument(*num_rows, "num_rows", at::kInt, {batch}, device)
                                : at::Tensor();
  Tree tree = AllocateTree(batch, rows, device);
  if (tokens.has_value()) {
    tree.tokens = IntegerArgument(*tokens, "tokens", at::kLong, {batch, rows}, device);
  }
  ParentsParams params;
  params.parents = static_cast<const int32_t*>(given.const_data_ptr());
  params.prefix_lens = static_cast<const int32_t*>(lens.const_data_ptr());
  if (counts.defined()) params.num_rows = static_cast<const int32_t*>(counts.const_data_ptr());
  params.out = OutputsOf(tree);
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(rows);
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    TreeFromParentsCpu(params);
    ThrowFaults(tree, "parents");
    return tree;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  LaunchTreeFromParents(params);
#endif
  return tree;
}

Tree TreeFromTopK(const std::vector<at::Tensor>& token_steps,
                  const std::vector<at::Tensor>& score_steps,
                  const std::vector<at::Tensor>& parent_steps, const at::Tensor& root_tokens,
                  const at::Tensor& prefix_lens, int64_t num_rows) {
  CheckStepCounts(token_steps, score_steps);
  const at::Device device = root_tokens.device();
  const at::Tensor roots = IntegerArgument(root_tokens, "root_tokens", at::kLong, {-1}, device);
  const int64_t batch = roots.size(0);
  const at::Tensor lens = IntegerArgument(prefix_lens, "prefix_lens", at::kInt, {batch}, device);
  NWOR_CHECK(token_steps[0].dim() >= 2, "token_steps[0]: got sizes ", token_steps[0].sizes(),
             ", expected [requests, k]");
  const int64_t k = token_steps[0].size(-1);
  const auto steps = static_cast<int64_t>(token_steps.size());
  NWOR_CHECK(k >= 1 && k * k <= kMaxTreeCandidates && k + (steps - 1) * k * k <= kMaxTreeCandidates,
             "token_steps: got ", steps, " steps of the best ", k, ", expected 1 .. ",
             kMaxTreeCandidates, " candidates in all");
  CheckTreeRows(num_rows, "num_rows");
  const int candidates = NumCandidates(static_cast<int>(steps), static_cast<int>(k));
  NWOR_CHECK(num_rows <= 1 + candidates, "num_rows: got ", num_rows, ", expected at most ",
             1 + candidates, " (the root and ", candidates, " candidates)");

  TopKParams params;
  params.num_steps = static_cast<int32_t>(steps);
  params.k = static_cast<int32_t>(k);
  std::vector<at::Tensor> held;  // keeps converted copies alive until the launch
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t count = step == 0 ? k : k * k;
    const std::string token_name = Concat("token_steps[", step, "]");
    const std::string score_name = Concat("score_steps[", step, "]");
    held.push_back(IntegerArgument(FlatStep(token_steps[step], token_name, batch, count),
                                   token_name.c_str(), at::kLong, {batch, count}, device));
    params.steps[step].tokens = static_cast<const int64_t*>(held.back().const_data_ptr());
    held.push_back(FloatArgument(FlatStep(score_steps[step], score_name, batch, count),
                                 score_name.c_str(), {batch, count}, device));
    params.steps[step].scores = static_cast<const float*>(held.back().const_data_ptr());
  }
  std::vector<at::Tensor> kept;
  for (size_t i = 0; i < parent_steps.size(); ++i) {
    kept.push_back(IntegerArgument(parent_steps[i], Concat("parent_steps[", i, "]").c_str(),
                                   at::kLong, {batch, -1}, device));
  }
  PlaceKept(kept, &params);

  Tree tree = AllocateTree(batch, num_rows, device);
  tree.tokens = at::empty({batch, num_rows}, roots.options());
  params.root_tokens = static_cast<const int64_t*>(roots.const_data_ptr());
  params.prefix_lens = static_cast<const int32_t*>(lens.const_data_ptr());
  params.out = OutputsOf(tree);
  params.out.tokens = static_cast<int64_t*>(tree.tokens.mutable_data_ptr());
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(num_rows);
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    TreeFromTopKCpu(params);
    ThrowFaults(tree, "candidates");
    return tree;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  LaunchTreeFromTopK(params);
#endif
  return tree;
}

}  // namespace nwor
