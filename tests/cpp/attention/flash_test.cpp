#include "attention/routes/flash.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <limits>
#include <map>

#include "attention/cuda/verify.h"
#include "attention/routes/flash_bounds.h"
#include "attention/verify.h"
#include "attention/verify_arguments.h"

// The flash routes around a stand-in for another package's kernel: ops of vLLM 0.26's names and
// schemas whose implementation is a few lines of dense attention on the CPU. What is tested is
// ours: finding an op, filling its schema by names, splitting prefix from rows, merging the two.

namespace {

int num_paged_calls = 0;
int num_causal_calls = 0;
int64_t wanted_splits = 0;
int64_t min_gap_rows = 1;  // requests with at least so many rows have zeros behind them

// Dense attention of one request: q [R, H, D], k and v [N, Hkv, D]. As FlashAttention-2 does, a row
// that sees nothing gets an LSE of +infinity.
std::pair<at::Tensor, at::Tensor> Dense(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, double scale, bool causal) {
  const int64_t group = q.size(1) / k.size(1);
  const at::Tensor keys = k.repeat_interleave(group, 1).to(at::kDouble).permute({1, 2, 0});
  const at::Tensor values = v.repeat_interleave(group, 1).to(at::kDouble).transpose(0, 1);
  if (k.size(0) == 0) {
    return {at::zeros_like(q),
            at::full({q.size(1), q.size(0)}, std::numeric_limits<float>::infinity())};
  }
  at::Tensor logits = at::matmul(q.to(at::kDouble).transpose(0, 1), keys) * scale;
  if (causal) {
    const at::Tensor hidden = at::ones({q.size(0), k.size(0)}, at::kBool).triu(1);
    logits = logits.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor out = at::matmul(logits.softmax(-1), values).transpose(0, 1).to(q.scalar_type());
  return {out, logits.logsumexp(-1).to(at::kFloat)};
}

std::vector<at::Tensor> DenseVarlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& starts,
                                    const std::optional<at::Tensor>& key_starts,
                                    const std::optional<at::Tensor>& lens,
                                    const std::optional<at::Tensor>& table, double scale,
                                    bool causal) {
  at::Tensor out = at::empty_like(q);
  at::Tensor lse = at::empty({q.size(1), q.size(0)}, at::kFloat);
  if (table.has_value()) ++num_paged_calls;
  if (causal) ++num_causal_calls;
  for (int64_t b = 0; b + 1 < starts.size(0); ++b) {
    const int64_t begin = starts[b].item<int32_t>(), count = starts[b + 1].item<int32_t>() - begin;
    const int64_t length = lens.has_value() ? (*lens)[b].item<int32_t>() : count;
    at::Tensor keys = k, values = v;
    if (!table.has_value()) {
      const int64_t from = (*key_starts)[b].item<int32_t>();
      keys = k.narrow(0, from, length);
      values = v.narrow(0, from, length);
    } else {
      const int64_t pages = (length + k.size(1) - 1) / k.size(1);
      const at::Tensor ids = (*table)[b].narrow(0, 0, pages).to(at::kLong);
      keys = k.index_select(0, ids).flatten(0, 1).narrow(0, 0, length);
      values = v.index_select(0, ids).flatten(0, 1).narrow(0, 0, length);
    }
    const auto [part, part_lse] = Dense(q.narrow(0, begin, count), keys, values, scale, causal);
    out.narrow(0, begin, count).copy_(part);
    lse.narrow(1, begin, count).copy_(part_lse);
  }
  return {out, lse};
}

using Maybe = std::optional<at::Tensor>;

// The real one reads tiles of V past a request's end: there must be zeros for the largest of them.
void CheckGaps(const at::Tensor& v, const at::Tensor& starts, const at::Tensor& lens) {
  for (int64_t b = 0; b < lens.size(0); ++b) {
    const int64_t end = starts[b].item<int32_t>() + lens[b].item<int32_t>();
    if (lens[b].item<int32_t>() < min_gap_rows) continue;
    TORCH_CHECK(end + 192 <= v.size(0) && v.narrow(0, end, 192).eq(0).all().item<bool>());
  }
}

// Takes its arguments as they come, checks them as the real one does, and wants those that we do
// not use to mean nothing.
void Flash3(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::map<std::string, c10::IValue> given;
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    given[argument->name()] = torch::jit::pop(*stack);
  }
  const auto maybe = [&](const char* name) { return given.at(name).toOptional<at::Tensor>(); };
  const at::Tensor starts = *maybe("cu_seqlens_q");
  const Maybe lens = maybe("seqused_k"), table = maybe("page_table");
  const auto is_list = [](const at::Tensor& tensor, int64_t size) {
    return tensor.scalar_type() == at::kInt && tensor.is_contiguous() && tensor.dim() == 1 &&
           tensor.size(0) == size;
  };
  const int64_t requests = starts.size(0) - 1;
  TORCH_CHECK(is_list(starts, requests + 1));
  TORCH_CHECK(maybe("cu_seqlens_k").has_value() != table.has_value());
  if (table.has_value()) {
    TORCH_CHECK(is_list(*lens, requests) && table->scalar_type() == at::kInt);
    TORCH_CHECK(table->size(0) == requests && table->stride(1) == 1);
  } else {
    TORCH_CHECK(is_list(*maybe("cu_seqlens_k"), requests + 1) && is_list(*lens, requests));
    CheckGaps(given.at("v").toTensor(), *maybe("cu_seqlens_k"), *lens);
  }
  for (const char* name :
       {"k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx",
        "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale",
        "v_descale", "scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"}) {
    TORCH_CHECK(given.at(name).isNone(), name);
  }
  for (const char* name : {"sm_margin", "cp_rank"}) {
    TORCH_CHECK(given.at(name).toInt() == 0, name);
  }
  TORCH_CHECK(given.at("num_splits").toInt() == wanted_splits);
  for (const char* name : {"window_size_left", "window_size_right"}) {
    TORCH_CHECK(given.at(name).toInt() == -1, name);
  }
  TORCH_CHECK(given.at("cp_world_size").toInt() == 1 && given.at("softcap").toDouble() == 0.0);
  const int64_t rows = starts.diff().max().item<int>();
  const int64_t tokens = table.has_value() ? lens->max().item<int>() : rows;
  TORCH_CHECK(given.at("max_seqlen_q").toInt() >= rows);
  TORCH_CHECK(given.at("max_seqlen_k").toInt() >= tokens);
  std::vector<at::Tensor> results =
      DenseVarlen(given.at("q").toTensor(), given.at("k").toTensor(), given.at("v").toTensor(),
                  starts, maybe("cu_seqlens_k"), lens, table, given.at("softmax_scale").toDouble(),
                  given.at("is_causal").toBool());
  results.resize(4);  // those of splits are undefined without any
  torch::jit::push(*stack, results);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> Flash2(
    at::Tensor q, const at::Tensor& k, const at::Tensor& v, const Maybe&, const at::Tensor& starts,
    const at::Tensor& key_starts, const Maybe& lens, const Maybe& table, int64_t max_query, int64_t,
    double dropout, double scale, bool, bool causal) {
  TORCH_CHECK(dropout == 0.0 && key_starts.size(0) == starts.size(0));
  // The real one would fold the heads of what it takes for one row per request, and writes the LSE
  // of one without tokens in pages somewhere else.
  TORCH_CHECK(max_query > 1);
  TORCH_CHECK(!table.has_value() || lens->min().item<int>() > 0);
  const std::vector<at::Tensor> results =
      DenseVarlen(q, k, v, starts, key_starts, lens, table, scale, causal);
  return {results[0], results[1], at::empty({0})};
}

}  // namespace

TORCH_LIBRARY(_vllm_fa3_C, library) {
  library.def(
      "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
      "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
      "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
      "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
      "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
      "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
      "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
      "Tensor? cp_tot_seqused_k) -> Tensor[]");
  library.impl("fwd", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                      torch::CppFunction::makeFromBoxedFunction<&Flash3>()));
}

TORCH_LIBRARY(_vllm_fa2_C, library) {
  library.def(
      "varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor? out_, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, Tensor? seqused_k_, Tensor? block_table_, int max_seqlen_q, "
      "int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal) "
      "-> (Tensor, Tensor, Tensor)");
  library.impl("varlen_fwd", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &Flash2));
}

namespace nwor {
namespace {

VerifyArguments MakeArguments(bool tree) {
  at::manual_seed(5);
  VerifyArguments arguments;
  arguments.query = at::randn({7, 4, 64});
  arguments.key = at::randn({7, 2, 64});
  arguments.value = at::randn({7, 2, 64});
  arguments.key_cache = at::randn({6, 16, 2, 64});
  arguments.value_cache = at::randn({6, 16, 2, 64});
  const auto ints = at::TensorOptions().dtype(at::kInt);
  arguments.block_table = at::tensor({3, 1, 5, 0, 2, 4}, ints).view({3, 2});
  arguments.prefix_lens = at::tensor({32, 0, 9}, ints);
  arguments.query_start = at::tensor({0, 4, 6, 7}, ints);
  arguments.scale = 0.125;
  if (tree) {
    arguments.tree_mask = at::tensor({1, 3, 5, 11, 1, 2, 1}, at::kLong).view({7, 1});
  }
  return arguments;
}

void ExpectWhatOurKernelGives(Route route, const VerifyArguments& arguments) {
  const VerifyOutputs expected = MakeVerifyOutputs(arguments.query, /*with_lse=*/true);
  VerifyAttention(arguments, expected);
  const VerifyOutputs outputs = MakeVerifyOutputs(arguments.query, /*with_lse=*/true);
  const CheckedVerify checked = CheckVerifyArguments(arguments, &outputs, /*plan_only=*/false);
  FlashVerify(route, arguments, checked, outputs);
  EXPECT_LT((outputs.out - expected.out).abs().max().item<float>(), 1e-5);
  EXPECT_LT((outputs.lse - expected.lse).abs().max().item<float>(), 1e-5);
}

class FlashRoutes : public ::testing::TestWithParam<std::tuple<Route, bool>> {};

TEST_P(FlashRoutes, MergePrefixAndRowsToWhatOurKernelGives) {
  const auto [route, tree] = GetParam();
  const VerifyArguments arguments = MakeArguments(tree);
  num_paged_calls = 0;
  ExpectWhatOurKernelGives(route, arguments);
  EXPECT_EQ(num_paged_calls, 1);
}

TEST_P(FlashRoutes, TakeRequestsWithoutRowsBesideThoseWithOne) {
  const auto [route, tree] = GetParam();
  VerifyArguments arguments = MakeArguments(tree);
  for (at::Tensor* rows : {&arguments.query, &arguments.key, &arguments.value}) {
    *rows = rows->narrow(0, 0, 2);
  }
  if (tree) arguments.tree_mask = at::ones({2, 1}, at::kLong);
  arguments.query_start = at::tensor({0, 1, 1, 2}, at::kInt);
  arguments.max_rows = 1;
  ExpectWhatOurKernelGives(route, arguments);
}

// Who computes the rows: a prefill's are left to the kernel that has the prefix.
TEST(Flash, RowsOfChainsAreOursBesideFlashAttention3) {
  const auto causal_calls = [](Route route, int64_t rows, int64_t head_dim) {
    VerifyArguments arguments = MakeArguments(/*tree=*/false);
    arguments.query = at::randn({rows, 4, head_dim});
    arguments.key = at::randn({rows, 2, head_dim});
    arguments.value = at::randn({rows, 2, head_dim});
    arguments.key_cache = at::randn({6, 16, 2, head_dim});
    arguments.value_cache = at::randn({6, 16, 2, head_dim});
    const int last = static_cast<int>(rows);
    arguments.query_start = at::tensor({0, 1, 2, last}, at::kInt);
    num_causal_calls = 0;
    ExpectWhatOurKernelGives(route, arguments);
    return num_causal_calls;
  };
  EXPECT_EQ(causal_calls(Route::kFlash3, 256, 64), 0);
  EXPECT_EQ(causal_calls(Route::kFlash3, 257, 64), 1);
  EXPECT_EQ(causal_calls(Route::kFlash3, 7, 72), 0);
  EXPECT_EQ(causal_calls(Route::kFlash2, 7, 64), 1);
}

// Prefix and rows of a prefill are not split, so that its bits do not depend on the others; these
// cost it nothing, and nothing of theirs is next to it.
TEST(Flash, APrefillAmongOthersIsComputedAsItIsAlone) {
  VerifyArguments arguments = MakeArguments(/*tree=*/false);
  arguments.query = at::randn({308, 4, 64});
  arguments.key = at::randn({308, 2, 64});
  arguments.value = at::randn({308, 2, 64});
  arguments.query_start = at::tensor({0, 3, 303, 308}, at::kInt);
  arguments.prefix_lens = at::tensor({32, 21, 9}, at::kInt);
  const VerifyOutputs expected = MakeVerifyOutputs(arguments.query, /*with_lse=*/true);
  VerifyAttention(arguments, expected);
  arguments.value.narrow(0, 303, 5).fill_(std::numeric_limits<float>::infinity());
  arguments.key.narrow(0, 303, 5).fill_(std::numeric_limits<float>::quiet_NaN());

  wanted_splits = 1;
  min_gap_rows = 257;
  const VerifyOutputs outputs = MakeVerifyOutputs(arguments.query, /*with_lse=*/true);
  const CheckedVerify checked = CheckVerifyArguments(arguments, &outputs, /*plan_only=*/false);
  FlashVerify(Route::kFlash3, arguments, checked, outputs, /*only_prefill=*/true);
  wanted_splits = 0;
  min_gap_rows = 1;
  const auto difference = [](const at::Tensor& one, const at::Tensor& other) {
    return (one.narrow(0, 3, 300) - other.narrow(0, 3, 300)).abs().max().item<float>();
  };
  EXPECT_LT(difference(outputs.out, expected.out), 1e-5);
  EXPECT_LT(difference(outputs.lse, expected.lse), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Ops, FlashRoutes,
                         ::testing::Combine(::testing::Values(Route::kFlash2, Route::kFlash3),
                                            ::testing::Bool()));

std::vector<int64_t> Told(const at::Tensor& status) {
  const int64_t* told = status.const_data_ptr<int64_t>();
  return {told, told + 3};
}

// What FlashVerify gives, and the first three words of its status.
std::pair<at::Tensor, std::vector<int64_t>> RunFlash(VerifyArguments arguments) {
  arguments.status = at::zeros({8}, at::kLong);
  const VerifyOutputs outputs = MakeVerifyOutputs(arguments.query, /*with_lse=*/false);
  const CheckedVerify checked = CheckVerifyArguments(arguments, &outputs, /*plan_only=*/false);
  FlashVerify(Route::kFlash3, arguments, checked, outputs);
  return {outputs.out, Told(*arguments.status)};
}

TEST(Flash, SeesAsMuchAsThereIsAndTellsOfTheRest) {
  const VerifyArguments good = MakeArguments(/*tree=*/false);
  const auto [expected, quiet] = RunFlash(good);
  EXPECT_EQ(quiet, (std::vector<int64_t>{0, 0, 0}));
  const auto changed = [&](at::Tensor VerifyArguments::*field, int64_t at, int value) {
    VerifyArguments arguments = good;
    arguments.*field = (good.*field).clone();
    (arguments.*field).flatten()[at] = value;
    return RunFlash(arguments);
  };
  const auto told = [](VerifyStatus code, int64_t request, int64_t value) {
    return std::vector<int64_t>{static_cast<int64_t>(code), request, value};
  };
  // The first request fills its pages: a longer one is that one.
  const auto [longer, too_long] = changed(&VerifyArguments::prefix_lens, 0, 33);
  EXPECT_EQ(too_long, told(VerifyStatus::kPrefixTooLong, 0, 33));
  EXPECT_TRUE(at::equal(longer, expected));
  const auto [shorter, negative] = changed(&VerifyArguments::prefix_lens, 1, -2);
  EXPECT_EQ(negative, told(VerifyStatus::kPrefixTooLong, 1, -2));
  EXPECT_TRUE(at::equal(shorter, expected));
  // The third request has 9 tokens, so its second entry (5) is not used; its first (4) is.
  const auto [unused, nobody] = changed(&VerifyArguments::block_table, 5, 1 << 30);
  EXPECT_EQ(nobody, told(VerifyStatus::kOk, 0, 0));
  EXPECT_TRUE(at::equal(unused, expected));
  EXPECT_EQ(changed(&VerifyArguments::block_table, 4, 6).second,
            told(VerifyStatus::kBadPage, 2, 6));
  EXPECT_EQ(changed(&VerifyArguments::block_table, 0, -1).second,
            told(VerifyStatus::kBadPage, 0, -1));
  // Nor are those of a request without rows: here the first has those of the second as well.
  VerifyArguments idle = good;
  idle.query_start = at::tensor({0, 6, 6, 7}, at::kInt);
  idle.prefix_lens = at::tensor({32, 20, 9}, at::kInt);
  const auto [all, silent] = RunFlash(idle);
  idle.block_table = good.block_table.clone();
  idle.block_table[1].fill_(-1);
  const auto [same, still] = RunFlash(idle);
  EXPECT_EQ(still, told(VerifyStatus::kOk, 0, 0));
  EXPECT_TRUE(at::equal(same, all));
  EXPECT_EQ(changed(&VerifyArguments::query_start, 3, 8).second,
            told(VerifyStatus::kBadRowRange, 2, 8));
  EXPECT_EQ(changed(&VerifyArguments::query_start, 1, 7).second,
            told(VerifyStatus::kBadRowRange, 1, 6));
}

TEST(Flash, RowsOverACacheWithoutPagesSeeEachOther) {
  for (const Route route : {Route::kFlash2, Route::kFlash3}) {
    VerifyArguments arguments = MakeArguments(/*tree=*/false);
    arguments.prefix_lens = at::zeros({3}, at::kInt);
    arguments.key_cache = at::empty({0, 16, 2, 64});
    arguments.value_cache = at::empty({0, 16, 2, 64});
    ExpectWhatOurKernelGives(route, arguments);
    // A length is too long for it, however large the table is.
    arguments.prefix_lens = at::tensor({0, 4, 0}, at::kInt);
    arguments.status = at::zeros({8}, at::kLong);
    const VerifyArguments safe = ClampToBounds(arguments);
    EXPECT_EQ(Told(*arguments.status), (std::vector<int64_t>{1, 1, 4}));
    EXPECT_EQ(safe.prefix_lens.max().item<int>(), 0);
  }
}

// The rows of a tree are ours, so that nothing is asked of the kernel of torch, which is not here.
TEST(Flash, RowsUnderACompactViewWithoutRoomSeeEachOther) {
  VerifyArguments arguments = MakeArguments(/*tree=*/true);
  const at::Tensor nothing = at::empty({3, 2, 0, 64});
  arguments.compact_view = {nothing, nothing.clone(), at::zeros({3}, at::kInt)};
  ExpectWhatOurKernelGives(Route::kTorchFlash, arguments);
  arguments.compact_view->lens = at::tensor({0, 0, 5}, at::kInt);
  arguments.status = at::zeros({8}, at::kLong);
  ClampToBounds(arguments);
  EXPECT_EQ(Told(*arguments.status), (std::vector<int64_t>{3, 2, 5}));
}

TEST(Flash, TellsOfMoreRowsThanTheMaskHasBits) {
  VerifyArguments arguments = MakeArguments(/*tree=*/true);
  arguments.query_start = at::tensor({0, 3, 68, 70}, at::kInt);
  arguments.query = at::randn({70, 4, 64});
  arguments.tree_mask = at::ones({70, 1}, at::kLong);
  arguments.status = at::zeros({8}, at::kLong);
  ClampToBounds(arguments);
  EXPECT_EQ(Told(*arguments.status), (std::vector<int64_t>{5, 1, 65}));
}

TEST(Flash, KeepsTheFirstErrorItTellsOf) {
  VerifyArguments arguments = MakeArguments(/*tree=*/false);
  arguments.prefix_lens = at::tensor({90, 0, 80}, at::kInt);
  EXPECT_EQ(RunFlash(arguments).second, (std::vector<int64_t>{1, 0, 90}));
  arguments.query_start = at::tensor({0, 4, 6, 9}, at::kInt);
  EXPECT_EQ(RunFlash(arguments).second, (std::vector<int64_t>{2, 2, 9}));
}

TEST(Flash, TellsOfRequestsThatDoNotUseTheCompactView) {
  VerifyArguments arguments = MakeArguments(/*tree=*/false);
  const at::Tensor keys = at::randn({3, 2, 12, 64});
  for (const auto& [lens, expected] :
       {std::pair{std::vector<int>{12, 0, 5}, std::vector<int64_t>{0, 0, 0}},
        std::pair{std::vector<int>{12, -1, 5}, std::vector<int64_t>{3, 1, -1}},
        std::pair{std::vector<int>{12, 0, 13}, std::vector<int64_t>{3, 2, 13}}}) {
    arguments.compact_view = {keys, keys, at::tensor(lens, at::kInt)};
    arguments.status = at::zeros({8}, at::kLong);
    const VerifyArguments safe = ClampToBounds(arguments);
    EXPECT_EQ(Told(*arguments.status), expected);
    EXPECT_GE(safe.compact_view->lens.min().item<int>(), 0);
    EXPECT_LE(safe.compact_view->lens.max().item<int>(), 12);
  }
}

TEST(Flash, FindsRegisteredOpsAndNamesThem) {
  RouteAvailability available;
  for (const int32_t capability : {ComputeCapability(at::kCPU), 90}) {
    FindFlashRoutes(&available, capability);
    EXPECT_TRUE(available.Has(Route::kFlash2));
    EXPECT_TRUE(available.Has(Route::kFlash3));
    EXPECT_EQ(DescribeFlashRoute(Route::kFlash3, capability), "present: _vllm_fa3_C::fwd");
    EXPECT_EQ(DescribeFlashRoute(Route::kFlash2, capability), "present: _vllm_fa2_C::varlen_fwd");
  }
}

TEST(Flash, FlashAttention3IsAbsentWhereItHasNoKernels) {
  for (const int32_t capability : {80, 89, 100, 120}) {
    RouteAvailability available;
    FindFlashRoutes(&available, capability);
    EXPECT_TRUE(available.Has(Route::kFlash2));
    EXPECT_FALSE(available.Has(Route::kFlash3));
    EXPECT_EQ(DescribeFlashRoute(Route::kFlash3, capability),
              "absent: _vllm_fa3_C::fwd needs a device of compute capability 9");
  }
}

}  // namespace
}  // namespace nwor
