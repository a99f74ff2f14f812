#include "engine.h"

#include <algorithm>
#include <iostream>

#include "base/check.h"
#include "tree/run_end.h"

namespace engine {

Engine::Engine(const Settings& settings, const Model& model, std::unique_ptr<Drafter> drafter,
               const std::vector<std::vector<int64_t>>& prompts)
    : settings_(settings), model_(model), drafter_(std::move(drafter)) {
  if (!settings.ignore_eos) stops_ = model.config().stops;
  int64_t longest = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto length = static_cast<int64_t>(prompts[i].size());
    NWOR_CHECK(length > 0, "prompt ", i, ": got no tokens, expected at least one");
    for (const int64_t token : prompts[i]) {
      NWOR_CHECK(token >= 0 && token < model.config().vocabulary, "prompt ", i, ": got token ",
                 token, ", expected ids from 0 to ", model.config().vocabulary - 1);
    }
    NWOR_CHECK(length + settings.max_new_tokens <= model.config().context, "prompt ", i, ": got ",
               length, " tokens and max_new_tokens ", settings.max_new_tokens, ", expected ",
               model.config().context, " together at most, the context of the model");
    Request request;
    request.index = static_cast<int64_t>(i);
    request.tokens = prompts[i];
    request.prompt_len = request.shown = length;
    request.seed = static_cast<int64_t>(static_cast<uint64_t>(settings.seed) + i);  // may wrap
    longest = std::max(longest, length + settings.max_new_tokens);
    requests_.push_back(std::move(request));
  }
  const auto batch = std::min(settings.max_batch_size, static_cast<int64_t>(requests_.size()));
  places_.resize(batch);
  int64_t most = 0;
  for (Request& request : requests_) {
    waiting_.push_back(&request);
    most = std::max(most, PagesOf(request));
  }
  free_pages_ = batch * most;
  if (settings.cache_tokens > 0) free_pages_ = settings.cache_tokens / settings.page_size;
  NWOR_CHECK(free_pages_ >= most, "cache_tokens: got ", settings.cache_tokens, ", expected ",
             most * settings.page_size, " or more for the longest of these requests");
  const at::Tensor& like = model.embedding();
  cache_ =
      std::make_unique<PagedCache>(model.config(), free_pages_, settings.page_size, like.device(),
                                   like.scalar_type(), settings.nwor, settings.check_contract);
  if (settings.specpv.enable_specpv) {
    const int64_t rows = drafter_ ? settings.tree.rows : 1;
    settings.specpv.ValidateFor(settings.page_size, rows, model.config().context);
    const nwor::Budget view = nwor::ChooseBudget(settings.specpv, rows, longest);
    if (view.static_tokens() >= longest) return;  // a view would cover everything
    const int64_t slack = 2 * rows + settings.specpv.specpv_n_spec_tokens_buf;
    store_ = nwor::PartialStore::Create(
        settings.specpv, cache_->keys, cache_->values,
        {.max_requests = batch, .max_tokens = longest + slack, .max_rows = rows, .dtype = {}});
    policy_ = std::make_unique<nwor::VerifyPolicy>(settings.specpv);
  }
}

// What a request may need at its end: its tokens, and in mode lossless a tail beyond them.
int64_t Engine::PagesOf(const Request& request) const {
  const int64_t tokens = request.prompt_len + settings_.max_new_tokens + 1 + settings_.tree.rows;
  return (tokens + settings_.page_size - 1) / settings_.page_size;
}

void Engine::Run() {
  while (true) {
    Admit();
    if (std::all_of(places_.begin(), places_.end(), [](Request* r) { return r == nullptr; })) break;
    Step();
  }
}

// Requests start in their order, as soon as there are a place and pages up to their end.
void Engine::Admit() {
  for (Request*& place : places_) {
    if (place != nullptr || waiting_.empty()) continue;
    Request* request = waiting_.front();
    if (PagesOf(*request) > free_pages_) return;
    waiting_.pop_front();
    place = request;
    request->place = &place - places_.data();
    free_pages_ -= PagesOf(*request);
    cache_->slots.Extend(request->index, 0);
    if (drafter_) drafter_->Begin(request->index, request->tokens[0]);
  }
}

// One forward pass: trees of the requests that decode beside pieces of prompts.
void Engine::Step() {
  auto round = std::make_unique<Round>(*cache_, PlanParts(), static_cast<int64_t>(places_.size()),
                                       store_.get());
  if (const auto refused = round->Begin()) {
    EndSpeculation("drafts cannot be staged: " + *refused);
    round = std::make_unique<Round>(*cache_, PlanParts(), static_cast<int64_t>(places_.size()),
                                    store_.get());
    NWOR_CHECK(!round->Begin(), "staging: refused a round without drafts");
  }
  static const std::vector<int64_t> kNone;
  round->Run(model_, drafter_ ? drafter_->feature_layers() : kNone);
  const std::vector<Verdict> verdicts = Judge(*round, settings_.sampling, lossless());
  // Where a sequence ends inside what was accepted, later drafts are not cached.
  std::vector<std::vector<int64_t>> paths, runs;
  for (size_t i = 0; i < verdicts.size(); ++i) {
    const Part& part = round->parts()[i];
    std::vector<int64_t> path = verdicts[i].path, run;
    for (const int64_t row : path) run.push_back(part.tree.tokens[row]);
    run.push_back(verdicts[i].next_token);
    const int64_t most = std::max<int64_t>(1, room(*part.request));
    run.resize(nwor::FindRunEnd(run, stops_, most).num_tokens);
    path.resize(run.size() - 1);
    paths.push_back(std::move(path));
    runs.push_back(std::move(run));
  }
  if (stats_.steps == broken_step_) cache_->values.back().select(0, -1).select(0, -1).fill_(1.0);
  round->Commit(paths);
  ++stats_.steps;
  stats_.largest_batch =
      std::max(stats_.largest_batch, static_cast<int64_t>(round->parts().size()));
  for (size_t i = 0; i < verdicts.size(); ++i) {
    const Part& part = round->parts()[i];
    if (part.request->prefilling()) {
      SettlePrompt(*round, part, verdicts[i]);
    } else {
      Settle(*round, part, verdicts[i], paths[i], runs[i]);
    }
  }
  if (!round->violations().empty()) {
    const nwor::Violation& first = round->violations().front();
    stats_.violations += static_cast<int64_t>(round->violations().size());
    EndSpeculation(nwor::Concat("contract ", first.rule, ": ", first.detail));
  }
}

std::vector<Part> Engine::PlanParts() {
  std::vector<int64_t> asked;
  for (const Request* request : places_) {
    if (drafter_ && request && !request->prefilling() && room(*request) > 1) {
      asked.push_back(request->index);
    }
  }
  std::map<int64_t, nwor::DraftTree> trees;
  if (!asked.empty() && settings_.tree.rows > 1) {
    const std::vector<nwor::DraftTree> drafted = drafter_->Draft(asked, settings_.tree);
    for (size_t i = 0; i < asked.size(); ++i) trees[asked[i]] = drafted[i];
  }
  std::vector<Part> parts;
  int64_t rows = settings_.prefill_rows;
  for (Request* request : places_) {
    if (request == nullptr) continue;
    if (request->prefilling()) {
      if (rows == 0) continue;
      parts.push_back(PrefillPart(*request, rows));
      rows -= parts.back().num_rows();
      continue;
    }
    const auto found = trees.find(request->index);
    parts.push_back({.request = request, .prefix_len = request->cached});
    parts.back().tree = found == trees.end() ? nwor::DraftTree{{request->tokens.back()}, {-1}}
                                             : Pruned(found->second, room(*request) - 1);
  }
  if (store_) DecideViews(&parts);
  return parts;
}

// The next piece of a prompt: its last row is the root, and of the last piece it is judged.
Part Engine::PrefillPart(Request& request, int64_t rows) const {
  const int64_t end = std::min(request.cached + rows, request.prompt_len);
  Part part{.request = &request, .prefix_len = request.cached};
  part.fed.assign(request.tokens.begin() + request.cached, request.tokens.begin() + end - 1);
  part.tree = {{request.tokens[end - 1]}, {-1}};
  part.wants_logits = end == request.prompt_len;
  return part;
}

// Full, full with the tail run again, or partial: the library's policy says it for each request.
void Engine::DecideViews(std::vector<Part>* parts) {
  for (Part& part : *parts) {
    Request& request = *part.request;
    const bool ended = !stats_.speculation_ended.empty();
    if (ended && request.partial && request.partial->tail_len() == 0) request.partial.reset();
    if (!request.partial) continue;
    if (ended || MustConfirm(request)) request.partial->RequireFull(nwor::FullTrigger::kPolicy);
    part.decision = policy_->Decide(*request.partial, part.tree.num_rows());
    part.prefix_len = part.decision->prefix_len;
    part.fed.assign(request.tokens.begin() + part.decision->prefix_len,
                    request.tokens.begin() + part.decision->committed_len);
    part.wants_fed_logits = !part.fed.empty();
  }
}

// Mode lossless: what waits for its confirmation would end the sequence.
bool Engine::MustConfirm(const Request& request) const {
  if (!lossless() || request.shown == request.size()) return false;
  const auto waiting = request.tokens.begin() + request.shown;
  return room(request) <= 0 || std::find_first_of(waiting, request.tokens.end(), stops_.begin(),
                                                  stops_.end()) != request.tokens.end();
}

void Engine::SettlePrompt(const Round& round, const Part& part, const Verdict& verdict) {
  Request& request = *part.request;
  const int64_t first = request.cached;
  request.cached += part.num_rows();
  if (part.wants_logits) request.tokens.push_back(verdict.next_token);
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < part.num_rows(); ++row) rows.push_back(part.begin + row);
  Observe(round, request, rows,
          {request.tokens.begin() + first + 1, request.tokens.begin() + request.cached + 1});
  if (!part.wants_logits) return;
  if (store_ && stats_.speculation_ended.empty()) {
    request.partial = store_->Open(request.prompt_len, settings_.max_new_tokens);
    if (request.partial) request.partial->Prefill(request.prompt_len);
  }
  Show(request);
}

// After a step: tokens, cache and drafter agree on what stands.
void Engine::Settle(const Round& round, const Part& part, const Verdict& verdict,
                    const std::vector<int64_t>& path, const std::vector<int64_t>& run) {
  Request& request = *part.request;
  stats_.drafts += part.tree.num_drafts();
  stats_.accepted += static_cast<int64_t>(path.size());
  const bool partial = part.decision && part.decision->kind == nwor::StepKind::kPartial;
  std::vector<int64_t> rows;
  if (verdict.whole) {
    const int64_t root = part.begin + part.num_fed();
    rows.push_back(root);
    for (const int64_t row : path) rows.push_back(root + row);
    request.tokens.insert(request.tokens.end(), run.begin(), run.end());
    request.cached = request.size() - 1;
  } else {  // the tail is cut where the full step disagrees
    const int64_t kept = part.prefix_len + 1 + verdict.confirmed;
    const int64_t lost = request.size() - kept;
    rows.push_back(part.begin + verdict.confirmed);
    request.tokens.resize(kept);
    request.tokens.insert(request.tokens.end(), run.begin(), run.end());
    request.cached = kept;
    stats_.cut_tokens += lost;
    cache_->slots.Truncate(request.index, kept);
    if (drafter_) drafter_->Retract(request.index, lost);
  }
  if (part.decision) {
    ++stats_
          .step_kinds[std::string(nwor::kStepKindNames[static_cast<size_t>(part.decision->kind)])];
    const int64_t accepted = static_cast<int64_t>(path.size()) + verdict.confirmed;
    request.partial->Finish(*part.decision, accepted, verdict.disagreed);
  }
  Observe(round, request, rows, run);
  if (!partial || !lossless()) Show(request);
}

void Engine::Observe(const Round& round, Request& request, const std::vector<int64_t>& rows,
                     const std::vector<int64_t>& tokens) {
  if (!drafter_) return;
  at::Tensor features;
  if (round.features().defined()) {
    features = round.features().index_select(0, ToDevice(rows, cache_->device));
  }
  drafter_->Observe(request.index, tokens, features);
}

// What is final goes to the user; a request that is done leaves its place and its pages.
void Engine::Show(Request& request) {
  const std::vector<int64_t> waiting(request.tokens.begin() + request.shown, request.tokens.end());
  const int64_t left = settings_.max_new_tokens - (request.shown - request.prompt_len);
  const nwor::RunEnd end = nwor::FindRunEnd(waiting, stops_, left);
  request.shown += end.num_tokens;
  stats_.new_tokens += end.num_tokens;
  if (end.finish == nwor::FinishReason::kNone) return;
  request.finish = nwor::Label(end.finish);
  request.tokens.resize(request.shown);
  request.partial.reset();
  cache_->slots.Free(request.index);
  free_pages_ += PagesOf(request);
  if (drafter_) drafter_->End(request.index);
  places_[request.place] = nullptr;
}

// After a violation or a refusal nothing is drafted any more: the requests go on with plain steps.
void Engine::EndSpeculation(const std::string& reason) {
  if (!stats_.speculation_ended.empty()) return;
  stats_.speculation_ended = reason;
  std::cerr << "engine: speculation ends, plain decoding goes on: " << reason << "\n";
  drafter_.reset();
}

}  // namespace engine
