#include "round.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "attention/verify.h"
#include "base/check.h"
#include "tree/tree.h"

namespace engine {
namespace {

void Append(std::vector<nwor::Violation>& all, const std::vector<nwor::Violation>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

at::Tensor ToDevice(const std::vector<int64_t>& values, at::Device device, at::ScalarType dtype) {
  return at::tensor(values, at::TensorOptions(at::kLong)).to(device, dtype);
}

Round::Round(PagedCache& cache, std::vector<Part> parts, int64_t places, nwor::PartialStore* store)
    : cache_(cache), parts_(std::move(parts)), places_(places), store_(store) {
  PlaceRows();
  BuildMask();
}

// Rows of all requests one after another, in the order of places. A place without rows stays
// in the batch: block tables and views are by place.
void Round::PlaceRows() {
  std::vector<int64_t> tokens, positions, slots, prefixes(places_), start(1, 0), spans, wanted;
  std::vector<std::optional<int64_t>> keys(places_);
  plan_ = {std::vector<int32_t>(places_), std::vector<int32_t>(places_),
           std::vector<std::vector<int32_t>>(places_)};
  auto part = parts_.begin();
  for (int64_t place = 0; place < places_; ++place) {
    const auto begin = static_cast<int64_t>(tokens.size());
    if (part == parts_.end() || part->request->place != place) {
      spans.insert(spans.end(), {begin, begin});
      start.push_back(begin);
      continue;
    }
    const int64_t key = part->request->index, fed = part->num_fed();
    const int64_t root = part->prefix_len + fed;
    // Drafts have no slots yet: they get theirs when they are accepted.
    const int64_t missing = root + 1 - cache_.slots.length(key);
    if (missing > 0) cache_.slots.Extend(key, missing);
    const std::vector<int64_t> own = cache_.slots.Slots(key, part->prefix_len, root + 1);
    slots.insert(slots.end(), own.begin(), own.end());
    slots.insert(slots.end(), part->tree.num_drafts(), -1);
    tokens.insert(tokens.end(), part->fed.begin(), part->fed.end());
    tokens.insert(tokens.end(), part->tree.tokens.begin(), part->tree.tokens.end());
    for (int64_t at = part->prefix_len; at < root; ++at) positions.push_back(at);
    for (const int32_t depth : part->tree.Depths()) positions.push_back(root + depth);
    part->begin = begin;
    part->logit_begin = static_cast<int64_t>(wanted.size());
    const int64_t end = begin + part->num_rows();
    for (int64_t row = begin + (part->wants_fed_logits ? 0 : fed); row < end; ++row) {
      if (part->wants_logits) wanted.push_back(row);
    }
    plan_.query_lens[place] = static_cast<int32_t>(part->num_rows());
    plan_.num_drafts[place] = static_cast<int32_t>(part->tree.num_drafts());
    for (int64_t row = 1; row < part->tree.num_rows(); ++row) {
      plan_.parents[place].push_back(static_cast<int32_t>(fed) + part->tree.parent(row));
    }
    spans.insert(spans.end(), {begin + fed, end});
    start.push_back(end);
    prefixes[place] = part->prefix_len;
    keys[place] = key;
    max_rows_ = std::max(max_rows_, part->num_rows());
    refreshing_ |= part->decision && part->decision->kind == nwor::StepKind::kFullRefresh;
    ++part;
  }
  const at::Device device = cache_.device;
  tokens_ = ToDevice(tokens, device);
  positions_ = ToDevice(positions, device);
  slots_ = ToDevice(slots, device);
  block_table_ = cache_.BlockTable(keys);
  prefix_lens_ = ToDevice(prefixes, device, at::kInt);
  query_start_ = ToDevice(start, device, at::kInt);
  tree_rows_ = ToDevice(spans, device, at::kInt).view({places_, 2});
  wanted_ = ToDevice(wanted, device);
}

// Which rows see which; none is needed where every request's rows are a chain.
void Round::BuildMask() {
  if (std::all_of(parts_.begin(), parts_.end(), [](const Part& p) { return p.tree.is_chain(); })) {
    return;
  }
  std::vector<int64_t> parents, counts, rows;
  for (const Part& part : parts_) {
    const auto first = static_cast<int64_t>(parents.size());
    for (int64_t row = 0; row < max_rows_; ++row) {
      const int64_t in_tree = row - part.num_fed();
      const bool chain = in_tree <= 0 || in_tree >= part.tree.num_rows();  // padding is not read
      parents.push_back(chain ? row - 1 : part.num_fed() + part.tree.parent(in_tree));
      if (row < part.num_rows()) rows.push_back(first + row);
    }
    counts.push_back(part.num_rows());
  }
  const at::Device device = cache_.device;
  const auto batch = static_cast<int64_t>(parts_.size());
  const nwor::Tree tree =
      nwor::TreeFromParents(ToDevice(parents, device, at::kInt).view({batch, max_rows_}),
                            at::zeros({batch}, at::TensorOptions(device).dtype(at::kInt)),
                            std::nullopt, ToDevice(counts, device, at::kInt));
  mask_ = tree.mask.flatten(0, 1).index_select(0, ToDevice(rows, device));
}

std::optional<std::string> Round::Begin() {
  if (cache_.checker) cache_.checker->Snapshot();
  const nwor::Decision decision = cache_.interceptor.Begin(plan_);
  if (plan_.num_draft_rows() > 0 && !decision.stage) {
    cache_.interceptor.Abort();
    return std::string(nwor::Label(decision.reason));
  }
  if (store_ != nullptr) {
    std::vector<nwor::BatchEntry> batch(places_);
    for (const Part& part : parts_) {
      if (part.decision) batch[part.request->place] = {part.request->partial, *part.decision};
    }
    store_->Begin(batch);
    store_->BuildViews(block_table_);
  }
  return std::nullopt;
}

void Round::Run(const Model& model, const std::vector<int64_t>& feature_layers) {
  const Model::Output output =
      model.Forward(tokens_, positions_, feature_layers,
                    [this](int64_t layer, const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value) { return Attend(layer, query, key, value); });
  features_ = output.features;
  logits_ = model.Logits(output.hidden.index_select(0, wanted_));
  if (cache_.checker) Append(violations_, cache_.checker->VerifyStaged());
}

at::Tensor Round::Attend(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value) {
  const nwor::Outcome written = cache_.interceptor.Write(cache_.names[layer], key, value, slots_);
  NWOR_CHECK(written.action != nwor::Action::kBypass, "layer ", layer,
             ": the interceptor refused its K/V: ", nwor::Label(written.reason));
  nwor::VerifyArguments step{.query = query, .key = key, .value = value};
  step.key_cache = cache_.keys[layer];
  step.value_cache = cache_.values[layer];
  step.block_table = block_table_;
  step.prefix_lens = prefix_lens_;
  step.query_start = query_start_;
  step.tree_mask = mask_;
  step.scale = 1.0 / std::sqrt(static_cast<double>(query.size(2)));
  step.max_rows = max_rows_;
  if (store_ != nullptr) {
    if (refreshing_) {  // blocks are chosen by the queries of the trees' rows
      const at::Tensor everyone = query.unsqueeze(0).expand({places_, -1, -1, -1});
      store_->RefreshLayer(layer, everyone, block_table_, tree_rows_);
    }
    step.partial_view = nwor::PartialViewTensors{store_->blocks(layer), store_->num_blocks(),
                                                 store_->view_lens(), store_->budget().block_size};
  }
  if (query.is_cuda()) {  // planned once for all layers
    if (!attention_plan_.defined()) {
      const int64_t block_size = store_ == nullptr ? 0 : store_->budget().block_size;
      attention_plan_ = at::empty({nwor::PlanBytes(step, block_size)},
                                  at::TensorOptions(query.device()).dtype(at::kByte));
      nwor::PlanVerify(step, attention_plan_);
    }
    step.plan = attention_plan_;
  }
  const nwor::VerifyOutputs outputs = nwor::MakeVerifyOutputs(query, /*with_lse=*/false);
  nwor::VerifyAttention(step, outputs);
  return outputs.out;
}

void Round::Commit(const std::vector<std::vector<int64_t>>& paths) {
  size_t depth = 1;
  for (const auto& path : paths) depth = std::max(depth, path.size());
  std::vector<int64_t> rows(places_ * depth, -1), slots(places_ * depth, -1), counts(places_);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const auto place = static_cast<size_t>(part.request->place);
    counts[place] = static_cast<int64_t>(paths[i].size());
    const auto own = cache_.slots.Extend(part.request->index, counts[place]);
    for (size_t step = 0; step < paths[i].size(); ++step) {
      rows[place * depth + step] = part.num_fed() + paths[i][step];
      slots[place * depth + step] = own[step];
    }
  }
  const std::vector<int64_t> sizes = {places_, static_cast<int64_t>(depth)};
  const at::Device device = cache_.device;
  const nwor::Receipt receipt = cache_.interceptor.Commit(
      ToDevice(rows, device, at::kInt).view(sizes), ToDevice(counts, device, at::kInt),
      {ToDevice(slots, device).view(sizes)}, nwor::RowSpace::kRequest);
  NWOR_CHECK(receipt.ok(), "commit: refused, nothing of the step was cached: ", receipt.problem);
  if (cache_.checker) Append(violations_, cache_.checker->Verify(&receipt, counts));
}

}  // namespace engine
