#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "drafter.h"
#include "kv_interceptor/interceptor.h"
#include "session/session_store.h"
#include "specpv/partial_store.h"

// The target model over a paged cache: what the library's SessionStore calls back in a round. The
// store holds the sequences and their pages, and goes through a round in this order:
//
//   slots for new tokens; Interceptor::Begin: which rows are drafts
//   Target::Forward    in each layer K/V written (drafts staged), views refreshed, attention; then
//                      the target's token after every row
//   Target::Accept     which drafts stand
//   Interceptor::Commit: these go to the cache, in all layers or in none

namespace engine {

// One sequence from its admission to its end. After its prompt, `tokens` ends with the root: the
// last token, whose K/V is not cached yet.
struct Request {
  std::string session;  // its name in the store
  std::vector<int64_t> tokens;
  int64_t prompt_len = 0;
  int64_t cached = 0;  // tokens in the cache
  int64_t shown = 0;   // tokens that are final; fewer than all in mode lossless only
  int64_t seed = 0;
  std::string finish;
  DraftState drafts;
  std::shared_ptr<nwor::StoredCache> view;  // its state under partial verification, or null

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  bool prefilling() const { return size() == prompt_len; }  // it has no token of its own yet
};

// A request's rows in a round, as the store takes them: new tokens, the last of which is the root,
// and the tree below it. Those before the root are a piece of the prompt, or a tail that a full
// step runs again.
struct Part : nwor::VerifyRequest {
  Request* request = nullptr;
  bool judged = true;                          // false: a piece of a prompt that goes on
  std::optional<nwor::StepDecision> decision;  // of partial verification

  // Filled by the round.
  int64_t begin = 0;       // its first row in the batch
  at::Tensor features;     // [rows, ..]
  int64_t confirmed = 0;   // how many of the tokens before the root stand
  int64_t disagreed = -1;  // how many of a tail that stands full attention would not choose

  int64_t num_fed() const { return static_cast<int64_t>(new_tokens.size()) - 1; }
  int64_t num_rows() const { return num_fed() + tree.num_rows(); }
  bool refed() const { return decision && decision->refed_rows > 0; }
};

class Target {
 public:
  // K/V for `num_pages` pages; `requests` at once, of `longest` tokens at their ends; trees of
  // `rows` rows. Throws nwor::Error when they do not fit the settings or the memory.
  Target(const Settings& settings, Model& model, int64_t num_pages, int64_t requests,
         int64_t longest, int64_t rows);

  // [T] int64: what the target says after each row; 0 where nobody asks.
  at::Tensor Forward(const nwor::SessionBatch& batch);
  nwor::Accepted Accept(const nwor::SessionBatch& batch, const at::Tensor& ids);

  std::map<std::string, Part> parts;     // of the round, by session
  std::vector<int64_t> feature_layers;   // whose outputs the round keeps
  std::vector<at::Tensor> keys, values;  // the cache of each layer, [P, S, Hkv, D]
  nwor::Interceptor interceptor;
  std::shared_ptr<nwor::PartialStore> views;  // null: every step is full

  bool lossless() const { return views && settings_.specpv_mode == nwor::SpecPVMode::kLossless; }

 private:
  struct Step;  // what all layers share
  void Attend(int64_t layer, const at::Tensor& query, const at::Tensor& key,
              const at::Tensor& value, const at::Tensor& out, Step* step);
  at::Tensor ChooseTokens(const at::Tensor& logits, const std::vector<int64_t>& seeds,
                          const at::Tensor& positions) const;

  const Settings& settings_;
  Model& model_;
  const at::Device device_;
  const int64_t max_requests_;
};

// [values.size()] on the device.
at::Tensor ToDevice(const std::vector<int64_t>& values, at::Device device,
                    at::ScalarType dtype = at::kLong);

}  // namespace engine
