#include "target.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "attention/verify.h"
#include "base/check.h"
#include "tree/acceptance.h"
#include "tree/logits.h"

namespace engine {
namespace {

// One side, K or V, of every layer. Under check it starts as NaN: whoever reads a slot that was
// never written shows at once.
std::vector<at::Tensor> Allocate(const Settings& settings, const Model& model, int64_t num_pages) {
  const ModelConfig& config = model.config();
  const at::TensorOptions options = model.embedding().options();
  const double fill = settings.check_contract ? NAN : 0.0;
  const std::vector<int64_t> sizes = {num_pages, settings.page_size, config.num_kv_heads,
                                      config.head_dim};
  double bytes = 2.0 * static_cast<double>(config.num_layers * options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= static_cast<double>(size);
  // Linux hands out more memory than there is, and kills who uses it: so it is counted first.
  const double memory = 1.0 * sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  std::vector<at::Tensor> layers(config.num_layers);
  try {
    NWOR_CHECK(!options.device().is_cpu() || bytes < memory, "beyond the memory of the machine");
    for (at::Tensor& layer : layers) layer = at::full(sizes, fill, options);
  } catch (const std::exception&) {
    NWOR_CHECK(false, "cache_tokens: got ", num_pages * settings.page_size, ", which take ",
               bytes / (1 << 30), " GiB, more than is free on ", options.device().str(),
               "; lower cache_tokens or max_batch_size");
  }
  return layers;
}

}  // namespace

at::Tensor ToDevice(const std::vector<int64_t>& values, at::Device device, at::ScalarType dtype) {
  return at::tensor(values, at::TensorOptions(at::kLong)).to(device, dtype);
}

Target::Target(const Settings& settings, Model& model, int64_t num_pages, int64_t requests,
               int64_t longest, int64_t rows)
    : keys(Allocate(settings, model, num_pages)),
      values(Allocate(settings, model, num_pages)),
      interceptor(settings),
      settings_(settings),
      model_(model),
      device_(model.embedding().device()),
      max_requests_(requests) {
  for (size_t layer = 0; layer < keys.size(); ++layer) {
    interceptor.BindLayer(std::to_string(layer), keys[layer], values[layer]);
  }
  // What falls back is told once for each reason.
  interceptor.SetLogSink([](nwor::BypassReason reason, std::string_view detail) {
    std::cerr << "engine: staging fell back: " << nwor::Label(reason) << ": " << detail << "\n";
  });
  if (!settings.enable_specpv) return;
  settings.ValidateFor(settings.page_size, rows, model.config().context);
  const nwor::Budget budget = nwor::ChooseBudget(settings, rows, longest);
  if (budget.static_tokens() >= longest) return;  // a view would cover everything
  const int64_t slack = 2 * rows + settings.specpv_n_spec_tokens_buf;
  views = nwor::PartialStore::Create(
      settings, keys, values,
      {.max_requests = requests, .max_tokens = longest + slack, .max_rows = rows, .dtype = {}});
}

struct Target::Step {
  const nwor::SessionBatch& batch;
  int64_t max_rows = 0;
  at::Tensor block_table, tree_rows;  // as views take them: of max_requests_ requests
  at::Tensor plan;
  bool refreshing = false;
};

at::Tensor Target::Forward(const nwor::SessionBatch& batch) {
  Step step{.batch = batch};
  // Whose rows are judged: those of the trees, and a tail's that a full step runs again.
  std::vector<int64_t> judged, seeds, tree_rows;
  std::vector<nwor::BatchEntry> entries;
  int64_t row = 0;
  for (const std::string& session : batch.sessions) {
    Part& part = parts.at(session);
    part.begin = row;
    const int64_t root = row + part.num_fed(), end = row + part.num_rows();
    for (row = part.refed() ? row : root; part.judged && row < end; ++row) {
      judged.push_back(row);
      seeds.push_back(part.request->seed);
    }
    row = end;
    step.max_rows = std::max(step.max_rows, part.num_rows());
    tree_rows.insert(tree_rows.end(), {root, end});
    entries.push_back({part.request->view, part.decision.value_or(nwor::StepDecision{})});
    step.refreshing |= part.decision && part.decision->kind == nwor::StepKind::kFullRefresh;
  }
  if (views) {  // their tensors are of as many requests as there may be
    tree_rows.resize(2 * max_requests_);
    step.tree_rows = ToDevice(tree_rows, device_, at::kInt).view({max_requests_, 2});
    step.block_table = at::constant_pad_nd(batch.block_table,
                                           {0, 0, 0, max_requests_ - batch.block_table.size(0)});
    views->Begin(entries);
    views->BuildViews(step.block_table);
  }
  const Model::Output output = model_.Forward(
      batch.tokens, batch.positions, feature_layers,
      [&](int64_t layer, const auto&... tensors) { Attend(layer, tensors..., &step); });
  for (const std::string& session : batch.sessions) {
    if (!output.features.defined()) break;
    Part& part = parts.at(session);
    part.features = output.features.slice(0, part.begin, part.begin + part.num_rows());
  }
  at::Tensor ids = at::zeros_like(batch.tokens);
  if (judged.empty()) return ids;
  const at::Tensor rows = ToDevice(judged, device_);
  const at::Tensor logits = model_.Logits(output.hidden.index_select(0, rows));
  return ids.index_copy_(0, rows,
                         ChooseTokens(logits, seeds, batch.positions.index_select(0, rows)));
}

void Target::Attend(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& out, Step* step) {
  const nwor::SessionBatch& batch = step->batch;
  interceptor.Write(std::to_string(layer), key, value, batch.slot_mapping, std::nullopt,
                    batch.epoch);
  nwor::VerifyArguments verify{.query = query, .key = key, .value = value};
  verify.key_cache = keys[layer];
  verify.value_cache = values[layer];
  verify.block_table = batch.block_table;
  verify.prefix_lens = batch.prefix_lens;
  verify.query_start = batch.query_start;
  if (batch.tree_mask.defined()) verify.tree_mask = batch.tree_mask;
  verify.scale = 1.0 / std::sqrt(static_cast<double>(query.size(2)));
  verify.max_rows = step->max_rows;
  if (views) {
    if (step->refreshing) {  // blocks are chosen by the queries of the trees' rows
      const at::Tensor everyone = query.unsqueeze(0).expand({max_requests_, -1, -1, -1});
      views->RefreshLayer(layer, everyone, step->block_table, step->tree_rows);
    }
    const auto count = static_cast<int64_t>(batch.sessions.size());
    verify.partial_view = {views->blocks(layer).slice(0, 0, count),
                           views->num_blocks().slice(0, 0, count),
                           views->view_lens().slice(0, 0, count), views->budget().block_size};
  }
  if (query.is_cuda()) {  // planned once for all layers
    if (!step->plan.defined()) {
      const int64_t block_size = views ? views->budget().block_size : 0;
      step->plan = at::empty({nwor::PlanBytes(verify, block_size)},
                             at::TensorOptions(device_).dtype(at::kByte));
      nwor::PlanVerify(verify, step->plan);
    }
    verify.plan = step->plan;
  }
  nwor::VerifyAttention(verify, {.out = out});
}

// The target's token after each row. A sampled one depends on its row's logits, its request's seed
// and its position alone: drafts are accepted where they are what plain sampling gives, and never
// change a text.
at::Tensor Target::ChooseTokens(const at::Tensor& logits, const std::vector<int64_t>& seeds,
                                const at::Tensor& positions) const {
  if (settings_.temperature == 0) return logits.argmax(-1);
  const auto each = [&](double value, at::ScalarType dtype) {
    return at::full({logits.size(0)}, value, at::TensorOptions(device_).dtype(dtype));
  };
  nwor::TargetProbsArguments options{.logits = logits.unsqueeze(1)};
  options.temperature = each(settings_.temperature, at::kFloat);
  options.top_k = each(static_cast<double>(settings_.top_k), at::kInt);
  options.top_p = each(settings_.top_p, at::kFloat);
  // Every row is a tree of its own, a root without drafts.
  const at::Tensor root = each(0, at::kLong).unsqueeze(1), leaf = each(-1, at::kInt).unsqueeze(1);
  const auto [coins, last] = nwor::MakeCoins(ToDevice(seeds, device_), positions + 1, 1);
  return nwor::AcceptSampling(root, nwor::TargetProbs(options), leaf, leaf, coins, last).next_token;
}

// A draft stands where the target chose it too. So do the tokens of a tail in mode lossless; below
// one that does not, the tree is void. In the other modes a tail stands, and what full attention
// would have said is counted.
nwor::Accepted Target::Accept(const nwor::SessionBatch& batch, const at::Tensor& ids) {
  nwor::Accepted accepted = nwor::AcceptFirstChoice(batch, ids);
  const at::Tensor host = ids.to(at::kCPU);
  for (size_t b = 0; b < batch.sessions.size(); ++b) {
    Part& part = parts.at(batch.sessions[b]);
    const int64_t tail = part.num_fed();
    part.confirmed = tail;
    if (!part.refed()) continue;
    const int64_t* said = host.const_data_ptr<int64_t>() + part.begin;
    const int64_t* stood = part.new_tokens.data() + 1;
    if (lossless()) {
      part.confirmed = std::mismatch(said, said + tail, stood).first - said;
      if (part.confirmed == tail) continue;
      accepted.counts[static_cast<int64_t>(b)].zero_();
      accepted.next_token[static_cast<int64_t>(b)].fill_(said[part.confirmed]);
    } else if (settings_.temperature == 0) {
      part.disagreed = 0;
      for (int64_t i = 0; i < tail; ++i) part.disagreed += said[i] != stood[i];
    }
  }
  return accepted;
}

}  // namespace engine
