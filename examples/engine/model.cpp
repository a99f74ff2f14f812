#include "model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "weights.h"

namespace engine {
namespace {

// Rows that steps on a GPU are padded to. Where there are more, launches hide behind the work.
constexpr std::array<int64_t, 10> kSizes = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64};

// Newer files have all of it under rope_parameters, older ones in rope_theta and rope_scaling.
at::Tensor Frequencies(const Json& json, int64_t head_dim) {
  Json rope = json.value("rope_parameters", Json());
  if (!rope.is_object()) rope = json.value("rope_scaling", Json());
  if (!rope.is_object()) rope = Json::object();
  const double theta = rope.value("rope_theta", json.value("rope_theta", 10000.0));
  at::Tensor steps = at::arange(0, head_dim, 2, at::kLong).to(at::kFloat) / head_dim;
  at::Tensor frequencies = 1.0 / at::pow(at::scalar_tensor(theta, at::kFloat), steps);
  const std::string kind = rope.value("rope_type", rope.value("type", "default"));
  if (kind == "default") return frequencies;
  NWOR_CHECK(kind == "llama3", "rope_type: got '", kind, "', expected 'default' or 'llama3'");
  // Llama 3.1: waves longer than the original context turn `factor` times slower; between two
  // lengths the change is gradual.
  const double factor = rope.at("factor"), low = rope.at("low_freq_factor");
  const double high = rope.at("high_freq_factor");
  const double context = rope.at("original_max_position_embeddings");
  const at::Tensor waves = 2 * M_PI / frequencies;
  const at::Tensor share = ((context / waves - low) / (high - low)).clamp(0, 1);
  return (1 - share) * (frequencies / factor) + share * frequencies;
}

}  // namespace

ModelConfig ModelConfig::Read(const fs::path& folder) {
  NWOR_CHECK(fs::is_directory(folder), "--model: got '", folder.string(),
             "', expected a folder with config.json and model.safetensors");
  const fs::path file = folder / "config.json", generation = folder / "generation_config.json";
  const Json json = ReadJson(file);
  const Json more = fs::exists(generation) ? ReadJson(generation) : Json::object();
  return InFile(file, "not a model's configuration", [&] {
    const auto size = [&](const char* key) {
      const auto value = json.at(key).get<int64_t>();
      NWOR_CHECK(value >= 1, key, ": got ", value, ", expected 1 or more");
      return value;
    };
    const std::string kind = json.at("model_type"), act = json.at("hidden_act");
    NWOR_CHECK(kind == "llama" || kind == "qwen2" || kind == "qwen3", "model_type: got '", kind,
               "', expected 'llama', 'qwen2' or 'qwen3'");
    NWOR_CHECK(act == "silu", "hidden_act: got '", act, "', expected 'silu'");
    NWOR_CHECK(!json.value("use_sliding_window", false),
               "use_sliding_window: got true, expected a model whose layers all see everything");
    ModelConfig config = {.num_layers = size("num_hidden_layers"),
                          .hidden = size("hidden_size"),
                          .intermediate = size("intermediate_size"),
                          .num_heads = size("num_attention_heads"),
                          .num_kv_heads = size("num_key_value_heads"),
                          .vocabulary = size("vocab_size"),
                          .context = size("max_position_embeddings"),
                          .norm_epsilon = json.at("rms_norm_eps"),
                          .tied = json.value("tie_word_embeddings", false)};
    const bool has_dim = !json.value("head_dim", Json()).is_null();
    config.head_dim = has_dim ? size("head_dim") : config.hidden / config.num_heads;
    config.frequencies = Frequencies(json, config.head_dim);
    config.dtype = json.value("dtype", json.value("torch_dtype", ""));
    Json stops = more.value("eos_token_id", Json());
    if (stops.is_null()) stops = json.value("eos_token_id", Json());
    if (stops.is_number()) stops = Json::array({stops});
    if (!stops.is_null()) config.stops = stops.get<std::vector<int64_t>>();
    return config;
  });
}

Model::Model(const fs::path& folder, at::Device device, bool cuda_graphs)
    : config_(ModelConfig::Read(folder)) {
  Weights weights(folder);
  const at::ScalarType half = config_.dtype == "float16" ? at::kHalf : at::kBFloat16;
  const at::ScalarType dtype = device.is_cpu() ? at::kFloat : half;
  const int64_t hidden = config_.hidden, dim = config_.head_dim, wide = config_.intermediate;
  const auto take = [&](const std::string& name, const std::vector<int64_t>& sizes) {
    return weights.Take(name, sizes).to(device, dtype);
  };
  const auto take_if = [&](const std::string& name, int64_t size) {
    const at::Tensor found = weights.Take(name, {size}, /*required=*/false);
    return found.defined() ? std::optional(found.to(device, dtype)) : std::nullopt;
  };
  const auto linear = [&](const std::string& name, int64_t outputs, int64_t inputs) {
    return nwor::LinearLayer{take(name + ".weight", {outputs, inputs}),
                             take_if(name + ".bias", outputs)};
  };
  embedding_ = take("model.embed_tokens.weight", {config_.vocabulary, hidden});
  norm_ = take("model.norm.weight", {hidden});
  const std::vector<int64_t> output_sizes = {config_.vocabulary, hidden};
  output_ = config_.tied ? embedding_ : take("lm_head.weight", output_sizes);
  if (config_.tied) weights.Take("lm_head.weight", output_sizes, /*required=*/false);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const std::string name = nwor::Concat("model.layers.", i, ".");
    const std::string attention = name + "self_attn.", mlp = name + "mlp.";
    weights.Take(attention + "rotary_emb.inv_freq", {dim / 2}, /*required=*/false);  // of old files
    inputs_.push_back({.norm = take(name + "input_layernorm.weight", {hidden}),
                       .epsilon = config_.norm_epsilon,
                       .query = linear(attention + "q_proj", config_.num_heads * dim, hidden),
                       .key = linear(attention + "k_proj", config_.num_kv_heads * dim, hidden),
                       .value = linear(attention + "v_proj", config_.num_kv_heads * dim, hidden),
                       .query_norm = take_if(attention + "q_norm.weight", dim),
                       .key_norm = take_if(attention + "k_norm.weight", dim)});
    outputs_.push_back({.attention = linear(attention + "o_proj", hidden, config_.num_heads * dim),
                        .norm = take(name + "post_attention_layernorm.weight", {hidden}),
                        .epsilon = config_.norm_epsilon,
                        .gate = take(mlp + "gate_proj.weight", {wide, hidden}),
                        .up = take(mlp + "up_proj.weight", {wide, hidden}),
                        .down = take(mlp + "down_proj.weight", {hidden, wide})});
  }
  weights.ExpectNoneLeft();
  frequencies_ = config_.frequencies.to(device);
  if (cuda_graphs && device.is_cuda()) graphs_.emplace(embedding_.device());
}

// What lies between attention in the layer before and in this one. The first piece begins with the
// tokens, and the last one ends with normalized rows. The layer's input comes first.
std::vector<at::Tensor> Model::RunPiece(int64_t layer, Step* step) const {
  at::Tensor& hidden = step->hidden;
  if (layer == 0) {
    hidden = embedding_.index_select(0, step->tokens);
    const at::Tensor angles = at::outer(step->positions, frequencies_).repeat({1, 2});
    step->cos = angles.cos().to(hidden.scalar_type());
    step->sin = angles.sin().to(hidden.scalar_type());
  } else {
    hidden = nwor::LayerOutput(hidden, step->attended.flatten(1), outputs_[layer - 1]);
  }
  if (layer == config_.num_layers) {
    return {hidden, at::rms_norm(hidden, {config_.hidden}, norm_, config_.norm_epsilon)};
  }
  const auto [q, k, v] = nwor::AttentionInputs(hidden, inputs_[layer], step->cos, step->sin);
  return {hidden, q, k, v};
}

Model::Output Model::Forward(const at::Tensor& tokens, const at::Tensor& positions,
                             const std::vector<int64_t>& feature_layers, const Attend& attend) {
  const int64_t rows = tokens.size(0), last = config_.num_layers;
  const auto size = std::lower_bound(kSizes.begin(), kSizes.end(), rows);
  const bool stays = tokens.is_cuda() && size != kSizes.end();
  Step own, &step = stays ? steps_[*size] : own;
  if (!step.tokens.defined()) {  // the first of its size runs as it is
    const int64_t all = stays ? *size : rows;
    step.tokens = at::zeros({all}, tokens.options());
    step.positions = at::zeros_like(step.tokens, at::kFloat);
    step.attended = embedding_.new_zeros({all, config_.num_heads, config_.head_dim});
  } else if (graphs_ && step.graph < 0) {
    for (int64_t i = 0; i <= last; ++i) {
      step.graph = graphs_->Capture([&] { return RunPiece(i, &step); }) - i;
    }
  }
  const auto cut = [rows](const at::Tensor& all) {
    return all.size(0) == rows ? all : all.slice(0, 0, rows);
  };
  cut(step.tokens).copy_(tokens);
  cut(step.positions).copy_(positions);
  const at::Tensor attended = cut(step.attended);
  std::vector<at::Tensor> piece, features;
  for (int64_t i = 0; i <= last; ++i) {
    piece = step.graph < 0 ? RunPiece(i, &step) : graphs_->Replay(step.graph + i);
    if (i < last) attend(i, cut(piece[1]), cut(piece[2]), cut(piece[3]), attended);
    for (const int64_t wanted : feature_layers) {
      if (wanted == i - 1) features.push_back(cut(piece[0]));
    }
  }
  return {cut(piece[1]), features.empty() ? at::Tensor() : at::cat(features, 1)};
}

}  // namespace engine
