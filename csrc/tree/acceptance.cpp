#include "tree/acceptance.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "tree/acceptance_params.h"
#include "tree/arguments.h"
#include "tree/coins_params.h"
#include "tree/fault.h"
#include "tree/philox.h"
#include "tree/probability.h"
#include "tree/tree_params.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace nwor {
namespace {

// The outputs, and on the CPU a status of our own where the caller gave none: it becomes an error.
struct Result {
  Accepted accepted;
  std::vector<int64_t> status;
  AcceptOutputs outputs;
};

Result MakeResult(int64_t batch, int64_t rows, at::Device device,
                  const std::optional<at::Tensor>& status) {
  const auto i64 = at::TensorOptions().dtype(at::kLong).device(device);
  Result result;
  result.outputs.status = StatusArgument(status, batch, device);
  result.accepted.path = at::empty({batch, rows}, i64.dtype(at::kInt));
  result.accepted.counts = at::empty({batch}, i64.dtype(at::kInt));
  result.accepted.next_token = at::empty({batch}, i64);
  result.outputs.path = static_cast<int32_t*>(result.accepted.path.mutable_data_ptr());
  result.outputs.counts = static_cast<int32_t*>(result.accepted.counts.mutable_data_ptr());
  result.outputs.next_token = static_cast<int64_t*>(result.accepted.next_token.mutable_data_ptr());
  if (device.is_cpu()) {
    result.status.resize(batch);
    result.outputs.status = result.status.data();
  }
  return result;
}

[[noreturn]] void ThrowFault(int64_t request, int64_t word, int64_t rows, bool has_draft) {
  const auto fault = static_cast<TreeFault>(word & 0xFF);
  const int64_t row = word >> 8 & 0xFFFFFF;
  const auto value = static_cast<int32_t>(word >> 32);
  const auto number = std::bit_cast<float>(value);
  const std::string at = Concat("[", request, ", ", row, "]");
  switch (fault) {
    case TreeFault::kLink:
      throw Error(Concat("first_child or next_sibling", at, ": got ", value,
                         ", expected -1 or a later row, at most ", rows - 1));
    case TreeFault::kToken:
      throw Error(Concat("tokens", at, ": got ", value, ", expected a token of the vocabulary"));
    case TreeFault::kRowCount:
      throw Error(Concat("num_drafts[", request, "]: got ", value, ", expected 0 .. ", rows - 1));
    case TreeFault::kCoin:
      throw Error(Concat(row == rows ? Concat("final_coins[", request, "]") : "coins" + at,
                         ": got ", number, ", expected 0 .. 1"));
    case TreeFault::kProbability:
      throw Error(Concat(has_draft ? "target_probs or draft_probs" : "target_probs", at, ": got ",
                         number, ", expected probabilities (", Sentence(fault), ")"));
    case TreeFault::kProbabilitySum:
      throw Error(Concat("target_probs", at, ": got a sum of ", number, ", expected 1 (",
                         Sentence(fault), ")"));
    case TreeFault::kDraftSum:
      throw Error(Concat("draft_probs", at, ": got a sum of ", number, ", expected 1 (",
                         Sentence(fault), ")"));
    case TreeFault::kSharedRow:
      throw Error(Concat("first_child and next_sibling: got ", value, " links to row ", row,
                         " of request ", request, ", expected one at most"));
    default:
      throw Error(Concat("request ", request, ", row ", row, ": got fault ",
                         static_cast<int32_t>(fault), ", expected none (", Sentence(fault), ")"));
  }
}

void Conclude(const Result& result, const std::optional<at::Tensor>& status,
              bool has_draft = false) {
  for (size_t b = 0; b < result.status.size(); ++b) {
    if (result.status[b] == 0) continue;
    ThrowFault(static_cast<int64_t>(b), result.status[b], result.accepted.path.size(1), has_draft);
  }
  if (status.has_value()) status->zero_();
}

ProbabilityRows RowsOf(const at::Tensor& probs) {
  return {static_cast<const float*>(probs.const_data_ptr()), probs.stride(0), probs.stride(1),
          probs.stride(2)};
}

void CheckProbs(const at::Tensor& probs, const char* name, int64_t batch, int64_t min_rows,
                int64_t max_rows, int64_t vocabulary, at::Device device) {
  NWOR_CHECK(probs.dim() == 3 && probs.size(0) == batch && probs.size(1) >= min_rows &&
                 probs.size(1) <= max_rows && (vocabulary < 0 || probs.size(2) == vocabulary),
             name, ": got sizes ", probs.sizes(), ", expected [", batch, ", ", min_rows,
             min_rows < max_rows ? Concat(" or ", max_rows) : std::string(), ", ",
             vocabulary < 0 ? std::string("vocabulary") : std::to_string(vocabulary), "]");
  NWOR_CHECK(probs.size(2) >= 1 && probs.size(2) <= kMaxVocabulary, name, ": got a vocabulary of ",
             probs.size(2), ", expected 1 .. ", kMaxVocabulary);
  NWOR_CHECK(probs.scalar_type() == at::kFloat, name, ": got dtype ",
             c10::toString(probs.scalar_type()), ", expected float32");
  CheckDevice(probs, name, device);
}

void CheckThreshold(double value, const char* name) {
  NWOR_CHECK(value > 0.0 && value <= 1.0, name, ": got ", value,
             ", expected more than 0, at most 1");
}

const int32_t* Ints(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const int32_t*>(tensor.const_data_ptr()) : nullptr;
}
const int64_t* Longs(const at::Tensor& tensor) {
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}
const float* Floats(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const float*>(tensor.const_data_ptr()) : nullptr;
}

// Index tensors of a call, kept alive until its launch.
struct Indices {
  at::Tensor tokens;
  at::Tensor first_child;
  at::Tensor next_sibling;
  at::Tensor num_drafts;

  TreeLinks links() const { return {Ints(first_child), Ints(next_sibling), Ints(num_drafts)}; }
};

Indices TreeIndices(const at::Tensor& tokens, const at::Tensor& first_child,
                    const at::Tensor& next_sibling) {
  const at::Device device = tokens.device();
  Indices indices;
  indices.tokens = IntegerArgument(tokens, "tokens", at::kLong, {-1, -1}, device);
  const int64_t batch = tokens.size(0);
  const int64_t rows = tokens.size(1);
  CheckTreeRows(rows, "tokens");
  indices.first_child =
      IntegerArgument(first_child, "first_child", at::kInt, {batch, rows}, device);
  indices.next_sibling =
      IntegerArgument(next_sibling, "next_sibling", at::kInt, {batch, rows}, device);
  return indices;
}

Accepted Sample(SamplingParams params, const Indices& indices, const at::Tensor& target_probs,
                const at::Tensor& coins, const at::Tensor& final_coins,
                const std::optional<at::Tensor>& status) {
  const at::Device device = indices.tokens.device();
  const int64_t batch = indices.tokens.size(0);
  const int64_t rows = indices.tokens.size(1);
  CheckProbs(target_probs, "target_probs", batch, rows, rows, -1, device);
  const at::Tensor accept = FloatArgument(coins, "coins", {batch, rows}, device);
  const at::Tensor last = FloatArgument(final_coins, "final_coins", {batch}, device);
  const Result result = MakeResult(batch, rows, device, status);
  params.tokens = Longs(indices.tokens);
  params.target = RowsOf(target_probs);
  params.links = indices.links();
  params.coins = Floats(accept);
  params.final_coins = Floats(last);
  params.out = result.outputs;
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(rows);
  params.vocabulary = static_cast<int32_t>(target_probs.size(2));
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    AcceptSamplingCpu(params);
    Conclude(result, status, params.rule == AcceptRule::kDraft);
    return result.accepted;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  const at::Tensor workspace =
      at::empty({SamplingWorkspaceBytes(params.num_requests, params.vocabulary)},
                at::TensorOptions().dtype(at::kByte).device(device));
  params.workspace = workspace.mutable_data_ptr();
  if (batch > 0) LaunchAcceptSampling(params);
#endif
  return result.accepted;
}

}  // namespace

Accepted AcceptGreedy(const at::Tensor& tokens, const at::Tensor& target_ids,
                      const at::Tensor& first_child, const at::Tensor& next_sibling,
                      const std::optional<at::Tensor>& status) {
  const Indices indices = TreeIndices(tokens, first_child, next_sibling);
  const at::Device device = tokens.device();
  const int64_t batch = tokens.size(0);
  const int64_t rows = tokens.size(1);
  const at::Tensor targets =
      IntegerArgument(target_ids, "target_ids", at::kLong, {batch, rows}, device);
  const Result result = MakeResult(batch, rows, device, status);
  GreedyParams params;
  params.tokens = Longs(indices.tokens);
  params.target_ids = Longs(targets);
  params.links = indices.links();
  params.out = result.outputs;
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(rows);
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    AcceptGreedyCpu(params);
    Conclude(result, status);
    return result.accepted;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  if (batch > 0) LaunchAcceptGreedy(params);
#endif
  return result.accepted;
}

Accepted AcceptSampling(const at::Tensor& tokens, const at::Tensor& target_probs,
                        const at::Tensor& first_child, const at::Tensor& next_sibling,
                        const at::Tensor& coins, const at::Tensor& final_coins,
                        double threshold_single, double threshold_acc,
                        const std::optional<at::Tensor>& status) {
  CheckThreshold(threshold_single, "threshold_single");
  CheckThreshold(threshold_acc, "threshold_acc");
  SamplingParams params;
  params.threshold_single = threshold_single;
  params.threshold_acc = threshold_acc;
  return Sample(params, TreeIndices(tokens, first_child, next_sibling), target_probs, coins,
                final_coins, status);
}

Accepted AcceptChainSampling(const at::Tensor& tokens, const at::Tensor& target_probs,
                             const std::optional<at::Tensor>& draft_probs, const at::Tensor& coins,
                             const at::Tensor& final_coins,
                             const std::optional<at::Tensor>& num_drafts,
                             const std::optional<at::Tensor>& status) {
  const at::Device device = tokens.device();
  Indices indices;
  indices.tokens = IntegerArgument(tokens, "tokens", at::kLong, {-1, -1}, device);
  const int64_t batch = tokens.size(0);
  const int64_t rows = tokens.size(1);
  CheckTreeRows(rows, "tokens");
  if (num_drafts.has_value()) {
    indices.num_drafts = IntegerArgument(*num_drafts, "num_drafts", at::kInt, {batch}, device);
  }
  SamplingParams params;
  if (draft_probs.has_value()) {
    NWOR_CHECK(target_probs.dim() == 3, "target_probs: got sizes ", target_probs.sizes(),
               ", expected [", batch, ", ", rows, ", vocabulary]");
    CheckProbs(*draft_probs, "draft_probs", batch, rows - 1, rows, target_probs.size(2), device);
    params.rule = AcceptRule::kDraft;
    params.draft = RowsOf(*draft_probs);
  }
  return Sample(params, indices, target_probs, coins, final_coins, status);
}

Coins MakeCoins(const at::Tensor& seeds, const at::Tensor& positions, int64_t num_rows) {
  const at::Device device = seeds.device();
  const at::Tensor keys = IntegerArgument(seeds, "seeds", at::kLong, {-1}, device);
  const int64_t batch = keys.size(0);
  const at::Tensor places = IntegerArgument(positions, "positions", at::kLong, {batch}, device);
  CheckTreeRows(num_rows, "num_rows");
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const Coins coins{at::empty({batch, num_rows}, options), at::empty({batch}, options)};
  CoinsParams params;
  params.seeds = Longs(keys);
  params.positions = Longs(places);
  params.accept = static_cast<float*>(coins.accept.mutable_data_ptr());
  params.final = static_cast<float*>(coins.final.mutable_data_ptr());
  params.num_requests = static_cast<int32_t>(batch);
  params.rows = static_cast<int32_t>(num_rows);
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    for (int64_t b = 0; b < batch; ++b) {
      const auto seed = static_cast<uint64_t>(params.seeds[b]);
      const auto position = static_cast<uint64_t>(params.positions[b]);
      for (int64_t d = 0; d < num_rows; ++d) {
        params.accept[b * num_rows + d] = CoinAt(seed, position + d, CoinPurpose::kAccept);
      }
      params.final[b] = CoinAt(seed, position, CoinPurpose::kFinal);
    }
    return coins;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  if (batch > 0) LaunchMakeCoins(params);
#endif
  return coins;
}

}  // namespace nwor
