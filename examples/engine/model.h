#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/device_graphs.h"
#include "decoder/decoder_rows.h"
#include "linear/linear_rows.h"

// A decoder of the Llama family, without its attention: what the library calls for the rows of a
// step is in decoder/decoder_rows.h. On the CPU in float32 a row's result does not depend on the
// rows beside it, so drafts, batches and pieces of prompts change no bit of the output.

namespace engine {

// From the folder's config.json, and generation_config.json for the tokens that end a text.
struct ModelConfig {
  int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocabulary, context;
  double norm_epsilon;
  bool tied;                   // the output matrix is the embedding
  at::Tensor frequencies;      // [head_dim / 2] float32, of rotary positions
  std::vector<int64_t> stops;  // end-of-text tokens
  std::string dtype;           // of the file: float32, float16 or bfloat16

  static ModelConfig Read(const std::filesystem::path& folder);
};

class Model {
 public:
  // On a CPU in float32, on a GPU in the file's float16, else bfloat16. Throws nwor::Error for
  // files, sizes and kinds of models that do not fit.
  Model(const std::filesystem::path& folder, at::Device device, bool cuda_graphs);

  // The caller's part of a layer: caches K/V and attends, to out [T, Hq, D] from query [T, Hq, D]
  // and key, value [T, Hkv, D].
  using Attend = std::function<void(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, const at::Tensor& out)>;

  struct Output {
    at::Tensor hidden;    // [T, hidden], normalized; the next call overwrites it
    at::Tensor features;  // [T, layers * hidden]: outputs of feature_layers side by side, if any
  };
  // tokens, positions: [T] int64 on the device.
  Output Forward(const at::Tensor& tokens, const at::Tensor& positions,
                 const std::vector<int64_t>& feature_layers, const Attend& attend);

  // [T, hidden] -> [T, vocabulary]
  at::Tensor Logits(const at::Tensor& hidden) const { return nwor::LinearRows(hidden, output_); }

  const ModelConfig& config() const { return config_; }
  const at::Tensor& embedding() const { return embedding_; }  // [vocabulary, hidden]
  const at::Tensor& output() const { return output_; }        // the same, or tied

 private:
  // What the pieces of a step between its attentions share. On a GPU a step of few rows is padded,
  // in tensors that stay; the second one of a size captures its pieces, which are then replayed.
  struct Step {
    at::Tensor tokens, positions, attended;  // are written between pieces
    at::Tensor hidden, cos, sin;
    int64_t graph = -1;  // of the first piece; -1: not captured
  };
  std::vector<at::Tensor> RunPiece(int64_t layer, Step* step) const;

  ModelConfig config_;
  at::Tensor embedding_, norm_, output_, frequencies_;
  std::vector<nwor::AttentionInputWeights> inputs_;  // of each layer
  std::vector<nwor::LayerOutputWeights> outputs_;
  std::map<int64_t, Step> steps_;  // those that stay, by their rows
  std::optional<nwor::DeviceGraphs> graphs_;
};

}  // namespace engine
