#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

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
  Model(const std::filesystem::path& folder, at::Device device);

  // The caller's part of a layer: caches K/V and attends, [T, Hq, D] from query [T, Hq, D] and key,
  // value [T, Hkv, D].
  using Attend = std::function<at::Tensor(int64_t layer, const at::Tensor&, const at::Tensor&,
                                          const at::Tensor&)>;

  struct Output {
    at::Tensor hidden;    // [T, hidden], normalized
    at::Tensor features;  // [T, layers * hidden]: outputs of feature_layers side by side, if any
  };
  // tokens, positions: [T] int64 on the device.
  Output Forward(const at::Tensor& tokens, const at::Tensor& positions,
                 const std::vector<int64_t>& feature_layers, const Attend& attend) const;

  // [T, hidden] -> [T, vocabulary]
  at::Tensor Logits(const at::Tensor& hidden) const { return nwor::LinearRows(hidden, output_); }

  const ModelConfig& config() const { return config_; }
  const at::Tensor& embedding() const { return embedding_; }  // [vocabulary, hidden]
  const at::Tensor& output() const { return output_; }        // the same, or tied

 private:
  struct Layer {
    nwor::AttentionInputWeights inputs;
    nwor::LayerOutputWeights outputs;
  };

  ModelConfig config_;
  at::Tensor embedding_, norm_, output_, frequencies_;
  std::vector<Layer> layers_;
};

}  // namespace engine
