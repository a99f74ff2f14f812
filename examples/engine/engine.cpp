#include "engine.h"

#include <algorithm>
#include <iostream>
#include <span>

#include "base/check.h"
#include "session/session_error.h"
#include "tree/run_end.h"

namespace engine {
Engine::Engine(const Settings& settings, Model& model,
               const std::vector<std::vector<int64_t>>& prompts)
    : settings_(settings) {
  const ModelConfig& config = model.config();
  if (!settings.ignore_eos) stops_ = config.stops;
  int64_t longest = 0, most_pages = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto length = static_cast<int64_t>(prompts[i].size());
    NWOR_CHECK(length > 0, "prompt ", i, ": got no tokens, expected at least one");
    for (const int64_t token : prompts[i]) {
      NWOR_CHECK(token >= 0 && token < config.vocabulary, "prompt ", i, ": got token ", token,
                 ", expected ids from 0 to ", config.vocabulary - 1);
    }
    NWOR_CHECK(length + settings.max_new_tokens <= config.context, "prompt ", i, ": got ", length,
               " tokens and max_new_tokens ", settings.max_new_tokens, ", expected ",
               config.context, " together at most, the context of the model");
    requests_.push_back({.session = std::to_string(i),
                         .tokens = prompts[i],
                         .prompt_len = length,
                         .shown = length,
                         .seed = static_cast<int64_t>(static_cast<uint64_t>(settings.seed) + i)});
    longest = std::max(longest, length + settings.max_new_tokens);
    most_pages = std::max(most_pages, PagesOf(requests_.back()));
  }
  for (Request& request : requests_) waiting_.push_back(&request);
  max_running_ = std::min<int64_t>(settings.max_batch_size, std::ssize(requests_));
  free_pages_ = max_running_ * most_pages;
  if (settings.cache_tokens > 0) free_pages_ = settings.cache_tokens / settings.page_size;
  NWOR_CHECK(free_pages_ >= most_pages, "cache_tokens: got ", settings.cache_tokens, ", expected ",
             most_pages * settings.page_size, " or more for the longest of these requests");
  if (settings.speculating()) drafter_.emplace(settings_, model);
  target_ = std::make_unique<Target>(settings_, model, free_pages_, max_running_, longest,
                                     drafter_ ? settings.tree_rows : 1);
  if (drafter_) target_->feature_layers = drafter_->feature_layers();
  if (target_->views) policy_.emplace(settings);
  if (settings.check_contract) checker_.emplace(target_->interceptor);
  nwor::SessionConfig sessions;
  sessions.vocab_size = config.vocabulary;
  sessions.max_batch = max_running_;
  store_ = std::make_unique<nwor::SessionStore>(
      sessions, target_->interceptor,
      [this](const nwor::SessionBatch& rows) { return target_->Forward(rows); },
      [this](const nwor::SessionBatch& rows, const at::Tensor& ids) { return Accept(rows, ids); });
}

// What a request may need at its end: its tokens, and in mode lossless a tail beyond them.
int64_t Engine::PagesOf(const Request& request) const {
  const int64_t tokens = request.prompt_len + settings_.max_new_tokens + 1 + settings_.tree_rows;
  return (tokens + settings_.page_size - 1) / settings_.page_size;
}

void Engine::Run() {
  for (Admit(); !running_.empty(); Admit()) Step();
  stats_.largest_batch = store_->stats().largest_batch;
}

// Requests start in their order, as soon as there are a place and pages up to their end: the store
// need not take pages from one that runs.
void Engine::Admit() {
  while (!waiting_.empty() && std::ssize(running_) < max_running_ &&
         PagesOf(*waiting_.front()) <= free_pages_) {
    Request* request = waiting_.front();
    waiting_.pop_front();
    running_.push_back(request);
    free_pages_ -= PagesOf(*request);
    request->drafts.text.Append({request->tokens[0]});
  }
}

// One round: trees of the requests that decode beside pieces of prompts.
void Engine::Step() {
  Plan();
  std::vector<nwor::VerifyRequest> asked;
  for (const auto& [session, part] : target_->parts) asked.push_back(part);
  violations_.clear();
  if (checker_) checker_->Snapshot();
  std::vector<nwor::VerifyResult> results;
  try {
    results = store_->VerifyBatch(asked);
  } catch (const nwor::CapacityError& error) {  // nothing was cached: the step is made without
    if (!drafter_) throw;
    return EndSpeculation(nwor::Concat("drafts cannot be staged: ", error.what()));
  }
  if (checker_) Check(results);
  ++stats_.steps;
  auto result = results.begin();
  for (const auto& [session, part] : target_->parts) Settle(part, *result++);
  std::erase_if(running_, [](const Request* request) { return !request->finish.empty(); });
}

// What every running request does next.
void Engine::Plan() {
  const auto drafts = [this](const Request& request) {
    return drafter_ && settings_.tree_rows > 1 && !request.prefilling() && room(request) > 1;
  };
  std::vector<const DraftState*> asked;
  for (const Request* request : running_) {
    if (drafts(*request)) asked.push_back(&request->drafts);
  }
  std::vector<nwor::DraftTree> trees;
  if (!asked.empty()) trees = drafter_->Draft(asked);
  auto tree = trees.begin();
  target_->parts.clear();
  int64_t rows = settings_.prefill_rows;
  for (Request* request : running_) {
    if (request->prefilling() && rows == 0) continue;
    const int64_t most = request->prefilling() ? rows : 1;
    const int64_t end = std::min(request->cached + most, request->size());
    if (request->prefilling()) rows -= end - request->cached;
    const nwor::DraftTree root{{request->tokens[end - 1]}, {-1}};
    target_->parts[request->session] =
        MakePart(*request, end, drafts(*request) ? (tree++)->Pruned(room(*request) - 1) : root);
  }
}

// Rows up to the token before `end`, which is the root: a piece of the prompt, or the root alone,
// and the tree below it. Under partial verification the library's policy says whether they see
// everything, or a view, or everything with the tail run again.
Part Engine::MakePart(Request& request, int64_t end, nwor::DraftTree tree) {
  Part part;
  part.request = &request;
  part.judged = end == request.size();
  part.expected_prefix_len = request.cached;
  const auto tokens = request.tokens.begin();
  const bool ended = !stats_.speculation_ended.empty();
  if (ended && request.view && request.view->tail_len() == 0) request.view.reset();
  if (request.view) {
    // Mode lossless: what would end the sequence waits for its confirmation.
    const bool unsure = target_->lossless() && request.shown < request.size();
    const bool at_end = room(request) <= 0 ||
                        std::find_first_of(tokens + request.shown, request.tokens.end(),
                                           stops_.begin(), stops_.end()) != request.tokens.end();
    if (ended || (unsure && at_end)) request.view->RequireFull(nwor::FullTrigger::kPolicy);
    part.decision = policy_->Decide(*request.view, tree.num_rows());
    part.expected_prefix_len = part.decision->prefix_len;
    if (part.refed()) store_->Rollback(request.session, part.expected_prefix_len);
  }
  part.session = request.session;
  part.tree = std::move(tree);
  part.new_tokens.assign(tokens + part.expected_prefix_len, tokens + end);
  part.stop_ids = stops_;
  part.max_new_tokens = std::max<int64_t>(1, room(request));
  return part;
}

// Between the pass and the commit: drafts must be in staging and nowhere else.
nwor::Accepted Engine::Accept(const nwor::SessionBatch& batch, const at::Tensor& ids) {
  last_pass_ = batch.sessions.size();
  if (checker_) {
    for (const auto& one : checker_->VerifyStaged()) violations_.push_back(one);
  }
  if (stats_.steps == settings_.break_contract) {
    target_->values.back().select(0, -1).select(0, -1).fill_(1.0);  // a slot that nobody has
  }
  return target_->Accept(batch, ids);
}

// After the commit. Drafts that do not fit into staging together go in several passes, and only the
// last one's rows are known to the checker.
void Engine::Check(const std::vector<nwor::VerifyResult>& results) {
  std::vector<int64_t> emitted;
  for (const nwor::VerifyResult& result : results) {
    if (last_pass_ == results.size()) emitted.push_back(std::ssize(result.accepted_rows));
  }
  for (const auto& one : checker_->Verify(nullptr, emitted)) violations_.push_back(one);
  stats_.violations += std::ssize(violations_);
  if (violations_.empty()) return;
  const nwor::Violation& first = violations_.front();
  EndSpeculation(nwor::Concat("contract ", first.rule, ": ", first.detail));
}

void Engine::SettlePrompt(const Part& part, int64_t next_token) {
  Request& request = *part.request;
  const int64_t first = request.cached + 1;
  request.cached += part.num_rows();
  if (part.judged) request.tokens.push_back(next_token);
  if (drafter_) {
    const auto begin = request.tokens.begin();
    drafter_->Observe(&request.drafts, {begin + first, begin + request.cached + 1}, part.features);
  }
  if (!part.judged) return;
  if (policy_ && stats_.speculation_ended.empty()) {
    request.view = target_->views->Open(request.prompt_len, settings_.max_new_tokens);
    if (request.view) request.view->Prefill(request.prompt_len);
  }
  Show(request);
}

// After a round: tokens, cache, view and drafter agree on what stands.
void Engine::Settle(const Part& part, const nwor::VerifyResult& result) {
  Request& request = *part.request;
  if (request.prefilling()) return SettlePrompt(part, result.next_token);
  const int64_t tail = part.num_fed(), accepted = std::ssize(result.accepted_rows);
  stats_.drafts += part.tree.num_drafts();
  stats_.accepted += accepted;
  // The tail as far as it is confirmed, the row after it (the root, if all of it is), the path.
  std::vector<int64_t> rows = {part.confirmed}, run = result.tokens;
  for (const int32_t row : result.accepted_rows) rows.push_back(tail + row);
  run.push_back(result.next_token);
  const int64_t kept = part.expected_prefix_len + part.confirmed + 1;
  const int64_t lost = request.size() - kept;
  request.tokens.resize(kept);
  request.tokens.insert(request.tokens.end(), run.begin(), run.end());
  request.cached = request.size() - 1;
  if (lost > 0) {
    stats_.cut_tokens += lost;
    store_->Rollback(request.session, request.cached);
    if (drafter_) drafter_->Retract(&request.drafts, lost);
  }
  const bool provisional = part.decision && part.decision->kind == nwor::StepKind::kPartial;
  if (part.decision) {
    const auto kind = static_cast<size_t>(part.decision->kind);
    ++stats_.step_kinds[std::string(nwor::kStepKindNames[kind])];
    request.view->Finish(*part.decision, accepted + (target_->lossless() ? part.confirmed : 0),
                         part.disagreed);
  }
  if (drafter_) {
    at::Tensor features = part.features;
    if (features.defined()) features = features.index_select(0, ToDevice(rows, features.device()));
    drafter_->Observe(&request.drafts, run, features);
  }
  if (!provisional || !target_->lossless()) Show(request);
}

// What is final goes to the user; a request that is done leaves its place and its pages.
void Engine::Show(Request& request) {
  const int64_t left = settings_.max_new_tokens - (request.shown - request.prompt_len);
  const nwor::RunEnd end =
      nwor::FindRunEnd(std::span(request.tokens).subspan(request.shown), stops_, left);
  request.shown += end.num_tokens;
  stats_.new_tokens += end.num_tokens;
  if (end.finish == nwor::FinishReason::kNone) return;
  request.finish = nwor::Label(end.finish);
  request.tokens.resize(request.shown);
  request.view.reset();
  store_->End(request.session);
  free_pages_ += PagesOf(request);
  request.drafts = {};
}

// After a violation or a refusal nothing is drafted any more: the requests go on with plain steps.
void Engine::EndSpeculation(const std::string& reason) {
  if (!stats_.speculation_ended.empty()) return;
  stats_.speculation_ended = reason;
  std::cerr << "engine: speculation ends, plain decoding goes on: " << reason << "\n";
  drafter_.reset();
  target_->feature_layers.clear();
}

}  // namespace engine
