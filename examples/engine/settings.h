#pragma once

#include <array>
#include <filesystem>
#include <string>
#include <string_view>

#include "kv_interceptor/interceptor.h"
#include "specpv/config.h"

// What the command line and a YAML or JSON file may say. Members are keys under their names, and
// options: --device, --max-new-tokens, --specpv-mode. An option wins over the file.

namespace engine {

enum class Method { kNone, kNgram, kEagle3 };
inline constexpr std::array<std::string_view, 3> kMethodNames = {"none", "ngram", "eagle3"};

// Those of the library that are keys: strict, staging_rows, max_staging_bytes; enable_specpv and
// specpv_*, but for specpv_storage and specpv_offload.
struct Settings : nwor::NworConfig, nwor::SpecPVConfig {
  // of the engine
  std::string device = "cpu";  // or cuda, cuda:1
  bool cuda_graphs = true;     // on a GPU, for steps of few rows
  int64_t max_new_tokens = 128;
  int64_t max_batch_size = 8;  // requests that run at once
  int64_t cache_tokens = 0;    // 0: room for max_batch_size of the longest requests
  int64_t page_size = 16;
  int64_t prefill_rows = 256;  // rows of prompts in a step
  bool check_contract = false;
  int64_t break_contract = -1;  // at this step something writes to a slot that belongs to nobody
  bool ignore_eos = false;
  int64_t seed = 0;
  double temperature = 0.0;  // 0: greedy
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;

  // under speculative_config; also accepted beside it
  bool enable_speculative_decoding = true;
  Method method = Method::kNone;
  bool enable_target_tree = true;
  std::string head;       // safetensors file of the EAGLE3 head
  int64_t tree_rows = 8;  // the root included
  int64_t tree_depth = 5;
  int64_t tree_top_k = 4;

  // Reads YAML, or JSON from a name that ends in .json. Throws nwor::Error that names file and key:
  // unknown keys, keys that stand there twice, wrong types, values out of range.
  void ReadFile(const std::filesystem::path& file);

  // One key as the command line has it. Throws nwor::Error.
  void Set(const std::string& key, const std::string& text);

  // What must fit together. Throws nwor::Error.
  void Validate() const;

  bool speculating() const {
    return enable_speculative_decoding && enable_target_tree && method != Method::kNone;
  }
};

}  // namespace engine
