#include "bindings/ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>

#include "attention/merge/merge_rows.h"
#include "attention/merge/merge_state.h"
#include "attention/verify.h"
#include "base/check.h"
#include "kv_interceptor/kv_ops.h"
#include "specpv/specpv_ops.h"
#include "specpv/view_gather.h"

// The torch ops: schemas, and one implementation each for CPU, CUDA and shape-only tensors. This is
// the only file that registers anything with torch, in parts (ops_<folder>.cpp) where they are
// many; what the ops do lives in their subsystem.

namespace nwor {
namespace {

void WriteKvOp(const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache,
               at::Tensor value_cache, const at::Tensor& slot_mapping,
               const OptionalTensor& stage_rows, const OptionalTensor& staged_key,
               const OptionalTensor& staged_value, const OptionalTensor& k_scale,
               const OptionalTensor& v_scale, bool exclusive, const OptionalTensor& status) {
  WithTorchErrors([&] {
    WriteKv(key, value, key_cache, value_cache, slot_mapping, stage_rows, staged_key, staged_value,
            k_scale, v_scale, exclusive, status);
  });
}

void CommitOp(const at::Tensor& staged_key, const at::Tensor& staged_value,
              const std::vector<at::Tensor>& key_caches,
              const std::vector<at::Tensor>& value_caches, const at::Tensor& path,
              const at::Tensor& counts, const at::Tensor& slots, at::Tensor status,
              const std::optional<at::Tensor>& parents,
              const std::optional<std::vector<at::Tensor>>& k_scales,
              const std::optional<std::vector<at::Tensor>>& v_scales,
              const OptionalTensor& tail_keys, const OptionalTensor& tail_values,
              const OptionalTensor& tail_begin, const OptionalTensor& root_slots,
              const OptionalTensor& tail_held) {
  const at::Tensor none;
  const TailTensors tail{tail_keys.value_or(none), tail_values.value_or(none),
                         tail_begin.value_or(none), root_slots.value_or(none),
                         tail_held.value_or(none)};
  WithTorchErrors([&] {
    CommitStaged(staged_key, staged_value, key_caches, value_caches, path, counts, slots, status,
                 parents, k_scales.value_or(std::vector<at::Tensor>{}),
                 v_scales.value_or(std::vector<at::Tensor>{}), tail);
  });
}

// The fake kernel of an op that returns nothing: shapes follow from the arguments.
void IgnoreArguments(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CheckOneDevice(op, *stack);
  torch::jit::drop(*stack, op.schema().arguments().size());
}

// ---- attention --------------------------------------------------------------------------------

// A view arrives as flat tensors: schemas know no structs. All of one view or none of it.
void SetView(const OptionalTensor& blocks, const OptionalTensor& num_blocks,
             const OptionalTensor& lens, int64_t block_size, const OptionalTensor& keys,
             const OptionalTensor& values, const OptionalTensor& compact_lens,
             VerifyArguments* arguments) {
  const bool partial = blocks.has_value() || num_blocks.has_value() || lens.has_value();
  const bool compact = keys.has_value() || values.has_value() || compact_lens.has_value();
  if (partial) {
    arguments->partial_view = {blocks.value_or(at::Tensor()), num_blocks.value_or(at::Tensor()),
                               lens.value_or(at::Tensor()), block_size};
  }
  if (compact) {
    arguments->compact_view = {keys.value_or(at::Tensor()), values.value_or(at::Tensor()),
                               compact_lens.value_or(at::Tensor())};
  }
}

void VerifyAttentionOp(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const at::Tensor& key_cache, const at::Tensor& value_cache,
                       const at::Tensor& block_table, const at::Tensor& prefix_lens,
                       const at::Tensor& query_start, const OptionalTensor& tree_mask, double scale,
                       at::Tensor out, const OptionalTensor& lse, const OptionalTensor& view_blocks,
                       const OptionalTensor& view_num_blocks, const OptionalTensor& view_lens,
                       int64_t view_block_size, const OptionalTensor& compact_keys,
                       const OptionalTensor& compact_values, const OptionalTensor& compact_lens,
                       const OptionalTensor& k_scale, const OptionalTensor& v_scale, int64_t window,
                       double softcap, int64_t max_rows, const OptionalTensor& plan,
                       const OptionalTensor& status, std::string_view route, bool prefix_ready) {
  VerifyArguments arguments;
  arguments.query = query;
  arguments.key = key;
  arguments.value = value;
  arguments.key_cache = key_cache;
  arguments.value_cache = value_cache;
  arguments.block_table = block_table;
  arguments.prefix_lens = prefix_lens;
  arguments.query_start = query_start;
  arguments.tree_mask = tree_mask;
  arguments.scale = scale;
  arguments.k_scale = k_scale;
  arguments.v_scale = v_scale;
  arguments.window = window;
  arguments.softcap = softcap;
  arguments.max_rows = max_rows;
  arguments.plan = plan;
  arguments.status = status;
  arguments.route = std::string(route);
  arguments.prefix_ready = prefix_ready;
  SetView(view_blocks, view_num_blocks, view_lens, view_block_size, compact_keys, compact_values,
          compact_lens, &arguments);
  WithTorchErrors([&] { VerifyAttention(arguments, {out, lse.value_or(at::Tensor())}); });
}

void VerifyPlanOp(const at::Tensor& query, const at::Tensor& key_cache,
                  const at::Tensor& block_table, const at::Tensor& prefix_lens,
                  const at::Tensor& query_start, const OptionalTensor& tree_mask, at::Tensor plan,
                  const OptionalTensor& view_blocks, const OptionalTensor& view_num_blocks,
                  const OptionalTensor& view_lens, int64_t view_block_size,
                  const OptionalTensor& compact_keys, const OptionalTensor& compact_values,
                  const OptionalTensor& compact_lens, int64_t window, int64_t max_rows,
                  const OptionalTensor& status) {
  VerifyArguments arguments;
  arguments.query = query;
  arguments.key_cache = key_cache;
  arguments.block_table = block_table;
  arguments.prefix_lens = prefix_lens;
  arguments.query_start = query_start;
  arguments.tree_mask = tree_mask;
  arguments.window = window;
  arguments.max_rows = max_rows;
  arguments.status = status;
  SetView(view_blocks, view_num_blocks, view_lens, view_block_size, compact_keys, compact_values,
          compact_lens, &arguments);
  WithTorchErrors([&] { PlanVerify(arguments, plan); });
}

std::tuple<at::Tensor, at::Tensor> MergeStatesOp(const std::vector<at::Tensor>& outs,
                                                 const std::vector<at::Tensor>& lses) {
  return WithTorchErrors(
      [&]() -> std::tuple<at::Tensor, at::Tensor> { return MergeStates(outs, lses); });
}

// Sizes may be symbols here, so nothing is compared; the real call checks everything.
std::tuple<at::Tensor, at::Tensor> MergeStatesFake(const std::vector<at::Tensor>& outs,
                                                   const std::vector<at::Tensor>& lses) {
  TORCH_CHECK_VALUE(!outs.empty() && outs.size() == lses.size(), "lses: got ", lses.size(),
                    " states, expected as many as outs, at least one");
  return {at::empty_symint(outs[0].sym_sizes(), outs[0].options()),
          at::empty_symint(lses[0].sym_sizes(), lses[0].options())};
}

void MergeRowsOp(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const at::Tensor& prefix_out, const at::Tensor& prefix_lse,
                 const at::Tensor& query_start, const OptionalTensor& tree_mask, double scale,
                 at::Tensor out, const OptionalTensor& lse, double softcap,
                 const OptionalTensor& token_lens, bool behind_verify) {
  MergeRowsArguments arguments{query,       key,       value, prefix_out, prefix_lse,
                               query_start, tree_mask, scale, softcap};
  arguments.token_lens = token_lens;
  // Every block of our kernels waits for the launches ahead before it ends.
  arguments.ordered = !behind_verify;
  WithTorchErrors([&] { MergeRows(arguments, out, lse.value_or(at::Tensor())); });
}

// Shared by the schemas that take a step's lengths and view.
#define NWOR_STEP_SCHEMA \
  "Tensor block_table, Tensor prefix_lens, Tensor query_start, Tensor? tree_mask, "
#define NWOR_VIEW_SCHEMA                                                             \
  "Tensor? view_blocks=None, Tensor? view_num_blocks=None, Tensor? view_lens=None, " \
  "int view_block_size=0, Tensor? compact_keys=None, Tensor? compact_values=None, "  \
  "Tensor? compact_lens=None, "

void RegisterAttentionSchemas(torch::Library& library) {
  library.def(
      "verify_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, "
      "Tensor value_cache, " NWOR_STEP_SCHEMA
      "float scale, Tensor(a!) out, Tensor(b!)? lse=None, *, " NWOR_VIEW_SCHEMA
      "Tensor? k_scale=None, Tensor? v_scale=None, int window=0, float softcap=0.0, "
      "int max_rows=0, Tensor? plan=None, Tensor(c!)? status=None, str route='', "
      "bool prefix_ready=False) -> ()");
  library.def("verify_plan(Tensor query, Tensor key_cache, " NWOR_STEP_SCHEMA
              "Tensor(a!) plan, *, " NWOR_VIEW_SCHEMA
              "int window=0, int max_rows=0, Tensor(b!)? status=None) -> ()");
  library.def("merge_states(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)");
  library.def(
      "merge_rows(Tensor query, Tensor key, Tensor value, Tensor prefix_out, Tensor prefix_lse, "
      "Tensor query_start, Tensor? tree_mask, float scale, Tensor(a!) out, Tensor(b!)? lse=None, "
      "*, float softcap=0.0, Tensor? token_lens=None, bool behind_verify=False) -> ()");
}

void RegisterAttentionKernels(torch::Library& library) {
  library.impl("verify_attention", &VerifyAttentionOp);
  library.impl("verify_plan", &VerifyPlanOp);
  library.impl("merge_states", &MergeStatesOp);
  library.impl("merge_rows", &MergeRowsOp);
}

// Ops that only write their arguments have nothing to say about shapes.
void RegisterAttentionFakes(torch::Library& library) {
  library.impl("verify_attention", torch::CppFunction::makeFromBoxedFunction<&IgnoreArguments>());
  library.impl("verify_plan", torch::CppFunction::makeFromBoxedFunction<&IgnoreArguments>());
  library.impl("merge_states", FakeKernel<&MergeStatesFake>());
  library.impl("merge_rows", torch::CppFunction::makeFromBoxedFunction<&IgnoreArguments>());
}

// ---- partial verification ---------------------------------------------------------------------

void BlockSummariesOp(const at::Tensor& key_cache, const at::Tensor& block_table,
                      const at::Tensor& start_tokens, const at::Tensor& end_tokens, at::Tensor kmax,
                      at::Tensor kmin, int64_t block_size, const OptionalTensor& k_scale,
                      const OptionalTensor& done_blocks, bool by_pages) {
  WithTorchErrors([&] {
    BlockSummaries(key_cache, block_table, start_tokens, end_tokens, kmax, kmin, block_size,
                   k_scale, done_blocks, by_pages);
  });
}

void SelectBlocksOutOp(const at::Tensor& query, const at::Tensor& kmax, const at::Tensor& kmin,
                       const at::Tensor& num_candidates, std::string_view score,
                       std::string_view query_reduce, std::string_view group_reduce,
                       std::string_view selection, const OptionalTensor& query_rows,
                       int64_t max_rows, at::Tensor ids, const OptionalTensor& scores,
                       const OptionalTensor& rows, const OptionalTensor& block_table,
                       int64_t first_block) {
  const SelectOptions options{score, query_reduce, group_reduce, selection, max_rows, first_block};
  WithTorchErrors([&] {
    SelectBlocks(query, kmax, kmin, num_candidates, options, query_rows, ids, scores, rows,
                 std::nullopt, block_table);
  });
}

at::Tensor SelectBlocksFake(const at::Tensor& query, const at::Tensor& kmax, const at::Tensor& kmin,
                            const at::Tensor& num_candidates, c10::SymInt k, std::string_view score,
                            std::string_view query_reduce, std::string_view group_reduce,
                            std::string_view selection, const OptionalTensor& query_rows,
                            int64_t max_rows) {
  TORCH_CHECK_VALUE(query.dim() == 4 && kmax.dim() == 4, "query, kmax: got ", query.dim(), " and ",
                    kmax.dim(), " dimensions, expected 4 each");
  return at::empty_symint({query.sym_size(0), kmax.sym_size(2), std::move(k)},
                          query.options().dtype(at::kInt));
}

at::Tensor SelectBlocksOp(const at::Tensor& query, const at::Tensor& kmax, const at::Tensor& kmin,
                          const at::Tensor& num_candidates, int64_t k, std::string_view score,
                          std::string_view query_reduce, std::string_view group_reduce,
                          std::string_view selection, const OptionalTensor& query_rows,
                          int64_t max_rows) {
  TORCH_CHECK_VALUE(k >= 0 && k <= INT32_MAX, "k: got ", k, ", expected 0 or more");
  at::Tensor ids = SelectBlocksFake(query, kmax, kmin, num_candidates, k, score, query_reduce,
                                    group_reduce, selection, query_rows, max_rows);
  ids.fill_(-1);  // for requests without candidates, which keep theirs
  SelectBlocksOutOp(query, kmax, kmin, num_candidates, score, query_reduce, group_reduce, selection,
                    query_rows, max_rows, ids, std::nullopt, std::nullopt, std::nullopt, 0);
  return ids;
}

void BuildViewOp(const at::Tensor& ids, const at::Tensor& block_table, const at::Tensor& full_lens,
                 const at::Tensor& committed_lens, const at::Tensor& partial, at::Tensor blocks,
                 at::Tensor num_blocks, at::Tensor view_lens, int64_t page_size, int64_t block_size,
                 int64_t sink_blocks, int64_t window_blocks, const OptionalTensor& rows) {
  WithTorchErrors([&] {
    BuildView(ids, block_table, full_lens, committed_lens, partial, blocks, num_blocks, view_lens,
              page_size, block_size, sink_blocks, window_blocks, rows);
  });
}

void GatherViewOp(const std::vector<at::Tensor>& key_caches,
                  const std::vector<at::Tensor>& value_caches, const at::Tensor& blocks,
                  at::Tensor lens, at::Tensor held, at::Tensor keys, at::Tensor values,
                  int64_t block_size) {
  WithTorchErrors(
      [&] { GatherView(key_caches, value_caches, blocks, lens, held, keys, values, block_size); });
}

#define NWOR_SELECT_SCHEMA                                                               \
  "str score='specpv', str query_reduce='mean', str group_reduce='mean', str selection=" \
  "'per_head', Tensor? query_rows=None, int max_rows=0"

void RegisterSpecPVSchemas(torch::Library& library) {
  library.def(
      "block_summaries(Tensor key_cache, Tensor block_table, Tensor start_tokens, "
      "Tensor end_tokens, Tensor(a!) kmax, Tensor(b!) kmin, int block_size, "
      "Tensor? k_scale=None, Tensor? done_blocks=None, bool by_pages=False) -> ()");
  library.def(
      "select_blocks(Tensor query, Tensor kmax, Tensor kmin, Tensor num_candidates, "
      "SymInt k, " NWOR_SELECT_SCHEMA ") -> Tensor");
  library.def(
      "select_blocks_out(Tensor query, Tensor kmax, Tensor kmin, Tensor "
      "num_candidates, " NWOR_SELECT_SCHEMA
      ", *, Tensor(a!) ids, Tensor(b!)? scores=None, Tensor? rows=None, "
      "Tensor? block_table=None, int first_block=0) -> ()");
  library.def(
      "build_view(Tensor ids, Tensor block_table, Tensor full_lens, Tensor committed_lens, "
      "Tensor partial, Tensor(a!) blocks, Tensor(b!) num_blocks, Tensor(c!) view_lens, "
      "int page_size, int block_size, int sink_blocks, int window_blocks, Tensor? rows=None) -> "
      "()");
  library.def(
      "gather_view(Tensor[] key_caches, Tensor[] value_caches, Tensor blocks, Tensor(a!) lens, "
      "Tensor(b!) held, Tensor(c!) keys, Tensor(d!) values, int block_size) -> ()");
}

void RegisterSpecPVKernels(torch::Library& library) {
  library.impl("block_summaries", &BlockSummariesOp);
  library.impl("select_blocks", &SelectBlocksOp);
  library.impl("select_blocks_out", &SelectBlocksOutOp);
  library.impl("build_view", &BuildViewOp);
  library.impl("gather_view", &GatherViewOp);
}

void RegisterSpecPVFakes(torch::Library& library) {
  for (const char* name : {"block_summaries", "select_blocks_out", "build_view", "gather_view"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&IgnoreArguments>());
  }
  library.impl("select_blocks", FakeKernel<&SelectBlocksFake>());
}

// One implementation serves every device: it checks, then goes by the tensors' device.
void RegisterKernels(torch::Library& library) {
  library.impl("write_kv", &WriteKvOp);
  library.impl("commit", &CommitOp);
}

}  // namespace

void CheckOneDevice(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  std::optional<at::Device> device;
  std::string first;
  const auto check = [&](const at::Tensor& tensor, const std::string& name) {
    if (!tensor.defined()) return;
    if (!device) std::tie(device, first) = std::pair(tensor.device(), name);
    TORCH_CHECK_VALUE(tensor.device() == *device, name, ": got device ", tensor.device(),
                      ", expected ", *device, " as ", first);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isTensor()) check(values[i].toTensor(), arguments[i].name());
    if (!values[i].isTensorList()) continue;
    for (const at::Tensor& tensor : values[i].toTensorVector()) check(tensor, arguments[i].name());
  }
}

}  // namespace nwor

TORCH_LIBRARY(nwor_specpv, library) {
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? stage_rows=None, Tensor(c!)? staged_key=None, "
      "Tensor(d!)? staged_value=None, Tensor? k_scale=None, Tensor? v_scale=None, bool "
      "exclusive=False, "
      "Tensor(e!)? status=None) -> ()");
  library.def(
      "commit(Tensor staged_key, Tensor staged_value, Tensor(a!)[] key_caches, "
      "Tensor(b!)[] value_caches, Tensor path, Tensor counts, Tensor slots, Tensor(c!) status, "
      "Tensor? parents=None, Tensor[]? k_scales=None, Tensor[]? v_scales=None, *, "
      "Tensor(d!)? tail_keys=None, Tensor(e!)? tail_values=None, Tensor? tail_begin=None, "
      "Tensor? root_slots=None, Tensor(f!)? tail_held=None) -> ()");
  nwor::RegisterDecoderSchemas(library);
  nwor::RegisterAttentionSchemas(library);
  nwor::RegisterTreeSchemas(library);
  nwor::RegisterSpecPVSchemas(library);
  nwor::RegisterDraftersSchemas(library);
}

TORCH_LIBRARY_IMPL(nwor_specpv, CPU, library) {
  nwor::RegisterKernels(library);
  nwor::RegisterDecoderKernels(library);
  nwor::RegisterAttentionKernels(library);
  nwor::RegisterTreeKernels(library);
  nwor::RegisterSpecPVKernels(library);
  nwor::RegisterDraftersKernels(library);
}
TORCH_LIBRARY_IMPL(nwor_specpv, Meta, library) {
  nwor::RegisterKernels(library);
  nwor::RegisterDecoderFakes(library);
  nwor::RegisterAttentionFakes(library);
  nwor::RegisterTreeFakes(library);
  nwor::RegisterSpecPVFakes(library);
  nwor::RegisterDraftersFakes(library);
}
#ifdef NWOR_WITH_CUDA
TORCH_LIBRARY_IMPL(nwor_specpv, CUDA, library) {
  nwor::RegisterKernels(library);
  nwor::RegisterDecoderKernels(library);
  nwor::RegisterAttentionKernels(library);
  nwor::RegisterTreeKernels(library);
  nwor::RegisterSpecPVKernels(library);
  nwor::RegisterDraftersKernels(library);
}
#endif
