#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "decoder/decoder_rows.h"
#include "session/draft_tree.h"

// Drafts with an EAGLE3 head: one decoder layer over features of the target, the outputs of some of
// its layers. An entry of the head's cache is a row's features with the token that follows the row;
// its output guesses the token after, and takes the place of features when a tree grows further
// down. A tree's own entries are not kept.

namespace nwor {

// What a head's file says of itself, under `eagle3` of its metadata.
struct Eagle3Shape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t target_vocabulary = 0;
  std::vector<int64_t> feature_layers;  // of the target, counted from 0
  int64_t window = 0;                   // entries that an entry sees at most, itself included
  double rope_theta = 10000.0;
  double norm_epsilon = 1e-5;
};

struct Eagle3Options {
  int64_t draft_vocabulary = 0;              // only so many of the head's tokens, the first; 0: all
  double min_probability = 0.0;              // rows that the head gives less are left out
  std::optional<at::ScalarType> dtype = {};  // of products; default: the target's
};

// Thread-safety: const after construction; a state belongs to one thread at a time. Device work is
// enqueued on the current stream; Draft waits for the device.
class NWOR_EXPORT Eagle3Head {
 public:
  // The head's cache of one request.
  struct State {
    at::Tensor keys, values;  // [entries, Hkv, D] float32, the latest ones
    int64_t position = 0;     // of the next entry
    int64_t root = -1;        // the last token; -1: nothing was observed yet
    at::Tensor hidden;        // [hidden]: output of the last entry
  };

  // weights: the tensors of the head's file, all of them. embedding, output [vocabulary, hidden]:
  // the target's, on the device where the head is to run. Throws Error for wrong sizes.
  Eagle3Head(const Eagle3Shape& shape, std::map<std::string, at::Tensor> weights,
             const at::Tensor& embedding, const at::Tensor& output,
             const Eagle3Options& options = {});

  // Rows of a request that stand: tokens[i] follows row i, whose features are features[i], those of
  // feature_layers side by side. The last of `tokens` is the root of the next tree.
  void Observe(State* state, const std::vector<int64_t>& tokens, const at::Tensor& features) const;

  // Takes the last `count` rows back. Observe brings others before the next tree.
  void Retract(State* state, int64_t count) const;

  // A tree for each request, below its root, of `rows` rows at most: the best of what grows when at
  // every depth the `top_k` best candidates get `top_k` children each.
  // REQUIRES: rows >= 1, 1 <= depth <= 32, top_k >= 1; every state has observed a row.
  std::vector<DraftTree> Draft(std::span<const State* const> states, int64_t rows, int64_t depth,
                               int64_t top_k) const;

  const Eagle3Shape& shape() const { return shape_; }

 private:
  // [.., count]: ids of the target, and the logarithms of their probabilities.
  struct Guesses {
    at::Tensor tokens, scores;
  };

  std::array<at::Tensor, 3> Project(const at::Tensor& tokens, const at::Tensor& hidden,
                                    const at::Tensor& positions) const;
  Guesses Guess(const at::Tensor& hidden, int64_t count) const;
  bool Complete(const std::vector<at::Tensor>& scores, const at::Tensor& best, int64_t rows) const;
  at::Tensor Index(const std::vector<int64_t>& values) const;

  Eagle3Shape shape_;
  double least_;  // rows that score less are left out
  at::Tensor feature_norm_, fuse_, norm_, to_target_, output_, embedding_, frequencies_;
  AttentionInputWeights inputs_;
  LayerOutputWeights outputs_;
};

}  // namespace nwor
